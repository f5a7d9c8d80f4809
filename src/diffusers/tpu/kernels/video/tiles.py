"""A map in overlapping tiles, each computed separately and blended into the next, as by upstream's `enable_tiling`."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .halo import as_finer, over_tiles


@dataclass(frozen=True)
class Tiling:
    """How a map is cut into tiles and reassembled; all fields are (height, width).

    Attributes:
        sizes, strides: of the tiles of the map.
        kept: how much of a tile's result precedes the next one's.
        overlaps: over how much the results of neighbouring tiles are blended.
        whole: of the result.
        largest: of maps that are not cut.
    """

    sizes: tuple[int, int]
    strides: tuple[int, int]
    kept: tuple[int, int]
    overlaps: tuple[int, int]
    whole: tuple[int, int]
    largest: tuple[int, int]

    @classmethod
    def overlapping(cls, sizes, results, factors: tuple[float, float], whole) -> "Tiling":
        """Tiles of `sizes` whose results have sizes `results`; each overlaps a share `factors` of the one before."""
        overlaps = tuple(int(size * factor) for size, factor in zip(results, factors))
        return cls(
            sizes=sizes,
            strides=tuple(int(size * (1 - factor)) for size, factor in zip(sizes, factors)),
            kept=tuple(size - overlap for size, overlap in zip(results, overlaps)),
            overlaps=overlaps,
            whole=whole,
            largest=sizes,
        )

    @classmethod
    def by_strides(cls, vae, size: tuple[int, int], patch: int = 1, encode: bool = False) -> "Tiling":
        """Tiles by a VAE's own sizes and strides, for latents of this size; with `encode`, for a video of this size in patches."""
        ratio = vae.spatial_compression_ratio
        of_map, of_result = (1, ratio // patch) if encode else (ratio, patch)
        sizes = vae.tile_sample_min_height, vae.tile_sample_min_width
        strides = vae.tile_sample_stride_height, vae.tile_sample_stride_width
        return cls(
            sizes=tuple(n // of_map for n in sizes),
            strides=tuple(n // of_map for n in strides),
            kept=tuple(n // of_result for n in strides),
            overlaps=tuple(size // of_result - stride // of_result for size, stride in zip(sizes, strides)),
            whole=tuple(n // of_result if encode else n * ratio // patch for n in size),
            # a video's tiles are larger in patches
            largest=tuple(n // patch if encode else n // ratio for n in sizes),
        )

    def cuts(self, height: int, width: int) -> bool:
        """Whether a map of this size is cut."""
        return height > self.largest[0] or width > self.largest[1]


def tiles_meet(size: int, ratio: int, factor: float) -> bool:
    """Whether a video's tiles, of `size` pixels and overlapping by a share `factor`, and its latents' tiles leave no gaps."""
    latents = size // ratio
    strides = int(size * (1 - factor)), ratio * int(latents * (1 - factor))
    kept = size - int(size * factor), ratio * (latents - int(latents * factor))
    return strides[0] > 0 and len({*strides, *kept}) == 1


def in_tiles(function: Callable, x: jax.Array, tiling: Tiling, axis: int = -1) -> jax.Array:
    """`function` of the tiles of a traced x, blended into one map. `axis` is the width's; the height's is before it."""
    axes = axis % x.ndim - 1, axis % x.ndim
    tops, lefts = (range(0, x.shape[a], stride) for a, stride in zip(axes, tiling.strides))
    tiles = {(top, left): _block(x, axes, tiling.sizes, (top, left)) for top in tops for left in lefts}
    tiles = _computed(function, tiles, axes)
    rows = []
    for top in tops:
        for left in lefts:
            for n, before in enumerate([(top - tiling.strides[0], left), (top, left - tiling.strides[1])]):
                if before in tiles:
                    tiles[top, left] = _faded(tiles[before], tiles[top, left], tiling.overlaps[n], axes[n])
        rows.append(jnp.concatenate([_block(tiles[top, left], axes, tiling.kept) for left in lefts], axes[1]))
    return _block(jnp.concatenate(rows, axes[0]), axes, tiling.whole)


def _computed(function: Callable, tiles: dict, axes: tuple[int, int]) -> dict:
    """`function` of each tile, by one program: smaller tiles are padded at the bottom and right, and their results cut."""
    own = np.array([[tile.shape[a] for a in axes] for tile in tiles.values()])
    size = own.max(0)

    def filled(tile):
        return jnp.pad(tile, [(0, size[axes.index(a)] - n if a in axes else 0) for a, n in enumerate(tile.shape)])

    stacked = jnp.stack([filled(tile) for tile in tiles.values()])
    outs = over_tiles(function, stacked, own if (own < size).any() else None, axes[1] + 1)
    became = zip(*(as_finer(own[:, n], size[n], outs.shape[a + 1]) for n, a in enumerate(axes)))
    return {place: _block(out, axes, sizes) for place, out, sizes in zip(tiles, outs, became)}


def _block(x: jax.Array, axes: tuple[int, int], sizes, starts=(0, 0)) -> jax.Array:
    for axis, size, start in zip(axes, sizes, starts):
        x = lax.slice_in_dim(x, start, min(start + size, x.shape[axis]), axis=axis)
    return x


def _faded(before: jax.Array, tile: jax.Array, overlap: int, axis: int) -> jax.Array:
    """The tile, with its first `overlap` rows or columns blended with the last ones of the tile before it."""
    overlap = min(before.shape[axis], tile.shape[axis], overlap)
    if overlap <= 0:
        return tile
    weight = (jnp.arange(overlap, dtype=jnp.float32) / overlap).reshape(-1, *(1,) * (tile.ndim - 1 - axis))
    _, old = jnp.split(before, [before.shape[axis] - overlap], axis)
    new, rest = jnp.split(tile, [overlap], axis)
    return jnp.concatenate([(old * (1 - weight) + new * weight).astype(tile.dtype), rest], axis)
