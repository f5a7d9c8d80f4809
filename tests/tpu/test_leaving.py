"""Oracle: the same module in torch. What a forward leaves behind and reads; its lines are written here."""

import copy
import functools
import types

import numpy as np
import pytest
import torch

import tiny
from conftest import relative
from diffusers.tpu.chips.sharding import ModelPlan
from diffusers.tpu.compile.module import CompiledModule
from diffusers.tpu.config import TPUConfig
from diffusers.tpu.pipelines.plans import module_plan
from test_changes import BLOCKS, WIDTH, Block


# Modules whose lines are written here: what they leave behind, and what they read


MEMORY = types.SimpleNamespace(before=0)
ROWS = torch.zeros(3, WIDTH)


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


def called(model, inputs) -> list[torch.Tensor]:
    MEMORY.before = 0
    with torch.no_grad():
        return [model(x).clone() for x in inputs]


def as_upstream(mesh, build) -> CompiledModule:
    """The runner of a model that was called some times, each time with upstream's answer."""
    inputs, theirs = torch.randn(4, 3, WIDTH), build()
    weights = copy.deepcopy(theirs.state_dict())
    oracles, ours = called(theirs, inputs), build()
    ours.load_state_dict(weights)
    runner = CompiledModule(ours, ModelPlan(), mesh, TPUConfig())
    runner.attach()
    for answer, oracle in zip(called(ours, inputs), oracles, strict=True):
        assert relative(answer, oracle) < 1e-6
    return runner


BY_A_VALUE = "decides by a value (test_leaving.py, line"
# Lines, attributes, why they run eagerly.
KEPT = {
    "before": ("before, self.before = self.before, x\nreturn self.linear(x) + before", {"before": ROWS}, "left in before"),
    "list": ("self.list.append(x)\nreturn self.linear(x) - self.list[0]", {"list": []}, "left in list"),
    "of the class": ("self.kept.append(x)\nreturn self.linear(x) - self.kept[0]", {}, "from call to call"),
    "the first": ("if not hasattr(self, 'first'): self.first = x\nreturn self.linear(x) - self.first", {}, "left in first"),
    "count": (
        "self.count = self.count + torch.ones((), device=x.device)\nreturn self.linear(x) * self.count",
        {"count": torch.ones(())}, "left in count",
    ),
    "buffer": ("before, self.buffer = self.buffer, x\nreturn self.linear(x) - before", {"buffer": ROWS}, "writes into buffer"),
    "buffer in place": ("self.buffer.add_(x)\nreturn self.linear(x) - self.buffer", {"buffer": ROWS}, "writes into buffer"),
    "sum": ("self.before.add_(x)\nreturn self.linear(x) - self.before", {"before": ROWS}, BY_A_VALUE),
    "formatted": ("return self.linear(x) * float(f'{x.max():.2f}')", {}, BY_A_VALUE),
    "numpy": ("return self.linear(x) + torch.from_numpy(x.numpy() * 2)", {}, BY_A_VALUE),
    "array of a view": ("return self.linear(x) + torch.as_tensor(np.asarray(x[1:2]) * 2)", {}, BY_A_VALUE),
    "printed": ("print(x)\nreturn self.linear(x)", {}, "it calls print"),
}  # fmt: skip


