"""Bounds of each head's keys and values, by which the attention kernel chooses its softmax mode (see `softmax_modes`).

They are a mean and a few maxima. Where keys are sharded, each chip reduces its own, and collectives of a few kilobytes combine
the results: the keys are never gathered for this.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from ..pallas import LANES, SUBLANES, added_up, by_token, call_kernel, cost, parts_of
from .softmax_modes import SMALLEST


LARGEST = 126.0  # largest exponent of a sum
BLOCK_ROWS = 512
TILE_ROWS = 256  # in registers, of one head or of one product
MOST_COLUMNS = 1280  # of one product
LEAST_ROWS = 1024  # with fewer rows XLA is no slower
# Keys of smaller heads come from a linear layer, as rows. Models with heads of 88 and 96 rotate them by XLA's code, which would have
# to write these rows first: HunyuanDiT takes 4 % longer on v6e-8, Allegro 0.5 % on v6e-1.
LARGEST_SMALL = 80


class KeyBounds(NamedTuple):
    """Bounds of the keys that some query sees, per key head.

    Attributes:
        reach: max |k|; larger where sums of values times exponentials of 2^SMALLEST could overflow float32.
        centre: their mean c, as rows in the keys' dtype that sum to it: one bfloat16 row would be off by as much as keys differ.
        radius: max |k - c|.
    """

    reach: Float[Array, "B K"]
    centre: Float[Array, "B K 8 D"]
    radius: Float[Array, "B K"]


def key_bounds(
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S E"],
    seen: Bool[Array, "B|1 K|1 S 1"] | Int[Array, ""] | None = None,
    axis: str | None = None,
    chips: int = 1,
    interpret=None,
    beside: tuple | None = None,
    meanwhile: Callable = lambda mean, maxima: (mean, maxima),
    count: Int[Array, ""] | int | None = None,
) -> KeyBounds:
    """The bounds of each head's keys and values, the same on all chips.

    Args:
        seen: which keys some query sees, or how many of the first; None: all. Other keys may hold anything, even NaN.
        count: how many keys of all chips some query sees, if `seen` is a number; None: `seen`, on one chip.
        axis: the mesh axis along which `chips` chips hold different keys of the same heads.
        interpret: of the kernel that computes norms; None: XLA does.
        beside: (keys, values, which are seen) of the same heads, replicated on every chip.
        meanwhile: called with (mean over all chips, this chip's maxima) before maxima are reduced over chips; returns both.
    """
    highest = functools.partial(lax.pmax, axis_name=axis) if axis else lambda x: x
    total = functools.partial(lax.psum, axis_name=axis) if axis else lambda x: x
    if count is None and (seen is None or seen.ndim == 0):
        count = k.shape[2] * chips if seen is None else seen
    centre = _mean_key(k, seen, total, count, beside, alone=axis is None)
    point = centre.astype(jnp.float32).sum(2)
    centre, maxima = meanwhile(centre, _measured(k, v, point, seen, interpret))
    reach, radius, largest = map(highest, maxima)
    tokens = k.shape[2] * chips
    if beside is not None:
        tokens += beside[0].shape[2]
        others = _measured(*beside[:2], point, beside[2], None)
        reach, radius, largest = (jnp.maximum(x, y) for x, y in zip((reach, radius, largest), others))
    room = LARGEST - jnp.log2(tokens * jnp.maximum(largest, 1.0))
    reach = jnp.where(room > 0, reach * jnp.maximum(SMALLEST / room, 1.0), jnp.inf)
    return KeyBounds(reach, centre, radius)


def _mean_key(k, seen, total, count, beside, alone: bool) -> Float[Array, "B K 8 D"]:
    """`KeyBounds.centre`. `total`: the sum over chips; `alone`: there is one. `count`: of all chips' keys; None: `seen` says which."""
    batch, heads, tokens, dim = k.shape
    rows = by_token(k)
    if count is None:
        count, rows = total(seen.sum(2)), by_token(jnp.where(seen, k, 0))
    elif seen is not None:
        rows = jnp.where(jnp.arange(tokens)[:, None] < seen, rows, 0)
    if (
        alone and dim <= LARGEST_SMALL
    ):  # a product: a sum the compiler takes of [B, S, K, D], which it transposes in memory
        exact = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
        sums = jnp.einsum("s,bsc->bc", jnp.ones(tokens, k.dtype), rows, **exact)
    else:
        sums = rows.astype(jnp.float32).sum(1)
    sums, count = total(sums.reshape(batch, heads, dim)), jnp.maximum(count, 1)
    if beside is not None:
        others, _, seen = beside
        wide = others.astype(jnp.float32)
        sums = sums + (wide if seen is None else jnp.where(seen, wide, 0.0)).sum(2)
        count = count + (others.shape[2] if seen is None else seen.sum(2))
    rows = [*parts_of(sums / count, k.dtype, 1 if k.dtype == jnp.float32 else 3)]
    rows += [jnp.zeros_like(rows[0])] * (SUBLANES - len(rows))
    return jnp.stack(rows, 2)


def _measured(k, v, point, seen, interpret):
    """max |k|, max |k - point|, max |v|, per head."""
    in_rows = by_kernel(k, seen, interpret)
    for_kernel, counted = seen, seen is not None and seen.ndim == 0
    if counted:
        seen = jnp.arange(k.shape[2])[:, None] < seen
    elif seen is not None:
        for_kernel = seen[:, 0, :, 0]

    def among_seen(x):
        return x if seen is None else jnp.where(seen, x, 0.0)

    def longest(x):
        return jnp.sqrt((x * x).sum(-1).max(-1))

    if in_rows and k.shape == v.shape and k.shape[3] < LANES:
        return key_norms(by_token(k), point, interpret, for_kernel, by_token(v))
    if in_rows:
        reach, radius = key_norms(by_token(k), point, interpret, for_kernel)
    else:
        wide = among_seen(k.astype(jnp.float32))
        reach, radius = longest(wide), longest(among_seen(wide - point[:, :, None]))
    # Columns first: otherwise heads that do not fill whole registers are transposed in memory.
    largest = by_token(jnp.abs(among_seen(v))).max(1).reshape(*v.shape[:2], -1).max(2)
    return reach, radius, largest.astype(jnp.float32)


def by_kernel(k, seen, interpret) -> bool:
    """Whether `key_bounds` takes norms by a kernel, which reads all heads of a token side by side."""
    alike = seen is None or seen.ndim == 0 or seen.shape[1] == 1
    many = interpret is not None and (interpret or k.shape[2] >= LEAST_ROWS)
    return alike and many and width_of(*k.shape[1::2]) is not None


def key_norms(
    k: Float[Array, "B S K*D"],
    centre: Float[Array, "B K D"],
    interpret,
    seen: Int[Array, ""] | Bool[Array, "B|1 S"] | None = None,
    v: Float[Array, "B S K*D"] | None = None,
) -> tuple[Float[Array, "B K"], ...]:
    """max |k|, max |k - centre| and, given v, max |v|, per head in float32 and in one pass; `width_of` must not be None.

    XLA would widen all keys, transpose them in memory to reduce per head, and read them twice. The matrix unit sums squares of
    small heads. `seen`: which keys count, or how many of the first; None: all. Other keys may hold anything.
    """
    batch, tokens, columns = k.shape
    heads, dim = centre.shape[1:]
    width = width_of(heads, dim)
    small, parts = width != dim, 2 if k.dtype == jnp.bfloat16 else 3
    lanes = LANES if small else width

    def kernel(r):
        @pl.when(pl.program_id(1) == 0)
        def _():
            for name in outputs:
                getattr(r, name)[...] = jnp.zeros_like(getattr(r, name))

        first = pl.program_id(1) * BLOCK_ROWS
        last = r.own[0] if hasattr(r, "own") else tokens

        @pl.loop(0, BLOCK_ROWS // TILE_ROWS)
        def _(n):
            rows = pl.ds(pl.multiple_of(n * TILE_ROWS, TILE_ROWS), TILE_ROWS)
            there = first + n * TILE_ROWS + lax.broadcasted_iota(jnp.int32, (TILE_ROWS, 1), 0) < last
            there = there & (r.seen[rows, :] != 0) if hasattr(r, "seen") else there
            for place in range(columns // width):
                of_heads = slice(place * width, (place + 1) * width)
                keys = r.k[rows, of_heads].astype(jnp.float32)
                for row, x in enumerate((keys, keys - r.centre[:, of_heads])):
                    squares = added_up(x * x, r.ones[...], parts) if small else (x * x).sum(-1, keepdims=True)
                    most = jnp.where(there, squares, 0.0).reshape(-1, SUBLANES, squares.shape[1]).max(0)
                    own = slice(place * lanes, (place + 1) * lanes)
                    r.o[row, :, own] = jnp.maximum(r.o[row, :, own], most)  # down the sublanes after the kernel
                if v is not None:
                    values = jnp.where(there, jnp.abs(r.v[rows, of_heads].astype(jnp.float32)), 0.0)
                    most = values.reshape(-1, SUBLANES, width).max(0)
                    r.m[:, of_heads] = jnp.maximum(r.m[:, of_heads], most)

    operands = {
        "k": (k, pl.BlockSpec((None, BLOCK_ROWS, columns), lambda b, t: (b, t, 0))),
        "centre": (centre.reshape(batch, 1, columns), pl.BlockSpec((None, 1, columns), lambda b, t: (b, 0, 0))),
    }
    if v is not None:
        operands["v"] = v, operands["k"][1]
    if small:
        ones = jnp.arange(width)[:, None] // dim == jnp.arange(LANES)
        operands["ones"] = ones.astype(jnp.bfloat16), pl.BlockSpec((width, LANES), lambda b, t: (0, 0))
    if seen is not None and seen.ndim == 0:
        operands["own"] = seen.reshape(1).astype(jnp.int32), pl.BlockSpec(memory_space=pltpu.SMEM)
    elif seen is not None:
        of_rows = pl.BlockSpec((None, BLOCK_ROWS, 1), lambda b, t: (b if seen.shape[0] > 1 else 0, t, 0))
        operands["seen"] = seen[..., None].astype(jnp.int32), of_rows
    squares = jax.ShapeDtypeStruct((batch, 2, SUBLANES, columns // width * lanes), jnp.float32)
    outputs = {"o": (squares, pl.BlockSpec((None, 2, *squares.shape[2:]), lambda b, t: (b, 0, 0, 0)))}
    if v is not None:
        largest = jax.ShapeDtypeStruct((batch, SUBLANES, columns), jnp.float32)
        outputs["m"] = largest, pl.BlockSpec((None, *largest.shape[1:]), lambda b, t: (b, 0, 0))
    how = {"parallel": 1, "work": cost(k, *[] if v is None else [v], flops=6 * k.size), "interpret": interpret}
    grid = batch, pl.cdiv(tokens, BLOCK_ROWS)
    found = call_kernel(kernel, "key_norms_kernel", grid, operands, outputs, **how)
    squares = found["o"].max(2).reshape(batch, 2, -1, lanes)[..., : width // dim]
    reach, radius = jnp.moveaxis(jnp.sqrt(squares), 1, 0).reshape(2, batch, heads)
    return (reach, radius) if v is None else (reach, radius, found["m"].max(1).reshape(batch, heads, dim).max(2))


def width_of(heads: int, dim: int) -> int | None:
    """Columns that the kernel sums at once: whole heads and whole registers, or all heads; None: it does not support these heads."""
    width = math.lcm(dim, LANES)
    width = heads * dim if heads * dim % width and heads <= LANES and dim <= LARGEST_SMALL else width
    return width if heads * dim % width == 0 and width <= MOST_COLUMNS else None
