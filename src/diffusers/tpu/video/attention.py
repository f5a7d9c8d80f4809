"""Attention over all frames of a video in which a frame sees itself and those before it, where maps may lie over chips."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..kernels.attention.api import attention
from ..kernels.attention.masks import Mask
from .slabs import slabs


def attention_by_frame(
    q: Float[Array, "B N T D"], k: Float[Array, "B N T D"], v: Float[Array, "B N T E"], frames: int
) -> Float[Array, "B N T E"]:
    """Attention of the positions of `frames` maps, one after another, each to those of its own frame and of the earlier.

    Where a chip has a slab of each map, keys are those of whole maps. Raises as `attention` does.
    """
    seen = None
    if slabs() is not None:
        k, v, seen = slabs().everyones(k, v, frames)
    if frames == 1 and seen is None:
        return attention(q, k, v)
    frame = q.shape[2] // frames, k.shape[2] // frames
    return attention(q, k, v, mask=Mask(keys=None if seen is None else jnp.asarray(seen), band=(None, 0), frame=frame))
