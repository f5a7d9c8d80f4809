"""JAX's splash attention for TPU, with which `kernel` is compared. Key masks and padding become segment ids.

q is multiplied by the scale in float32 before it is rounded to the kernel's dtype.
"""

import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jaxtyping import Array

from ..pallas import LANES, round_up
from .masks import Mask
from .reference import Keys, Out, Queries, Values


BLOCKS = (1024, 1024, 512)


def unsupported(q, k, v, mask: Mask | None) -> str | None:
    """What splash does not support of this call, or None."""
    if q.shape[1] != k.shape[1]:
        return f"{q.shape[1]} query heads over {k.shape[1]} key heads"
    if mask is None:
        return None
    if mask.nearest is not None or mask.dense is not None or (mask.keys is not None and mask.keys.shape[1] != 1):
        return "a mask that differs between queries or heads"
    if mask.keys is not None and mask.keys.dtype != jnp.bool_:
        return "a bias on the scores"
    return None if mask.band in (None, (None, 0)) and mask.frame == (1, 1) else "a window"


def splash_attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    scale: float,
    mask: Mask | None = None,
    first_row: int | Array = 0,
    first_key: int | Array = 0,
    with_lse: bool = False,
    blocks: tuple[int, int, int] | None = None,
    differentiable: bool = False,
    interpret: bool = False,
) -> Out:
    """Attention in q's dtype on one chip. Raises NotImplementedError for what is `unsupported`, and for `with_lse`.

    `blocks`: queries, keys, and keys of one inner step; also for the backward pass, if `differentiable`.
    """
    mask = mask or Mask()
    if reason := "with_lse" if with_lse else unsupported(q, k, v, mask):
        raise NotImplementedError(f"splash attention does not take {reason}; use 'kernel' or the reference")
    batch, heads, q_len, dim = q.shape
    s_len = k.shape[2]
    wanted_q, wanted_kv, inner = blocks or BLOCKS
    block_q, block_kv = (min(limit, round_up(n, LANES)) for limit, n in ((wanted_q, q_len), (wanted_kv, s_len)))
    inner = math.gcd(inner, block_kv)
    q_padded, s_padded = round_up(q_len, block_q), round_up(s_len, block_kv)
    padded_dim = round_up(dim, LANES) if dim > LANES else dim

    q = (q.astype(jnp.float32) * scale).astype(q.dtype)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, q_padded - q_len), (0, padded_dim - dim)))
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, s_padded - s_len), (0, padded_dim - dim))) for x in (k, v))
    valid = jnp.broadcast_to(jnp.arange(s_padded) < s_len, (batch, s_padded))
    if mask.keys is not None:
        valid = valid & jnp.pad(mask.keys[:, 0, 0], ((0, 0), (0, s_padded - s_len)))
    segments = _segments(valid, q_padded)
    one = splash.CausalMask if mask.band is not None else splash.FullMask
    back = {}
    if differentiable:
        back = {"block_q_dkv": block_q, "block_kv_dkv": block_kv, "block_kv_dkv_compute": inner}
        back["use_fused_bwd_kernel"] = True  # a quarter faster than two (v6e), but keeps a dq per block of keys
    kernel = splash.make_splash_mha_single_device(
        mask=splash.MultiHeadMask([one((q_padded, s_padded))] * heads),
        block_sizes=splash.BlockSizes(block_q=block_q, block_kv=block_kv, block_kv_compute=inner, **back),
        interpret=interpret,
    )
    # The kernel's products are exact for bfloat16 operands; the compiler refuses a higher precision for them.
    with jax.default_matmul_precision("highest" if q.dtype == jnp.float32 else "default"):
        out = jax.vmap(kernel)(q, k, v, segments)[:, :, :q_len, :dim]
    seen = valid.any(1)[:, None, None, None]
    return jnp.where(seen if mask.queries is None else seen & mask.queries, out, 0).astype(q.dtype)


def _segments(valid: Array, q_len: int) -> splash.SegmentIds:
    """Segment ids: 0 for queries and valid keys, 1 for keys that are not valid."""
    queries = jnp.zeros((valid.shape[0], q_len), jnp.int32)
    return splash.SegmentIds(q=queries, kv=jnp.where(valid, 0, 1).astype(jnp.int32))
