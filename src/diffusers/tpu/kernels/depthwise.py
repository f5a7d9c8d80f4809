"""Depthwise convolution: 3 x 3 taps of a map padded by one zero run as a kernel for one TPU chip, others as a sum of shifted maps.

The compiler's sum of nine maps shifts six of them before they are multiplied, as positions lie along sublanes, and pads the map in
memory first. The kernel reads each row once. It sums the taps of a column over three rows without shifts, then shifts two of the
three sums by a position.
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
ROWS_AT_ONCE = 3  # unrolled: one by one takes a quarter longer
BLOCK_BYTES = 2 << 20  # of a block, whole maps of some channels: x and the result have two buffers each
MOST_BYTES = 8 << 20  # of a map of one register's lanes, at most


def by_channel(
    x: Float[Array, "B *sizes C"],
    w: Float[Array, "*taps C"],
    b: Float[Array, " C"] | None,
    widths: list[tuple[int, int]],
    settings: Settings,
) -> Float[Array, "B *sizes C"]:
    """Depthwise convolution of x, padded by `widths` zeros, summed in float32 and rounded once.

    The kernel supports bfloat16, at least 128 channels, maps that fit VMEM, and one chip.
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
    filled = round_up(width, ROWS)  # positions behind a row may hold anything
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
    large = 2 * height * filled * lanes > BLOCK_BYTES  # else no VMEM is requested, which other operations would lack
    room = vmem_room(generation) if large else None
    how = {"parallel": 2, "work": work, "interpret": interpret, "vmem_bytes": room}
    outputs, grid = {"o": (jax.ShapeDtypeStruct(x.shape, x.dtype), block)}, (batch, pl.cdiv(channels, lanes))
    return call_kernel(run, "depthwise_kernel", grid, operands, outputs, **how)["o"]
