"""What cannot be compiled whole still runs. Oracle: upstream's modules, and small ones of known lines, in torch on the host."""

import copy
import dataclasses

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import test_hunyuan_video
import tiny_videos
from conftest import programs_of, relative
from diffusers import MochiTransformer3DModel, tpu
from diffusers.models.transformers.transformer_hunyuan_video_framepack_flax import PLAN as FRAMEPACK
from diffusers.models.transformers.transformer_mochi_flax import PLAN as MOCHI
from diffusers.tpu import bridge
from diffusers.tpu.bridge.decisions import MOST_ENTRIES
from diffusers.tpu.chips.sharding import ModelPlan
from diffusers.tpu.compile import modes
from diffusers.tpu.compile.guards import MOST_RUN_ONCE
from diffusers.tpu.compile.module import CompiledModule
from diffusers.tpu.config import TPUConfig


WORDS, WIDTH = 11, 8


def attached(model: torch.nn.Module, mesh, plan=ModelPlan()) -> CompiledModule:
    runner = CompiledModule(model, plan, mesh, TPUConfig())
    runner.attach()
    return runner


def rungs(runner: CompiledModule) -> dict[str, str]:
    return {one["module"]: one["rung"] for one in modes.rungs(runner)}


def first(*lengths: int) -> torch.Tensor:
    """A mask of so many words each."""
    return torch.arange(WORDS) < torch.tensor(lengths)[:, None]


# Whole models


def mochi():
    model = MochiTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, num_layers=3, pooled_projection_dim=16, text_embed_dim=tiny_videos.WIDTH,
        time_embed_dim=16, in_channels=4,
    )  # fmt: skip
    torch.nn.init.normal_(model.pos_frequencies)
    return model.eval()


def mochi_inputs(model, mask) -> dict:
    batch = len(mask)
    return {
        "hidden_states": torch.randn(batch, 4, 3, 6, 10),
        "encoder_hidden_states": torch.randn(batch, WORDS, tiny_videos.WIDTH),
        "timestep": torch.randint(1, 1000, (batch,)),
        "encoder_attention_mask": mask,
        "return_dict": False,
    }


def framepack_inputs(model, mask) -> dict:
    given = test_hunyuan_video.inputs(model, (3, 16, 8), len(mask))
    return given | {"encoder_attention_mask": mask.to(torch.bfloat16)}  # as its pipeline gives it


MODELS = {
    "mochi": (mochi, mochi_inputs, ModelPlan(), "attention_processor.py, line", "torch.nonzero("),
    "framepack": (
        lambda: test_hunyuan_video.built("framepack"),
        framepack_inputs,
        dataclasses.replace(FRAMEPACK, decide=None),
        "transformer_hunyuan_video_framepack.py, line",
        "effective_",
    ),
}


@pytest.mark.parametrize(
    "name, mesh, batch",
    [
        ("mochi", (1, 1, 1), 2),
        ("mochi", (2, 2, 2), 1),
        ("framepack", (1, 1, 1), 2),
        ("framepack", (2, 4, 1), 1),
    ],
)
@torch.no_grad()
def test_lengths_are_decided_before_each_call(make_mesh, name, mesh, batch):
    """Without what our plans put in place of upstream's lines; back to the first length nothing is compiled."""
    build, inputs, plan, file, code = MODELS[name]
    theirs = build()
    ours = copy.deepcopy(theirs)
    runner = attached(ours, make_mesh(*mesh), plan)
    for lengths, programs in (((5, 3), 1), ((7, WORDS), 2), ((5, 3), 2)):
        given = inputs(theirs, first(*lengths[:batch]))
        (expected,), (found,) = theirs(**given), ours(**given)
        assert relative(found, expected) < 1e-5, lengths
        assert programs_of(runner) == programs and not runner.eager
    (one,) = modes.rungs(runner)
    assert one["module"] == "" and one["rung"] == "decided"
    assert all(reason.startswith(file) and code in reason for reason in one["reasons"])


@torch.no_grad()
def test_mochi_has_one_program_for_all_prompts(make_mesh):
    theirs = mochi()
    ours = copy.deepcopy(theirs)
    runner = attached(ours, make_mesh(2, 2, 2), MOCHI)
    for mask in (first(5, 3), first(0, WORDS), torch.rand(2, WORDS) > 0.5):
        given = mochi_inputs(theirs, mask)
        (expected,), (found,) = theirs(**given), ours(**given)
        assert relative(found, expected) < 1e-5
    assert programs_of(runner) == 1 and rungs(runner) == {"": "compiled"}


