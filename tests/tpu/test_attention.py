"""Oracle: softmax(scale q k^T + bias) v in float64 numpy, the whole matrix at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import relative
from diffusers.tpu.attention import api, splash
from diffusers.tpu.attention.masks import Mask, classify
from diffusers.tpu.attention.online import online_attention
from diffusers.tpu.attention.reference import reference_attention


def dense(q, k, v, mask=None, is_causal=False, scale=None):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, groups, axis=1) for x in (k, v))
    s = np.einsum("bntd,bnsd->bnts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        s = np.where(np.tril(np.ones(s.shape[-2:], bool)), s, -np.inf)
    if mask is not None:
        mask = np.asarray(mask)
        s = np.where(mask, s, -np.inf) if mask.dtype == bool else s + mask
    top = s.max(-1, keepdims=True)
    p = np.exp(s - np.where(np.isinf(top), 0, top))
    total = p.sum(-1, keepdims=True)
    return np.einsum("bnts,bnsd->bntd", p / np.where(total == 0, 1, total), v)


def draw(*shape, dtype=jnp.float32, rng=np.random.default_rng()):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def masks_of(kind, batch, heads, q_len, kv_len, rng):
    if kind == "none":
        return None
    if kind == "keys":
        lengths = rng.integers(1, kv_len + 1, batch)
        return (np.arange(kv_len) < lengths[:, None])[:, None, None]
    if kind == "dense":
        mask = rng.random((batch, 1, q_len, kv_len)) < 0.6
        mask[0, 0, 0] = False  # a row without keys
        return mask
    return rng.standard_normal((1, heads, q_len, kv_len)).astype(np.float32)


@pytest.mark.parametrize("kind", ["none", "keys", "dense", "bias", "causal"])
@pytest.mark.parametrize("q_len, kv_len", [(1, 1), (7, 13), (33, 33), (70, 129)])
def test_reference_equals_the_formula(kind, q_len, kv_len):
    rng = np.random.default_rng()
    q, k, v = draw(2, 4, q_len, 24), draw(2, 2, kv_len, 24), draw(2, 2, kv_len, 24)
    mask = masks_of("none" if kind == "causal" else kind, 2, 4, q_len, kv_len, rng)
    ours = reference_attention(
        q,
        k,
        v,
        scale=0.3,
        mask=classify(mask, 2, 4, q_len, kv_len),
        is_causal=kind == "causal",
        block_q=16,
        block_kv=32,
    )
    assert relative(ours, dense(q, k, v, mask, kind == "causal", 0.3)) < 1e-6  # measured: 2e-7


def test_keys_past_the_true_length_never_join_even_as_nan():
    q, k, v = draw(1, 2, 5, 8) - 4, draw(1, 2, 48, 8) + 4, draw(1, 2, 48, 8)  # all scores strongly negative
    oracle = dense(q, k[:, :, :37], v[:, :, :37])
    k, v = k.at[:, :, 37:].set(jnp.nan), v.at[:, :, 37:].set(jnp.nan)
    assert relative(reference_attention(q, k, v, scale=8**-0.5, kv_len=37, block_kv=16), oracle) < 1e-6


def test_nothing_of_tokens_by_tokens_is_made():
    tokens = 4096
    q = jax.ShapeDtypeStruct((1, 2, tokens, 16), jnp.bfloat16)
    mask = Mask("keys", jax.ShapeDtypeStruct((1, 1, 1, tokens), jnp.bool_))
    lowered = jax.jit(lambda q, m: reference_attention(q, q, q, scale=0.25, mask=Mask("keys", m))).lower(
        q, mask.values
    )
    assert lowered.compile().memory_analysis().temp_size_in_bytes < tokens * tokens  # a byte per score would be that


@pytest.mark.parametrize("degrees", [(1, 8, 1), (2, 4, 1), (2, 2, 2), (1, 3, 1), (1, 1, 3)])
@pytest.mark.parametrize("heads, kv_heads", [(16, 8), (30, 30), (1, 1), (8, 2)])
def test_any_mesh_gives_what_one_chip_gives(make_mesh, degrees, heads, kv_heads):
    rng = np.random.default_rng()
    kind = str(rng.choice(["none", "keys", "dense", "causal"]))
    length, batch = int(rng.integers(9, 40)), int(rng.integers(1, 3))
    q, k, v = draw(batch, heads, length, 8), draw(batch, kv_heads, length, 8), draw(batch, kv_heads, length, 8)
    mask = masks_of("none" if kind == "causal" else kind, batch, heads, length, length, rng)
    settings = api.Settings(mesh=make_mesh(*degrees), kernel="reference")

    @jax.jit
    def ours(q, k, v):
        with api.using(settings):
            return api.attention(q, k, v, mask=mask, is_causal=kind == "causal", enable_gqa=heads != kv_heads)

    assert relative(ours(q, k, v), dense(q, k, v, mask, kind == "causal")) < 1e-6, (kind, batch, length)


@pytest.mark.parametrize("q_len, kv_len", [(21, 5), (3, 40)])
def test_cross_attention_over_a_mesh(make_mesh, q_len, kv_len):
    q, k, v = draw(1, 6, q_len, 8), draw(1, 6, kv_len, 8), draw(1, 6, kv_len, 8)
    with api.using(api.Settings(mesh=make_mesh(1, 4, 2))):
        assert relative(jax.jit(api.attention)(q, k, v), dense(q, k, v)) < 1e-6


@pytest.mark.parametrize("kind", ["none", "keys", "causal"])
def test_splash_has_true_key_lengths(kind):
    q, k, v = draw(2, 2, 150, 64), draw(2, 2, 150, 64), draw(2, 2, 150, 64)
    mask = masks_of("none" if kind == "causal" else kind, 2, 2, 150, 150, np.random.default_rng())
    kv_len = 131 if kind == "none" else 150
    ours = splash.splash_attention(
        q,
        k,
        v,
        scale=0.125,
        mask=classify(mask, 2, 2, 150, 150),
        is_causal=kind == "causal",
        kv_len=kv_len,
        interpret=True,
    )
    oracle = dense(q, k[:, :, :kv_len], v[:, :, :kv_len], mask, kind == "causal", 0.125)
    assert relative(ours, oracle) < 5e-6  # measured: 6e-7


@pytest.mark.parametrize("degrees", [(2, 4, 1), (1, 2, 2), (1, 1, 8)])
@pytest.mark.parametrize("masked", [False, True])
def test_a_kernel_is_split_by_heads_where_nobody_lays_out(degrees, masked, make_mesh):
    """Eight heads, or as many chips as divide six; the kernel in interpret mode, as on a TPU inside shard_map."""
    for heads in (8, 6):
        q, k, v = draw(2, heads, 40, 64), draw(2, heads, 130, 64), draw(2, heads, 130, 64)
        mask = np.arange(130)[None, None, None] < np.array([130, 77]).reshape(2, 1, 1, 1) if masked else None
        settings = api.Settings(mesh=make_mesh(*degrees), sequence=False, kernel="splash", interpret=True)
        with api.using(settings):
            ours = jax.jit(lambda q, k, v: api.attention(q, k, v, mask=mask))(q, k, v)
        assert relative(ours, dense(q, k, v, mask, False, 0.125)) < 5e-6


@pytest.mark.parametrize(
    ("q_len", "kv_len", "padding", "dim", "blocks"),
    [
        (130, 300, 0, 64, (128, 256, 128)),
        (257, 500, 13, 128, (128, 256, 128)),
        (1, 7, 1, 72, None),
        (256, 512, 256, 128, None),
    ],
)
def test_the_online_kernel_by_the_formula(q_len, kv_len, padding, dim, blocks):
    q, k, v = draw(2, 3, q_len, dim), draw(2, 3, kv_len, dim), draw(2, 3, kv_len, dim)
    full_k, full_v = (jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0)), constant_values=jnp.nan) for x in (k, v))
    ours = online_attention(q, full_k, full_v, scale=dim**-0.5, kv_len=kv_len, blocks=blocks, interpret=True)
    assert relative(ours, dense(q, k, v)) < 5e-6  # measured: 4e-7
    with pytest.raises(NotImplementedError, match="a mask"):
        online_attention(q, k, v, scale=1.0, is_causal=True)


def test_bfloat16_error_is_that_of_its_inputs():
    q, k, v = (draw(1, 4, 100, 32, dtype=jnp.bfloat16) for _ in range(3))
    rounded = jnp.asarray(dense(q, k, v), jnp.bfloat16)  # the best a bfloat16 result can be
    ours = reference_attention(q, k, v, scale=32**-0.5)
    assert relative(ours.astype(jnp.float32), dense(q, k, v)) < 1.25 * relative(
        rounded.astype(jnp.float32), dense(q, k, v)
    )


def test_the_reference_is_said_where_splash_was_expected(caplog, monkeypatch):
    from diffusers.utils import logging

    api._say_once.cache_clear()
    logging.enable_propagation()
    with api.using(api.Settings(kernel="auto", platform="tpu")):
        api.attention(draw(1, 2, 4, 8), draw(1, 2, 4, 8), draw(1, 2, 4, 8), mask=np.zeros((1, 1, 4, 4), np.float32))
    logging.disable_propagation()
    assert "differs between queries" in caplog.text
    with api.using(api.Settings(kernel="splash")), pytest.raises(NotImplementedError, match="differs between queries"):
        api.attention(draw(1, 2, 4, 8), draw(1, 2, 4, 8), draw(1, 2, 4, 8), mask=np.zeros((1, 1, 4, 4), np.float32))


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"mask": np.ones((3, 4), bool)}, ValueError, "broadcasts to"),
        ({"mask": np.ones((1, 1, 4, 5), np.int32)}, TypeError, "bool or floating"),
        ({"mask": np.ones((4, 5), bool), "is_causal": True}, ValueError, "either attn_mask or is_causal"),
        ({"k": jnp.zeros((1, 3, 5, 8))}, ValueError, "3 key heads"),
        ({"v": jnp.zeros((1, 2, 6, 8))}, ValueError, "expected q"),
        ({"k": jnp.zeros((1, 2, 5, 8), jnp.bfloat16)}, TypeError, "one dtype"),
        ({"q": jnp.zeros((2, 4, 8))}, ValueError, "four axes"),
    ],
)
def test_bad_calls_are_refused(change, error, words):
    call = {"q": jnp.zeros((1, 2, 4, 8)), "k": jnp.zeros((1, 2, 5, 8)), "v": jnp.zeros((1, 2, 5, 8)), **change}
    if "k" in change and change["k"].shape[1] == 3:
        call["v"] = jnp.zeros((1, 3, 5, 8))
    with pytest.raises(error, match=words):
        api.attention(call.pop("q"), call.pop("k"), call.pop("v"), **call)


def test_a_host_mask_of_all_true_is_dropped():
    assert classify(np.ones((1, 1, 4, 5), bool), 1, 2, 4, 5) is None
    assert classify(np.array([[True, False]]), 1, 2, 4, 2).kind == "keys"
