"""Layouts of denoisers from what upstream declares, and from the trace. Oracle: upstream's in the same process, same weights and inputs;
and the compiled program."""

import copy
import functools
import re

import jax
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch.utils._pytree import tree_map_only

from conftest import relative, slow
from denoisers import built, inputs
from diffusers import Flux2Transformer2DModel, tpu
from diffusers.hooks.tensor_parallel import PackedColwiseParallel, PackedRowwiseParallel
from diffusers.models.embeddings import PatchEmbed
from diffusers.tpu.chips.figures import GIB
from diffusers.tpu.chips.sharding import INFERRED, TOKENS, ModelPlan, axes_of, kind_of
from diffusers.tpu.common.config import TPUConfig
from diffusers.tpu.compile.weights import named_tensors
from diffusers.tpu.pipelines.attach import runs
from diffusers.tpu.pipelines.plans import declared_plan
from diffusers.tpu.weights.hbm import storages, tensor_degree


def drawn(name: str):
    """(upstream's, the same to be run on the mesh, given)."""
    theirs = built(name)
    return theirs, copy.deepcopy(theirs), inputs(name)


def answers(model, given) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([x.flatten() for x in model(**given) if isinstance(x, torch.Tensor)])


@pytest.mark.parametrize(
    "made, degrees",
    [
        slow("chronoedit", (1, 4, 1)), ("flux2", (1, 2, 2)), ("helios", (1, 4, 1)), slow("ltx", (2, 4, 1)), ("ltx2", (1, 2, 2)),
        slow("minimax", (1, 8, 1)), ("flux", (1, 1, 4)),
    ],
)  # fmt: skip
def test_equals_upstream_and_chips_share_the_work(attach, made, degrees):
    theirs, ours, given = drawn(made)
    runner = attach(theirs, 1, 1, 1)
    call = runner.flatten_call("forward", (), given)
    alone = runner.trace(call).traced.lower().cost_analysis()["flops"]
    runner.detach()
    runner = attach(ours, *degrees, plan=declared_plan(ours))
    assert relative(answers(ours, given), answers(theirs, given)) < 1e-5
    (program,) = runner.programs.values()
    share = program.compiled.cost_analysis()["flops"] / alone
    assert share < 2 / np.prod(degrees)  # measured: 1.1 to 1.6, of few tokens; what no block does is every chip's


def kinds_of(module, chips: int = 1) -> dict[str, float]:
    """Bytes of each kind of weight, of one name but for the number of the block, that a chip has: of large ones its part."""
    found = {}
    for name, t in [*module.named_parameters(), *module.named_buffers()]:
        kind = re.sub(r"\.\d+", ".*", name)
        found[kind] = found.get(kind, 0) + t.nbytes / (chips if t.numel() >= 1 << 16 else 1)
    return found


def test_weights_are_whole_as_far_as_there_is_room(make_mesh):
    """By hand, rooms in models; beside it a text encoder of half its size, over all chips. Where no room is known all are stored so."""
    with torch.device("meta"):
        model, other = (Flux2Transformer2DModel(num_layers=n, num_single_layers=0) for n in (2, 1))
    kinds, parts = kinds_of(model), kinds_of(model, 8)
    size, beside = sum(kinds.values()), sum(kinds_of(other, 8).values())
    models, mesh = {"a": (model, declared_plan(model)), "b": (other, ModelPlan())}, make_mesh(2, 4, 1)
    least = sum(parts.values()) / size
    for part in (1.0, 0.6, 0.3, least):
        room = int(part * size + beside)
        found = storages(models, mesh, room)
        left = room - beside - sum((kinds if kind in found["a"] else parts)[kind] for kind in kinds)
        assert left >= 0 and not found["b"]
        assert all(kinds[kind] - parts[kind] > left for kind in {*kinds} - found["a"])
        assert (len(found["a"]) == len(kinds)) == (part == 1) and (next(iter(kinds)) in found["a"]) == (part > least)
    assert not storages(models, None, None)["a"] and tensor_degree(models, 8, None) == 1
    # What no rule splits is whole whatever tp is: embeddings, modulation.
    patterns = [pattern for pattern, _ in models["a"][1].rules]
    over_tp = sum(p.nbytes for n, p in model.named_parameters() if any(re.search(one, n) for one in patterns))
    enough = [int(over_tp / tp + size - over_tp + beside) for tp in (1, 2, 4, 8)]
    assert [tensor_degree(models, 8, room) for room in (*enough, enough[-1] - 2)] == [1, 2, 4, 8, 1]
    assert storages(models, make_mesh(2, 2, 2), enough[1])["a"] == {*kinds}
    names = "blocks.3.to_q.weight", "blocks.[2:5].to_q.base_layer.weight", "blocks.*.to_q.lora_A.style.weight"
    assert {*map(kind_of, names)} == {"blocks.*.to_q.weight"}
    # Two experts of a video model: alike, in two thirds of the room; what is trained is over all.
    experts = {name: (model, ModelPlan(activation_spec=TOKENS)) for name in ("transformer", "transformer_2")}
    assert storages(experts, mesh, 3 * size) == dict.fromkeys(experts, {*kinds})
    one, other = storages(experts, mesh, 2 * size).values()
    assert one == other and size / 3 < sum(kinds[kind] for kind in one) < size
    assert not any(storages(experts, mesh, 3 * size, trained=True).values())


