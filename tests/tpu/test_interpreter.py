"""Every kernel in Pallas's TPU interpreter, at ragged sizes: memory that nobody wrote is NaN, reads beyond an array are errors,
programs of "parallel" axes run in a random order on two cores, and races between them, or with copies, are found.

Oracle: float64 formulas.
"""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from attention_masks import KINDS, attention_formula, gradients_formula, make_mask
from conftest import relative, wide
from diffusers.tpu.kernels import convolution as convolution_kernel
from diffusers.tpu.kernels import linear, rotary
from diffusers.tpu.kernels.attention import backward, exchange, kernel, kernel_body
from diffusers.tpu.kernels.attention.blocks import Blocks, Tile
from diffusers.tpu.kernels.attention.softmax_modes import BOUND, CENTRED, MODES, ONLINE
from test_linear import activated
from test_norms import normed, turned


pytestmark = pytest.mark.slow

SMALL = Blocks(256, 256, 128, Tile(128, 128, 1), Tile(128, 128, 2))


@pytest.fixture
def interpreted():
    """A function that runs a kernel (given what to pass as `interpret`) and says (result, whether a race was found)."""

    def run(call, cores: int = 2):
        seed = int(np.random.default_rng().integers(1 << 30))
        settings = pltpu.InterpretParams(
            uninitialized_memory="nan", detect_races=True, num_cores_or_threads=cores, random_seed=seed
        )
        result = jax.block_until_ready(call(settings))
        return result, interpret_pallas_call.races.races_found

    yield run
    pltpu.reset_tpu_interpret_mode_state()


def draw(rng, dtype, *shapes):
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def sizes(rng):
    """Queries and keys of a block and some more, or of less than one."""
    return [int(rng.integers(1, 120)) if rng.random() < 0.2 else int(rng.integers(260, 500)) for _ in range(2)]


@pytest.mark.parametrize("kind", KINDS)
def test_attention(interpreted, kind):
    rng = np.random.default_rng()
    (t, s), with_lse = sizes(rng), rng.random() < 0.5
    dtype, kv_heads, dim = rng.choice([jnp.float32, jnp.bfloat16]), int(rng.choice([1, 2])), int(rng.choice([64, 128]))
    q, k, v = draw(rng, dtype, (2, 2, t, dim), (2, kv_heads, s, dim), (2, kv_heads, s, dim))
    mask, what = make_mask(rng, kind, 2, t, s), f"{np.dtype(dtype)}, {t} queries, {kv_heads} x {s} keys of {dim}"
    call = functools.partial(
        kernel.tpu_attention, q, k, v, scale=dim**-0.5, mask=mask, blocks=SMALL, with_lse=with_lse
    )
    ours, raced = interpreted(lambda settings: call(interpret=settings))
    assert not raced, what
    oracle, oracle_lse = attention_formula(*map(wide, (q, k, v)), dim**-0.5, mask)
    out, lse = ours if with_lse else (ours, oracle_lse)
    empty = np.isneginf(oracle_lse)
    assert np.isfinite(wide(out)).all() and not wide(out)[empty].any(), what
    np.testing.assert_array_equal(np.isneginf(lse), empty, err_msg=what)
    if not empty.all():
        assert relative(wide(out), oracle) < (3e-6 if dtype == jnp.float32 else 6e-3), what  # measured: 4e-7, 2.6e-3
        assert np.abs(wide(lse)[~empty] - oracle_lse[~empty]).max() < (1e-5 if dtype == jnp.float32 else 1e-4), what


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_attention(interpreted, kind):
    rng = np.random.default_rng()
    (t, s), dim, kv_heads = sizes(rng), int(rng.choice([64, 128])), int(rng.choice([1, 2]))
    q, k, v, of_out = draw(rng, jnp.float32, (2, 2, t, dim), *[(2, kv_heads, s, dim)] * 2, (2, 2, t, dim))
    mask, of_lse = make_mask(rng, kind, 2, t, s), draw(rng, jnp.float32, (2, 2, t))[0]
    out, lse = map(jnp.float32, attention_formula(q, k, v, 0.1, mask))
    expected = gradients_formula(q, k, v, of_out, of_lse, 0.1, mask)
    with mock.patch.object(backward, "chunk_of", lambda *_: 1):
        call = functools.partial(
            backward.attention_gradients, q, k, v, mask, out, lse, of_out, of_lse, scale=0.1, blocks=SMALL
        )
        found, raced = interpreted(lambda settings: call(interpret=settings))
    assert not raced
    for ours, theirs in zip(found, expected):
        assert np.linalg.norm(ours - theirs) <= 3e-6 * np.linalg.norm(theirs), (kind, t, s, dim, kv_heads)


