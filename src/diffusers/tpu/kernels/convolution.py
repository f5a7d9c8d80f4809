"""A convolution of maps for one TPU chip: y[h, w] = sum over taps (i, j) of x[h + i - p, w + j - p] w[i, j] + b, p zeros around.

The compiler's own takes 8 to 28 s of a core each for some 40 of SDXL's UNet, at 53 to 72 % of the units' peak (v5e, libtpu 0.0.42.1).

Grid: (blocks of features, batch, blocks of rows), rows innermost: a block of w with all taps and channels stays in VMEM while
the map passes. A block of x has p rows more on both sides (`pl.Element`). A piece of straight code is whole rows of the map:
for each tap along the width a sum of products [positions, C] [C, O] over taps along the height, in float32, is moved by whole
positions and added where the map has such a column. So nothing is moved before the products.

VMEM: two buffers of x [rows + 2p, W, C], w [k, k, C, features], the result; and per tap along the width a spilled piece, twice.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from ..chips.figures import chip_of
from .linear import MARGIN
from .pallas import LANES, call_kernel, cost, product, round_up, with_gradients_of
from .settings import Settings


SUBLANES = 16  # of bfloat16: the columns of a map are whole registers of them
PIECE = 256  # positions of one piece of straight code, where the map's rows are no longer
MOST_POSITIONS = 2048  # of one step
MOST_WORK = 3_000_000  # taps x channels x features of a block: 3 s of a core to compile; twice as much is no faster
LEAST_CHANNELS = 64
LEAST_POSITIONS = 512  # of all maps; for some of 16 x 16 the compiler takes up to a minute each, of less it is fast and leaves weights as they lie


class Blocks(NamedTuple):
    """`rows` of the map and `features` of the result in one grid step; `piece` rows in one piece of straight code."""

    rows: int
    features: int
    piece: int


def choose(height: int, width: int, channels: int, features: int, taps: int, generation=None) -> Blocks | None:
    """Blocks that fit VMEM and compile in seconds: with least work for what fills up matrix units, then the largest; None if none do."""
    width, found, chip = round_up(width, SUBLANES), [], chip_of(generation)
    piece = max(1, min(height, PIECE // width))
    most_rows = min(round_up(height, piece), max(1, MOST_POSITIONS // (piece * width)) * piece)
    for count in range(1, -(-features // LANES) + 1):
        columns = features if count == 1 else round_up(-(-features // count), LANES)
        if columns > chip.matrix_side and taps**2 * channels * columns > MOST_WORK:
            continue
        for rows in range(most_rows, 0, -piece):
            operands = (rows + taps - 1) * width * channels + taps**2 * channels * columns + rows * width * columns
            if 4 * operands + 8 * taps * piece * width * columns <= chip.vmem_bytes - MARGIN:
                found.append((count * round_up(columns, chip.matrix_side), count, Blocks(rows, columns, piece)))
                break
    return min(found, key=lambda x: x[:2])[2] if found else None


@functools.partial(jax.jit, static_argnames=("blocks", "generation", "interpret"), inline=True)
def tpu_convolution(
    x: Float[Array, "B H W C"],
    w: Float[Array, "k k C O"],
    b: Float[Array, " O"] | None,
    *,
    blocks: Blocks,
    generation: str | None = None,
    interpret: bool = False,
) -> Float[Array, "B H W O"]:
    """The convolution with an odd number k of taps and k // 2 zeros around, summed in float32 and rounded once to x's dtype."""
    batch, height, width, channels = x.shape
    taps, features = w.shape[0], w.shape[-1]
    edge, wide, tall = taps // 2, round_up(width, SUBLANES), round_up(height, blocks.rows)
    x = jnp.pad(x, [(0, 0), (edge, edge + tall - height), (0, wide - width), (0, 0)])
    b = jnp.zeros((1, features), jnp.float32) if b is None else b.astype(jnp.float32)[None]
    positions = blocks.piece * wide

    def piece(r, number):
        first = number * blocks.piece
        column = lax.broadcasted_iota(jnp.int32, (positions, 1), 0) % wide
        rows = [r.x[pl.ds(first + i, blocks.piece)].reshape(positions, channels) for i in range(taps)]
        total = r.b[...]
        for j in range(taps):
            y = sum(product(rows[i], r.w[i, j]) for i in range(taps))
            if j != edge:
                y = pltpu.roll(y, (edge - j) % positions, 0)
                y = jnp.where((column >= edge - j) & (column < width + edge - j), y, 0)
            total = total + y
        r.o[pl.ds(first, blocks.piece)] = total.astype(x.dtype).reshape(blocks.piece, wide, -1)

    with_edges = None, pl.Element(blocks.rows + 2 * edge), pl.Element(wide), pl.Element(channels)
    out_spec = pl.BlockSpec((None, blocks.rows, wide, blocks.features), lambda n, i, m: (i, m, 0, n))
    out = call_kernel(
        lambda r: pl.loop(0, blocks.rows // blocks.piece)(functools.partial(piece, r)),
        "linear_kernel_of_windows",
        (pl.cdiv(features, blocks.features), batch, tall // blocks.rows),
        {
            "x": (x, pl.BlockSpec(with_edges, lambda n, i, m: (i, m * blocks.rows, 0, 0))),
            "w": (w, pl.BlockSpec((taps, taps, channels, blocks.features), lambda n, i, m: (0, 0, 0, n))),
            "b": (b, pl.BlockSpec((1, blocks.features), lambda n, i, m: (0, n))),
        },
        {"o": (jax.ShapeDtypeStruct((batch, tall, wide, features), x.dtype), out_spec)},
        parallel=1,
        work=cost(x, w, flops=2 * batch * height * width * w.size),
        interpret=interpret,
        vmem_bytes=chip_of(generation).vmem_bytes - MARGIN,
    )["o"]
    return out[:, :height, :width]


def convolution(
    x: Float[Array, "B H W C"], w: Float[Array, "k k C O"], b: Float[Array, " O"] | None, settings: Settings
) -> Float[Array, "B H W O"] | None:
    """As `tpu_convolution`, with its blocks; None for a call that the kernel does not take.

    It takes bfloat16, windows that are odd squares, at least `LEAST_CHANNELS` and whole ones, one chip, and `LEAST_POSITIONS`.
    """
    batch, height, width, channels = x.shape
    taps, across, _, features = w.shape
    interpret, mesh = settings.interpreted, settings.mesh
    taken = settings.own_layers and x.dtype == w.dtype == jnp.bfloat16 and taps == across and taps % 2
    taken = taken and not channels % LEAST_CHANNELS and not features % LEAST_CHANNELS
    taken = taken and (mesh is None or mesh.size == 1) and (interpret or batch * height * width >= LEAST_POSITIONS)
    blocks = choose(height, width, channels, features, taps, settings.generation) if taken else None
    if blocks is None:
        return None
    how = {"blocks": blocks, "generation": settings.generation, "interpret": interpret}
    run = functools.partial(tpu_convolution, **how)
    return (with_gradients_of(_plain, run) if settings.differentiable else run)(x, w, b)


def _plain(x, w, b):
    out = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return out if b is None else (out.astype(jnp.float32) + b).astype(x.dtype)
