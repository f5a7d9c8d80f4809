"""A map in overlapping tiles, each computed by itself and faded into the next: what upstream's `enable_tiling` does."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .slabs import as_finer, over_tiles


@dataclass(frozen=True)
class Tiling:
    """How a map is cut and put together; heights and widths.

    Attributes:
        sizes, strides: of the tiles of the map.
        kept: of what becomes of a tile, this much is put beside the next.
        overlaps: of what becomes of tiles, over which one fades into the next.
        whole: of the result.
    """

    sizes: tuple[int, int]
    strides: tuple[int, int]
    kept: tuple[int, int]
    overlaps: tuple[int, int]
    whole: tuple[int, int]

    @classmethod
    def overlapping(cls, sizes, results, factors: tuple[float, float], whole) -> "Tiling":
        """Tiles of `sizes` that become maps of the sizes `results`, each over a share `factors` of the one before."""
        overlaps = tuple(int(size * factor) for size, factor in zip(results, factors))
        return cls(
            sizes=sizes,
            strides=tuple(int(size * (1 - factor)) for size, factor in zip(sizes, factors)),
            kept=tuple(size - overlap for size, overlap in zip(results, overlaps)),
            overlaps=overlaps,
            whole=whole,
        )

    @classmethod
    def from_latents(cls, vae, height: int, width: int, patch: int = 1) -> "Tiling":
        """A VAE's own tiles of latents of this size, which become pixels in patches of `patch` by `patch`."""
        ratio, (sizes, strides) = vae.spatial_compression_ratio, _sizes_in_pixels(vae)
        return cls(
            sizes=tuple(size // ratio for size in sizes),
            strides=tuple(stride // ratio for stride in strides),
            kept=tuple(stride // patch for stride in strides),
            overlaps=tuple(size // patch - stride // patch for size, stride in zip(sizes, strides)),
            whole=(height * ratio // patch, width * ratio // patch),
        )

    @classmethod
    def to_latents(cls, vae, height: int, width: int, patch: int = 1) -> "Tiling":
        """A VAE's own tiles of a video of this size, in patches, which become latents."""
        ratio, (sizes, strides) = vae.spatial_compression_ratio // patch, _sizes_in_pixels(vae)
        return cls(
            sizes=sizes,
            strides=strides,
            kept=tuple(stride // ratio for stride in strides),
            overlaps=tuple(size // ratio - stride // ratio for size, stride in zip(sizes, strides)),
            whole=(height // ratio, width // ratio),
        )


def _sizes_in_pixels(vae) -> tuple[tuple[int, int], tuple[int, int]]:
    """Sizes and strides of tiles, as upstream's VAEs have them whose tiles overlap by a stride."""
    sizes = vae.tile_sample_min_height, vae.tile_sample_min_width
    return sizes, (vae.tile_sample_stride_height, vae.tile_sample_stride_width)


def in_tiles(function: Callable, x: jax.Array, tiling: Tiling, axis: int = -1) -> jax.Array:
    """`function` of tiles of a traced x, put together. `axis` is the width's, the height lies before it."""
    across = axis % x.ndim
    axes = across - 1, across
    starts = [range(0, x.shape[a], stride) for a, stride in zip(axes, tiling.strides)]
    tiles = {
        (top, left): _part(_part(x, top, tiling.sizes[0], axes[0]), left, tiling.sizes[1], axes[1])
        for top in starts[0]
        for left in starts[1]
    }
    tiles = _computed(function, tiles, axes)
    rows = []
    for top in starts[0]:
        for left in starts[1]:
            if top:
                before = tiles[top - tiling.strides[0], left]
                tiles[top, left] = _faded(before, tiles[top, left], tiling.overlaps[0], axes[0])
            if left:
                before = tiles[top, left - tiling.strides[1]]
                tiles[top, left] = _faded(before, tiles[top, left], tiling.overlaps[1], axes[1])
        kept = [
            _part(_part(tiles[top, left], 0, tiling.kept[0], axes[0]), 0, tiling.kept[1], axes[1])
            for left in starts[1]
        ]
        rows.append(jnp.concatenate(kept, axes[1]))
    return _part(_part(jnp.concatenate(rows, axes[0]), 0, tiling.whole[0], axes[0]), 0, tiling.whole[1], axes[1])


def _computed(function: Callable, tiles: dict, axes: tuple[int, int]) -> dict:
    """`function` of each tile, by one program: smaller ones are filled up below and on the right, what becomes of that is cut off."""
    own = np.array([[tile.shape[a] for a in axes] for tile in tiles.values()])
    size = own.max(0)

    def filled(tile):
        return jnp.pad(tile, [(0, size[axes.index(a)] - n if a in axes else 0) for a, n in enumerate(tile.shape)])

    outs = over_tiles(
        function,
        jnp.stack([filled(tile) for tile in tiles.values()]),
        own if (own < size).any() else None,
        axes[1] + 1,
    )
    rows, columns = (as_finer(own[:, n], size[n], outs.shape[a + 1]) for n, a in enumerate(axes))
    return {
        place: _part(_part(out, 0, rows[n], axes[0]), 0, columns[n], axes[1])
        for n, (place, out) in enumerate(zip(tiles, outs))
    }


def _part(x: jax.Array, start: int, size: int, axis: int) -> jax.Array:
    return lax.slice_in_dim(x, start, min(start + size, x.shape[axis]), axis=axis)


def _faded(before: jax.Array, tile: jax.Array, overlap: int, axis: int) -> jax.Array:
    """The tile, its first `overlap` rows or columns faded in from the last ones of the tile before it."""
    overlap = min(before.shape[axis], tile.shape[axis], overlap)
    if overlap <= 0:
        return tile
    weight = (jnp.arange(overlap, dtype=jnp.float32) / overlap).reshape(-1, *(1,) * (tile.ndim - 1 - axis))
    old = lax.slice_in_dim(before, before.shape[axis] - overlap, before.shape[axis], axis=axis)
    new, rest = _part(tile, 0, overlap, axis), _part(tile, overlap, tile.shape[axis], axis)
    return jnp.concatenate([(old * (1 - weight) + new * weight).astype(tile.dtype), rest], axis)
