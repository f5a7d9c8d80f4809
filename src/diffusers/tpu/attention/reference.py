"""The definition of correct: softmax(scale * q k^T + bias) v in float32, in blocks, never T x S at once.

Per query block, key blocks are visited in order with a running maximum m, sum l and accumulator a (Milakov and
Gimelshein 2018, algorithm 3):  m' = max(m, max_j s_j);  l' = l e^(m-m') + sum_j e^(s_j-m');  a' = a e^(m-m') + e^(s-m') v.
A row whose keys are all masked gives zeros, as torch's scaled_dot_product_attention does.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .masks import Mask


BLOCK_Q = 512
BLOCK_KV = 1024


def reference_attention(
    q: Float[Array, "B N T D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S E"],
    *,
    scale: float,
    mask: Mask | None = None,
    is_causal: bool = False,
    kv_len: int | None = None,
    first_row: int | jax.Array = 0,
    block_q: int = BLOCK_Q,
    block_kv: int = BLOCK_KV,
) -> Float[Array, "B N T E"]:
    """Attention in q's dtype. N is a multiple of K (grouped queries); keys from `kv_len` on are padding.

    `first_row` is the position of the first query, for causality where one chip holds a part of the rows.
    """
    batch, heads, q_len, dim = q.shape
    kv_heads, s_len = k.shape[1], k.shape[2]
    groups = heads // kv_heads
    kv_len = s_len if kv_len is None else kv_len
    block_q, block_kv = min(block_q, q_len), min(block_kv, s_len)
    q_blocks, kv_blocks = -(-q_len // block_q), -(-s_len // block_kv)

    q32 = _pad(q.reshape(batch, kv_heads, groups, q_len, dim).astype(jnp.float32) * scale, 3, q_blocks * block_q)
    k32, v32 = (_pad(x.astype(jnp.float32), 2, kv_blocks * block_kv) for x in (k, v))
    bias = None if mask is None else _grouped(mask.values, kv_heads, groups, q_blocks * block_q, kv_blocks * block_kv)

    def visit_keys(i, state, j):
        m, l, a = state  # noqa: E741
        k_j, v_j = (lax.dynamic_slice_in_dim(x, j * block_kv, block_kv, 2) for x in (k32, v32))
        q_i = lax.dynamic_slice_in_dim(q32, i * block_q, block_q, 3)
        s = jnp.einsum("bkgtd,bksd->bkgts", q_i, k_j, precision=lax.Precision.HIGHEST)
        columns = j * block_kv + jnp.arange(block_kv)
        allowed = columns < kv_len
        if is_causal:
            allowed = allowed & (columns <= (first_row + i * block_q + jnp.arange(block_q))[:, None])
        if bias is not None:
            block = _block(_block(bias, 3, i, block_q), 4, j, block_kv)
            if block.dtype == jnp.bool_:
                allowed = allowed & block
            else:
                s = s + block.astype(jnp.float32)
        s = jnp.where(allowed, s, -jnp.inf)
        m_next = jnp.maximum(m, s.max(-1))
        m_safe = jnp.where(jnp.isneginf(m_next), 0.0, m_next)
        p = jnp.exp(s - m_safe[..., None])
        rescale = jnp.exp(m - m_safe)
        # Padding may hold anything, NaN included: 0 * NaN must not reach the sum.
        v_j = jnp.where(columns[:, None] < kv_len, v_j, 0.0)
        a = a * rescale[..., None] + jnp.einsum("bkgts,bkse->bkgte", p, v_j, precision=lax.Precision.HIGHEST)
        return m_next, l * rescale + p.sum(-1), a

    def rows(i):
        shape = (batch, kv_heads, groups, block_q)
        state = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, v.shape[-1])))
        if kv_blocks == 1:
            _, l, a = visit_keys(i, state, 0)  # noqa: E741
        else:
            (_, l, a), _ = lax.scan(lambda c, j: (visit_keys(i, c, j), None), state, jnp.arange(kv_blocks))  # noqa: E741
        return (a / jnp.where(l == 0, 1.0, l)[..., None]).astype(q.dtype)

    if q_blocks == 1:
        out = rows(0)
    else:
        out = jnp.moveaxis(lax.map(rows, jnp.arange(q_blocks)), 0, 3)
        out = out.reshape(batch, kv_heads, groups, q_blocks * block_q, v.shape[-1])[..., :q_len, :]
    return out.reshape(batch, heads, q_len, v.shape[-1])


def _pad(x: jax.Array, axis: int, size: int) -> jax.Array:
    widths = [(0, size - x.shape[a] if a == axis else 0) for a in range(x.ndim)]
    return jnp.pad(x, widths) if size != x.shape[axis] else x


def _grouped(values: jax.Array, kv_heads: int, groups: int, q_padded: int, s_padded: int) -> jax.Array:
    """Mask values [b, n, t, s] as [b, k, g, t, s], full axes padded to whole blocks."""
    b, n, t, s = values.shape
    values = values.reshape(b, *((1, 1) if n == 1 else (kv_heads, groups)), t, s)
    values = values if t == 1 else _pad(values, 3, q_padded)
    return values if s == 1 else _pad(values, 4, s_padded)


def _block(x: jax.Array, axis: int, index, size: int) -> jax.Array:
    return x if x.shape[axis] == 1 else lax.dynamic_slice_in_dim(x, index * size, size, axis)
