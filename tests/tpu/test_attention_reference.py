"""Oracle: softmax(scale q k^T + bias) v and its log-sum-exp in float64 numpy, the whole matrix at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_masks import KINDS, LOWEST, make_mask
from conftest import QUICKLY, attention_formula, relative
from diffusers.tpu.kernels.attention.masks import Mask, with_length
from diffusers.tpu.kernels.attention.reference import reference_attention


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


run = jax.jit(
    lambda q, k, v, mask, **more: reference_attention(
        q, k, v, scale=0.3, mask=mask, with_lse=True, block_q=16, block_kv=32, **more
    ),
    compiler_options=QUICKLY,
)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_formula(kind):
    rng = np.random.default_rng()
    t, s = rng.permutation([(1, 1), (7, 13), (33, 33), (70, 129), (70, 129)])[0].tolist()
    q, k, v = draw(t, s)
    mask = make_mask(rng, kind, 4, t, s)
    assert_equal(run(q, k, v, mask), attention_formula(q, k, v, 0.3, mask))


@pytest.mark.parametrize("kind", ["keys", "outer", "dense", "window", "key bias"])
def test_what_masked_keys_hold_changes_nothing(kind):
    rng, (t, s) = np.random.default_rng(), (37, 70)
    q, k, v = draw(t, s)
    hidden = rng.random(s) < 0.5
    hidden[:40] = False if kind == "window" else hidden[:40]
    seen, order = jnp.asarray(~hidden[None, None, None]), np.arange(s)
    mask = {
        "keys": Mask(keys=seen),
        "key bias": Mask(keys=jnp.where(seen, 0.5, LOWEST)),
        "outer": Mask(seen, jnp.asarray(np.arange(t) % 3 > 0)[None, None, :, None]),
        "dense": Mask(dense=jnp.broadcast_to(seen, (1, 1, t, s))),
        "window": Mask(band=(None, 2)),  # no query sees a key from 39 on
    }[kind]
    expected = run(q, k, v, mask)
    order[hidden] = rng.permutation(order[hidden])
    for change in (lambda x: x[:, :, order], lambda x: jnp.where(jnp.asarray(hidden)[:, None], jnp.nan, x)):
        for ours, theirs in zip(run(q, change(k), change(v), mask), expected):
            np.testing.assert_array_equal(ours, theirs)
    assert_equal(expected, attention_formula(q, k, v, 0.3, mask))


@pytest.mark.parametrize("length", [20, jnp.int32(1)])
def test_keys_past_a_length_never_join(length):
    q, k, v = draw(5, 48)
    q, k = q - 1, k + 1  # scores around -7, where a key of zeros would have 0
    oracle = attention_formula(q, k[:, :, : int(length)], v[:, :, : int(length)], 0.3, None)
    k, v = (x.at[:, :, int(length) :].set(jnp.nan) for x in (k, v))
    assert_equal(run(q, k, v, with_length(None, length, 48)), oracle)


@pytest.mark.parametrize("places", [(11, 8), (0, 5), (30, 0)])
def test_first_row_and_first_key_say_where_the_band_lies(places):
    q, k, v = draw(6, 9)
    mask = Mask(band=(3, 1))
    ours = run(q, k, v, mask, first_row=places[0], first_key=places[1])
    assert_equal(ours, attention_formula(q, k, v, 0.3, mask, *places))


def test_nothing_of_tokens_by_tokens_is_made():
    tokens = 4096
    seen = jnp.ones((1, 1, 1, tokens), bool)
    for mask in (Mask(seen, jnp.swapaxes(seen, 2, 3)), Mask(band=(None, 0))):
        q = jax.ShapeDtypeStruct((1, 2, tokens, 16), jnp.bfloat16)
        lowered = jax.jit(lambda q, mask: reference_attention(q, q, q, scale=0.25, mask=mask)).lower(q, mask)
        assert (
            lowered.compile().memory_analysis().temp_size_in_bytes < tokens * tokens
        )  # a byte per score would be that
