"""Tests of kernels' values once more, and of what lies in memory: in Pallas's TPU interpreter, at ragged sizes. Memory that nobody wrote
is NaN, reads beyond an array are errors, programs of "parallel" axes run in a random order on two cores, and races between them, or with
copies, are found.

Oracle: float64 formulas.
"""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from conftest import relative, wide
from diffusers.tpu.kernels import rotary
from diffusers.tpu.kernels.attention import kernel, kernel_body, pieces
from diffusers.tpu.kernels.attention.blocks import Blocks, Tile
from diffusers.tpu.kernels.pallas import by_token
from test_attention_kernel import (  # noqa: F401
    test_each_head_and_block_of_queries_goes_its_own_way,
    test_every_mask_of_every_shape,
    test_first_row_and_first_key_say_where_the_band_lies,
)
from test_convolution import test_any_map  # noqa: F401
from test_kernel_gradients import test_every_mask  # noqa: F401
from test_linear import test_any_number_of_rows  # noqa: F401
from test_norms import normed, turned


pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def strictly(monkeypatch, capsys):
    """How kernels are interpreted here; a race is a test's failure, unless it has read what was said of it."""
    seed, call = int(np.random.default_rng().integers(1 << 30)), pl.pallas_call
    settings = pltpu.InterpretParams(
        uninitialized_memory="nan", detect_races=True, num_cores_or_threads=2, random_seed=seed
    )
    strict = lambda *given, interpret, **how: call(*given, interpret=interpret and settings, **how)  # noqa: E731
    jax.clear_caches()
    monkeypatch.setattr(pl, "pallas_call", strict)
    yield
    jax.clear_caches()
    pltpu.reset_tpu_interpret_mode_state()
    assert "RACE DETECTED" not in capsys.readouterr().out


def draw(rng, dtype, *shapes):
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


@pytest.mark.parametrize("tokens, dim", [(1, 128), (255, 64), (300, 128)])
def test_rotary(tokens, dim):
    rng = np.random.default_rng()
    size = 256 if dim == 128 else dim  # small heads are normed each
    (x,), (weight,) = draw(rng, jnp.bfloat16, (2, tokens, 256)), draw(rng, jnp.float32, (size,))
    angle = np.repeat(rng.uniform(-100, 100, (tokens, dim // 2)), 2, axis=1)
    cos, sin = (jnp.asarray(f(angle), jnp.float32) for f in (np.cos, np.sin))
    static = {"eps": 1e-6, "centred": False, "biased": False, "apart": False}
    ours = rotary._by_kernel(x, weight, cos, sin, **static, interpret=True)
    assert relative(ours, turned(normed(x, size, weight), angle[None, :, ::2])) < 5e-3  # measured: 2.4e-3


@pytest.mark.parametrize(
    "ways, tokens, rest, shares", [(2, 300, 0, (1, 1)), (4, 128, 7, (2, 1)), (3, 517, 130, (3, 2))]
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_exchange(monkeypatch, ways, tokens, rest, shares, dtype):
    """Every order to the bit: pieces of a group's columns, of one tensor or of two side by side, tokens of all chips joined with what is
    behind them, as they are and turned."""
    monkeypatch.setattr(pieces, "BLOCK_BYTES", 128 * 128 * ways * 4)  # several blocks, the last not full
    *both, behind = draw(
        np.random.default_rng(), dtype, *[(2, tokens, sum(shares) * 128 * ways)] * 2, (2, rest, 128 * shares[1])
    )
    behind, width = behind if rest else None, behind.shape[2]

    def run(kernel, *arguments, **how):
        return kernel(*arguments, interpret=True, **how)

    sent = [run(pieces.cut, both[: group + 1], ways, group=group, shares=shares) for group in range(2)]
    parts = [np.split(wide(x), [shares[0] * 128 * ways], 2) for x in both]
    np.testing.assert_array_equal(wide(sent[0]), np.stack(np.split(parts[0][0], ways, 2)))
    last = [np.stack(np.split(x, ways, 2)) for _, x in parts]
    np.testing.assert_array_equal(wide(sent[1]), np.concatenate(last, 3))
    pasted = run(pieces.paste, [sent[0], sent[1][..., :width]])
    np.testing.assert_array_equal(wide(pasted), wide(both[0]))
    whole = tokens // 128 * 128
    for dim, turned, place in ((128, False, 0), (64, False, 1), (128, True, 1)):
        made = run(pieces.join, sent[1], dim, turned, behind=behind, place=place, places=2)
        rows, of_place = wide(made), [wide(p)[..., width * place : width * (place + 1)] for p in sent[1]]
        rows = rows.swapaxes(1, 2) if turned else by_token(rows) if dim == 64 else rows
        in_order = [p[:, :whole] for p in of_place] + [p[:, whole:] for p in of_place]
        in_order += [] if behind is None else [wide(behind)]
        np.testing.assert_array_equal(rows, np.concatenate(in_order, 1))
    np.testing.assert_array_equal(wide(run(pieces.part, made, ways, tokens)), np.stack(of_place))


def test_a_race_and_memory_that_nobody_wrote_are_seen(capsys):
    """Planted: blocks of keys in any order on both cores; values of the last block that are never laid out."""
    q, k, v = draw(np.random.default_rng(), jnp.float32, (1, 1, 128, 128), (1, 1, 600, 128), (1, 1, 600, 128))
    blocks = Blocks(256, 256, 128, Tile(128, 128, 1), Tile(128, 128, 2))
    attend = functools.partial(kernel.tpu_attention, q, k, v, scale=0.1, blocks=blocks, interpret=True)
    made = pltpu.CompilerParams

    def all_parallel(dimension_semantics, **more):
        return made(dimension_semantics=("parallel",) * len(dimension_semantics), **more)

    with mock.patch.object(pltpu, "CompilerParams", all_parallel):
        jax.block_until_ready(attend())
    assert "RACE DETECTED" in capsys.readouterr().out
    pltpu.reset_tpu_interpret_mode_state()
    with mock.patch.object(kernel_body, "_prepare_cut", lambda *_: None):
        assert np.isnan(attend()).any()