@pytest.mark.parametrize("way", MODES)
def test_every_way_of_attention_by_itself(interpreted, way):
    """Keys far from zero and queries so small that each way is exact."""
    rng = np.random.default_rng()
    q, k, v = draw(rng, jnp.bfloat16, (1, 2, 300, 128), (1, 2, 400, 128), (1, 2, 400, 128))
    q, k = q / 8, k + (0 if way == BOUND else 2)
    call = functools.partial(kernel.tpu_attention, q, k, v, scale=128**-0.5, blocks=SMALL)
    chosen, raced = interpreted(lambda settings: call(interpret=settings, modes={CENTRED: MODES}.get(way, (way,))))
    assert not raced and relative(wide(chosen), attention_formula(*map(wide, (q, k, v)), 128**-0.5)[0]) < 6e-3
    if way != ONLINE:
        return
    apart, _ = interpreted(lambda settings: call(interpret=settings, mask=None, first_row=7, first_key=jnp.int32(3)))
    assert relative(wide(apart), wide(chosen)) < 6e-3


@pytest.mark.parametrize("activation, rows, columns", [("", 300, 384), ("silu", 513, 128), ("gelu_tanh", 300, 384)])
def test_linear(interpreted, activation, rows, columns):
    """A last block of rows and one of columns that are not full."""
    x, w, b = draw(np.random.default_rng(), jnp.bfloat16, (rows, 256), (columns, 256), (columns,))
    call = functools.partial(linear.tpu_linear, x[None], w, b, activation=activation, blocks=linear.Blocks(256, 256))
    ours, raced = interpreted(lambda settings: call(interpret=settings)[0])
    exact = activated(activation, wide(x) @ wide(w).T + wide(b))
    assert not raced and relative(ours, exact) < 5e-3  # measured: 1.7e-3 to 2.9e-3


