"""A causal model's loop over chunks of frames as one scan; its layers' last frames are what is handed on."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torchax.tensor import Tensor


def scan_chunks(step: Callable, x: torch.Tensor, size: int, slots: int) -> torch.Tensor:
    """`step` of each chunk of `size` frames of a traced x [B, C, T, H, W], one after another, its outputs joined in time.

    The first chunk is the first frame with frames of zeros before it, so that it is computed by the same program: of its
    output the last frame is kept. Nothing in the zeros' places may reach that frame, or what is handed on: that is the
    step's duty. One frame in all is no chunk: its number is None, and the cache, of Nones, is thrown away.

    Args:
        step: (chunk, cache, number of the chunk, a traced scalar) -> [B, C', T', H', W']. The cache is a list that the step
            changes: in each of its `slots` None for good, or frames [B, C, t, H, W] that a layer keeps for the next
            chunk; zeros in the first.
        size: divides T - 1.

    Raises ValueError for a number of frames that does not fit.
    """
    env, (batch, channels, frames, height, width) = x._env, x.shape
    if (frames - 1) % size:
        raise ValueError(f"expected one frame and a multiple of {size} more, got {frames} frames")
    if frames == 1:
        return step(x, [None] * slots, None)
    array = jnp.pad(x.jax(), [(0, 0), (0, 0), (size - 1, 0), (0, 0), (0, 0)])
    chunks = jnp.moveaxis(array.reshape(batch, channels, -1, size, height, width), 2, 0)

    def one(kept, numbered):
        number, chunk = numbered
        cache = [entry if entry is None else Tensor(entry, env) for entry in kept]
        out = step(Tensor(chunk, env), cache, Tensor(number, env)).jax()
        return [entry if entry is None else entry.jax() for entry in cache], out

    numbered = jnp.arange(len(chunks)), chunks
    kept, found = None, [None] * slots
    while found != kept:
        kept = found
        found, _ = jax.eval_shape(one, kept, jax.tree.map(lambda a: a[0], numbered))
    _, outs = lax.scan(one, [k if k is None else jnp.zeros(k.shape, k.dtype) for k in kept], numbered)
    outs = jnp.moveaxis(outs, 0, 2)
    dropped = outs.shape[3] - 1
    return Tensor(outs.reshape(*outs.shape[:2], -1, *outs.shape[4:])[:, :, dropped:], env)
