"""Sparse self-attention of a video's tokens: each tile of queries sees the tiles of keys nearest in time and space.

Tokens are reordered by columns: one spatial cell after another, each with its frames in order, so that tiles of consecutive
tokens are compact. All tiles of queries see equally many tiles of keys, those with the largest

    sum over its queries and their keys of 1 / ((dt + e) (ds + e))

with distances dt and ds as shares of the video's length and of its height and width. So frames near in time are seen whole, and
places near in space in all frames, as in radial attention (Li et al. 2025), but in tiles large enough for this kernel. A last tile
of keys that is not full is seen by all tiles of queries: the kernel then masks only in the last steps of each.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..pallas import ROWS, round_up


MOST_KEYS = 2048  # of a tile
LEAST_TILES = 16  # of keys
CHUNK = 128  # tokens whose mean position represents them
SOFTENED = 0.05  # e
PATCHES = (1, 2, 4)  # sides of a patch, in latents, that models turn into one token


class Tiles(NamedTuple):
    """Tokens of a tile of queries, tokens of a tile of keys, and per tile of queries the tiles of keys that it sees."""

    queries: int
    keys: int
    seen: tuple[tuple[int, ...], ...]

    def visited(self, tokens: int, kv_len: int) -> np.ndarray:
        """Per tile of queries, the tiles of keys that it sees, and those of the keys after `tokens`."""
        behind = range(-(-tokens // self.keys), -(-kv_len // self.keys))
        return np.array([(*seen, *behind) for seen in self.seen], np.int32)


@dataclass(frozen=True)
class Nearest:
    """Which tokens see which: the static part of a call.

    Attributes:
        grid: frames, height and width in tokens; the video's tokens come first.
        sparsity: share of the tiles of keys that a tile of queries does not see.
        stop: positions from `tokens` up to here are padding. Tokens behind it see all, and are seen by all.
    """

    grid: tuple[int, int, int]
    sparsity: float
    stop: int

    @property
    def tokens(self) -> int:
        return math.prod(self.grid)

    @functools.cached_property
    def cell(self) -> tuple[int, int]:
        """Height and width of a cell: about as many cells along each as tiles along frames; rows of whole registers, if possible."""
        frames, height, width = self.grid
        along = self.tiles_of_keys ** (1 / 3)

        def unlike(cell: tuple[int, int]) -> tuple[bool, float]:
            a, b = cell
            run = b if b < width else a * b
            return run % ROWS != 0, abs(math.log(height / a / along)) + abs(math.log(width / b / along))

        divisors = ([n for n in range(1, size + 1) if size % n == 0] for size in (height, width))
        return min(itertools.product(*divisors), key=unlike)

    @property
    def order(self) -> np.ndarray:
        """Positions in the sequence, indexed by position in the order of tiles."""
        (frames, height, width), (a, b) = self.grid, self.cell
        places = np.arange(self.tokens).reshape(frames, height // a, a, width // b, b)
        return places.transpose(1, 3, 0, 2, 4).reshape(-1)

    @property
    def tile(self) -> tuple[int, int]:
        """Tokens of a tile of queries, and of one of keys."""
        keys = min(MOST_KEYS, round_up(-(-self.tokens // LEAST_TILES), 2 * CHUNK))
        return keys // 2, keys

    @property
    def tiles_of_keys(self) -> int:
        return -(-self.tokens // self.tile[1])

    @property
    @functools.lru_cache(256)
    def tiles(self) -> Tiles:
        queries, keys = self.tile
        where = np.stack(np.unravel_index(self.order, self.grid), 1) / np.array(self.grid)  # [T, 3]
        sizes = np.diff([*range(0, self.tokens, CHUNK), self.tokens])
        middles = np.add.reduceat(where, np.arange(0, self.tokens, CHUNK)) / sizes[:, None]
        dt = np.abs(middles[:, None, 0] - middles[None, :, 0])
        ds = np.hypot(*(middles[:, None, axis] - middles[None, :, axis] for axis in (1, 2)))
        mass = sizes[:, None] * sizes / ((dt + SOFTENED) * (ds + SOFTENED))
        mass = np.add.reduceat(mass, np.arange(0, len(mass), queries // CHUNK))
        mass = np.add.reduceat(mass, np.arange(0, mass.shape[1], keys // CHUNK), 1)
        mass[np.arange(len(mass)), np.arange(len(mass)) * queries // keys] = np.inf  # its own tile
        shared = self.tokens % keys != 0
        if shared:
            mass[:, -1] = np.inf
        number = max(1 + shared, round((1 - self.sparsity) * mass.shape[1]))
        seen = np.sort(np.argsort(-mass, axis=1, kind="stable")[:, :number], axis=1)
        return Tiles(queries, keys, tuple(map(tuple, seen.tolist())))

    @property
    def share(self) -> float:
        """The mean share of the video that a token sees."""
        tiles = self.tiles
        sizes = np.diff([*range(0, self.tokens, tiles.keys), self.tokens])
        return float(np.mean([sizes[[*seen]].sum() for seen in tiles.seen])) / self.tokens

    def in_columns(self, x: Float[Array, "B N T D"]) -> Float[Array, "B N T D"]:
        """The video's tokens in the order of tiles."""
        frames, height, width = self.grid
        a, b = self.cell
        return self._moved(x, (frames, height // a, a, width // b, b), (1, 3, 0, 2, 4))

    def in_frames(self, x: Float[Array, "B N T D"]) -> Float[Array, "B N T D"]:
        """The inverse of `in_columns`."""
        frames, height, width = self.grid
        a, b = self.cell
        return self._moved(x, (height // a, width // b, frames, a, b), (2, 0, 3, 1, 4))

    def _moved(self, x, shape: tuple[int, ...], order: tuple[int, ...]):
        batch, heads, tokens, dim = x.shape
        rows = jnp.swapaxes(x, 1, 2).reshape(batch, *shape, heads * dim)
        rows = rows.transpose(0, *(1 + axis for axis in order), len(shape) + 1)
        return jnp.swapaxes(rows.reshape(batch, tokens, heads, dim), 1, 2)

    def seen_by(self, rows: Array, columns: Array) -> Array:
        """Whether queries at positions [T, 1] see keys at positions [S]: [T, S]."""
        tiles, tokens = self.tiles, self.tokens
        place = np.argsort(self.order)  # in the order of tiles
        table = np.zeros((len(tiles.seen) + 1, self.tiles_of_keys + 1), bool)
        for n, seen in enumerate(tiles.seen):
            table[n, [*seen]] = True
        table[-1], table[:, -1] = True, True

        def tile_of(places, size: int, last: int):
            inside = jnp.asarray(place // size)[jnp.minimum(places, tokens - 1)]
            return jnp.where(places < tokens, inside, last)

        own = tile_of(rows[:, 0], tiles.queries, len(tiles.seen))
        return jnp.asarray(table)[own][:, tile_of(columns, tiles.keys, self.tiles_of_keys)]


def nearest(latents: tuple[int, int, int], sparsity: float, tokens: int, stop: int) -> Nearest | None:
    """`Nearest` for `tokens` of a video with latents of these frames, height and width; None: no patch size gives `tokens`.

    `stop`: as in `Nearest`, padding included.
    """
    for patch_t, patch in itertools.product(PATCHES, PATCHES):
        grid = tuple(-(-n // size) for n, size in zip(latents, (patch_t, patch, patch)))
        if math.prod(grid) == tokens:
            return Nearest(grid, sparsity, stop)
    return None


def by_tiles(local: Callable, q, k, v, mask, **how):
    """Attention as `mask.nearest` says, by `local` on q, k and v in the order of `Tiles`; queries behind the video see all."""
    near = mask.nearest
    tokens, stop, behind = near.tokens, near.stop, k.shape[2] > near.stop
    rest = replace(mask, nearest=None)
    if rest.keys is not None:
        keys = jnp.concatenate([rest.keys[..., :tokens], rest.keys[..., stop:]], 3)
        rest = replace(rest, keys=keys if behind else None)
    rest = rest if rest.kind else None

    def of_video(x):
        video = near.in_columns(x[:, :, :tokens])
        return jnp.concatenate([video, x[:, :, stop:]], 2) if x.shape[2] > stop else video

    k, v = of_video(k), of_video(v)
    out = near.in_frames(local(near.in_columns(q[:, :, :tokens]), k, v, mask=rest, tiles=near.tiles, **how))
    if q.shape[2] == tokens:
        return out
    out = jnp.pad(out, ((0, 0), (0, 0), (0, min(q.shape[2], stop) - tokens), (0, 0)))
    if q.shape[2] <= stop:
        return out
    return jnp.concatenate([out, local(q[:, :, stop:], k, v, mask=rest, **how)], 2)
