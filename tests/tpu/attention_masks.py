"""Operands of attention, and masks in parts, of every kind, with random values; what answers are held to."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from conftest import relative
from diffusers.tpu.kernels.attention.masks import Mask


LOWEST = float(np.finfo(np.float32).min)
KINDS = ["none", "prefix", "keys", "keys by head", "key bias", "causal", "window", "half window", "dense", "bias"]
KINDS += ["bfloat16 bias", "outer", "keys, causal", "all", "nothing", "tail", "causal by frame", "window by frame"]


def make_mask(rng, kind: str, heads: int, t: int, s: int) -> Mask:
    """One of `KINDS`, each part for one or all of the batch of two and of the heads."""
    b, n = int(rng.choice([1, 2])), int(rng.choice([1, heads]))
    lengths = rng.integers(0 if b == 2 else 1, s + 1, (b, 1, 1, 1))
    hole = np.sort(rng.integers(0, s + 1, 2))
    some = (rng.random((b, n, 1, s)) < 0.7) & ((np.arange(s) < hole[0]) | (np.arange(s) >= hole[1]))
    bias = rng.standard_normal((b, n, t, s)).astype(np.float32)
    bias[rng.random(bias.shape) < 0.3] = rng.choice([LOWEST, -np.inf])
    pairs = rng.random((b, n, t, s)) < 0.6
    pairs[0, 0, 0] = False  # a row without keys
    pairs[..., hole[0] : hole[1]], bias[..., hole[0] : hole[1]] = False, -np.inf
    queries = rng.random((b, n, t, 1)) < 0.7
    window = tuple(int(x) for x in rng.integers(0, max(2, min(t, s)), 2))
    frame = tuple(int(x) for x in rng.integers(1, max(2, min(t, s) // 2), 2))
    whole = int(rng.integers(0, s + 1))
    frames = tuple(int(x) for x in rng.integers(0, 4, 2))
    parts = {
        "none": {},
        "prefix": {"keys": np.arange(s) < lengths},
        "keys": {"keys": some[:, :1]},
        "keys by head": {"keys": (rng.random((b, heads, 1, s)) < 0.7) & some},
        "key bias": {"keys": bias[:, :, 0:1]},
        "causal": {"band": (None, 0)},
        "window": {"band": window},
        "half window": {"band": (window[0], None)},
        "dense": {"dense": pairs},
        "bias": {"dense": bias},
        "bfloat16 bias": {"dense": jnp.asarray(bias, jnp.bfloat16)},
        "outer": {"keys": some, "queries": queries},
        "keys, causal": {"keys": some, "band": (None, 0)},
        "all": {"keys": bias[:, :, 0:1], "queries": queries, "dense": pairs, "band": (s // 2, t // 3)},
        "tail": {"keys": some[:, :1] | (np.arange(s) < whole), "whole": whole},
        "causal by frame": {"band": (None, 0), "frame": frame},
        "window by frame": {"keys": some, "band": frames, "frame": frame},
        "nothing": {"keys": np.zeros((1, 1, 1, s), bool)},
    }[kind]
    return Mask(**{name: x if name in ("band", "frame", "whole") else jnp.asarray(x) for name, x in parts.items()})


def draw(heads, kv_heads, q_len, kv_len, dim, v_dim=None, batch=2) -> list[np.ndarray]:
    """q, k, v in float32."""
    rng = np.random.default_rng()
    shapes = (batch, heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, v_dim or dim)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def attention_weights(q, k, scale: float, mask=None, first_row: int = 0, first_key: int = 0):
    """softmax(scale q k^T + mask), zeros where a row sees no key, and its log-sum-exp in float64; the parts of a `Mask`."""
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    s = np.matmul(q, np.repeat(k, q.shape[1] // k.shape[1], axis=1).swapaxes(2, 3)) * scale
    for part in (mask.keys, mask.queries, mask.dense) if mask else ():
        if part is not None:
            part = np.asarray(part)
            part = part if part.dtype == bool else part.astype(np.float64)
            s = np.where(part, s, -np.inf) if part.dtype == bool else s + np.where(part > -1e30, part, -np.inf)
    if mask and mask.band:
        left, right = (np.inf if side is None else side for side in mask.band)
        keys, rows = first_key + np.arange(s.shape[3]), first_row + np.arange(s.shape[2])[:, None]
        ahead = keys // mask.frame[1] - rows // mask.frame[0]
        s = np.where((ahead >= -left) & (ahead <= right), s, -np.inf)
    top = s.max(-1, keepdims=True)
    top = np.where(np.isinf(top), 0, top)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    return p / np.where(total == 0, 1, total), lse


def attention_formula(q, k, v, scale: float, mask=None, first_row: int = 0, first_key: int = 0):
    """softmax(scale q k^T + mask) v and its log-sum-exp in float64, the whole matrix at once."""
    weights, lse = attention_weights(q, k, scale, mask, first_row, first_key)
    return np.matmul(weights, np.repeat(np.asarray(v, np.float64), q.shape[1] // v.shape[1], axis=1)), lse


def gradients_formula(q, k, v, of_out, of_lse, scale: float, mask=None):
    """Those of q, k, v and of the scores, in float64; of_lse counts where a row sees a key."""
    q, k, v, of_out = (np.asarray(x, np.float64) for x in (q, k, v, of_out))
    if mask and mask.queries is not None:
        of_out = np.where(np.asarray(mask.queries), of_out, 0)
    weights, lse = attention_weights(q, k, scale, mask)
    every_k, every_v = (np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    less = (of_out * (weights @ every_v)).sum(-1) - np.where(np.isneginf(lse), 0, of_lse)
    of_scores = weights * (of_out @ every_v.swapaxes(2, 3) - less[..., None])

    def of_group(x):
        return x.reshape(len(x), k.shape[1], -1, *x.shape[2:]).sum(2)

    of_k, of_v = of_group(scale * of_scores.swapaxes(2, 3) @ q), of_group(weights.swapaxes(2, 3) @ of_out)
    return scale * of_scores @ every_k, of_k, of_v, of_scores


def spoilt(q, k, v, mask, first_row=0, first_key=0):
    """k and v with NaN in the keys that are hidden from all of their queries: they have no part in the answer."""
    mask = dataclasses.replace(mask, queries=None)  # rows that give zeros hide no key
    weights = attention_weights(q, k, 0.1, mask, first_row, first_key)[0]
    seen = weights.reshape(len(q), k.shape[1], -1, k.shape[2]).any(2)[..., None]
    return np.where(seen, k, np.nan), np.where(seen, v, np.nan)


def assert_right(ours, oracle, what="", tolerance=3e-6, lse_tolerance=1e-5):
    """Out by its norm, lse by its largest difference; zeros and -inf exactly. Measured: 6e-7, 2e-6."""
    out, lse = (np.asarray(x, np.float64) for x in ours)
    empty = np.isneginf(oracle[1])
    np.testing.assert_array_equal(np.isneginf(lse), empty, err_msg=what)
    assert np.isfinite(out).all() and not out[empty].any(), what
    if not empty.all():
        assert relative(out, oracle[0]) < tolerance, what
        assert np.abs(lse[~empty] - oracle[1][~empty]).max() < lse_tolerance, what
