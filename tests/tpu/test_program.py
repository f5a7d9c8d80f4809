"""Oracle: the compiled program itself. What the layout promises is read from it: loops, collectives, sizes."""

import math
import re
from collections import Counter

import pytest
import torch

from diffusers import HunyuanVideo15Transformer3DModel, WanTransformer3DModel
from diffusers.tpu.compile.module import CompiledModule
from diffusers.tpu.config import TPUConfig
from diffusers.tpu.kernels.attention import api
from diffusers.tpu.pipelines.plans import module_plan


LAYERS, HEADS, DIM, TEXT, GLYPHS, IMAGE = 5, 8, 32, 24, 12, 6
LATENTS, SMALLER = (3, 16, 20), (3, 14, 22)  # SMALLER: tokens that eight chips do not divide
TOKENS = 3 * 16 * 20 // 4
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
def program(make_mesh):
    """A function from degrees to the optimised HLO of one step of a small model, both guidance branches if dp is 2."""

    def compile(*degrees, latents=LATENTS, made=wan) -> str:
        model, inputs = made(latents)
        runner = CompiledModule(model.eval(), module_plan(model), make_mesh(*degrees), TPUConfig())
        runner.attach()
        call = runner.flatten_call("forward", (), {**inputs, "timestep": torch.empty(1), "return_dict": False})
        lowered = runner.trace(call, branches=degrees[0]).traced.lower()
        runner.detach()
        return re.sub(r"/\*.*?\*/", "", lowered.compile().as_text())

    return compile


def loops(hlo: str) -> list[int]:
    """Known trip counts of the program's loops."""
    return [int(n) for n in re.findall(r'while\(.*"known_trip_count":\{"n":"(\d+)"\}', hlo)]


def computations(hlo: str) -> dict[str, str]:
    """Computation name -> its text."""
    parts = re.split(r"\n(?=(?:ENTRY )?%?[\w.\-]+ \()", hlo)
    return {re.match(r"(?:ENTRY )?%?([\w.\-]+)", part.lstrip()).group(1): part for part in parts[1:]}


def in_block(hlo: str) -> str:
    """The body of the loop over blocks."""
    (body,) = re.findall(rf'body=%?([\w.\-]+).*"known_trip_count":\{{"n":"{LAYERS}"\}}', hlo)
    return computations(hlo)[body]


@pytest.mark.parametrize("degrees, latents", [((1, 8, 1), SMALLER), ((2, 4, 1), LATENTS)])
def test_one_loop_over_blocks_that_gathers_weights_and_reduces_nothing(program, degrees, latents):
    hlo = program(*degrees, latents=latents)
    assert loops(hlo) == [LAYERS]
    body = in_block(hlo)
    found = [(m["op"], m["shape"]) for m in COLLECTIVE.finditer(body)]
    gathers = [shape for op, shape in found if op == "all-gather"]
    assert len(gathers) == 10  # q, k, v, out twice; feed-forward in and out
    assert all(re.search(r"\[1,(256|512),(256|512)\]", shape) for shape in gathers)
    assert {op for op, _ in found} == {"all-gather", "all-to-all"}
    assert not any(m["op"] == "all-reduce" for m in COLLECTIVE.finditer(hlo))


def test_activations_in_the_block_are_split_over_the_sequence(program):
    body = in_block(program(1, 8, 1))
    whole = re.findall(rf"\[1,{TOKENS},{HEADS * DIM}\]", body)
    assert not whole and f"[1,{TOKENS // 8},{HEADS * DIM}]" in body


@pytest.mark.parametrize("latents", [LATENTS, SMALLER])
def test_two_streams_exchange_heads_and_text_alone(program, latents, monkeypatch):
    """Queries, keys, values and the answer of latents trade rows for heads; of text only the answer's heads are joined."""
    monkeypatch.setattr(api, "_dispatched", Counter())
    hlo = program(1, 8, 1, latents=latents, made=hunyuan15)
    tokens = latents[0] * latents[1] * latents[2] // 4
    assert loops(hlo) == [LAYERS]
    body = in_block(hlo)
    found = [(m["op"], m["shape"]) for m in COLLECTIVE.finditer(body)]
    assert {op for op, _ in found} == {"all-gather", "all-to-all"}
    assert sum(op == "all-to-all" for op, _ in found) == 4
    joined = [shape for op, shape in found if op == "all-gather" and not re.search(r"\[1,\d{3,},\d{3,}\]", shape)]
    assert [re.search(r"\[(.*?)\]", shape)[1] for shape in joined] == [f"1,{HEADS},{WORDS},{DIM}"]
    rows = -(-tokens // 8)
    assert f"[1,{rows},{HEADS * DIM}]" in body and not re.search(rf"\[1,({tokens}|{8 * rows}),{HEADS * DIM}\]", body)
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
    body = in_block(program(1, 2, 4))
    reduced = [m["shape"] for m in COLLECTIVE.finditer(body) if m["op"] in ("all-reduce", "reduce-scatter")]
    wide = [shape for shape in reduced if f",{HEADS * DIM}]" in shape]
    assert len(wide) == 3  # after self-attention, cross-attention and feed-forward; the rest are norms' statistics
