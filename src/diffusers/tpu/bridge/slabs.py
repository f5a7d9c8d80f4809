"""A map split over its width: each chip computes one slab of it, and asks its neighbours for what an operator reads beyond.

`over_width` runs a function of traced tensors whose last axis is the width, one slab a chip. Inside, the operators that look
sideways know of it: padding along the width brings the neighbours' columns (zeros at the map's own two edges), attention
sees the whole map's keys. Everything else must not mix columns. A width that the chips do not divide is filled up on the
right; what lies there never reaches a column of the map. On one chip, and in `over_tiles`, the map is one slab.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.sharding import PartitionSpec as P
from torchax.tensor import Tensor

from ..attention import api


FACTORS = [Fraction(2) ** power for power in range(-6, 7)]  # of the finer and coarser maps of one model


@dataclass(frozen=True)
class Slabs:
    """How maps are split here.

    Attributes:
        axes: of the mesh, over which chips side by side hold slabs side by side; `count` of them.
        height, width: of the map that was split; other maps are finer or coarser by a power of two.
        local: the columns of one slab of it.
    """

    axes: tuple[str, ...]
    count: int
    height: int
    width: int
    local: int

    def columns(self, local: int) -> int:
        """The width of the map whose slabs have `local` columns."""
        return self.width * local // self.local

    @property
    def filled(self) -> bool:
        """The last slabs hold columns that are not the map's."""
        return self.width < self.count * self.local

    def with_neighbours(self, x: jax.Array, left: int, right: int) -> jax.Array:
        """A slab [..., W] with `left` and `right` columns of its neighbours, zeros beyond the map.

        Raises NotImplementedError where a neighbour has fewer.
        """
        local = x.shape[-1]
        if not left and not right:
            return x
        if max(left, right) > local:
            raise NotImplementedError(
                f"expected slabs of at least {max(left, right)} columns, got {local}: split this width over fewer chips"
            )
        if self.count == 1:
            return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(left, right)])
        if self.filled:
            x = jnp.where(lax.axis_index(self.axes) * local + jnp.arange(local) < self.columns(local), x, 0)
        parts = [x]
        if left:
            parts.insert(0, lax.ppermute(x[..., -left:], self.axes, [(i, i + 1) for i in range(self.count - 1)]))
        if right:
            parts.append(lax.ppermute(x[..., :right], self.axes, [(i + 1, i) for i in range(self.count - 1)]))
        return jnp.concatenate(parts, -1)

    def everyones(self, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, np.ndarray | None]:
        """Keys and values of all positions of the map, chip after chip, and which keys are its own (None: all)."""
        tokens = k.shape[2]
        if self.count == 1:
            return k, v, None
        k, v = (lax.all_gather(x, self.axes, axis=2, tiled=True) for x in (k, v))
        if not self.filled:
            return k, v, None
        local = next(int(self.local * f) for f in FACTORS if int(self.height * f) * self.local * f == tokens)
        column = np.arange(self.count)[:, None] * local + np.arange(tokens) % local
        return k, v, (column < self.columns(local)).reshape(1, 1, 1, -1)


_slabs = contextvars.ContextVar("diffusers_tpu_slabs", default=None)


def slabs() -> Slabs | None:
    """How maps are split where this is traced; None outside of `over_width` and `over_tiles`."""
    return _slabs.get()


@contextlib.contextmanager
def _computing(slabs: Slabs):
    """On one chip: operators know how its slab lies, and spread nothing further."""
    token = _slabs.set(slabs)
    try:
        with api.using(replace(api.current(), mesh=None)):
            yield
    finally:
        _slabs.reset(token)


def over_width(function: Callable, x: torch.Tensor, multiple: int = 1) -> torch.Tensor:
    """`function(x)` of a traced map [B, ..., H, W], one slab of the width a chip; a batch that `dp` divides lies over it.

    Args:
        function: gives a map [B, ..., H f, W f] of any f, by operators that know of slabs or do not mix columns.
        multiple: of columns, that a slab must have: how often the function halves the width.
    """
    mesh, array, env = api.current().mesh, x.jax(), x._env
    sizes = dict(mesh.shape) if mesh is not None else {}
    (batch, *_, height, width), dp = array.shape, sizes.get("dp", 1)
    on_dp = "dp" if batch > 1 and dp > 1 and batch % dp == 0 else None
    axes = tuple(axis for axis, size in sizes.items() if axis != on_dp and size > 1)
    count = math.prod(sizes[axis] for axis in axes)
    local = -(-width // (count * multiple)) * multiple if count > 1 else width
    split = Slabs(axes, count, height, width, local)

    def one_slab(slab):
        with _computing(split):
            return function(Tensor(slab, env)).jax()

    if mesh is None or mesh.size == 1:
        return Tensor(one_slab(array), env)
    spec = P(on_dp, *(None,) * (array.ndim - 2), axes)
    if split.filled:
        array = jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, count * local - width)])
    out = jax.shard_map(one_slab, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(array)
    return Tensor(out[..., : split.columns(out.shape[-1] // count)] if split.filled else out, env)


def over_tiles(function: Callable, x: torch.Tensor) -> torch.Tensor:
    """`function` of each of the traced tiles x [N, ..., H, W], one after another on a chip; chips share the tiles."""
    mesh, array, env = api.current().mesh, x.jax(), x._env
    height, width = array.shape[-2:]
    chips = 1 if mesh is None else mesh.size
    filled = jnp.concatenate((array, jnp.broadcast_to(array[-1:], (-len(array) % chips, *array.shape[1:]))))

    def some_tiles(tiles):
        with _computing(Slabs((), 1, height, width, width)):
            return lax.map(lambda tile: function(Tensor(tile, env)).jax(), tiles)

    if chips > 1:
        spec = P(mesh.axis_names)
        some_tiles = jax.shard_map(some_tiles, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return Tensor(some_tiles(filled)[: len(array)], env)
