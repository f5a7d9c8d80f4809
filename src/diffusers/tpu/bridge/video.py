"""The room `video` for traced tensors: B C T H W, or with the width last."""

from collections.abc import Callable

import jax
import torch
from torchax.tensor import Tensor

from ..video import attention, chunks, slabs, tiles


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
    """`attention.attention_by_frame` of q, k, v [B, N, T, D]."""
    return Tensor(attention.attention_by_frame(q.jax(), k.jax(), v.jax(), frames), q._env)


def in_tiles(function: Callable, x: torch.Tensor, tiling: tiles.Tiling) -> torch.Tensor:
    """`tiles.in_tiles` of x [B, ..., H, W]."""
    return Tensor(tiles.in_tiles(_of_arrays(function, x._env), x.jax(), tiling), x._env)


def _of_arrays(function: Callable, env) -> Callable[[jax.Array], jax.Array]:
    return lambda array: function(Tensor(array, env)).jax()
