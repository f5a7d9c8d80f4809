"""The compiled program: loops over blocks, collectives, sizes. Oracles: what the layout promises; the same blocks in torch."""

import math
import re
from collections import Counter

import pytest
import torch

import tiny
from conftest import relative, table
from diffusers import HunyuanVideo15Transformer3DModel, WanTransformer3DModel
from diffusers.tpu.compile.tracing.scan import find_groups
from diffusers.tpu.kernels.attention import api
from diffusers.tpu.pipelines.plans import module_plan


LAYERS, HEADS, DIM, TEXT, GLYPHS, IMAGE = 5, 8, 32, 24, 12, 6
LATENTS, SMALLER = (3, 16, 20), (3, 14, 22)  # SMALLER: tokens that eight chips do not divide
WORDS = TEXT + GLYPHS + IMAGE
COLLECTIVE = re.compile(
    r" = (?P<shape>\(?\w+\[[^=]*?) (?P<op>all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(-start)?\("
)


def wan(latents):
    """(model, inputs of one call)."""
    model = WanTransformer3DModel(
        num_attention_heads=HEADS, attention_head_dim=DIM, text_dim=32, freq_dim=32, ffn_dim=512, num_layers=LAYERS
    )
    return model, {"hidden_states": torch.empty(1, 16, *latents), "encoder_hidden_states": torch.empty(1, TEXT, 32)}


