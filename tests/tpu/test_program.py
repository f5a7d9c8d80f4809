"""Oracle: the compiled program itself. What the layout promises is read from it: loops, collectives, sizes."""

import re

import pytest
import torch

from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan_flax import PLAN
from diffusers.tpu.config import TPUConfig
from diffusers.tpu.runner import Runner


LAYERS, HEADS, DIM, TEXT = 5, 8, 32, 24
TOKENS = 3 * 16 * 20 // 4
COLLECTIVE = re.compile(
    r" = (?P<shape>\(?\w+\[[^=]*?) (?P<op>all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(-start)?\("
)


@pytest.fixture
def program(make_mesh):
    """A function from degrees to the optimised HLO of one step of a small Wan, both guidance branches if dp is 2."""

    def compile(*degrees, latents=(3, 16, 20)) -> str:
        model = WanTransformer3DModel(
            num_attention_heads=HEADS, attention_head_dim=DIM, text_dim=32, freq_dim=32, ffn_dim=512, num_layers=LAYERS
        ).eval()
        runner = Runner(model, PLAN, make_mesh(*degrees), TPUConfig())
        runner.attach()
        inputs = {
            "hidden_states": torch.empty(1, 16, *latents),
            "timestep": torch.empty(1),
            "encoder_hidden_states": torch.empty(1, TEXT, 32),
            "return_dict": False,
        }
        call = runner.take_apart("forward", (), inputs)
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


@pytest.mark.parametrize("degrees", [(1, 8, 1), (2, 4, 1)])
def test_one_loop_over_blocks_that_gathers_weights_and_reduces_nothing(program, degrees):
    hlo = program(*degrees)
    assert loops(hlo) == [LAYERS]
    body = in_block(hlo)
    found = [(m["op"], m["shape"]) for m in COLLECTIVE.finditer(body)]
    gathers = [shape for op, shape in found if op == "all-gather"]
    assert len(gathers) == 10  # q, k, v, out twice; feed-forward in and out
    assert all(re.search(r"\[1,(256|512),(256|512)\]", shape) for shape in gathers)
    assert {op for op, _ in found} == {"all-gather", "all-to-all"}
    assert not any(m["op"] == "all-reduce" for m in COLLECTIVE.finditer(hlo))


def test_a_sequence_that_does_not_divide_costs_no_collective_more(program):
    hlo = program(1, 8, 1, latents=(3, 14, 18))  # 189 tokens
    assert {m["op"] for m in COLLECTIVE.finditer(in_block(hlo))} == {"all-gather", "all-to-all"}


def test_activations_in_the_block_are_split_over_the_sequence(program):
    body = in_block(program(1, 8, 1))
    whole = re.findall(rf"\[1,{TOKENS},{HEADS * DIM}\]", body)
    assert not whole and f"[1,{TOKENS // 8},{HEADS * DIM}]" in body


def test_nothing_of_tokens_by_tokens(program):
    latents, tokens = (4, 48, 48), 4 * 24 * 24
    hlo = program(1, 1, 1, latents=latents)
    largest = max(
        eval("*".join(dims.split(",")) or "1") for dims in re.findall(r"(?:f32|bf16|pred|s32)\[([\d,]+)\]", hlo)
    )
    assert largest < HEADS * tokens * tokens / 2
    assert f"{tokens},{tokens}]" not in hlo


def test_tensor_parallel_reduces_the_two_sums_it_must(program):
    body = in_block(program(1, 2, 4))
    reduced = [m["shape"] for m in COLLECTIVE.finditer(body) if m["op"] in ("all-reduce", "reduce-scatter")]
    wide = [shape for shape in reduced if f",{HEADS * DIM}]" in shape]
    assert len(wide) == 3  # after self-attention, cross-attention and feed-forward; the rest are norms' statistics