# Lines that ask of a mask


def written_mask(self, x, mask):
    mask = mask.clone()
    mask[:, 2 : mask.sum(1).max()] = False
    return x[mask]


def of_views(self, x, mask):
    seen = mask[1:][:, None].squeeze(1).flatten()
    return x[1, torch.nonzero(seen)[:, 0]]


def all_kinds(self, x, mask):
    if not mask.any() or mask.all():
        return x * 2
    return x[:, : int(mask.sum(1).min())] + len(mask.sum(1).tolist())


def taken_apart(self, x, mask):
    different, times = torch.unique(mask.sum(1), return_counts=True)
    return x.flatten(0, 1)[: different.numel() + times[0]]


def put_in_place(self, x, mask):
    x = x.clone()
    x[:, mask[0]] = 0.5
    x[mask] = x[mask] * 3
    return x


LINES = {
    "boolean index": lambda self, x, mask: x[mask].cumsum(0),
    "masked_select": lambda self, x, mask: x.masked_select(mask[:, :, None]),
    "nonzero": lambda self, x, mask: torch.cat([x[n, m.nonzero().flatten()] for n, m in enumerate(mask)]),
    "where": lambda self, x, mask: x[torch.where(mask)],
    "repeat_interleave": lambda self, x, mask: x[0].repeat_interleave(mask[0].int() * 2, 0),
    "loop": lambda self, x, mask: sum((x * n for n in range(mask.sum().item())), x),
    "numpy": lambda self, x, mask: x[:, : int(mask.numpy().sum(1).max())],
    "host": lambda self, x, mask: x * len(mask.cpu().nonzero()),
    "text": lambda self, x, mask: x * str(mask.long()).count("1"),
    "split": lambda self, x, mask: x[0].split([mask[0].sum(), x.shape[1] - mask[0].sum()])[1],
    **{f.__name__: f for f in (written_mask, of_views, all_kinds, taken_apart, put_in_place)},
}


def module(forward, **parts):
    model = type("Asking", (torch.nn.Module,), {"forward": forward})().eval()
    for name, part in parts.items():
        setattr(model, name, part)
    return model


@pytest.mark.parametrize("name", LINES)
@torch.no_grad()
def test_a_line_that_asks_of_a_mask_has_upstreams_values_for_every_answer(make_mesh, name):
    theirs = module(LINES[name])
    ours = copy.deepcopy(theirs)
    runner = attached(ours, make_mesh(1, 2, 1))
    masks = first(4, 2), first(7, 5), torch.rand(2, WORDS) > 0.5, first(4, 2), ~first(0, 0), first(0, 0)
    compiled = []
    for mask in masks:
        x = torch.randn(2, WORDS, 3)
        expected, found = theirs(x, mask), ours(x, mask)
        assert found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
        compiled.append(programs_of(runner))
    assert rungs(runner) == {"": "decided"} and not runner.eager
    assert compiled[3] == compiled[2] > 1


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        return x + self.linear(x) / mask.nonzero().shape[0]


class Scanned(torch.nn.Module):
    _repeated_blocks = ["Block"]

    def __init__(self, middle=None):
        super().__init__()
        self.first, self.middle = torch.nn.Linear(WIDTH, WIDTH), middle
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, x, mask):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, mask)
        return x if self.middle is None else self.middle(x)


@torch.no_grad()
def test_scanned_blocks_decide_once_and_by_the_values_of_the_call(make_mesh):
    """Written through numpy's memory, which torch does not count, and on the device."""
    theirs = Scanned()
    ours = copy.deepcopy(theirs)
    runner = attached(ours, make_mesh(1, 2, 1))
    mask, x = first(3).clone(), torch.randn(1, 4, WIDTH)
    for n in (0, 1, 2):
        mask.numpy()[0, 8 + n] = True
        assert relative(ours(x, mask), theirs(x, mask)) < 1e-6
        assert programs_of(runner) == n + 1
    (program, *_) = runner.programs.values()
    assert len(runner.guards.questions) == 1 and program.compiled.as_text().count("while(") == 1
    env = bridge.environment()
    with env.override_property(mesh=runner.mesh), env:
        on_chips = env.moved(mask)
        for n in (0, 5):
            on_chips[0, n] = False
            found = bridge.from_numpy(ours(env.moved(x), on_chips).jax())
            mask[0, n] = False
            assert relative(found, theirs(x, mask)) < 1e-6
    assert rungs(runner) == {"": "decided"}