def hunyuan15(latents):
    """The same of two streams, on maps of half the height and width: one token a position."""
    model = HunyuanVideo15Transformer3DModel(
        in_channels=9, out_channels=4, num_attention_heads=HEADS, attention_head_dim=DIM, num_layers=LAYERS, mlp_ratio=2.0,
        patch_size=1, num_refiner_layers=2, text_embed_dim=32, text_embed_2_dim=24, image_embed_dim=16,
        rope_axes_dim=(4, 14, 14),
    )  # fmt: skip
    frames, height, width = latents
    texts = {"": (TEXT, 32), "_2": (GLYPHS, 24)}
    inputs = {f"encoder_hidden_states{n}": torch.empty(1, *shape) for n, shape in texts.items()}
    inputs |= {f"encoder_attention_mask{n}": torch.ones(1, tokens, dtype=bool) for n, (tokens, _) in texts.items()}
    inputs |= {"image_embeds": torch.zeros(1, IMAGE, 16), "is_t2v": True}
    return model, {"hidden_states": torch.empty(1, 9, frames, height // 2, width // 2), **inputs}


@pytest.fixture
def program(attach):
    """A function from degrees to the optimised HLO of one step of a small model, both guidance branches if dp is 2."""

    def compile(*degrees, latents=LATENTS, made=wan) -> str:
        model, inputs = made(latents)
        runner = attach(model, *degrees, plan=module_plan(model))
        call = runner.flatten_call("forward", (), {**inputs, "timestep": torch.empty(1), "return_dict": False})
        lowered = runner.trace(call, branches=degrees[0]).traced.lower()
        runner.detach()
        return re.sub(r"/\*.*?\*/", "", lowered.compile().as_text())

    return compile


def loops(hlo: str) -> list[int]:
    """Known trip counts of the program's loops."""
    return [int(n) for n in re.findall(r'while\(.*"known_trip_count":\{"n":"(\d+)"\}', hlo)]


def in_block(hlo: str) -> str:
    """The body of the loop over blocks."""
    (body,) = re.findall(rf'body=%?([\w.\-]+).*"known_trip_count":\{{"n":"{LAYERS}"\}}', hlo)
    return re.search(rf"^%?{re.escape(body)} \(.*?^}}", hlo, re.M | re.S)[0]


def exchanges(text: str) -> list[tuple[str, str]]:
    """(operation, shape) of each collective."""
    return [(m["op"], m["shape"]) for m in COLLECTIVE.finditer(text)]


def assert_split(body: str, latents: tuple[int, ...], ways: int) -> int:
    """Activations in the block are split over the sequence: so many rows on each chip, filled up."""
    tokens = math.prod(latents) // 4
    rows = -(-tokens // ways)
    assert f"[1,{rows},{HEADS * DIM}]" in body
    assert not re.search(rf"\[1,({tokens}|{ways * rows}),{HEADS * DIM}\]", body)
    return rows


@pytest.mark.parametrize("degrees, latents", [((1, 8, 1), SMALLER), ((2, 4, 1), LATENTS)])
def test_one_loop_over_blocks_that_gathers_weights_and_reduces_nothing(program, degrees, latents):
    hlo = program(*degrees, latents=latents)
    assert loops(hlo) == [LAYERS]
    found = exchanges(in_block(hlo))
    gathers = [shape for op, shape in found if op == "all-gather"]
    assert len(gathers) == 10  # q, k, v, out twice; feed-forward in and out
    assert all(re.search(r"\[1,(256|512),(256|512)\]", shape) for shape in gathers)
    assert {op for op, _ in found} == {"all-gather", "all-to-all"}
    assert not any(op == "all-reduce" for op, _ in exchanges(hlo))
    assert_split(in_block(hlo), latents, degrees[1])


@pytest.mark.parametrize("latents", [LATENTS, SMALLER])
def test_two_streams_exchange_heads_and_text_alone(program, latents, monkeypatch):
    """Queries, keys, values and the answer of latents trade rows for heads; of text only the answer's heads are joined, and of scales and
    shifts each chip's part: their weights stay where they are."""
    monkeypatch.setattr(api, "_dispatched", Counter())
    hlo = program(1, 8, 1, latents=latents, made=hunyuan15)
    tokens = math.prod(latents) // 4
    assert loops(hlo) == [LAYERS]
    body = in_block(hlo)
    found = exchanges(body)
    assert {op for op, _ in found} == {"all-gather", "all-to-all"}
    assert sum(op == "all-to-all" for op, _ in found) == 4
    joined = [shape for op, shape in found if op == "all-gather" and not re.search(r"\[1,\d{3,},\d{3,}\]", shape)]
    of_stream, of_text = f"1,{6 * HEADS * DIM}", f"1,{HEADS},{WORDS},{DIM}"
    assert [re.search(r"\[(.*?)\]", shape)[1] for shape in joined] == [of_stream, of_stream, of_text]
    assert not any(f"[{6 * HEADS * DIM},{HEADS * DIM}]" in shape for _, shape in found)
    rows = assert_split(body, latents, 8)
    assert {(way.q[2], way.mask) for way in api.explain()} == {
        (tokens, "joint+keys"),  # for its shapes
        (8 * rows, "joint+keys"),  # what runs: filled up where `sp` does not divide
        (TEXT, "outer"),
    }


def test_nothing_of_tokens_by_tokens(program):
    latents, tokens = (4, 48, 48), 4 * 24 * 24
    hlo = program(1, 1, 1, latents=latents, made=hunyuan15)
    arrays = [[int(n) for n in dims.split(",") if n] for dims in re.findall(r"(?:f32|bf16|pred|s32)\[([\d,]*)\]", hlo)]
    assert max(map(math.prod, arrays)) < HEADS * tokens * tokens / 2
    assert not any(sum(n >= tokens for n in dims) > 1 for dims in arrays)


def test_tensor_parallel_reduces_the_two_sums_it_must(program):
    found = exchanges(in_block(program(1, 2, 4)))
    wide = [op for op, shape in found if op in ("all-reduce", "reduce-scatter") and f",{HEADS * DIM}]" in shape]
    assert len(wide) == 3  # after self-attention, cross-attention and feed-forward; the rest are norms' statistics


# Runs of equal blocks: models that do odd things between their blocks are the point


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


class Notes:
    total = 0


class Writing(Block):
    def forward(self, x, context, notes):
        notes.total = notes.total + x.sum()
        return super().forward(x, context)


class Model(torch.nn.Module):
    """Blocks in a loop, of whose turns these are the lines; then the value of `result`."""

    _repeated_blocks = ["Block", "TwoStreams", "WithNothing", "IntoList", "IntoTensor", "Writing"]

    def __init__(self, lines="x = block(x, context)", result="x", block=Block):
        super().__init__()
        self.blocks = torch.nn.ModuleList(block() for _ in range(BLOCKS))
        names = {"__name__": __name__, "notes": Notes, "torch": torch}
        head = "def loop(blocks, x, context):\n kept = []\n for n, block in enumerate(blocks):\n  "
        exec(head + lines.replace("\n", "\n  ") + f"\n return {result}", names)
        self.loop = names["loop"]

    def forward(self, x, context):
        return self.loop(self.blocks, x, context)


@pytest.fixture
def loops_of(attach):
    """A function from a model to the number of loops of its program, whose result is upstream's."""

    def loops_of(model, *degrees) -> int:
        given = torch.randn(2, 3, WIDTH)
        with torch.no_grad():
            theirs = model(*given)
            runner = attach(model, *degrees)
            assert relative(model(*given), theirs) < 1e-6
            program = runner.trace(runner.flatten_call("forward", (*given,), {})).traced.lower().as_text()
        runner.detach()
        return program.count("stablehlo.while")

    return loops_of


# Lines of a turn, the result, the block's class, how many loops the program has.
LOOPS = table("programs/runs_of_blocks")


@pytest.mark.parametrize("name", LOOPS)
def test_runs_are_found_and_values_kept(loops_of, name):
    lines, result, block, loops = LOOPS[name]
    assert loops_of(Model(lines, result, globals()[block]), 1, 1, 1) == loops


def test_blocks_that_differ_are_not_one_group(loops_of):
    model = Model()
    model.none = torch.nn.ModuleList([None])  # as Mochi's VAE has them
    assert [(g.start, g.stop, g.label) for g in find_groups(model)] == [(0, BLOCKS, "blocks.*")]
    model.blocks[2].linear = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    assert [(g.start, g.stop, g.label) for g in find_groups(model)] == [(0, 2, "blocks.[0:2]"), (3, 5, "blocks.[3:5]")]
    assert loops_of(model, 1, 2, 1) == 2
    model._repeated_blocks = []  # lists that a class does not name are left alone
    assert find_groups(model) == []
    (group,) = find_groups(tiny.cogvideox().transformer)  # it names its unsplit modules
    assert (group.label, group.start, group.stop) == ("transformer_blocks.*", 0, 3)
    assert find_groups(tiny.cogvideox().vae) == []
