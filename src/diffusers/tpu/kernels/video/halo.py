"""A map split over its width: each chip computes one shard, with a halo of its neighbours' columns where an operator reads beyond.

Inside of `shard_width` operators that pad the width fetch the halo, and attention gathers the whole map's keys, both by
`halo_shards()`; nothing else may mix columns. A width that the chips do not divide is padded on the right, tiles at the bottom and
right; no column of the map depends on the padding. `axis` is the width's; the height's is before it.
"""

import contextvars
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from ..attention.api import attention
from ..attention.masks import Mask
from ..attention.reference import Keys, Out, Queries, Values, padded_to
from ..settings import bound, current, using
from .chunks import Behind


class NotByShards(NotImplementedError):
    """An operator needs the whole map."""


FACTORS = [Fraction(2) ** power for power in range(-6, 7)]  # scales of the finer and coarser maps of one model


def as_finer(own, size: int, became: int):
    """How many rows or columns `own` become, if `size` of them become `became`; rounded down."""
    factor = next(f for f in FACTORS if int(size * f) == became)
    return own * factor.numerator // factor.denominator


@dataclass(frozen=True)
class HaloShards:
    """How maps are sharded where this is traced.

    Attributes:
        axes: mesh axes over which `count` chips hold the shards, in the order of columns.
        height, width: of the map that was split; other maps are finer or coarser by a power of two.
        local: the columns of one shard of it.
        own: rows and columns without padding, traced scalars; None: all.
        keys_here: each shard has all of attention's keys: those of text, or of the frames of one position.
    """

    axes: tuple[str, ...]
    count: int
    height: int
    width: int
    local: int
    own: tuple[jax.Array, jax.Array] | None = None
    keys_here: bool = False

    def columns(self, local: int) -> int:
        """The width of the map whose shards have `local` columns."""
        return self.width * local // self.local

    @property
    def filled(self) -> bool:
        """Whether the last shards hold padding."""
        return self.width < self.count * self.local

    def with_neighbours(
        self, x: jax.Array | Behind, left: int, right: int, axis: int = -1, repeated=False
    ) -> jax.Array:
        """A shard with `left` and `right` columns of its neighbours as a halo; beyond the map zeros, or its last column `repeated`.

        Padding is overwritten by what is beyond the map. A video is written into the result where it is computed, without a copy
        afterwards. `x`: an array, or a `Behind`.

        Raises NotByShards where a neighbour has fewer columns.
        """
        behind = x if isinstance(x, Behind) else None
        x = x if behind is None else behind.x
        axis %= x.ndim
        local = x.shape[axis]
        if not left and not right:
            return x if behind is None else behind.joined()
        if max(left, right) > local:
            raise NotByShards(
                f"expected shards of at least {max(left, right)} columns, got {local}: split this width over fewer chips"
            )
        place = lax.axis_index(self.axes) if self.count > 1 else 0
        last = self.columns(local) - 1 - place * local  # of the map, counted from this shard's first column

        def filled(part):
            if self.count == 1 and self.own is not None:
                rows, columns = self._own(part.shape[axis - 1], local)
                return _filled_up(_filled_up(part, rows - 1, axis - 1, repeated), columns - 1, axis, repeated)
            return _filled_up(part, last, axis, repeated) if self.filled else part

        in_place = x.ndim == 5  # columns of a single map lie within registers, where this is slow
        first = left if in_place else 0
        if in_place:
            sizes, there = list(x.shape), [left if a == axis else 0 for a in range(x.ndim)]
            sizes[axis] += left + right
            start = [*there]
            if behind is not None:
                sizes[behind.axis] += behind.place
                there[behind.axis] = behind.place
            whole = lax.dynamic_update_slice(lax.empty(tuple(sizes), x.dtype), filled(x), there)
            if behind is not None:
                # x's first frame is read from the result, so that x itself need not be kept.
                own = [1 if a == behind.axis else size for a, size in enumerate(x.shape)]
                before = behind.frames_before(lax.dynamic_slice(whole, there, own))
                before = before if behind.first is None else lax.optimization_barrier(before)
                whole = lax.dynamic_update_slice(whole, filled(before), start)
        else:
            whole = filled(x)

        def columns(start, number):
            return lax.slice_in_dim(whole, first + start, first + start + number, axis=axis)

        def sent(edge, steps):
            return lax.ppermute(edge, self.axes, steps) if self.count > 1 else jnp.zeros_like(edge)

        edges = {}
        if left:
            edge = sent(columns(local - left, left), [(i, i + 1) for i in range(self.count - 1)])
            edges[0] = jnp.where(place == 0, columns(0, 1), edge) if repeated else edge
        if right:
            edge = sent(columns(0, right), [(i + 1, i) for i in range(self.count - 1)])
            edges[left + local] = jnp.where(last < local, columns(local - 1, 1), edge) if repeated else edge
        if not in_place:
            beside = edges.get(0), whole, edges.get(left + local)
            return jnp.concatenate([part for part in beside if part is not None], axis)
        # Without the barrier the chosen column is read from the array that it is written to, which the compiler then copies whole.
        edges = lax.optimization_barrier(edges) if repeated else edges
        for start, edge in edges.items():
            whole = lax.dynamic_update_slice_in_dim(whole, edge, start, axis)
        return whole

    def _own(self, height: int, width: int) -> tuple[jax.Array, jax.Array]:
        """Rows and columns without padding, of a map of this height and width."""
        return as_finer(self.own[0], self.height, height), as_finer(self.own[1], self.width, width)

    def own_positions(self, height: int, width: int) -> jax.Array | None:
        """Which positions of a shard of this size are not padding, [height, width]; None: all."""
        if self.own is None and not self.filled:
            return None
        if self.filled:
            place = lax.axis_index(self.axes) * width + jnp.arange(width)
            return jnp.broadcast_to(place < self.columns(width), (height, width))
        rows, columns = self._own(height, width)
        return (jnp.arange(height) < rows)[:, None] & (jnp.arange(width) < columns)

    def of_positions(self, positions: int) -> tuple[int, int]:
        """Rows and columns of a shard with so many positions."""
        sizes = ((int(self.height * f), int(self.local * f)) for f in FACTORS)
        return next(size for size in sizes if math.prod(size) == positions)

    def everyones(self, k: jax.Array, v: jax.Array, frames: int = 1) -> tuple:
        """(keys, values, which keys are not padding, None: all) of the whole map: frame by frame, within a frame chip by chip."""
        if self.count == 1 and self.own is None:
            return k, v, None
        tokens = k.shape[2] // frames
        height, local = self.of_positions(tokens)
        if self.count == 1:
            place, (rows, columns) = np.arange(tokens), self._own(height, local)
            seen = (place // local < rows) & (place % local < columns)
            return k, v, jnp.tile(seen.reshape(1, 1, 1, -1), frames)

        def gathered(x):
            x = x.reshape(*x.shape[:2], frames, tokens, -1)
            return lax.all_gather(x, self.axes, axis=3, tiled=True).reshape(*x.shape[:2], -1, x.shape[-1])

        k, v = gathered(k), gathered(v)
        if not self.filled:
            return k, v, None
        column = np.arange(self.count)[:, None] * local + np.arange(tokens) % local
        return k, v, np.tile((column < self.columns(local)).reshape(1, 1, 1, -1), frames)


def _filled_up(x: jax.Array, last: jax.Array, axis: int, repeated: bool) -> jax.Array:
    """x with zeros, or the entry at `last` if `repeated`, in the places after `last`."""
    size = x.shape[axis]
    place = jnp.arange(size).reshape(-1, *(1,) * (x.ndim - 1 - axis))
    beyond = lax.dynamic_slice_in_dim(x, jnp.clip(last, 0, size - 1), 1, axis) if repeated else 0
    return jnp.where(place <= last, x, beyond)


_halo_shards = contextvars.ContextVar("diffusers_tpu_halo_shards", default=None)


def halo_shards() -> HaloShards | None:
    """How maps are sharded where this is traced; None outside of `shard_width` and `over_tiles`."""
    return _halo_shards.get()


def keys_here(here: bool = True):
    """A context in which each shard has all of attention's keys, if `here` or if it was so before, and not a part of them."""
    split = _halo_shards.get()
    return bound(_halo_shards, split and replace(split, keys_here=here or split.keys_here))


def _on_shard(shards: HaloShards, function: Callable, *arrays):
    """`function` of arrays on one chip, with these `halo_shards()` and no mesh, so that operators shard nothing further."""
    with bound(_halo_shards, shards), using(replace(current(), mesh=None)):
        return function(*arrays)


def shard_width(
    function: Callable, x: jax.Array, multiple: int = 1, axis: int = -1, maps: tuple = (), beside: tuple = ()
):
    """`function(x, *maps, *beside)` of a traced map [B, ...], a shard of the width per chip; `dp` splits a batch that it divides.

    Args:
        function: returns a map with f times the columns, for any f, or a pytree of them; it mixes columns only by `halo_shards()`.
        multiple: divides the columns of a shard: 2^n if the function halves the width n times.
        maps, beside: further maps, finer or coarser by a power of two, and further arrays of the batch [B, ...].
    """
    mesh, axis = current().mesh, axis % x.ndim
    sizes = dict(mesh.shape) if mesh is not None else {}
    batch, height, width, dp = x.shape[0], x.shape[axis - 1], x.shape[axis], sizes.get("dp", 1)
    on_dp = "dp" if batch > 1 and dp > 1 and batch % dp == 0 else None
    axes = tuple(name for name, size in sizes.items() if name != on_dp and size > 1)
    count = math.prod(sizes[name] for name in axes)
    local = -(-width // (count * multiple)) * multiple if count > 1 else width
    split = HaloShards(axes, count, height, width, local)
    one_shard = functools.partial(_on_shard, split, function)
    if current().chips == 1:
        return one_shard(x, *maps, *beside)
    spec = P(on_dp, *(axes if a == axis else None for a in range(1, x.ndim)))

    def filled(m):
        return padded_to(m, axis, count * as_finer(local, width, m.shape[axis])) if split.filled else m

    def cut(m):
        return lax.slice_in_dim(m, 0, split.columns(m.shape[axis] // count), axis=axis) if split.filled else m

    maps = [*map(filled, (x, *maps))]
    specs = *(spec for _ in maps), *(P(on_dp) for _ in beside)
    run = jax.shard_map(one_shard, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False)
    return jax.tree.map(cut, run(*maps, *beside))


def over_tiles(function: Callable, x: jax.Array, own: np.ndarray | None = None, axis: int = -1) -> jax.Array:
    """`function` of each of the traced tiles x [N, ...], one after another on a chip; chips share the tiles.

    Args:
        own: [N, 2], rows and columns of each tile without padding; None: all. Results of padding are undefined.
    """
    mesh, chips, axis = current().mesh, current().chips, axis % x.ndim
    height, width = x.shape[axis - 1], x.shape[axis]
    tiles = (x,) if own is None else (x, jnp.asarray(own))
    filled = [jnp.concatenate((a, jnp.broadcast_to(a[-1:], (-len(a) % chips, *a.shape[1:])))) for a in tiles]

    def one_tile(tile, own=None):
        return _on_shard(HaloShards((), 1, height, width, width, None if own is None else tuple(own)), function, tile)

    def some_tiles(*tiles):
        return lax.map(lambda tile: one_tile(*tile), tiles)

    if chips > 1:
        spec = P(mesh.axis_names)
        some_tiles = jax.shard_map(some_tiles, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return some_tiles(*filled)[: len(x)]


def attention_by_frame(q: Queries, k: Keys, v: Values, frames: int) -> Out:
    """Attention among the positions of `frames` maps, frame by frame: each sees its own frame and the earlier ones.

    If maps are sharded, keys are those of whole maps. Raises as `attention` does.
    """
    seen = None
    if halo_shards() is not None:
        k, v, seen = halo_shards().everyones(k, v, frames)
    if frames == 1 and seen is None:
        return attention(q, k, v)
    frame = q.shape[2] // frames, k.shape[2] // frames
    return attention(q, k, v, mask=Mask(keys=None if seen is None else jnp.asarray(seen), band=(None, 0), frame=frame))
