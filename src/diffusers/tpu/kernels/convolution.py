"""Convolution of maps and videos for one TPU chip: y[l, t, p] = sum over taps (i, j, k) of x[l + i, t + j, p + k - e] w[i, j, k] + b.

XLA takes 8 to 28 s of a core to compile each of some 40 convolutions of SDXL's UNet, which reach 53 to 72 % of the units' peak
(v5e, libtpu 0.0.42.1). For a video it writes a float32 result per tap along the width, and then sums them.

A line is what lies along sublanes: a row of a map, a column of a video. The grid is (blocks of features, batch, blocks of lines,
blocks of frames), frames innermost: a block of w with all taps and channels stays in VMEM while the maps pass. A block of x
includes the lines and frames beside it that its taps reach (`pl.Element`). Zeros around x are computed, not read. A piece of
straight-line code is whole lines of one frame: the inputs of all taps of lines and frames are concatenated [positions, taps * C] and
multiplied with [taps along a line * O, taps * C] in float32. The features of each tap along the line are then shifted by whole positions and added, where the line has such
a position. So nothing is shifted before the product, and all taps together fill the matrix units.

A map that is to be doubled in lines and positions is read undoubled. Two lines of the result are two products of the same lines in
another order, and each product's taps are added up for two positions: half the work of the doubled map.

w is read in the layout that the TPU gives torch's weights [O, C, ...], with O and C minor. If a tap is whole registers, taps
already lie side by side; otherwise they are copied so once, in VMEM.

VMEM: two buffers of x [lines + taps - 1, frames + taps - 1, P, C], w [taps, features, C], the result and a residual; a spilled piece, twice.
"""

import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from ..chips.figures import chip_of
from .pallas import LANES, ROWS, call_kernel, cost, layer_of_stack, product, round_up, vmem_room
from .settings import Settings


PIECE = 512  # most positions of one piece of straight-line code, unless a line is longer
LEAST_PIECE = 224  # positions whose product takes as long as loading weights into a matrix unit
MOST_POSITIONS = 8192  # of one grid step
MOST_WORK = 4_000_000  # taps x channels x features of a block: 4 s of a core to compile; twice as much runs no faster
LEAST_CHANNELS = 64
# Of a map of few channels that is padded: XLA takes half a minute for a UNet's first layer and the norm after it.
FILLED_BYTES = 32 << 20


Zeros = tuple[tuple[int, int], tuple[int, int]]  # lines before and after those of x, and frames


class Blocks(NamedTuple):
    """`lines`, `frames` and `features` of the result in a grid step; `piece` lines of a frame in a piece of straight-line code."""

    lines: int
    frames: int
    features: int
    piece: int


