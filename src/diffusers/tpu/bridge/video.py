"""The room `video` for traced tensors: B C T H W, or with the width last."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch
from torchax.tensor import Tensor

from ..attention.api import attention
from ..attention.masks import Mask
from ..video import chunks, slabs, tiles


def scan_chunks(step: Callable, x: torch.Tensor, size: int, slots: int) -> torch.Tensor:
    """`chunks.scan_chunks` of x [B, C, T, H, W].

    Args:
        step: (chunk, cache, number) -> output. The cache is a list of `slots` entries that the step changes: in each None
            for good, or frames that a layer keeps for the next chunk.
    """
    env = x._env

    def one(chunk, kept, number):
        cache = [entry if entry is None else Tensor(entry, env) for entry in kept]
        if number is None:
            return step(Tensor(chunk, env), cache, None).jax(), None  # upstream's cache may hold anything
        out = step(Tensor(chunk, env), cache, Tensor(number, env)).jax()
        return out, [entry if entry is None else entry.jax() for entry in cache]

    return Tensor(chunks.scan_chunks(one, x.jax(), size, [None] * slots, axis=2), env)


def over_width(function: Callable, x: torch.Tensor, multiple: int = 1) -> torch.Tensor:
    """`slabs.over_width` of x [B, ..., H, W]."""
    return Tensor(slabs.over_width(_of_arrays(function, x._env), x.jax(), multiple), x._env)


def attention_by_frame(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, frames: int) -> torch.Tensor:
    """Attention in which a frame sees itself and those before it. q, k, v: [B, N, T, D] of `frames` maps, one after another.

    Where a chip has a slab of each map, keys are those of whole maps.
    """
    arrays, seen = [x.jax() for x in (q, k, v)], None
    if slabs.slabs() is not None:
        *arrays[1:], seen = slabs.slabs().everyones(*arrays[1:], frames)
    frame = tuple(x.shape[2] // frames for x in arrays[:2])
    mask = Mask(keys=None if seen is None else jnp.asarray(seen), band=(None, 0), frame=frame)
    return Tensor(attention(*arrays, mask=mask if frames > 1 or seen is not None else None), q._env)


def in_tiles(function: Callable, x: torch.Tensor, tiling: tiles.Tiling) -> torch.Tensor:
    """`tiles.in_tiles` of x [B, ..., H, W]."""
    return Tensor(tiles.in_tiles(_of_arrays(function, x._env), x.jax(), tiling), x._env)


def _of_arrays(function: Callable, env) -> Callable[[jax.Array], jax.Array]:
    return lambda array: function(Tensor(array, env)).jax()
