"""What cannot be compiled whole still runs. Oracle: upstream's modules, and small ones of known lines, in torch on the host."""

import copy
import dataclasses

import pytest
import torch

import denoisers
import tiny
from conftest import programs_of, relative, slow
from diffusers import MochiTransformer3DModel
from diffusers.models.transformers.transformer_hunyuan_video_framepack_flax import PLAN as FRAMEPACK
from diffusers.models.transformers.transformer_mochi_flax import PLAN as MOCHI
from diffusers.tpu import bridge
from diffusers.tpu.bridge.decisions import MOST_ENTRIES
from diffusers.tpu.chips.sharding import ModelPlan
from diffusers.tpu.compile import explain
from diffusers.tpu.compile.modes import MOST_RUN_ONCE
from diffusers.tpu.compile.module import CompiledModule


WORDS, WIDTH = 11, 8

pytestmark = pytest.mark.usefixtures("without_gradients")


def rungs(runner: CompiledModule) -> dict[str, str]:
    return {one["module"]: one["rung"] for one in explain.rungs(runner)}


def first(*lengths: int) -> torch.Tensor:
    """A mask of so many words each."""
    return torch.arange(WORDS) < torch.tensor(lengths)[:, None]


# Whole models


def mochi():
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 3, "time_embed_dim": 16}
    model = MochiTransformer3DModel(**sizes, in_channels=4, pooled_projection_dim=16, text_embed_dim=tiny.WIDTH)
    torch.nn.init.normal_(model.pos_frequencies)
    return model.eval()


def mochi_inputs(model, mask) -> dict:
    given = {"hidden_states": torch.randn(len(mask), 4, 3, 6, 10), "timestep": torch.randint(1, 1000, (len(mask),))}
    texts = torch.randn(len(mask), WORDS, tiny.WIDTH)
    return given | {"encoder_hidden_states": texts, "encoder_attention_mask": mask, "return_dict": False}


def framepack_inputs(model, mask) -> dict:
    given = denoisers.inputs("framepack", len(mask))
    return given | {"encoder_attention_mask": mask.to(torch.bfloat16)}  # as its pipeline gives it


MODELS = {
    "mochi": (mochi, mochi_inputs, ModelPlan(), "attention_processor.py, line", "torch.nonzero("),
    "framepack": (
        lambda: denoisers.built("framepack"),
        framepack_inputs,
        dataclasses.replace(FRAMEPACK, decide=None),
        "transformer_hunyuan_video_framepack.py, line",
        "effective_",
    ),
}


@pytest.mark.parametrize("name, degrees, batch", [slow("mochi", (2, 2, 2), 1), ("framepack", (1, 1, 1), 2)])
def test_lengths_are_decided_before_each_call(attach, name, degrees, batch):
    """Without what our plans put in place of upstream's lines; back to the first length nothing is compiled."""
    build, inputs, plan, file, code = MODELS[name]
    theirs = build()
    runner = attach(ours := copy.deepcopy(theirs), *degrees, plan=plan)
    for lengths, programs in (((5, 3), 1), ((7, WORDS), 2), ((5, 3), 2)):
        given = inputs(theirs, first(*lengths[:batch]))
        (expected,), (found,) = theirs(**given), ours(**given)
        assert relative(found, expected) < 1e-5, lengths
        assert programs_of(runner) == programs and not runner.eager
    (one,) = explain.rungs(runner)
    assert one["module"] == "" and one["rung"] == "decided"
    assert all(reason.startswith(file) and code in reason for reason in one["reasons"])
    if name == "mochi":  # with its plan: one program for all prompts
        runner = attach(ours := copy.deepcopy(theirs), 2, 2, 2, plan=MOCHI)
        for mask in (first(5, 3), first(0, WORDS), torch.rand(2, WORDS) > 0.5):
            given = mochi_inputs(theirs, mask)
            (expected,), (found,) = theirs(**given), ours(**given)
            assert relative(found, expected) < 1e-5
        assert programs_of(runner) == 1 and rungs(runner) == {"": "compiled"}


# Lines that ask of a mask


def all_kinds(self, x, mask):
    if not mask.any() or mask.all():
        return x * 2
    return x[:, : int(mask.sum(1).min())] + len(mask.sum(1).tolist())


def put_in_place(self, x, mask):
    x = x.clone()
    x[:, mask[0]] = 0.5
    x[mask] = x[mask] * 3
    return x


def places(self, x, mask):
    kept = [x[n, one.nonzero().flatten()] for n, one in enumerate(mask)]
    return torch.cat([*kept, x[0].repeat_interleave(mask[0].int() * 2, 0)])