def test_layers_of_a_time_by_token_meet_tokens(chips, own_store):
    theirs, ours, given = drawn("ltx2 image")
    ours = tpu.install(ours, TPUConfig(mesh=(1, 2, 2)))
    assert relative(answers(ours, given), answers(theirs, given)) < 1e-5
    assert not tpu.report(ours)["eager"]


@pytest.mark.parametrize(
    "kind, room, degrees",
    [("flux2", 1.1, (1, 8, 1)), ("flux2", 0.6, (1, 4, 2)), ("flux2", None, (1, 8, 1)), ("qwen", 0.6, (1, 8, 1))],
)
def test_a_model_runs_where_it_has_room(chips, kind, room, degrees):
    """Qwen-Image's on a mesh that was asked for, which has room for some of the weights."""
    theirs, ours, given = drawn(kind)
    kinds, parts = kinds_of(ours), kinds_of(ours, 8)
    room = room and room * sum(kinds.values())
    config = {} if room is None else {"hbm_gib": room / GIB, "reserve_gib": 0}
    tpu.install(ours, TPUConfig(mesh=degrees if kind == "qwen" else None, **config))
    assert relative(answers(ours, given), answers(theirs, given)) < 1e-5
    runner = runs(ours)
    assert tuple(runner.mesh.shape.values()) == degrees
    split = {*kinds} - runner.storage
    assert len(split) == (len(kinds) if room is None else 0) or (kind == "qwen" and split)
    for key, aval in runner._placed.avals.items():
        if re.sub(r"\.\d+", ".*", key) in runner.storage and key not in runner._placed.settled:
            assert not {axis for entry in aval.sharding.spec for axis in axes_of(entry)} & {"dp", "sp"}, key
    left = 0 if room is None else room - runner.bytes_per_chip
    assert left >= 0 and all(kinds[kind] - parts[kind] > left for kind in split if kinds[kind] > parts[kind])


class Streams(torch.nn.Module):
    """A block whose answers stand in another order than its arguments."""

    def __init__(self):
        super().__init__()
        self.one, self.other = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, hidden_states, context):
        return context + self.other(context), hidden_states + self.one(hidden_states)


class OfStreams(torch.nn.Module):
    _repeated_blocks = ["Streams"]

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Streams(), Streams(), Streams()])

    def forward(self, hidden_states, context, return_dict=False):
        for block in self.blocks:
            context, hidden_states = block(hidden_states, context)
        return hidden_states, context


def test_the_longest_stream_is_split_between_blocks(attach):
    theirs, given = OfStreams(), {"hidden_states": torch.randn(1, 30, 16), "context": torch.randn(1, 6, 16)}
    ours = copy.deepcopy(theirs)
    runner = attach(ours, 1, 4, 1, plan=declared_plan(ours))
    assert relative(answers(ours, given), answers(theirs, given)) < 1e-6
    (program,) = runner.programs.values()
    (loop,) = (line for line in program.compiled.as_text().splitlines() if " while(" in line)
    assert {"f32[1,8,16]", "f32[1,6,16]"} == set(re.findall(r"f32\[1,\d+,16\]", loop.partition(" while(")[0]))


class WithPlaces(torch.nn.Module):
    """A larger map's positions, of which upstream cuts the middle, as in Stable Diffusion 3."""

    _repeated_blocks = ["Linear"]

    def __init__(self):
        super().__init__()
        self.embed = PatchEmbed(16, 16, 1, 4, 16, pos_embed_max_size=24)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(3)])

    def forward(self, x, return_dict=False):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return (x,)


def test_every_chip_cuts_its_part_of_a_table(attach):
    theirs, given = WithPlaces(), {"x": torch.randn(1, 4, 16, 16)}
    ours = copy.deepcopy(theirs)
    runner = attach(ours, 1, 4, 1, plan=declared_plan(ours))
    assert relative(answers(ours, given), answers(theirs, given)) < 1e-6
    (program,) = runner.programs.values()
    assert "collective-permute" not in program.compiled.as_text()


class Shifted(torch.nn.Linear):
    def forward(self, hidden_states, shift, seen):
        return torch.where(seen, hidden_states + super().forward(hidden_states) * shift, hidden_states)


