"""Oracle: the same model run block by block in torch. Models that do odd things between their blocks are the point."""

import pytest
import torch

import tiny
from conftest import relative
from diffusers.tpu.chips.sharding import ModelPlan
from diffusers.tpu.compile.module import CompiledModule
from diffusers.tpu.compile.tracing.scan import find_groups
from diffusers.tpu.config import TPUConfig


WIDTH, BLOCKS = 6, 5


class Block(torch.nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.register_buffer("shift", torch.randn(width))

    def forward(self, x, context, gain=1.0):
        return x + torch.tanh(self.linear(x) * context + self.shift) * gain


class TwoStreams(Block):
    def forward(self, x, context, gain=1.0):
        y = super().forward(x, context, gain)
        return y, context + y.mean()


class WithNothing(Block):
    """As T5's: some of what it returns is no tensor."""

    def forward(self, x, context, gain=1.0):
        return super().forward(x, context, gain), None, 3


class IntoList(Block):
    def forward(self, x, context, kept):
        kept[0] = kept[0] + x.sum()
        return super().forward(x, context)


class IntoTensor(Block):
    def forward(self, x, context, kept):
        kept += x
        return super().forward(x, context)


class Model(torch.nn.Module):
    """Blocks in a loop, of whose turns these are the lines; then the value of `result`."""

    _repeated_blocks = ["Block", "TwoStreams", "WithNothing", "IntoList", "IntoTensor"]

    def __init__(self, lines="x = block(x, context)", result="x", block=Block):
        super().__init__()
        self.blocks = torch.nn.ModuleList(block() for _ in range(BLOCKS))
        names = {"__name__": __name__, "notes": Notes}
        head = "def loop(blocks, x, context):\n kept = []\n for n, block in enumerate(blocks):\n  "
        exec(head + lines.replace("\n", "\n  ") + f"\n return {result}", names)
        self.loop = names["loop"]

    def forward(self, x, context):
        return self.loop(self.blocks, x, context)


def run(model, mesh, scan=True):
    x, context = torch.randn(3, WIDTH), torch.randn(3, WIDTH)
    with torch.no_grad():
        theirs = model(x, context)
        runner = CompiledModule(model, ModelPlan(), mesh, TPUConfig(scan=scan))
        runner.attach()
        ours = model(x, context)
        call = runner.flatten_call("forward", (x, context), {})
        program = runner.trace(call).traced.lower().as_text()
    runner.detach()
    return relative(ours, theirs), program.count("stablehlo.while")


PLAIN = "x = block(x, context)"
# Lines of a turn, the result, the block's class, how many loops the program has.
LOOPS = {
    "plain": (PLAIN, "x", Block, 1),
    "first of three": ("x, nothing, three = block(x, context)", "x", WithNothing, 1),
    "two streams": ("x, context = block(x, context)", "x + context", TwoStreams, 1),
    "addition in the middle": (f"{PLAIN}\nif n == 2: x = x + context", "x", Block, 2),
    "other argument at the end": ("x = block(x, context, gain=1.0 if n < 3 else 0.5)", "x", Block, 2),
    "skips a block": (f"if n != 1: {PLAIN}", "x", Block, 1),
    "backwards": ("x = blocks[4 - n](x, context)", "x", Block, 0),
    "context renewed": ("x = block(x, context * 1.0)", "x", Block, 0),
    # The first block makes [1, W] into [3, W]: what is carried has another shape from the second block on.
    "wide input": ("x = block(x[:1] if n == 0 else x, context)", "x", Block, 1),
    "long skips": (f"{PLAIN}\nkept.append(x)", "x + kept[1] - 2 * kept[3]", Block, 1),
    "skip in the middle": (f"kept.append(x)\n{PLAIN}\nif n == 3: x = x + kept[3] + kept[2]", "x + kept[2]", Block, 1),
    "into a list": ("if n == 0: kept.append(0)\nx = block(x, context, kept)", "x + kept[0]", IntoList, 0),
    "into a tensor": ("if n == 0: kept.append(x * 1)\nx = block(x, context, kept[0])", "x + kept[0]", IntoTensor, 0),
    "hints": ("hint, context = block(x, context)\nkept.append(hint)", "sum(n * x for n, x in enumerate(kept)) + context", TwoStreams, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_runs_are_found_and_values_kept(make_mesh, name):
    *made, loops = LOOPS[name]
    error, whiles = run(Model(*made), make_mesh(1, 1, 1))
    assert error < 1e-6 and whiles == loops


def test_blocks_that_differ_are_not_one_group(make_mesh):
    model = Model()
    assert [(g.start, g.stop, g.label) for g in find_groups(model)] == [(0, BLOCKS, "blocks.*")]
    model.blocks[2].linear = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    assert [(g.start, g.stop, g.label) for g in find_groups(model)] == [(0, 2, "blocks.[0:2]"), (3, 5, "blocks.[3:5]")]
    error, whiles = run(model, make_mesh(1, 2, 1))
    assert error < 1e-6 and whiles == 2
    model._repeated_blocks = []  # lists that a class does not name are left alone
    assert find_groups(model) == []


class Notes:
    total = 0


class Writing(Block):
    def forward(self, x, context, notes):
        notes.total = notes.total + x.sum()
        return super().forward(x, context)


def test_a_block_given_an_object_runs_where_it_is_called(make_mesh):
    lines = "if n == 0: kept.append(notes())\nx = block(x, context, kept[0])"
    model = Model(lines, "x + kept[0].total", Writing)
    model._repeated_blocks = ["Writing"]
    error, whiles = run(model, make_mesh(1, 1, 1))
    assert error < 1e-6 and whiles == 0


def test_a_model_that_names_only_its_unsplit_modules_is_scanned():
    (group,) = find_groups(tiny.cogvideox().transformer)
    assert (group.label, group.start, group.stop) == ("transformer_blocks.*", 0, 3)
    assert find_groups(tiny.cogvideox().vae) == []
