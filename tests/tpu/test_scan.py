"""Oracle: the same model run block by block in torch. Models that do odd things between their blocks are the point."""

import contextvars

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


class Model(torch.nn.Module):
    """Blocks in a loop; `loop` says what happens between them."""

    _repeated_blocks = ["Block", "TwoStreams", "WithNothing"]

    def __init__(self, loop, block=Block):
        super().__init__()
        self.blocks = torch.nn.ModuleList(block() for _ in range(BLOCKS))
        self.loop = loop

    def forward(self, x, context):
        return self.loop(self.blocks, x, context)


def plain(blocks, x, context):
    for block in blocks:
        x = block(x, context)
    return x


def two_streams(blocks, x, context):
    for block in blocks:
        x, context = block(x, context)
    return x + context


def first_of_three(blocks, x, context):
    for block in blocks:
        x, nothing, three = block(x, context)
        assert nothing is None and three == 3
    return x


def addition_in_the_middle(blocks, x, context):
    for index, block in enumerate(blocks):
        x = block(x, context)
        if index == 2:
            x = x + context
    return x


def other_argument_at_the_end(blocks, x, context):
    for index, block in enumerate(blocks):
        x = block(x, context, gain=1.0 if index < 3 else 0.5)
    return x


def skips_a_block(blocks, x, context):
    for index, block in enumerate(blocks):
        if index != 1:
            x = block(x, context)
    return x


def backwards(blocks, x, context):
    for block in reversed(blocks):
        x = block(x, context)
    return x


def context_renewed(blocks, x, context):
    for block in blocks:
        x = block(x, context * 1.0)
    return x


def wide_input(blocks, x, context):
    # The first block makes [1, W] into [3, W]: what is carried has another shape from the second block on.
    x = blocks[0](x[:1], context)
    for block in blocks[1:]:
        x = block(x, context)
    return x


def long_skips(blocks, x, context):
    kept = []
    for block in blocks:
        x = block(x, context)
        kept.append(x)
    return x + kept[1] - 2 * kept[3]


def skip_in_the_middle(blocks, x, context):
    """What was handed on is used while the run goes on, and again at the end."""
    for index, block in enumerate(blocks):
        before, x = x, block(x, context)
        if index == 1:
            kept = x
        if index == 3:
            x = x + before + kept
    return x + kept


def hints(blocks, x, context):
    """One stream runs on, of the other every block's output is collected."""
    given = []
    for block in blocks:
        hint, context = block(x, context)
        given.append(hint)
    return sum(n * hint for n, hint in enumerate(given)) + context


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
    return relative(ours, theirs), program.count("stablehlo.while"), runner


@pytest.mark.parametrize(
    "loop, block, loops",
    [
        (plain, Block, 1),
        (first_of_three, WithNothing, 1),
        (two_streams, TwoStreams, 1),
        (addition_in_the_middle, Block, 2),
        (other_argument_at_the_end, Block, 2),
        (skips_a_block, Block, 1),
        (backwards, Block, 0),
        (context_renewed, Block, 0),
        (wide_input, Block, 1),
        (long_skips, Block, 1),
        (skip_in_the_middle, Block, 1),
        (hints, TwoStreams, 1),
    ],
)
def test_runs_are_found_and_values_kept(make_mesh, loop, block, loops):
    error, whiles, _ = run(Model(loop, block), make_mesh(1, 1, 1))
    assert error < 1e-6 and whiles == loops


def test_blocks_that_differ_are_not_one_group():
    model = Model(plain)
    assert [(g.start, g.stop, g.label) for g in find_groups(model)] == [(0, BLOCKS, "blocks.*")]
    model.blocks[2].linear = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    assert [(g.start, g.stop, g.label) for g in find_groups(model)] == [(0, 2, "blocks.[0:2]"), (3, 5, "blocks.[3:5]")]


def test_differing_blocks_keep_their_values(make_mesh):
    model = Model(plain)
    model.blocks[2].linear = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    error, whiles, _ = run(model, make_mesh(1, 2, 1))
    assert error < 1e-6 and whiles == 2


def test_lists_that_a_class_does_not_name_are_left_alone():
    model = Model(plain)
    model._repeated_blocks = []
    assert find_groups(model) == []


def test_a_block_given_an_object_runs_where_it_is_called(make_mesh):
    class Notes:
        def __init__(self):
            self.total = 0

    class Writing(Block):
        def forward(self, x, context, notes):
            notes.total = notes.total + x.sum()
            return super().forward(x, context)

    def writes(blocks, x, context):
        notes = Notes()
        for block in blocks:
            x = block(x, context, notes)
        return x + notes.total

    Model._repeated_blocks.append("Writing")
    error, whiles, _ = run(Model(writes, Writing), make_mesh(1, 1, 1))
    assert error < 1e-6 and whiles == 0


def test_a_model_that_names_only_its_unsplit_modules_is_scanned():
    (group,) = find_groups(tiny.cogvideox().transformer)
    assert (group.label, group.start, group.stop) == ("transformer_blocks.*", 0, 3)
    assert find_groups(tiny.cogvideox().vae) == []


def test_hooks_of_blocks_see_the_models_calls_alone(make_mesh):
    """As transformers collects hidden states: by hooks on the blocks, put there by the first forward, for good."""
    model, collector = Model(plain), contextvars.ContextVar("collector")
    for n, block in enumerate(model.blocks):
        block.layer_idx = n  # which no block computes with

    def collects(blocks, x, context):
        collector.set([])
        if not getattr(model, "installed", False):
            for block in model.blocks:
                block.register_forward_hook(lambda block, args, output: collector.get().append(output))
            model.installed = True
        return plain(blocks, x, context) * 0 + sum(n * x for n, x in enumerate(collector.get()))

    model.loop = collects
    x, context, theirs = torch.randn(3, WIDTH), torch.randn(3, WIDTH), 0.0
    with torch.no_grad():
        y = x
        for n, block in enumerate(model.blocks):
            y = block(y, context)
            theirs = theirs + n * y
        runner = CompiledModule(model, ModelPlan(), make_mesh(1, 1, 1), TPUConfig())
        runner.attach()
        for rows in (x, x[:2]):  # hooks that the first trace left behind would collect twice in the second
            assert relative(model(rows, context[: len(rows)]), theirs[: len(rows)]) < 1e-6
        call = runner.flatten_call("forward", (x, context), {})
        assert runner.trace(call).traced.lower().as_text().count("stablehlo.while") == 1
    assert not model.blocks[0]._forward_hooks and not hasattr(model, "installed")