@pytest.mark.parametrize("tokens, dim", [(1, 128), (255, 64), (300, 128)])
def test_rotary(interpreted, tokens, dim):
    rng = np.random.default_rng()
    size = 256 if dim == 128 else dim  # small heads are normed each
    (x,), (weight,) = draw(rng, jnp.bfloat16, (2, tokens, 256)), draw(rng, jnp.float32, (size,))
    angle = np.repeat(rng.uniform(-100, 100, (tokens, dim // 2)), 2, axis=1)
    cos, sin = (jnp.asarray(f(angle), jnp.float32) for f in (np.cos, np.sin))
    static = {"eps": 1e-6, "centred": False, "biased": False, "apart": False}
    ours, raced = interpreted(lambda settings: rotary._by_kernel(x, weight, cos, sin, **static, interpret=settings))
    assert not raced and relative(ours, turned(normed(x, size, weight), angle[:, ::2])) < 5e-3  # measured: 2.4e-3


@pytest.mark.parametrize(
    "sizes, channels, features, taps, biased",
    [
        ((9, 4, 20), 64, 192, (3, 3, 3), True),
        ((5, 1, 33), 128, 64, (5, 1, 5), False),
        ((7, 3, 16), 64, 64, (1, 2, 1), True),
    ],
)
def test_convolution(interpreted, sizes, channels, features, taps, biased):
    """Last blocks of lines and frames that are not full, positions that are no whole registers, and more than one block of features."""
    shapes = (2, *sizes, channels), (*taps, features, channels), (features,)
    x, w, b = draw(np.random.default_rng(), jnp.bfloat16, *shapes)
    blocks, edge = convolution_kernel.Blocks(lines=4, frames=1, features=min(features, 128), piece=2), taps[2] // 2
    how = {"blocks": blocks, "edge": edge}
    call = functools.partial(convolution_kernel.tpu_convolution, x, w, b if biased else None, **how)
    ours, raced = interpreted(lambda settings: call(interpret=settings))
    around = np.pad(wide(x), [(0, 0), (0, 0), (0, 0), (edge, edge), (0, 0)])
    windows = np.lib.stride_tricks.sliding_window_view(around, taps, (1, 2, 3))
    exact = np.einsum("bltpcijk,ijkoc->bltpo", windows, wide(w)) + (wide(b) if biased else 0)
    assert not raced and relative(ours, exact) < 5e-3  # measured: 1.7e-3


@pytest.mark.parametrize(
    "ways, tokens, rest, shares", [(2, 300, 0, (1, 1)), (4, 128, 7, (2, 1)), (3, 517, 130, (3, 2))]
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_exchange(interpreted, monkeypatch, ways, tokens, rest, shares, dtype):
    """Every order to the bit: pieces of a group's columns, of one tensor or of two side by side, tokens of all chips joined with what is
    behind them, as they are and turned."""
    monkeypatch.setattr(exchange, "BLOCK_BYTES", 128 * 128 * ways * 4)  # several blocks, the last not full
    *both, behind = draw(
        np.random.default_rng(), dtype, *[(2, tokens, sum(shares) * 128 * ways)] * 2, (2, rest, 128 * shares[1])
    )
    behind, width = behind if rest else None, behind.shape[2]

    def run(kernel, *arguments, **how):
        made, raced = interpreted(lambda settings: kernel(*arguments, interpret=settings, **how))
        assert not raced, kernel.__name__
        return made

    pieces = [run(exchange.cut, both[: group + 1], ways, group=group, shares=shares) for group in range(2)]
    parts = [np.split(wide(x), [shares[0] * 128 * ways], 2) for x in both]
    np.testing.assert_array_equal(wide(pieces[0]), np.stack(np.split(parts[0][0], ways, 2)))
    last = [np.stack(np.split(x, ways, 2)) for _, x in parts]
    np.testing.assert_array_equal(wide(pieces[1]), np.concatenate(last, 3))
    pasted = run(exchange.paste, [pieces[0], pieces[1][..., :width]])
    np.testing.assert_array_equal(wide(pasted), wide(both[0]))
    whole = tokens // 128 * 128
    for turned, place in ((False, 0), (True, 1)):
        made = run(exchange.join, pieces[1], turned, behind=behind, place=place, places=2)
        rows, of_place = wide(made), [wide(p)[..., width * place : width * (place + 1)] for p in pieces[1]]
        rows = rows.swapaxes(1, 2) if turned else rows
        in_order = [p[:, :whole] for p in of_place] + [p[:, whole:] for p in of_place]
        in_order += [] if behind is None else [wide(behind)]
        np.testing.assert_array_equal(rows, np.concatenate(in_order, 1))
    np.testing.assert_array_equal(wide(run(exchange.part, made, ways, tokens)), np.stack(of_place))


def test_a_race_and_memory_that_nobody_wrote_are_seen(interpreted):
    """Planted: blocks of keys in any order on both cores; values of the last block that are never laid out."""
    q, k, v = draw(np.random.default_rng(), jnp.float32, (1, 1, 128, 128), (1, 1, 600, 128), (1, 1, 600, 128))
    call = functools.partial(kernel.tpu_attention, q, k, v, scale=0.1, blocks=SMALL)
    made = pltpu.CompilerParams

    def all_parallel(dimension_semantics, **more):
        return made(dimension_semantics=("parallel",) * len(dimension_semantics), **more)

    with mock.patch.object(kernel.pltpu, "CompilerParams", all_parallel):
        assert interpreted(lambda settings: call(interpret=settings))[1]
    pltpu.reset_tpu_interpret_mode_state()
    with mock.patch.object(kernel_body, "_prepare_cut", lambda *_: None):
        assert np.isnan(interpreted(lambda settings: call(interpret=settings))[0]).any()