@functools.lru_cache(1024)
def choose(
    sizes: tuple[int, int, int],
    channels: int,
    features: int,
    taps: tuple[int, int, int],
    generation: str | None = None,
    doubled: bool = False,
    with_residual: bool = False,
) -> Blocks | None:
    """Blocks that fit VMEM and compile in seconds, with the least work of matrix units, then the least to fetch; None if none do.

    Args:
        sizes: lines and frames of the result, positions of x; taps: along each of them.
        doubled: the result has each line and position twice; `sizes` counts them once.
    """
    lines, frames, positions = sizes
    positions, deep, chip, found = round_up(positions, ROWS), round_up(channels, LANES), chip_of(generation), []
    for count in range(1, -(-features // LANES) + 1):
        columns = features if count == 1 else round_up(-(-features // count), LANES)
        wide = taps[2] * _lanes(columns, taps[2], chip.matrix_side)
        if columns > LANES and math.prod(taps) * channels * columns > MOST_WORK:
            continue
        for piece in range(1, max(1, min(lines, PIECE // positions)) + 1):
            fixed = 4 * math.prod(taps) * round_up(columns, ROWS) * deep + 8 * piece * positions * wide
            if not _as_it_lies(columns, channels):
                fixed += 2 * round_up(wide, ROWS) * round_up(math.prod(taps[:2]) * channels, LANES)
            if doubled:
                fixed += 8 * piece * positions * round_up(columns, LANES)
            made = (8 if doubled else 2) * (2 if with_residual else 1)
            slower = max(piece * positions, LEAST_PIECE) / (piece * positions)
            for t in range(1, frames + 1):
                for l in range(piece, round_up(lines, piece) + 1, piece):  # noqa: E741
                    fetched = (l + taps[0] - 1) * (t + taps[1] - 1) * deep
                    vmem = fixed + 4 * positions * (fetched + made * l * t * columns)
                    if (l, t) != (piece, 1) and l * t * positions > MOST_POSITIONS or vmem > vmem_room(generation):
                        break
                    filled = round_up(lines, l) * round_up(frames, t)
                    work = count * round_up(wide, chip.matrix_side) * filled * slower
                    found.append((work, count * fetched * filled / (l * t), Blocks(l, t, columns, piece)))
    return min(found, key=lambda x: x[:2])[2] if found else None


def _as_it_lies(features: int, channels: int) -> bool:
    """Whether taps of [features, channels] are whole registers, which lie side by side without a copy."""
    return not features % ROWS and not channels % LANES


def _lanes(features: int, taps: int, side: int) -> int:
    """A product's columns for one tap along a line: whole registers, unless all taps fit into one or packed ones into fewer units."""
    whole = round_up(features, LANES)
    packs = taps * features <= LANES or round_up(taps * features, side) < round_up(taps * whole, side)
    return features if packs else whole


@functools.partial(
    jax.jit,
    static_argnames=("blocks", "edge", "zeros", "repeated", "doubled", "wide", "generation", "interpret"),
    inline=True,
)
def tpu_convolution(
    x: Float[Array, "B L T P C"],
    w: Float[Array, "l t p O C"] | Float[Array, "N l t p O C"],
    b: Float[Array, " O"] | None,
    residual: Float[Array, "B M U Q O"] | None = None,
    *,
    layer: Int[Array, ""] | None = None,
    blocks: Blocks,
    edge: int,
    zeros: Zeros = ((0, 0), (0, 0)),
    repeated: bool = False,
    doubled: bool = False,
    wide: bool = False,
    generation: str | None = None,
    interpret: bool = False,
) -> Float[Array, "B M U Q O"]:
    """The convolution with `edge` zeros at both ends of each line, and `zeros` around lines and frames, summed in float32.

    `repeated`: a line's own end replaces its one zero. The sum is rounded once to x's dtype, or stays float32 if `wide`; then the
    residual is added, and the result rounded.
    `doubled`: of x with each line and position twice, by three taps along both and an edge of one: M = 2 (L - 2), Q = 2 P, where
    L counts lines of zeros too.
    `layer`: index of the layer if w is a stack; slicing the stack would copy.
    """
    batch, *_, positions, channels = x.shape
    *taps, features, _ = w.shape[-5:]
    dtype = jnp.float32 if wide else x.dtype
    (lines, frames), kept = _of_result(x, w, zeros), positions + 2 * edge - taps[2] + 1
    line = round_up(positions, 8 if blocks.piece == 1 else ROWS)
    columns = _lanes(blocks.features, taps[2], chip_of(generation).matrix_side)
    times = 2 if doubled else 1
    kept, longest = times * kept, min(round_up(times * kept, ROWS), times * line)
    x = jnp.pad(x, [(0, 0)] * 3 + [(0, line - positions), (0, 0)])
    sizes, beyond = x.shape[1:3], [-lines % blocks.lines, -frames % blocks.frames]  # of the result, in the last block
    read = [min(step + count - 1, size) for step, count, size in zip(blocks, taps, sizes)]
    b = jnp.zeros((1, features), jnp.float32) if b is None else b.astype(jnp.float32)[None]
    size, depth = blocks.piece * line, math.prod(taps[:2]) * channels
    reads_stored = _as_it_lies(blocks.features, channels)

    # Two positions are interleaved by writing every other row of float32, one register's lanes at a time.
    ends = [*range(0, blocks.features, LANES if doubled else blocks.features), blocks.features]
    parts = [*map(slice, ends, ends[1:])]

    def taps_side_by_side(r):
        """[taps along a line * columns, taps of lines and frames * C]"""
        of_lines = [[r.w[i, j, k] for i in range(taps[0]) for j in range(taps[1])] for k in range(taps[2])]
        fill = [jnp.zeros((columns - blocks.features, depth), w.dtype)] if columns > blocks.features else []
        return jnp.concatenate([part for side in of_lines for part in (jnp.concatenate(side, 1), *fill)], 0)

    def start(axis: int, block):
        """The first of the lines (axis 0) or frames (1) of x that a block reads: those that it reaches, without zeros."""
        return jnp.clip(block * blocks[axis] - zeros[axis][0], 0, sizes[axis] - read[axis])

    def seen(r, block, at):
        """A line of a frame of x, `at` (line, frame) from where the `block` begins; zeros where x has none."""
        places, there = [], True
        for axis, (own, size) in enumerate(zip(at, sizes)):
            if any(zeros[axis]) or beyond[axis]:
                own = block[axis] * blocks[axis] + own - zeros[axis][0]
                there = there & (own >= 0) & (own < size) if any(zeros[axis]) else there
                own = jnp.clip(own, 0, size - 1) - start(axis, block[axis])
            places.append(own)
        found = r.x[tuple(places)]
        return found if there is True else jnp.where(there, found, 0)

    def run(r):
        block = [pl.program_id(axis) for axis in (2, 3)]
        if not reads_stored:

            @pl.when(sum(pl.program_id(axis) for axis in (1, 2, 3)) == 0)
            def _():
                for i, j, k in itertools.product(*map(range, taps)):
                    rows, at = pl.ds(k * columns, blocks.features), pl.ds((i * taps[1] + j) * channels, channels)
                    r.side_by_side[rows, at] = r.w[i, j, k]

        pl.loop(0, blocks.lines // blocks.piece * blocks.frames)(functools.partial(piece, r, block))

    def reached(tap: int, before: int, twin: int) -> int:
        """The offset at which a tap reads lines or positions; `twin`: of the first or the second of two doubled ones."""
        return (tap - before + twin) // 2 if doubled else tap - before

    def piece(r, block, number):
        frame, first = lax.rem(number, blocks.frames), lax.div(number, blocks.frames) * blocks.piece
        position = lax.rem(lax.broadcasted_iota(jnp.int32, (size, 1), 0), line)
        for twin in range(times):
            of_taps = itertools.product([first + 1 + reached(i, 1, twin) for i in range(taps[0])], range(taps[1]))
            inputs = [
                jnp.concatenate([seen(r, block, (at + n, frame + j)) for n in range(blocks.piece)], 0)
                for at, j in of_taps
            ]
            y = product(jnp.concatenate(inputs, 1), taps_side_by_side(r) if reads_stored else r.side_by_side[...], 1)
            for which, part in enumerate(parts):
                total = added(y, r.b[:, part], part, position, 0)
                if doubled:
                    in_turns = getattr(r, f"in_turns{which}")
                    in_turns[pl.ds(0, size, stride=2)] = total
                    in_turns[pl.ds(1, size, stride=2)] = added(y, r.b[:, part], part, position, 1)
                    total = in_turns[...]
                total = total.astype(dtype).reshape(blocks.piece, times * line, -1)
                for n in range(blocks.piece):
                    place, own = (times * (first + n) + twin, frame, slice(None), part), total[n, :longest]
                    if residual is not None:
                        own = (own.astype(jnp.float32) + r.residual[place].astype(jnp.float32)).astype(dtype)
                    r.o[place] = own

    def added(y, total, part, position, one):
        """`total` plus columns `part` of each tap's features, shifted to the positions that the tap belongs to."""
        for k in range(taps[2]):
            own, ahead = y[:, k * columns + part.start : k * columns + part.stop], reached(k, edge, one)
            of_tap = pltpu.roll(own, -ahead % size, 0) if ahead else own
            if edge and ahead:
                there = (position >= -ahead) & (position < positions - ahead)
                of_tap = jnp.where(there, of_tap, own if repeated else 0)
            total = total + of_tap
        return total

    steps = pl.cdiv(features, blocks.features), batch, pl.cdiv(lines, blocks.lines), pl.cdiv(frames, blocks.frames)
    one_layer = jax.ShapeDtypeStruct(w.shape[-5:], w.dtype)
    flops = 2 * batch * times * lines * frames * positions * math.prod(taps) * channels * features
    scratch = {} if reads_stored else {"side_by_side": pltpu.VMEM((taps[2] * columns, depth), w.dtype)}
    for n, part in enumerate(parts if doubled else ()):
        scratch[f"in_turns{n}"] = pltpu.VMEM((2 * size, part.stop - part.start), jnp.float32)
    scalars, of_weights = layer_of_stack(layer, (*taps, blocks.features, channels), lambda n: (0, 0, 0, n, 0))
    window = map(pl.Element, (*read, line, channels))
    of_x = pl.BlockSpec((None, *window), lambda n, i, l, t, *_: (i, start(0, l), start(1, t), 0, 0))
    out = jax.ShapeDtypeStruct(
        (batch, steps[2] * times * blocks.lines, steps[3] * blocks.frames, longest, features), dtype
    )
    out_block = pl.BlockSpec(
        (None, times * blocks.lines, blocks.frames, longest, blocks.features), lambda n, i, l, t, *_: (i, l, t, 0, n)
    )
    added_up = {}
    if residual is not None:
        added_up["residual"] = jnp.pad(residual, [(0, 0)] * 3 + [(0, longest - kept), (0, 0)]), out_block
    of_b = pl.BlockSpec((1, blocks.features), lambda n, *_: (0, n))
    out = call_kernel(
        run,
        "linear_kernel_of_windows",
        steps,
        {"x": (x, of_x), "w": (w, of_weights), "b": (b, of_b), **added_up},
        {"o": (out, out_block)},
        parallel=1,
        scalars=scalars,
        scratch=scratch,
        work=cost(x, one_layer, out, *(array for array, _ in added_up.values()), flops=flops),
        interpret=interpret,
        vmem_bytes=vmem_room(generation),
    )["o"]
    return out[:, : times * lines, :frames, :kept]


def _of_result(x, w, zeros: Zeros) -> list[int]:
    """Lines and frames of the result, of a map that is not doubled."""
    return [n + sum(around) - taps + 1 for n, around, taps in zip(x.shape[1:3], zeros, w.shape[-5:-3])]


def convolution(
    x: Float[Array, "B L T P C"],
    w: Float[Array, "l t p O C"],
    b: Float[Array, " O"] | None,
    settings: Settings,
    residual: Float[Array, "B M U Q O"] | None = None,
    *,
    edge: int,
    zeros: Zeros = ((0, 0), (0, 0)),
    repeated: bool = False,
    doubled: bool = False,
    wide: bool = False,
    fill: bool = False,
    layers: tuple[Float[Array, "N l t p O C"], Int[Array, ""]] | None = None,
) -> Float[Array, "B M U Q O"] | None:
    """As `tpu_convolution`, with blocks of `choose`; None for a call that the kernel does not support.

    It supports bfloat16, lines that do not grow, at least `LEAST_CHANNELS` channels, and one chip. `fill`: maps of up to
    `FILLED_BYTES` are padded to so many channels. `layers`: the stack that w is a layer of, and its index.
    """
    if fill and x.shape[-1] < LEAST_CHANNELS and x.size // x.shape[-1] * LANES * x.dtype.itemsize <= FILLED_BYTES:
        x, w = (jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, LEAST_CHANNELS - a.shape[-1])]) for a in (x, w))
        layers = None
    *_, positions, channels = x.shape
    *taps, features, _ = w.shape
    lines, frames = _of_result(x, w, zeros)
    taken = settings.own_layers and settings.chips == 1 and x.dtype == w.dtype == jnp.bfloat16
    taken = taken and channels >= LEAST_CHANNELS and not channels % 32 and (features < LANES or not features % 32)
    taken = taken and 2 * edge < taps[2] <= positions and not (repeated and edge > 1) and min(lines, frames) > 0
    sizes = lines, frames, positions
    of_call = sizes, channels, features, tuple(taps), settings.generation, doubled, residual is not None
    blocks = choose(*of_call) if taken else None
    if blocks is None:
        return None
    how = {"edge": edge, "repeated": repeated, "doubled": doubled, "wide": wide}
    chip = {"generation": settings.generation, "interpret": settings.interpreted}
    run = functools.partial(tpu_convolution, blocks=blocks, **chip, **how)
    if settings.differentiable:
        x = jnp.pad(x, [(0, 0), *zeros, (0, 0), (0, 0)])
        y = _differentiable(run, settings, **how)(x, w, b)
        return y if residual is None else y + residual
    w, layer = (w, None) if layers is None else layers
    return run(x, w, b, residual, layer=layer, zeros=zeros)


def _differentiable(run, settings: Settings, edge: int, repeated: bool, doubled: bool, wide: bool):
    """The kernel `run`, whose gradient by x is also the kernel's, of w with taps reversed and channels swapped."""

    def back(given, gradient):
        plain = functools.partial(_plain, edge=edge, repeated=repeated, doubled=doubled, wide=wide)
        of_x, *others = jax.vjp(plain, *given)[1](gradient)
        w, found = given[1], None
        if not (repeated or doubled or wide):
            lines, frames, positions = (taps - 1 for taps in w.shape[:3])
            own = positions - edge if positions - edge <= edge else 0  # zeros that the kernel adds itself
            beside = positions - edge - own
            zeros = [(0, 0), *((n, n) for n in (lines, frames, beside)), (0, 0)]
            turned = w[::-1, ::-1, ::-1].swapaxes(-1, -2)
            found = convolution(jnp.pad(gradient, zeros), turned, None, settings, edge=own)
        return of_x if found is None else found, *others

    layer = jax.custom_vjp(run)
    layer.defvjp(lambda *given: (run(*given), given), back)
    return layer


def _plain(x, w, b, edge, repeated, doubled, wide):
    x = jnp.repeat(jnp.repeat(x, 2, 1)[:, 1:-1], 2, 3) if doubled else x
    x, w = (x.astype(jnp.float32), w.astype(jnp.float32)) if wide else (x, w)
    x = jnp.pad(x, [(0, 0)] * 3 + [(edge, edge), (0, 0)], mode="edge" if repeated else "constant")
    y = lax.conv_general_dilated(x, w, (1,) * 3, "VALID", dimension_numbers=("NDHWC", "DHWOI", "NDHWC"))
    return (y.astype(jnp.float32) + (0 if b is None else b)).astype(x.dtype)
