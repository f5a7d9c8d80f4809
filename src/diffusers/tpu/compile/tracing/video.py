"""The functions of `kernels.video` for traced tensors: B C T H W, or with the width last."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ...bridge import Tensor, autocast, environment
from ...bridge.convolutions import joined_in_time
from ...kernels.video import chunks, halo, norm, tiles
from ...kernels.video.convolution import doubled_by_lines
from .functional import with_weights


def _lifted(function: Callable, **fixed) -> Callable:
    """`function` of arrays as one of traced tensors, also in pytrees. Functions among its arguments take and return tensors."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        return environment().j2t_iso(function(*_arrays(args), **_arrays(kwargs), **fixed))

    return call


def _arrays(tree):
    def of(x):
        if isinstance(x, torch.Tensor):
            return x.jax()
        return (lambda *args: _arrays(x(*environment().j2t_iso(args)))) if callable(x) else x

    return jax.tree.map(of, tree)


attention_by_frame = _lifted(halo.attention_by_frame)
in_tiles = _lifted(tiles.in_tiles)
shard_width = _lifted(halo.shard_width)
scan_batches = _lifted(chunks.scan_batches, axis=2)


def behind(before: torch.Tensor, x: torch.Tensor, first: torch.Tensor | None = None) -> torch.Tensor:
    """x [B, C, T, H, W] behind the frames before it, as a convolution's input; the convolution reads x there (see `operators`).

    `first`: where this is true, x's first frame replaces each of the frames before it.
    """
    return joined_in_time(environment(), chunks.Behind(*_arrays((before, x, 2, first))))


def keeping_last(
    convolve: Callable, x: torch.Tensor, frames: int, shortcut: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`convolve(x)` of x [B, C, T, H, W] plus a shortcut, and the last frames of x, read from the convolution's own input before
    its result is used: x is held neither twice nor any longer."""
    out = convolve(x) if shortcut is None else convolve(x) + shortcut
    return _lifted(lambda *both: lax.optimization_barrier(both))(out, x[:, :, -frames:])


def causal_pad(x: torch.Tensor, kept: torch.Tensor | None, frames: int) -> torch.Tensor:
    """`chunks.causal_frames` of x [B, C, T, H, W], as in `behind`."""
    return joined_in_time(environment(), chunks.causal_frames(*_arrays((x, kept, frames)), axis=2))


def scan_chunks(step: Callable, x: torch.Tensor, size: int, slots: int) -> torch.Tensor:
    """`chunks.scan_chunks` of x [B, C, T, H, W], by `step(chunk, cache, number)` -> output.

    The cache is a list of `slots` entries that the step changes: always None, or frames that a layer keeps for the next chunk.
    """

    def one(chunk, cache, number):
        cache = [*cache]
        out = step(chunk, cache, number)
        return out, None if number is None else cache  # with one chunk upstream's cache may hold anything

    return _lifted(chunks.scan_chunks, axis=2)(one, x, size, [None] * slots)


def scan_alike(call: Callable, modules: list[torch.nn.Module], x: torch.Tensor, own) -> tuple[torch.Tensor, object]:
    """Modules of one kind one after another, traced once and scanned: (the last one's output, what each keeps, stacked).

    `call(module, x, own)` returns x for the next and what the module keeps, any structure of tensors. `own`: stacked; or None.
    """
    weights = [dict(module.state_dict(keep_vars=True)) for module in modules]
    stacked = {name: jnp.stack([tensors[name].jax() for tensors in weights]) for name in weights[0]}

    def one(x, weights_and_own):
        weights, own = weights_and_own
        return with_weights(modules[0], weights, call, modules[0], x, own)[0]

    return _lifted(lax.scan)(one, x, (stacked, own))


def normed_by_place(
    layer: torch.nn.GroupNorm, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, silu: bool = False
) -> torch.Tensor:
    """`norm.normed_by_place` of x [B, C, T, H, W] with maps `scale` and `shift`, as fine as x or coarser."""

    def of_arrays(weight, bias, *maps):
        x, *maps = (jnp.moveaxis(array, 1, -1) for array in maps)
        return jnp.moveaxis(norm.normed_by_place(x, weight, bias, layer.num_groups, layer.eps, *maps, silu), -1, 1)

    return _lifted(of_arrays)(layer.weight, layer.bias, x, scale, shift)


def doubled(conv: torch.nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    """`convolution.doubled_by_lines` of x [B, C, T, H, W] or of maps [N, C, H, W]: on a shard by columns, else by rows.

    Raises NotByShards for a convolution that pads with anything but zeros.
    """
    if conv.padding_mode != "zeros":
        raise halo.NotByShards(f"expected zeros around a map that is doubled, got padding_mode {conv.padding_mode!r}")
    (array, weight, bias), split = (t.jax() for t in autocast.lowered(x, conv.weight, conv.bias)), halo.halo_shards()
    if split is None:
        rows = jnp.pad(jnp.moveaxis(array, 1, -1), [(0, 0)] * (x.ndim - 3) + [(1, 1), (0, 0), (0, 0)])
        frames, rows = rows.shape[:-3], rows.reshape(-1, rows.shape[-3], 1, *rows.shape[-2:])
        out = doubled_by_lines(rows, weight.transpose(2, 3, 1, 0), bias)
        return Tensor(jnp.moveaxis(out.reshape(*frames, out.shape[1], *out.shape[3:]), -1, 1), x._env)
    if x.ndim == 4:  # maps do not affect each other: convolve them as one video's frames
        return doubled(conv, x.swapaxes(0, 1)[None])[0].swapaxes(0, 1)
    columns = split.with_neighbours(array, 1, 1).transpose(0, 4, 2, 3, 1)
    out = doubled_by_lines(columns, weight.transpose(3, 2, 1, 0), bias)
    return Tensor(out.transpose(0, 4, 2, 3, 1), x._env)


def shard_maps(function: Callable, arguments: dict, names: tuple[str, ...], x: torch.Tensor, multiple: int):
    """`function(arguments)` by `shard_width`: tensors in the arguments of these `names` are maps, and x is one of them."""
    leaves, spec = tree_flatten(arguments)
    tensors = [t for name in names for t in tree_leaves(arguments.get(name)) if isinstance(t, torch.Tensor)]
    of_maps = [t for t in tensors if t is not x]
    if any(t.ndim != x.ndim or len(t) != len(x) or t.shape[-1] * multiple < x.shape[-1] for t in of_maps):
        raise halo.NotByShards(
            f"expected maps beside {list(x.shape)} of its batch, got {[list(t.shape) for t in of_maps]}"
        )
    batch = [t for t in leaves if isinstance(t, torch.Tensor) and t.shape[:1] == x.shape[:1] and t.ndim]
    moved = [x, *of_maps, *(t for t in batch if not any(t is other for other in (x, *of_maps)))]
    place = {id(t): n for n, t in enumerate(moved)}

    def run(*parts):
        given = [parts[place[id(leaf)]] if id(leaf) in place else leaf for leaf in leaves]
        return function(tree_unflatten(given, spec))

    return shard_width(run, x, multiple, maps=tuple(of_maps), beside=tuple(moved[1 + len(of_maps) :]))
