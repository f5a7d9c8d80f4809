"""Attention on a GPU through JAX: cuDNN's fused attention by `jax.nn.dot_product_attention`.

Takes bfloat16 and float16, heads of up to 128 in eights, no mask, causal, and masks of queries x keys that the caller
made. Key masks would have to be written out to queries x keys: they go to the reference.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .masks import BELOW, Mask


def unsupported(q, k, v, mask: Mask | None) -> str | None:
    """What of this call cuDNN does not take, or None."""
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{q.dtype}"
    if q.shape[3] % 8 or q.shape[3] > 128 or v.shape[3] != q.shape[3]:
        return f"heads of {q.shape[3]} and values of {v.shape[3]}"
    if mask is not None and mask.keys is not None:
        return "a key mask"
    if mask is not None and mask.band not in (None, (None, 0)):
        return "a window"
    return None


def cudnn_attention(
    q: Float[Array, "B N T D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    *,
    scale: float,
    mask: Mask | None = None,
    first_row: int | Array = 0,
    first_key: int | Array = 0,
    with_lse: bool = False,
) -> Float[Array, "B N T D"] | tuple[Float[Array, "B N T D"], Float[Array, "B N T"]]:
    """Attention with the arguments of `reference_attention`. Raises NotImplementedError with the reason (`unsupported`)."""
    mask = mask or Mask()
    reason = unsupported(q, k, v, mask)
    if mask.band is not None and not (isinstance(first_row, int) and first_row == first_key):
        reason = "causality over a ring"
    if reason:
        raise NotImplementedError(f"cuDNN attention does not take {reason}; use the reference")
    dense = {}
    if mask.dense is not None:
        is_bool = mask.dense.dtype == jnp.bool_
        dense = {"mask" if is_bool else "bias": mask.dense if is_bool else mask.dense.astype(q.dtype)}
    out = jax.nn.dot_product_attention(
        *(jnp.swapaxes(x, 1, 2) for x in (q, k, v)),
        **dense,
        scale=scale,
        is_causal=mask.band is not None,
        implementation="cudnn",
        return_residual=with_lse,
    )
    out, lse = out if with_lse else (out, None)
    out = jnp.swapaxes(out, 1, 2)
    # cuDNN gives the mean of the values where torch gives zeros: rows that see no key.
    seen = mask.queries
    if mask.dense is not None:
        some = (mask.dense if mask.dense.dtype == jnp.bool_ else mask.dense > BELOW).any(-1, keepdims=True)
        seen = some if seen is None else seen & some
    out = out if seen is None else jnp.where(seen, out, 0)
    if not with_lse:
        return out
    lse = jnp.swapaxes(lse, 1, 2).astype(jnp.float32)
    return out.astype(jnp.float32), lse if seen is None else jnp.where(seen[..., 0], lse, -jnp.inf)
