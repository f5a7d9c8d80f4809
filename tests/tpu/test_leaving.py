"""Oracle: the same module in torch. What a forward leaves behind and reads; its lines are written here."""

import copy
import functools

import numpy as np
import pytest
import torch

import tiny
from conftest import relative, table
from diffusers.tpu.compile.module import CompiledModule
from diffusers.tpu.pipelines.plans import module_plan
from test_changes import BLOCKS, WIDTH, Block


# Modules whose lines are written here: what they leave behind, and what they read


ROWS = torch.zeros(3, WIDTH)

pytestmark = pytest.mark.usefixtures("without_gradients")


def made(lines: str, blocks: int = 0, **attributes):
    """A module whose forward has these lines, or a row of such blocks; the class is its own."""
    names = {**globals(), "np": np}
    exec(compile("def forward(self, x):\n  " + lines.replace("\n", "\n  "), __file__, "exec"), names)
    cls = type("Leaving", (torch.nn.Module,), {"forward": names["forward"], "kept": []})
    parts = [cls() for _ in range(blocks or 1)]
    for part in parts:
        part.linear = torch.nn.Linear(WIDTH, WIDTH)
        for name, value in attributes.items():
            (part.register_buffer if name == "buffer" else part.__setattr__)(name, copy.deepcopy(value))
    if not blocks:
        return parts[0].eval()
    return Row(parts).eval()


class Row(torch.nn.Module):
    _repeated_blocks = ["Leaving"]

    def __init__(self, blocks):
        super().__init__()
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def as_upstream(runner_of, build) -> CompiledModule:
    """The runner of a model that was called some times, each time with upstream's answer."""
    inputs, theirs = torch.randn(4, 3, WIDTH), build()
    weights = copy.deepcopy(theirs.state_dict())
    oracles, ours = [theirs(x).clone() for x in inputs], build()
    ours.load_state_dict(weights)
    runner = runner_of(ours)
    for x, oracle in zip(inputs, oracles):
        assert relative(ours(x).clone(), oracle) < 1e-6
    return runner


# Lines, attributes, why they run eagerly; lines that stay compiled; loops over `self.blocks`.
KEPT, SCRATCH, LOOPS = table("programs/forwards").values()
VALUES = {"rows": ROWS, "one": torch.ones(()), "list": []}


@pytest.mark.idiom("stores", "decisions")
@pytest.mark.parametrize("name, blocks", [*((name, 0) for name in KEPT), ("before", BLOCKS)])
def test_what_a_forward_leaves_and_reads_is_upstreams(attach, name, blocks, capsys):
    lines, attributes, reason = KEPT[name]
    degrees, reason = ((2, 2, 2), reason.replace("in ", "in blocks.0.")) if blocks else ((1, 1, 1), reason)
    build = functools.partial(made, lines, blocks, **{name: VALUES[kind] for name, kind in attributes.items()})
    runner = as_upstream(lambda model: attach(model, *degrees), build)
    assert not runner.programs and not runner.compilations and len(runner.eager) == 1 and reason in runner.eager[0]
    shown = capsys.readouterr().out.replace(", device='jax:0'", "")
    assert shown[: len(shown) // 2] == shown[len(shown) // 2 :]


@pytest.mark.parametrize(
    "name, blocks", [*((name, 0) for name in SCRATCH), ("emptied last", BLOCKS), ("flag", BLOCKS)]
)
def test_scratch_tables_and_what_the_first_call_does_stay_compiled(attach, name, blocks):
    build = functools.partial(made, SCRATCH[name], blocks, list=[], before=None)
    runner = as_upstream(lambda model: attach(model, 1, 1, 1), build)
    assert not runner.eager and runner.compilations == 1


def test_a_check_says_upstreams_values(attach):
    model = made("if x.shape[0] != 2: raise ValueError(f'expected two rows, got {x}')\nreturn x")
    attach(model, 1, 1, 1)
    x = torch.randn(3, WIDTH)
    with pytest.raises(ValueError) as error:
        model(x)
    assert str(error.value) == f"expected two rows, got {x}"


@pytest.mark.parametrize("name", LOOPS)
def test_blocks_see_the_values_of_their_call(attach, name):
    """Something happens to what blocks share, or they are given one value twice."""
    model = made("c = x.flip(0).clone()\n" + LOOPS[name])
    model.blocks, model._repeated_blocks = torch.nn.ModuleList(Block() for _ in range(BLOCKS)), ["Block"]
    x = torch.randn(2, WIDTH)
    theirs = model(x)
    attach(model, 1, 1, 1)
    assert relative(model(x), theirs) < 1e-6


@pytest.mark.parametrize("arguments, windowed", [("x", False), ("x, timestep=None", True)])
def test_a_window_of_attention_is_the_denoisers_alone(attach, arguments, windowed):
    attend = eval(f"lambda self, {arguments}: torch.nn.functional.scaled_dot_product_attention(x, x, x)", globals())
    cls, x = type("Attending", (torch.nn.Module,), {"forward": attend}), torch.randn(1, 2, 9, WIDTH)
    module = cls()
    attach(module, 1, 1, 1, attention_window=(1, 1))
    assert (relative(module(x), cls.forward(module, x)) > 1e-2) == windowed


class Tables(torch.nn.Module):
    """As Qwen-Image's positions: computed on the device once per length, and kept on the class."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    @functools.lru_cache(maxsize=None)
    def table(self, length, device):
        return torch.arange(length, device=device)[:, None] * torch.ones(WIDTH, device=device)

    def forward(self, x):
        return self.linear(x) + self.table(4, x.device)[:1] + self.table(x.shape[1], x.device)


def test_a_cache_on_the_class_keeps_nothing_of_a_trace(attach):
    runner = attach(module := Tables(), 1, 1, 1)
    for length in (3, 5, 3):
        x = torch.randn(2, length, WIDTH)
        assert relative(module(x), Tables.forward(module, x)) < 1e-6
    assert not runner.eager


def test_hidden_states_of_a_text_encoder_stay_right(attach):
    """transformers installs hooks in the first forward that asks for them: a second trace would find them twice."""
    theirs = tiny.clip_text()
    runner = attach(ours := copy.deepcopy(theirs), 2, 2, 2, plan=module_plan(theirs))
    for batch in (1, 3, 1):
        ids = torch.randint(3, 60, (batch, 16))
        states, oracle = (m(ids, output_hidden_states=True).hidden_states for m in (ours, theirs))
        assert len(states) == len(oracle) and max(map(relative, states, oracle)) < 1e-6
    assert not runner.eager