@pytest.mark.idiom("stores", "decisions")
@pytest.mark.parametrize("name", KEPT)
def test_what_a_forward_leaves_and_reads_is_upstreams(make_mesh, name, capsys):
    lines, attributes, reason = KEPT[name]
    runner = as_upstream(make_mesh(1, 1, 1), functools.partial(made, lines, **attributes))
    assert not runner.programs and len(runner.eager) == 1 and reason in runner.eager[0]
    shown = capsys.readouterr().out.replace(", device='jax:0'", "")
    assert shown[: len(shown) // 2] == shown[len(shown) // 2 :]


def test_what_blocks_leave_and_read_is_upstreams(make_mesh):
    runner = as_upstream(make_mesh(2, 2, 2), lambda: made(*KEPT["before"][:1], blocks=BLOCKS, before=ROWS))
    assert not runner.compilations and "left in blocks.0.before" in runner.eager[0]


SCRATCH = {
    "only written": "self.before, self.shape = self.linear(x), x.shape\nreturn self.before * 2",
    "emptied first": "self.list = [None]\nfor _ in '12': self.list[0] = self.linear(x) + (0 if self.list[0] is None else self.list[0])\nreturn self.list[0]",
    "emptied last": "for _ in '12': self.list.append(self.linear(x) + sum(self.list))\nx = self.list[1]\nself.list.clear()\nreturn x",
    "table": "if self.before is None: self.before = torch.arange(8, device=x.device) * 0.5\nreturn self.linear(x) * self.before",
    "flag": "if hasattr(self, 'called'): return self.linear(x)\nself.called = True\nreturn x",
}  # fmt: skip


@pytest.mark.parametrize(
    "name, blocks", [*((name, 0) for name in SCRATCH), ("emptied last", BLOCKS), ("flag", BLOCKS)]
)
def test_scratch_tables_and_what_the_first_call_does_stay_compiled(make_mesh, name, blocks):
    runner = as_upstream(make_mesh(1, 1, 1), lambda: made(SCRATCH[name], blocks, list=[], before=None))
    assert not runner.eager and runner.compilations == 1


def test_a_check_says_upstreams_values(make_mesh):
    model, x = (
        made("if x.shape[0] != 2: raise ValueError(f'expected two rows, got {x}')\nreturn x"),
        torch.randn(3, WIDTH),
    )
    CompiledModule(model, ModelPlan(), make_mesh(1, 1, 1), TPUConfig()).attach()
    with pytest.raises(ValueError) as error, torch.no_grad():
        model(x)
    assert str(error.value) == f"expected two rows, got {x}"


LOOPS = {
    "writes between": "for block in self.blocks:\n  x = block(x, c)\n  c.mul_(0.5)\nreturn x",
    "writes a part between": "for block in self.blocks:\n  x = block(x, c)\n  c[0] = 3.0\nreturn x",
    "one value twice": "x = self.blocks[0](x, c)\nfor block in self.blocks[1:]: x = block(x, x)\nreturn x",
}


@pytest.mark.parametrize("name", LOOPS)
def test_blocks_see_the_values_of_their_call(make_mesh, name):
    """Something happens to what blocks share, or they are given one value twice."""
    model = made("c = x.flip(0).clone()\n" + LOOPS[name])
    model.blocks, model._repeated_blocks = torch.nn.ModuleList(Block() for _ in range(BLOCKS)), ["Block"]
    x = torch.randn(2, WIDTH)
    with torch.no_grad():
        theirs = model(x)
        CompiledModule(model.eval(), ModelPlan(), make_mesh(1, 1, 1), TPUConfig()).attach()
        assert relative(model(x), theirs) < 1e-6


@pytest.mark.parametrize("arguments, windowed", [("x", False), ("x, timestep=None", True)])
def test_a_window_of_attention_is_the_denoisers_alone(make_mesh, arguments, windowed):
    attend = eval(f"lambda self, {arguments}: torch.nn.functional.scaled_dot_product_attention(x, x, x)", globals())
    cls, x = type("Attending", (torch.nn.Module,), {"forward": attend}), torch.randn(1, 2, 9, WIDTH)
    module = cls()
    CompiledModule(module, ModelPlan(), make_mesh(1, 1, 1), TPUConfig(attention_window=(1, 1))).attach()
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


def test_a_cache_on_the_class_keeps_nothing_of_a_trace(make_mesh):
    module = Tables().eval()
    runner = CompiledModule(module, ModelPlan(), make_mesh(1, 1, 1), TPUConfig())
    runner.attach()
    for length in (3, 5, 3):
        x = torch.randn(2, length, WIDTH)
        with torch.no_grad():
            assert relative(module(x), Tables.forward(module, x)) < 1e-6
    assert not runner.eager


def test_hidden_states_of_a_text_encoder_stay_right(make_mesh):
    """transformers installs hooks in the first forward that asks for them: a second trace would find them twice."""
    theirs = tiny.clip_text()
    ours = copy.deepcopy(theirs)
    runner = CompiledModule(ours, module_plan(ours), make_mesh(2, 2, 2), TPUConfig())
    runner.attach()
    for batch in (1, 3, 1):
        ids = torch.randint(3, 60, (batch, 16))
        with torch.no_grad():
            states, oracle = (m(ids, output_hidden_states=True).hidden_states for m in (ours, theirs))
        assert len(states) == len(oracle) and max(map(relative, states, oracle)) < 1e-6
    assert not runner.eager
