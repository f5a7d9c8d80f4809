"""Convolution of each channel alone: 3 x 3 positions of a map with zeros around it by a kernel for one TPU chip, others as a sum of maps.

The compiler's sum of nine maps moves six of them before they are multiplied, as positions lie along sublanes, and has the map filled up
with zeros in memory first. The kernel reads each row once; what taps of one column give is summed over three rows where it is, and
two of these three sums are moved by a position.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from .pallas import LANES, ROWS, call_kernel, cost, round_up, vmem_room, with_gradients_of
from .settings import Settings


TAPS = 3
ROWS_AT_ONCE = 3  # in straight code: one by one takes a quarter longer
BLOCK_BYTES = 2 << 20  # of whole maps of some channels: two buffers each of x and of the result
MOST_BYTES = 8 << 20  # of those of a register's lanes


def by_channel(
    x: Float[Array, "B *sizes C"],
    w: Float[Array, "*taps C"],
    b: Float[Array, " C"] | None,
    widths: list[tuple[int, int]],
    settings: Settings,
) -> Float[Array, "B *sizes C"]:
    """Each channel's own convolution of x with so many zeros around it, summed in float32 and rounded once.

    The kernel takes bfloat16, maps that VMEM holds, and one chip.
    """
    taken = settings.own_layers and settings.chips == 1 and x.dtype == w.dtype == jnp.bfloat16
    if taken and w.shape[:-1] == (TAPS, TAPS) and widths == [(1, 1), (1, 1)]:
        _, height, width, channels = x.shape
        room = 2 * height * round_up(width, ROWS) * LANES <= MOST_BYTES
        if height >= TAPS and channels >= LANES and room:
            b = jnp.zeros(channels, jnp.float32) if b is None else b
            run = functools.partial(_by_kernel, generation=settings.generation, interpret=settings.interpreted)
            return (with_gradients_of(_sum_of_maps, run) if settings.differentiable else run)(x, w, b)
    return _sum_of_maps(x, w, b, widths)


def _sum_of_maps(x, w, b, widths=((1, 1), (1, 1))):
    wide = jnp.promote_types(x.dtype, jnp.float32)
    filled, total = jnp.pad(x, [(0, 0), *widths, (0, 0)]), 0 if b is None else b.astype(wide)
    sizes = [n - taps + 1 for n, taps in zip(filled.shape[1:], w.shape)]
    for tap in np.ndindex(w.shape[:-1]):
        part = filled[(slice(None), *(slice(at, at + size) for at, size in zip(tap, sizes)))]
        total = total + part.astype(wide) * w[tap].astype(wide)
    return total.astype(x.dtype)


def _by_kernel(x, w, b, generation, interpret):
    batch, height, width, channels = x.shape
    filled = round_up(width, ROWS)  # what is behind a row is anything
    tiles = max(1, BLOCK_BYTES // (2 * height * filled * LANES))
    lanes = min(tiles, pl.cdiv(channels, LANES)) * LANES

    def run(r):
        for at in range(0, lanes, LANES):
            channels_of_lanes(r, slice(at, at + LANES))

    def channels_of_lanes(r, part):
        position = lax.broadcasted_iota(jnp.int32, (filled, LANES), 0)
        columns = [[r.w[TAPS * i + k : TAPS * i + k + 1, part] for i in range(TAPS)] for k in range(TAPS)]

        def read(row):
            return r.x[row, :, part].astype(jnp.float32)

        def write(row, *seen):
            rows = [(i, x) for i, x in enumerate(seen) if x is not None]
            left, own, right = (sum(x * taps[i] for i, x in rows) for taps in columns)
            left = jnp.where(position > 0, pltpu.roll(left, 1, 0), 0)
            right = jnp.where(position < width - 1, pltpu.roll(right, filled - 1, 0), 0)
            r.o[row, :, part] = (r.b[:, part] + own + left + right).astype(x.dtype)

        def some(start, count, above, here):
            for row in range(count):
                below = read(start + row + 1)
                write(start + row, above, here, below)
                above, here = here, below
            return above, here

        above, here = some(0, 1, None, read(0))
        times, rest = divmod(height - 2, ROWS_AT_ONCE)
        above, here = lax.fori_loop(
            0, times, lambda n, rows: some(1 + n * ROWS_AT_ONCE, ROWS_AT_ONCE, *rows), (above, here)
        )
        above, here = some(height - 1 - rest, rest, above, here)
        write(height - 1, above, here, None)

    block = pl.BlockSpec((None, height, filled, lanes), lambda n, c: (n, 0, 0, c))
    of_channels = lambda rows: pl.BlockSpec((rows, lanes), lambda n, c: (0, c))  # noqa: E731
    operands = {
        "x": (x, block),
        "w": (w.reshape(TAPS * TAPS, channels).astype(jnp.float32), of_channels(TAPS * TAPS)),
        "b": (b.astype(jnp.float32)[None], of_channels(1)),
    }
    work = cost(x, x, flops=2 * TAPS * TAPS * x.size)
    large = 2 * height * filled * lanes > BLOCK_BYTES  # else it asks for nothing, which others would lack
    room = vmem_room(generation) if large else None
    how = {"parallel": 2, "work": work, "interpret": interpret, "vmem_bytes": room}
    outputs, grid = {"o": (jax.ShapeDtypeStruct(x.shape, x.dtype), block)}, (batch, pl.cdiv(channels, lanes))
    return call_kernel(run, "depthwise_kernel", grid, operands, outputs, **how)["o"]