@torch.no_grad()
def test_what_is_no_small_input_is_not_asked_before_each_call(make_mesh):
    runner = attached(module(lambda self, x: x if x.sum() > 0 else -x), make_mesh(1, 1, 1))
    for sign in (1, -1):
        assert runner.module(torch.full((MOST_ENTRIES + 1,), float(sign))).min() == 1
    assert rungs(runner) == {"": "parts"} and not runner.guards.questions


@torch.no_grad()
def test_branches_that_decide_run_alone_by_their_own_values(make_mesh):
    theirs = Scanned()
    ours = copy.deepcopy(theirs)
    runner = attached(ours, make_mesh(2, 2, 1), ModelPlan(batched=("x", "mask")))
    env, x = bridge.environment(), torch.randn(1, 4, WIDTH)
    with env.override_property(mesh=runner.mesh), env:
        found = [ours(env.moved(x), env.moved(first(n))) for n in (3, 6)]
        found = [bridge.from_numpy(answer.jax()) for answer in found]
    for n, answer in zip((3, 6), found):
        assert relative(answer, theirs(x, first(n))) < 1e-6
    assert [program.branches for program in runner.programs.values()] == [1, 1] and not runner.eager


@torch.no_grad()
def test_answers_that_are_others_in_each_call_are_worth_no_program_each(make_mesh):
    theirs = Scanned(module(lambda self, x: x))
    theirs.forward = lambda x, step: theirs.blocks[0].linear(x) * step.item()
    ours = Scanned(module(lambda self, x: x))
    ours.load_state_dict(theirs.state_dict())
    ours.forward = lambda x, step: ours.blocks[0].linear(x) * step.item()
    runner = attached(ours, make_mesh(1, 1, 1))
    x = torch.randn(2, WIDTH)
    for step in range(MOST_RUN_ONCE + 3):
        assert relative(ours(x, torch.tensor(step + 1)), theirs(x, torch.tensor(step + 1))) < 1e-6
    assert len(runner.traced) == MOST_RUN_ONCE and rungs(runner)[""] == "parts"
    assert "others in each call" in runner.eager[0] and "test_ladder.py, line" in runner.eager[0]


# Parts


class Routed(torch.nn.Module):
    """By what weights have made."""

    def __init__(self):
        super().__init__()
        self.gate, self.bias = torch.nn.Linear(WIDTH, 2), torch.nn.Parameter(torch.randn(WIDTH))
        self.ways = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.count += 1
        return self.ways[self.gate(x).sum() > 0](x) + self.bias * self.count