class OfShifted(torch.nn.Module):
    """Blocks with a tensor of their own each, as slices of one modulation are."""

    _repeated_blocks = ["Shifted"]

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Shifted(16, 16) for _ in range(6)])

    def forward(self, hidden_states, shifts, seen, return_dict=False):
        for n, block in enumerate(self.blocks):
            hidden_states = block(hidden_states, shifts[:, n : n + 1] if n != 1 else shifts[:, :1] * 2, seen[n // 3])
        return (hidden_states,)


def test_tensors_of_each_block_are_stacked_beside_the_weights(attach):
    """Floating ones: by truths a block may decide."""
    theirs = OfShifted()
    given = {name: torch.randn(2, 6, 16) for name in ("hidden_states", "shifts")} | {"seen": torch.rand(2, 6, 1) < 0.5}
    runner = attach(ours := copy.deepcopy(theirs), 1, 4, 1, plan=declared_plan(theirs))
    for _ in range(2):
        assert relative(answers(ours, given), answers(theirs, given)) < 1e-6
        given = {name: x.flip(0) for name, x in given.items()}
    (program,) = runner.programs.values()
    assert sum(" while(" in line for line in program.compiled.as_text().splitlines()) == 2


class Fused(torch.nn.Linear):
    """Three projections in one weight, two in another. `reads`: also the first weight itself, as an adapter (DoRA) does."""

    def __init__(self, reads):
        super().__init__(16, 40)
        self.out, self.reads = torch.nn.Linear(32, 16), reads
        self.out._tp_packed_row_blocks = [8, 24]

    def forward(self, hidden_states):
        x, rest = super().forward(hidden_states).split([8, 32], -1)
        gate, more = rest.split([8, 24], -1)
        out = self.out(torch.cat([x * gate.sigmoid(), more.sin()], -1))
        return hidden_states + (out * self.weight[:8].norm() if self.reads else out)


class OfFused(torch.nn.Module):
    _repeated_blocks = ["Fused"]
    _tp_plan = {"blocks.*.out": PackedRowwiseParallel(), "blocks.*": PackedColwiseParallel([1, 1, 3])}

    def __init__(self, reads):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Fused(reads) for _ in range(3)])

    def forward(self, hidden_states, return_dict=False):
        for block in self.blocks:
            hidden_states = block(hidden_states)
        return (hidden_states,)


@pytest.mark.parametrize("reads", [False, True])
def test_each_projection_of_one_weight_is_split(attach, reads):
    """Their outputs are taken apart, and joined, without an exchange; who runs line by line, or reads the weight, sees upstream's."""
    theirs, given = OfFused(reads), {"hidden_states": torch.randn(2, 6, 16)}
    plan = declared_plan(theirs)
    assert {name: one.sizes for name, one in plan.packed.items() if ".1." in name} == {
        "blocks.1.weight": (8, 8, 24),
        "blocks.1.bias": (8, 8, 24),
        "blocks.1.out.weight": (8, 24),
    }
    runner = attach(ours := copy.deepcopy(theirs), 1, 2, 4, plan=plan)
    assert relative(answers(ours, given), answers(theirs, given)) < 1e-6
    (program,) = runner.programs.values()
    exchanges = re.findall(r" (all-[\w-]+|collective-permute)\(", program.compiled.as_text())
    assert reads or sorted(exchanges) == ["all-gather"] * 3 + ["all-reduce"]  # of weights over sp, and of the result
    stored = np.asarray(runner._placed.arrays["blocks.*.weight"])
    assert np.array_equal(stored[1, :10], theirs.blocks[1].weight.detach()[[0, 1, 8, 9, *range(16, 22)]])
    assert relative(runner.place().one_by_one()[0]["blocks.1.out.weight"], theirs.blocks[1].out.weight) == 0


def test_only_what_can_be_said_is_taken_from_a_declaration():
    model = torch.nn.Module()
    model.proj, model.blocks = torch.nn.Linear(2, 2), torch.nn.ModuleList([Streams(), Streams()])
    assert declared_plan(model) == ModelPlan()
    model._repeated_blocks = ["Streams"]
    model._tp_plan = {"proj": "colwise", "proj_2": "rowwise", "blocks.*": "sequence"}
    plan = declared_plan(model)
    assert plan.activation_spec == INFERRED and [spec for _, spec in plan.rules] == [P("tp", ("dp", "sp")), P("tp")]


@pytest.mark.parametrize("made", ["chronoedit", slow("helios"), slow("minimax")])
def test_what_upstream_keeps_in_float32_stays_so(chips, made, tmp_path, monkeypatch):
    theirs, _, given = drawn(made)
    exact = answers(theirs.double(), tree_map_only(torch.FloatTensor, torch.Tensor.double, given))
    theirs.float().save_pretrained(tmp_path)
    load = functools.partial(type(theirs).from_pretrained, tmp_path, torch_dtype=torch.bfloat16)
    monkeypatch.setenv("DIFFUSERS_TPU", "cpu")
    tpu.activate()
    try:
        theirs, ours = load(), load(device_map="cuda")
    finally:
        tpu.idioms.off()
    kept = {name: tensor.dtype for name, tensor in named_tensors(theirs).items()}
    assert {torch.float32, torch.bfloat16} == {*kept.values()}
    given = tree_map_only(torch.Tensor, lambda x: x.bfloat16() if x.ndim > 2 else x, given)
    error, upstreams = (relative(answers(model, given).double(), exact) for model in (ours, theirs))
    placed = runs(ours)._placed
    assert {name: placed.avals[key].dtype for key, names in placed.sources.items() for name in names} == {
        name: {torch.float32: np.float32, torch.bfloat16: jax.numpy.bfloat16}[dtype] for name, dtype in kept.items()
    }
    assert error < 1.25 * upstreams
