"""The definition of correct: softmax(scale * q k^T + bias) v in float32, in blocks, never T x S at once.

For each block of queries, blocks of keys are visited in order with a running maximum m, sum l and accumulator a (Milakov and
Gimelshein 2018, algorithm 3):  m' = max(m, max_j s_j);  l' = l e^(m-m') + sum_j e^(s_j-m');  a' = a e^(m-m') + e^(s-m') v.
A row whose keys are all masked gives zeros, as torch's scaled_dot_product_attention does; its log-sum-exp is -inf.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .masks import Mask, takes_part


BLOCK_Q, BLOCK_KV = 512, 1024

Queries, Keys, Values = Float[Array, "B N T D"], Float[Array, "B K S D"], Float[Array, "B K S E"]
Out, LogSumExp = Float[Array, "B N T E"], Float[Array, "B N T"]


def reference_attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    scale: float,
    mask: Mask | None = None,
    first_row: int | Array = 0,
    first_key: int | Array = 0,
    with_lse: bool = False,
    again: bool = False,
    block_q: int = BLOCK_Q,
    block_kv: int = BLOCK_KV,
) -> Out | tuple[Out, LogSumExp]:
    """Attention in q's dtype; with `with_lse` in float32, and the natural log of each row's sum of e^score.
    `again`: the backward pass computes scores again instead of keeping them.

    A key that the mask (apart from `Mask.queries`) hides from every query may hold anything, even NaN. `first_row`, `first_key`:
    positions of the first query and key, for the mask's band where one chip holds a part of the rows or keys.
    """
    batch, heads, q_len, dim = q.shape
    kv_heads, s_len = k.shape[1], k.shape[2]
    groups = heads // kv_heads
    block_q, block_kv = min(block_q, q_len), min(block_kv, s_len)
    q_blocks, kv_blocks = -(-q_len // block_q), -(-s_len // block_kv)
    mask = mask or Mask()

    q32 = padded_to(q.reshape(batch, kv_heads, groups, q_len, dim).astype(jnp.float32) * scale, 3, q_blocks * block_q)
    k32, v32 = (padded_to(x.astype(jnp.float32), 2, kv_blocks * block_kv) for x in (k, v))
    sizes = kv_heads, groups, q_blocks * block_q, kv_blocks * block_kv
    parts = [_grouped(part, *sizes) for part in (mask.keys, mask.queries, mask.dense) if part is not None]

    def scores(i, j):
        """Scores of one block, [B, K, N/K, block_q, block_kv], -inf where a key is masked."""
        q_i, k_j = _block(q32, 3, i, block_q), _block(k32, 2, j, block_kv)
        s = jnp.einsum("bkgtd,bksd->bkgts", q_i, k_j, precision=lax.Precision.HIGHEST)
        rows, columns = i * block_q + jnp.arange(block_q)[:, None], j * block_kv + jnp.arange(block_kv)
        allowed = (rows < q_len) & (columns < s_len)
        if mask.band is not None:
            ahead = (first_key + columns) // mask.frame[1] - (first_row + rows) // mask.frame[0]
            left, right = mask.band
            allowed = allowed if left is None else allowed & (ahead >= -left)
            allowed = allowed if right is None else allowed & (ahead <= right)
        if mask.nearest is not None:
            allowed = allowed & mask.nearest.seen_by(rows, columns)
        for part in parts:
            block = _block(_block(part, 3, i, block_q), 4, j, block_kv)
            s = s if block.dtype == jnp.bool_ else s + block.astype(jnp.float32)
            allowed = allowed & takes_part(block)
        return jnp.where(allowed, s, -jnp.inf)

    def visit_keys(i, state, j):
        m, l, a = state  # noqa: E741
        s, v_j = scores(i, j), _block(v32, 2, j, block_kv)
        m_next = jnp.maximum(m, s.max(-1))
        m_safe = jnp.where(jnp.isneginf(m_next), 0.0, m_next)
        p = jnp.exp(s - m_safe[..., None])
        rescale = jnp.exp(m - m_safe)
        # A key that no query sees may hold anything: 0 * NaN must not reach the sum.
        seen = ~jnp.isneginf(s).all((2, 3))
        v_j = jnp.where(seen[..., None], v_j, 0.0)
        a = a * rescale[..., None] + jnp.einsum("bkgts,bkse->bkgte", p, v_j, precision=lax.Precision.HIGHEST)
        return m_next, l * rescale + p.sum(-1), a

    def visit_rows(i):
        shape = (batch, kv_heads, groups, block_q)
        state = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, v.shape[-1])))
        if kv_blocks == 1:
            m, l, a = visit_keys(i, state, 0)  # noqa: E741
        else:
            (m, l, a), _ = lax.scan(lambda c, j: (visit_keys(i, c, j), None), state, jnp.arange(kv_blocks))  # noqa: E741
        out = a / jnp.where(l == 0, 1.0, l)[..., None]
        return (out, m + jnp.log(l)) if with_lse else out.astype(q.dtype)

    if again:
        visit_rows = jax.checkpoint(visit_rows)
    if q_blocks == 1:
        out = visit_rows(0)
    else:
        out = jax.tree.map(
            lambda x: jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], q_blocks * block_q, *x.shape[5:])[:, :, :, :q_len],
            lax.map(visit_rows, jnp.arange(q_blocks)),
        )
    return jax.tree.map(lambda x: x.reshape(batch, heads, *x.shape[3:]), out)


def padded_to(x: jax.Array, axis: int, size: int, value: float = 0) -> jax.Array:
    """x padded at the end of an axis to `size`, with this value."""
    widths = [(0, size - n if a == axis else 0) for a, n in enumerate(x.shape)]
    return jnp.pad(x, widths, constant_values=value) if size != x.shape[axis] else x


def _grouped(values: jax.Array, kv_heads: int, groups: int, q_padded: int, s_padded: int) -> jax.Array:
    """Mask values [b, n, t, s] as [b, k, g, t, s], full axes padded to whole blocks."""
    b, n, t, s = values.shape
    values = values.reshape(b, *((1, 1) if n == 1 else (kv_heads, groups)), t, s)
    values = values if t == 1 else padded_to(values, 3, q_padded)
    return values if s == 1 else padded_to(values, 4, s_padded)


def _block(x: jax.Array, axis: int, index, size: int) -> jax.Array:
    return x if x.shape[axis] == 1 else lax.dynamic_slice_in_dim(x, index * size, size, axis)
