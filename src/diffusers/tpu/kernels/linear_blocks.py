"""Blocks of a linear layer's kernel, chosen by its estimated time on a chip of a generation."""

import math
from typing import NamedTuple

from ..chips.figures import chip_of
from .pallas import LANES, SUBLANES, round_up, vmem_room
from .rows import LEAST_ROWS


TILE_ROWS = 256  # of x against one block of w, or up to half as many more that divide them evenly: straight-line code
MOST_TILES = 6  # in one block
MOST_FILL = 1.25  # times a layer's rows and columns: of a block of 1,024 with 512 rows half is wasted
MOST_SLOWER = 1.08  # than blocks that wait for HBM: XLA, which keeps activations in VMEM, waits less
MOST_STEPPING = 0.1  # time of a grid's steps to that of the units
MUCH_WORK = 9_300_000  # columns x depth of one tile, straight-line code: compiles in some 3 s on two cores
MOST_WORK = 18_000_000  # the same, if a layer takes a tenth more time with less: 6 s
DEEP = 13_824  # beyond it the compiler keeps a copy of a tile of x: v6e, 7.5 MiB at 15,360, none at 12,288
SHORT = 2e-5  # seconds; XLA may compile a shorter layer for a minute, in one loop with what precedes it (SD 1.5)


class Blocks(NamedTuple):
    """`rows` of x and `columns` of the result (rows of w) in one grid step, `tile` rows at a time."""

    rows: int
    columns: int
    tile: int = TILE_ROWS


def choose(
    rows: int,
    columns: int,
    depth: int,
    generation: str | None = None,
    residual=False,
    patient=False,
    narrow=False,
    products: int = 1,
) -> Blocks | None:
    """The fastest blocks for bfloat16 operands, or `narrow` ones of 8 bits, and of these those that read HBM least. None if units
    would wait for HBM, or compute more than `MOST_FILL`, in a layer of many rows that is neither `SHORT` nor `patient`.

    VMEM: two buffers of x [rows, depth], of w [columns, depth] of each of the `products`, of the result and a residual [rows,
    columns]; and what the compiler spills: a tile of each product in float32, twice, and a tile of x if matrix units have 128 rows
    (v5e) or rows are `DEEP`.
    """
    chip, found, results = chip_of(generation), [], 2 if residual else 1
    depth, size, flops = round_up(depth, LANES), 1 if narrow else 2, chip.flops * (2 if narrow else 1) / products
    useful = 2 * rows * columns * depth / flops
    patient = patient or narrow or rows < LEAST_ROWS or useful < SHORT or columns < LANES
    # The kernel would take the layer without its residual, which would then be added in a separate pass.
    patient = patient or (residual and choose(rows, columns, depth, generation) is not None)
    tiles = {tile: -(-rows // tile) for tile in _tiles(rows, 4 * SUBLANES // size)}
    heights = [(n * tile, tile) for tile, whole in tiles.items() for n in (whole, 4, 3, 2, 1) if n <= MOST_TILES]
    for count in range(1, max(columns // LANES, 1) + 1):
        width = round_up(-(-columns // count), LANES)
        for height, tile in heights:
            vmem = 2 * size * (height + products * width) * depth + 4 * results * height * width
            vmem += 8 * tile * width * products
            vmem += size * tile * depth if chip.matrix_side < 256 or depth > DEEP else 0
            vmem += 8 * LANES * height if narrow else 0  # scales of rows, in whole lanes
            work = width * depth * size * products * tile // (2 * TILE_ROWS)
            if work > MOST_WORK or vmem > vmem_room(generation):
                continue
            across, down = -(-columns // width), -(-rows // height)
            # If all rows are one block, x is read once.
            read = (across if down > 1 else 1) * rows * depth + products * columns * depth
            moved = size * read + 2 * results * rows * columns
            compute, stepping = 2 * down * height * across * width * depth / flops, across * down * 200 / chip.clock
            wait = moved / chip.hbm_bandwidth
            in_vain = compute > MOST_FILL * useful or stepping > MOST_STEPPING * compute
            waits = math.inf if in_vain else wait / (compute + stepping)
            # Columns occupy whole units, which fill and drain for each tile: some 250 cycles in the schedules of 4 to 12 units.
            taken = compute * round_up(width, chip.matrix_side) / width
            taken += down * height // tile * TILE_ROWS * across / chip.clock
            # More than MUCH_WORK must make the layer a tenth quicker.
            seconds = max(taken + stepping, wait) * (1 if work <= MUCH_WORK else 1.1)
            found.append((seconds, moved, compute, work, waits, Blocks(height, width, tile)))
    # At most this much work a tile, if HBM takes less than this share of the units' time.
    for most, share in ((MOST_WORK, 0.8), (MUCH_WORK, math.inf if patient else 0)):
        best = min((one for one in found if one[3] <= most and one[4] <= share), key=lambda one: one[:3], default=None)
        if best is not None and (share > 1 or best[0] <= MOST_SLOWER * min(found)[0]):
            return best[-1]
    return None


def _tiles(rows: int, of_register: int) -> tuple[int, ...]:
    """Rows of a tile: those of equal tiles, of at least `TILE_ROWS`, that fill whole registers; if rows are many also `TILE_ROWS`, or
    that alone if others leave no fewer rows empty."""
    even = round_up(-(-rows // max(rows // TILE_ROWS, 1)), of_register)
    even = even if even <= TILE_ROWS * 3 // 2 else TILE_ROWS
    if rows <= MOST_TILES * TILE_ROWS:
        return (even,)
    return (TILE_ROWS, even) if round_up(rows, even) < 0.98 * round_up(rows, TILE_ROWS) else (TILE_ROWS,)
