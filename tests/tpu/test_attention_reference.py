"""Oracle: softmax(scale q k^T + bias) v and its log-sum-exp in float64 numpy, the whole matrix at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import QUICKLY, attention_formula, relative
from diffusers.tpu.kernels.attention.masks import Mask, with_length
from diffusers.tpu.kernels.attention.reference import reference_attention


LOWEST = float(np.finfo(np.float32).min)


def draw(t, s, heads=4, kv_heads=2, dim=24, v_dim=10):
    shapes = ((2, heads, t, dim), (2, kv_heads, s, dim), (2, kv_heads, s, v_dim))
    return [jnp.asarray(np.random.default_rng().standard_normal(shape), jnp.float32) for shape in shapes]


def assert_equal(ours, oracle):
    """Out by its norm, 1e-6 (measured: 2.2e-7); lse by its largest difference, 4e-6 (1.1e-6); -inf and zeros exactly."""
    out, lse = (np.asarray(x, np.float64) for x in ours)
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(oracle[1]))
    assert not out[np.isneginf(lse)].any()
    some = ~np.isneginf(lse)
    if some.any():
        assert relative(out, oracle[0]) < 1e-6
        assert np.abs(lse[some] - oracle[1][some]).max() < 4e-6


def parts(kind: str, t: int, s: int) -> Mask | None:
    rng = np.random.default_rng()
    bias = rng.standard_normal((2, 4, t, s)).astype(np.float32)
    bias[rng.random(bias.shape) < 0.3] = rng.choice([LOWEST, -np.inf])
    keys, queries = rng.random((2, 1, 1, s)) < 0.6, rng.random((1, 4, t, 1)) < 0.7
    pairs = rng.random((2, 1, t, s)) < 0.6
    pairs[0, 0, 0] = False  # a row without keys
    masks = {
        "none": None,
        "keys": Mask(keys=jnp.asarray(keys)),
        "key bias": Mask(keys=jnp.asarray(bias[:1, :, :1])),
        "outer": Mask(jnp.asarray(keys), jnp.asarray(queries)),
        "dense": Mask(dense=jnp.asarray(pairs)),
        "bias": Mask(dense=jnp.asarray(bias)),
        "causal": Mask(band=(None, 0)),
        "window": Mask(band=(7, 2)),
        "all": Mask(jnp.asarray(keys), jnp.asarray(queries), jnp.asarray(bias), (s // 2, 5)),
        "nothing": Mask(keys=jnp.zeros((1, 1, 1, s), bool)),
    }
    return masks[kind]


KINDS = ["none", "keys", "key bias", "outer", "dense", "bias", "causal", "window", "all", "nothing"]
run = jax.jit(
    lambda q, k, v, mask, **more: reference_attention(
        q, k, v, scale=0.3, mask=mask, with_lse=True, block_q=16, block_kv=32, **more
    ),
    compiler_options=QUICKLY,
)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_formula(kind, large):
    t, s = np.random.default_rng().permutation([(33, 33), (70, 129)] if large else [(1, 1), (7, 13)])[0].tolist()
    q, k, v = draw(t, s)
    mask = parts(kind, t, s)
    assert_equal(run(q, k, v, mask), attention_formula(q, k, v, 0.3, mask))


@pytest.mark.parametrize("kind", ["keys", "outer", "dense", "window", "key bias"])
def test_what_masked_keys_hold_changes_nothing(kind):
    t, s = 37, 70
    q, k, v = draw(t, s)
    hidden = np.random.default_rng().random(s) < 0.5
    hidden[:40] = False if kind == "window" else hidden[:40]
    mask = {
        "keys": Mask(keys=jnp.asarray(~hidden[None, None, None])),
        "key bias": Mask(keys=jnp.where(jnp.asarray(hidden), LOWEST, 0.5)[None, None, None]),
        "outer": Mask(jnp.asarray(~hidden[None, None, None]), jnp.asarray(np.arange(t) % 3 > 0)[None, None, :, None]),
        "dense": Mask(dense=jnp.asarray(np.broadcast_to(~hidden, (1, 1, t, s)))),
        "window": Mask(band=(None, 2)),  # no query sees a key from 39 on
    }[kind]
    expected = run(q, k, v, mask)
    order = np.arange(s)
    order[hidden] = np.random.default_rng().permutation(order[hidden])
    for x, y in (
        (k[:, :, order], v[:, :, order]),
        [jnp.where(jnp.asarray(hidden)[:, None], jnp.nan, x) for x in (k, v)],
    ):
        for ours, theirs in zip(run(q, x, y, mask), expected):
            np.testing.assert_array_equal(ours, theirs)
    assert_equal(expected, attention_formula(q, k, v, 0.3, mask))


@pytest.mark.parametrize("length", [20, jnp.int32(1)])
def test_keys_past_a_length_never_join(length):
    q, k, v = draw(5, 48)
    q, k = q - 1, k + 1  # scores around -7, where a key of zeros would have 0
    oracle = attention_formula(q, k[:, :, : int(length)], v[:, :, : int(length)], 0.3, None)
    k, v = (x.at[:, :, int(length) :].set(jnp.nan) for x in (k, v))
    assert_equal(run(q, k, v, with_length(None, length, 48)), oracle)


@pytest.mark.parametrize("kind", ["bias", "causal", "all"])
def test_parts_of_rows_and_keys_merge_by_lse(kind):
    """As a ring does: lse = log sum e^lse_h, out = sum out_h e^(lse_h - lse)."""
    t, s = 28, 61
    q, k, v = draw(t, s)
    mask = parts(kind, t, s) or Mask()
    rows, keys = [0, 14, t], [0, int(np.random.default_rng().integers(1, s)), s]
    out, lse = [], []
    for r0, r1 in zip(rows, rows[1:]):
        pieces = []
        for k0, k1 in zip(keys, keys[1:]):
            cut = Mask(
                None if mask.keys is None else mask.keys[..., k0:k1],
                None if mask.queries is None else mask.queries[:, :, r0:r1],
                None if mask.dense is None else mask.dense[:, :, r0:r1, k0:k1],
                mask.band,
            )
            places = {"first_row": jnp.int32(r0), "first_key": jnp.int32(k0)}
            pieces.append(run(q[:, :, r0:r1], k[:, :, k0:k1], v[:, :, k0:k1], cut, **places))
        outs, lses = (np.stack([np.asarray(x, np.float64) for x in some]) for some in zip(*pieces))
        with np.errstate(divide="ignore", invalid="ignore"):
            lse.append(np.logaddexp.reduce(lses, axis=0))
            out.append((np.where(np.isneginf(lses), 0, np.exp(lses - lse[-1]))[..., None] * outs).sum(0))
    assert_equal((np.concatenate(out, 2), np.concatenate(lse, 2)), attention_formula(q, k, v, 0.3, mask))


def test_first_row_and_first_key_say_where_the_band_lies():
    q, k, v = draw(6, 9)
    whole_q, whole_k, whole_v = draw(20, 30)
    whole_q, whole_k, whole_v = (
        whole_q.at[:, :, 11:17].set(q),
        whole_k.at[:, :, 8:17].set(k),
        whole_v.at[:, :, 8:17].set(v),
    )
    seen = Mask(keys=jnp.asarray((np.arange(30) >= 8) & (np.arange(30) < 17))[None, None, None], band=(3, 1))
    out, lse = attention_formula(whole_q, whole_k, whole_v, 0.3, seen)
    assert_equal(run(q, k, v, Mask(band=(3, 1)), first_row=11, first_key=8), (out[:, :, 11:17], lse[:, :, 11:17]))


def test_a_result_in_qs_dtype_is_the_float32_one_rounded():
    q, k, v = (x.astype(jnp.bfloat16) for x in draw(40, 50))
    wide, _ = run(q, k, v, None)
    ours = reference_attention(q, k, v, scale=0.3, block_q=16, block_kv=32)
    assert (ours.dtype, wide.dtype) == (jnp.bfloat16, jnp.float32)
    oracle = attention_formula(q, k, v, 0.3, None)[0]
    assert relative(wide, oracle) < 1e-6
    assert relative(ours.astype(jnp.float32), oracle) < 1.01 * relative(
        jnp.asarray(oracle, jnp.bfloat16).astype(jnp.float32), oracle
    )


@pytest.mark.parametrize("kind", ["keys", "outer", "causal"])
def test_nothing_of_tokens_by_tokens_is_made(kind):
    tokens = 4096
    mask = {
        "keys": Mask(keys=jnp.ones((1, 1, 1, tokens), bool)),
        "outer": Mask(jnp.ones((1, 1, 1, tokens), bool), jnp.ones((1, 1, tokens, 1), bool)),
        "causal": Mask(band=(None, 0)),
    }[kind]
    q = jax.ShapeDtypeStruct((1, 2, tokens, 16), jnp.bfloat16)
    lowered = jax.jit(lambda q, mask: reference_attention(q, q, q, scale=0.25, mask=mask)).lower(q, mask)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < tokens * tokens  # a byte per score would be that