class Lacking(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(torch.special.airy_ai(x))


class Failing(torch.nn.Module):
    """A view in another dtype, at which torchax ends with a TypeError."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = torch.nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x.view(torch.int32).view(torch.float32)) * self.calls


MIDDLES = {
    "routed": (Routed, {"middle": "parts", "middle.gate": "compiled"}, "it decides by a value (test_ladder.py, line"),
    "lacking": (
        Lacking,
        {"middle": "parts", "middle.linear": "compiled"},
        "torchax lacks aten.special_airy_ai.default (test_",
    ),
    "failing": (Failing, {"middle": "host"}, "TypeError (test_ladder.py, line"),
}


@pytest.mark.parametrize("name", MIDDLES)
@torch.no_grad()
def test_a_submodule_that_cannot_be_compiled_runs_while_the_rest_is(chips, make_mesh, name):
    build, expected, reason = MIDDLES[name]
    theirs = Scanned(build())
    ours = tpu.install(copy.deepcopy(theirs), tpu.TPUConfig(mesh=(2, 2, 2)))
    runner, mask = ours._tpu_runner, first(3, 5)

    def differ() -> float:
        x = torch.randn(2, 4, WIDTH)
        return relative(ours(x, mask), theirs(x, mask))

    assert max(differ() for _ in range(16)) < 1e-6  # both ways of each branch, whatever is drawn
    found = rungs(runner)
    assert {module: found[module] for module in expected} == expected
    assert found | {"": "parts", "first": "compiled"} == found
    assert [found[f"blocks.{n}"] for n in range(3)] == ["decided"] * 3
    compiled = programs_of(runner)
    assert differ() < 1e-6 and programs_of(runner) == compiled
    text = tpu.explain(ours)
    assert (
        "Scanned.blocks.*: decided (3 alike)" in text
        and reason in text
        and f"Scanned.middle: {expected['middle']}" in text
    )
    assert any(one["module"] == "blocks.2" for one in tpu.report(ours)["programs"])
    blocks = [next(iter(runner.parts.runners[f"blocks.{n}"].programs.values())).compiled for n in range(3)]
    assert blocks[0] is blocks[1] is blocks[2]
    for m in (ours, theirs):
        m.middle = torch.nn.Identity()
    assert differ() < 1e-6 and rungs(runner) == {"": "decided"} and runner._placed.arrays
    theirs.middle = build()
    ours.middle = copy.deepcopy(theirs.middle)  # one like the first, which the first one's runner does not run
    assert differ() < 1e-6 and rungs(runner)["middle"] == expected["middle"]
    copied = copy.deepcopy(ours)
    x = torch.randn(2, 4, WIDTH)
    assert relative(copied(x, mask), copy.deepcopy(theirs)(x, mask)) < 1e-6
    assert "forward" not in vars(ours.first) and not any("_tpu" in key for m in ours.children() for key in vars(m))


class Store:
    def __init__(self):
        self.kept = []


class Shares(torch.nn.Module):
    """What a part does to what it was given, its caller sees."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x, how):
        if isinstance(how, Store):
            how.kept.append(self.linear(x))
            return how.kept[0]
        if how == "writes":
            x += self.linear(x)
        return x if how != "view" else x[1:]


class Caller(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.shares = Shares()

    def forward(self, x, how):
        x = x * 2
        if x.mean().item() > 1e9:
            return x
        store = Store()
        y = self.shares(x, store if how == "store" else how)
        y += 1
        return x + y[:1] * 3 + sum(store.kept)


@pytest.mark.parametrize("how", ["writes", "same", "view", "store"])
@torch.no_grad()
def test_a_part_shares_its_callers_memory(make_mesh, how):
    theirs = Caller()
    ours = copy.deepcopy(theirs)
    runner = attached(ours, make_mesh(1, 1, 1))
    for _ in range(2):
        x = torch.randn(3, WIDTH)
        assert relative(ours(x, how), theirs(x, how)) < 1e-6
    assert rungs(runner)["shares"] == "parts"


class Encoding(torch.nn.Module):
    """Its forward calls another of its entries, as a VAE's does."""

    def __init__(self):
        super().__init__()
        self.inner = Routed()

    def encode(self, x):
        if x.sum().item() > 1e6:
            raise ValueError("expected less")
        return self.inner(x)

    def forward(self, x):
        return self.encode(x) + 1


@torch.no_grad()
def test_an_entry_that_calls_another_is_one_call_in_parts(make_mesh):
    theirs = Encoding()
    ours = copy.deepcopy(theirs)
    runner = attached(ours, make_mesh(1, 1, 1), ModelPlan(entries=("forward", "encode")))
    for _ in range(2):
        with pytest.raises(ValueError, match="expected less"):
            ours(torch.full((2, WIDTH), 1e7))
    traces = []
    for _ in range(3):
        x = torch.randn(3, WIDTH)
        assert relative(ours(x), theirs(x)) < 1e-6
        traces.append(sum(one.traces for _, one in runner.with_parts()))
    found = rungs(runner)
    assert found[""] == found["inner"] == "parts" and found["inner.gate"] == "compiled" and traces[1] == traces[2]


@torch.no_grad()
def test_a_language_model_goes_on_from_its_keys_and_values(make_mesh):
    """On the host, as no length comes twice; the encoder that it is for pipelines is a program, before and after."""
    config = Qwen3Config(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        vocab_size=64, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    theirs = Qwen3ForCausalLM(config).eval()
    ours = copy.deepcopy(theirs)
    runner = attached(ours, make_mesh(1, 2, 1))
    words = torch.randint(1, 64, (1, 5))
    answers = [model.generate(words, max_new_tokens=4, do_sample=False).tolist() for model in (ours, theirs)]
    assert answers[0] == answers[1]
    for _ in range(2):
        assert relative(*(model(words, use_cache=False).logits for model in (ours, theirs))) < 1e-6
    assert [one["rung"] for one in modes.rungs(runner)] == ["compiled", "host"] and programs_of(runner) == 1
