"""The room `video` for traced tensors: B C T H W, or with the width last."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch
from jax import lax

from ...bridge import Tensor
from ...video import attention, chunks, norm, slabs, tiles
from ...video.convolution import doubled_by_columns
from .blocks import Method


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


def scan_batches(step: Callable, x: torch.Tensor, size: int) -> torch.Tensor:
    """`chunks.scan_batches` of x [B, C, T, H, W]. `step` hands on any structure of tensors."""
    env = x._env

    def one(batch, kept):
        out, kept = step(Tensor(batch, env), _tensors(kept, env))
        return out.jax(), _arrays(kept)

    return Tensor(chunks.scan_batches(one, x.jax(), size, axis=2), env)


def looking_back(x: torch.Tensor, kept: torch.Tensor | None, frames: int) -> torch.Tensor:
    """`chunks.looking_back` of x [B, C, T, H, W]."""
    return Tensor(chunks.looking_back(x.jax(), None if kept is None else kept.jax(), frames, axis=2), x._env)


def scan_alike(call: Callable, modules: list[torch.nn.Module], x: torch.Tensor, own) -> tuple[torch.Tensor, object]:
    """Modules of one kind one after another, traced once and scanned: (what the last gives, what each keeps, stacked).

    Args:
        call: (module, x, what is its own) -> (x for the next, what it keeps: any structure of tensors).
        own: None, or the structures of all of them, stacked.
    """
    env, first = x._env, modules[0]
    weights = [dict(module.state_dict(keep_vars=True)) for module in modules]
    stacked = {name: jnp.stack([tensors[name].jax() for tensors in weights]) for name in weights[0]}
    method = Method(first, lambda x, kept: call(first, x, kept))

    def one(x, weights_and_own):
        weights, own = weights_and_own
        weights = {f"module.{name}": Tensor(array, env) for name, array in weights.items()}
        out, kept = torch.func.functional_call(method, weights, (Tensor(x, env), _tensors(own, env)))
        return out.jax(), _arrays(kept)

    x, kept = lax.scan(one, x.jax(), (stacked, _arrays(own)))
    return Tensor(x, env), _tensors(kept, env)


def _tensors(tree, env):
    return jax.tree.map(lambda array: Tensor(array, env), tree)


def _arrays(tree):
    return jax.tree.map(lambda tensor: tensor.jax(), tree, is_leaf=lambda leaf: isinstance(leaf, torch.Tensor))


def normed_by_place(
    layer: torch.nn.GroupNorm, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor
) -> torch.Tensor:
    """`norm.normed_by_place` of x [B, C, T, H, W] and maps that are as fine or coarser."""
    how = layer.weight.jax(), layer.bias.jax(), layer.num_groups, layer.eps
    maps = (_last(tensor.jax()) for tensor in (x, scale, shift))
    return Tensor(jnp.moveaxis(norm.normed_by_place(next(maps), *how, *maps), -1, 1), x._env)


def doubled(conv: torch.nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    """`convolution.doubled_by_columns` of x [B, C, T, H, W] or of maps [N, C, H, W], on a slab, or whole where a VAE is in parts.

    Raises NotOnSlabs for a convolution that pads with other than zeros.
    """
    if conv.padding_mode != "zeros":
        raise slabs.NotOnSlabs(f"expected zeros around a map that is doubled, got padding_mode {conv.padding_mode!r}")
    if x.ndim == 4:  # none of them sees another: as if they were one's frames
        return doubled(conv, x.swapaxes(0, 1)[None])[0].swapaxes(0, 1)
    array, split = x.jax(), slabs.slabs()
    padded = jnp.pad(array, [(0, 0)] * 4 + [(1, 1)]) if split is None else split.with_neighbours(array, 1, 1)
    columns = padded.transpose(0, 4, 2, 3, 1)
    out = doubled_by_columns(columns, conv.weight.jax().transpose(2, 3, 1, 0), conv.bias.jax())
    return Tensor(out.transpose(0, 4, 2, 3, 1).astype(array.dtype), x._env)


def _last(x: jax.Array) -> jax.Array:
    """Channels last."""
    return jnp.moveaxis(x, 1, -1)


def on_a_slab() -> bool:
    """Whether what is traced here computes a part of a map."""
    return slabs.slabs() is not None


def over_width(
    function: Callable, x: torch.Tensor, multiple: int = 1, beside: tuple[torch.Tensor, ...] = ()
) -> torch.Tensor:
    """`slabs.over_width` of x [B, ..., H, W]."""
    arrays = tuple(tensor.jax() for tensor in beside)
    return Tensor(slabs.over_width(_of_arrays(function, x._env), x.jax(), multiple, beside=arrays), x._env)


def attention_by_frame(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, frames: int) -> torch.Tensor:
    """`attention.attention_by_frame` of q, k, v [B, N, T, D]."""
    return Tensor(attention.attention_by_frame(q.jax(), k.jax(), v.jax(), frames), q._env)


def in_tiles(function: Callable, x: torch.Tensor, tiling: tiles.Tiling) -> torch.Tensor:
    """`tiles.in_tiles` of x [B, ..., H, W]."""
    return Tensor(tiles.in_tiles(_of_arrays(function, x._env), x.jax(), tiling), x._env)


def _of_arrays(function: Callable, env) -> Callable[..., jax.Array]:
    return lambda *arrays: function(*(Tensor(array, env) for array in arrays)).jax()