def sizes(self, x, mask):
    looped = sum((x * n for n in range(mask.sum().item())), x) * len(mask.cpu().nonzero())
    split = x[0].split([mask[0].sum(), x.shape[1] - mask[0].sum()])[1]
    different, times = torch.unique(mask.sum(1), return_counts=True)
    taken_apart = x.flatten(0, 1)[: different.numel() + times[0]]
    return torch.cat([looped[0], split, taken_apart, x[0, : int(mask.numpy().sum(1).max())]])


LINES = {f.__name__: f for f in (all_kinds, places, put_in_place, sizes)}
LINES["boolean index"] = lambda self, x, mask: x[mask].cumsum(0)


def module(forward, **parts):
    model = type("Asking", (torch.nn.Module,), {"forward": forward})().eval()
    for name, part in parts.items():
        setattr(model, name, part)
    return model


@pytest.mark.parametrize("name", LINES)
def test_a_line_that_asks_of_a_mask_has_upstreams_values_for_every_answer(attach, name):
    theirs = module(LINES[name])
    runner = attach(ours := copy.deepcopy(theirs), 1, 2, 1)
    masks = first(4, 2), torch.rand(2, WORDS) > 0.5, first(4, 2), ~first(0, 0), first(0, 0)
    compiled = []
    for mask in masks:
        x = torch.randn(2, WORDS, 3)
        expected, found = theirs(x, mask), ours(x, mask)
        assert found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
        compiled.append(programs_of(runner))
    assert rungs(runner) == {"": "decided"} and not runner.eager
    assert compiled[2] == compiled[1] > 1


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


def test_scanned_blocks_decide_once_and_by_the_values_of_the_call(attach):
    """Written through numpy's memory, which torch does not count, and on the device."""
    theirs = Scanned()
    runner = attach(ours := copy.deepcopy(theirs), 1, 2, 1)
    mask, x = first(3).clone(), torch.randn(1, 4, WIDTH)
    for n in (0, 1, 2):
        mask.numpy()[0, 8 + n] = True
        assert relative(ours(x, mask), theirs(x, mask)) < 1e-6
        assert programs_of(runner) == n + 1
    (program, *_) = runner.programs.values()
    assert len(runner.known) == 1 and program.compiled.as_text().count("while(") == 1
    env = bridge.environment()
    with env.override_property(mesh=runner.mesh), env:
        on_chips = env.moved(mask)
        for n in (0, 5):
            on_chips[0, n] = False
            found = bridge.from_numpy(ours(env.moved(x), on_chips).jax())
            mask[0, n] = False
            assert relative(found, theirs(x, mask)) < 1e-6
    assert rungs(runner) == {"": "decided"}


def test_what_is_no_small_input_is_not_asked_before_each_call(attach):
    runner = attach(module(lambda self, x: x if x.sum() > 0 else -x), 1, 1, 1)
    for sign in (1, -1):
        assert runner.module(torch.full((MOST_ENTRIES + 1,), float(sign))).min() == 1
    assert rungs(runner) == {"": "parts"} and not runner.known


def test_branches_that_decide_run_alone_by_their_own_values(attach):
    theirs = Scanned()
    runner = attach(ours := copy.deepcopy(theirs), 2, 2, 1, plan=ModelPlan(batched=("x", "mask")))
    env, x = bridge.environment(), torch.randn(1, 4, WIDTH)
    with env.override_property(mesh=runner.mesh), env:
        found = [ours(env.moved(x), env.moved(first(n))) for n in (3, 6)]
        found = [bridge.from_numpy(answer.jax()) for answer in found]
    for n, answer in zip((3, 6), found):
        assert relative(answer, theirs(x, first(n))) < 1e-6
    assert [program.branches for program in runner.programs.values()] == [1, 1] and not runner.eager


def test_answers_that_are_others_in_each_call_are_worth_no_program_each(attach):
    theirs = module(lambda self, x, step: self.linear(x) * step.item(), linear=torch.nn.Linear(WIDTH, WIDTH))
    runner = attach(ours := copy.deepcopy(theirs), 1, 1, 1)
    x = torch.randn(2, WIDTH)
    for step in range(MOST_RUN_ONCE + 3):
        assert relative(ours(x, torch.tensor(step + 1)), theirs(x, torch.tensor(step + 1))) < 1e-6
    assert len(runner.traced) == MOST_RUN_ONCE and rungs(runner)[""] == "parts"
    assert "others in each call" in runner.eager[0] and "test_ladder.py, line" in runner.eager[0]
