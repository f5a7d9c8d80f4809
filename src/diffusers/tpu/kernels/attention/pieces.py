"""Kernels that lay out what chips exchange: `cut` and `join` before attention, `part` and `paste` after it. `join` also sets apart
keys of heads that fill no registers, of one chip.

XLA takes two passes over memory to cut columns into pieces, one per chip to join pieces, and one to transpose tokens to lanes;
each kernel here takes one. After joining, each chip's tokens begin at a whole tile of `LANES`; the remainders of all chips (`rest`)
follow at the end.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from ...chips.devices import QUEUED_BY
from ..pallas import LANES, as_heads, call_kernel, cost, in_steps, round_up


BLOCK_BYTES = 4 << 20  # of one array in VMEM; a kernel has two, or three with the remainders
VMEM_BYTES = 3 * 2 * BLOCK_BYTES + (8 << 20)  # two buffers of each array, and the compiler's own


def takes(x: Float[Array, "B N T D"], chips: int, in_order: bool) -> bool:
    """Whether kernels support heads [B, N, T, D]: half registers of each chip, and tokens that may be reordered or fill whole tiles."""
    _, heads, tokens, dim = x.shape
    whole = heads % chips == 0 and heads // chips * dim % (LANES // 2) == 0
    return whole and tokens >= LANES and not (in_order and tokens % LANES)


def divides(shares: tuple[int, int], chips: int, heads: int, dim: int) -> bool:
    """Whether heads can be sent in two groups: the blocks that the second is cut from, and its tensors side by side, fill registers."""
    columns = heads * dim // (sum(shares) * chips)
    whole = heads % (sum(shares) * chips) == 0
    return whole and shares[1] * columns % LANES == chips * math.gcd(*shares) * columns % LANES == 0


def cut(
    tensors: list[Float[Array, "B T C"]], chips: int, interpret, group: int = 0, shares: tuple[int, ...] = (1,)
) -> Array:
    """Columns of one group in pieces, one per chip; tensors of one shape lie side by side: [W, B, T, N C / W]."""
    batch, tokens, columns = tensors[0].shape
    unit, share, before = columns // (sum(shares) * chips), shares[group], sum(shares[:group])
    rows = _rows_of_block(len(tensors) * chips * share * unit * tensors[0].dtype.itemsize)
    of_block = chips * math.gcd(share, before)  # in units; a group is several whole blocks
    blocks = range(chips * before // of_block, chips * (before + share) // of_block)

    def kernel(r):
        def some(at):
            for chip in range(chips):
                own = [divmod(chip * share + n, of_block) for n in range(share)]  # (block, unit of it)
                found = (
                    getattr(r, f"x{place}_{block}")[at, n * unit : (n + 1) * unit]
                    for place in range(len(tensors))
                    for block, n in own
                )
                r.o[chip, at, :] = jnp.concatenate([*found], 1)

        in_steps(rows, math.gcd(rows, LANES), some)

    def spec(block: int):
        return pl.BlockSpec((None, rows, of_block * unit), lambda b, t: (b, t, block))

    pairs = itertools.product(enumerate(tensors), enumerate(blocks))
    operands = {f"x{place}_{n}": (x, spec(block)) for (place, x), (n, block) in pairs}
    shape, grid = (chips, batch, tokens, len(tensors) * share * unit), (batch, pl.cdiv(tokens, rows))
    out_spec = pl.BlockSpec((chips, None, rows, shape[3]), lambda b, t: (0, b, t, 0))
    name = "exchange_cut" if len(tensors) == 1 else QUEUED_BY
    return _call(kernel, name, grid, operands, shape, out_spec, interpret)


def paste(pieces: list[Float[Array, "W B T C"]], interpret) -> Float[Array, "B T W*C"]:
    """The inverse of `cut`, with all groups side by side."""
    chips, batch, tokens, _ = pieces[0].shape
    columns = chips * sum(x.shape[3] for x in pieces)
    rows = _rows_of_block(columns * pieces[0].dtype.itemsize)

    def kernel(r):
        def some(at):
            found = (getattr(r, f"x{group}")[chip, at, :] for group in range(len(pieces)) for chip in range(chips))
            r.o[at, :] = jnp.concatenate([*found], 1)

        in_steps(rows, math.gcd(rows, LANES), some)

    def block(x):
        return pl.BlockSpec((chips, None, rows, x.shape[3]), lambda b, t: (0, b, t, 0))

    operands = {f"x{group}": (x, block(x)) for group, x in enumerate(pieces)}
    out_spec = pl.BlockSpec((None, rows, columns), lambda b, t: (b, t, 0))
    shape, grid = (batch, tokens, columns), (batch, pl.cdiv(tokens, rows))
    return _call(kernel, "exchange_paste", grid, operands, shape, out_spec, interpret)


def _rows_of_block(row_bytes: int) -> int:
    return max(16, BLOCK_BYTES // row_bytes // LANES * LANES)


def join(
    pieces: Float[Array, "W B T N*C"],
    dim: int,
    turned: bool,
    interpret,
    behind: Float[Array, "B L C"] | None = None,
    place: int = 0,
    places: int = 1,
) -> Array:
    """Tokens of all chips, then those of `behind`, as the kernel reads them without a copy.

    [B, C, W T + L] if `turned`; else [B, W T + L, C] for heads that fill whole registers, and [B, C / D, W T + L, D] for others.
    `place`: which of the `places` tensors that were cut together.
    """
    chips, batch, tokens, width = pieces.shape
    width //= places
    by_head = not turned and dim % LANES != 0
    rows, whole, rest = _blocks(
        tokens, (width // dim * round_up(dim, LANES) if by_head else width) * pieces.dtype.itemsize
    )
    rest = chips * rest + (0 if behind is None else behind.shape[1])
    last = -(-rest // rows)  # blocks of the remainders

    def block(b, i):
        i = jnp.minimum(i, chips * whole - 1)
        return lax.div(i, whole), b, lax.rem(i, whole), place

    def laid_out(batch, tokens, of=lambda size: size):
        if by_head:
            return batch, of(width // dim), tokens, of(dim)
        return (batch, of(width), tokens) if turned else (batch, tokens, of(width))

    def of_tokens(index):
        return pl.BlockSpec(laid_out(None, rows), lambda b, i: laid_out(b, index(i), lambda size: 0))

    operands = {"x": (pieces, pl.BlockSpec((None, None, rows, width), block))}
    if rest:
        left = jnp.moveaxis(pieces[:, :, whole * rows :, place * width : (place + 1) * width], 0, 1).reshape(
            batch, -1, width
        )
        left = left if behind is None else jnp.concatenate([left, behind], 1)
        left = jnp.pad(left, ((0, 0), (0, last * rows - rest), (0, 0)))
        spec = of_tokens(lambda i: jnp.maximum(i - chips * whole, 0))
        left = as_heads(left, dim) if by_head else jnp.swapaxes(left, 1, 2) if turned else left
        operands["left"] = left, spec

    def kernel(r):
        def take(ref):
            r.o[...] = ref[...]

        def by_heads():
            for n in range(width // dim):
                r.o[n] = r.x[:, n * dim : (n + 1) * dim]

        own = by_heads if by_head else functools.partial(_turn, r.x, r.o) if turned else functools.partial(take, r.x)
        if not rest:
            return own()
        pl.when(pl.program_id(1) < chips * whole)(own)
        pl.when(pl.program_id(1) >= chips * whole)(functools.partial(take, r.left))

    shape, grid = laid_out(batch, chips * whole * rows + rest), (batch, chips * whole + last)
    return _call(kernel, "exchange_join", grid, operands, shape, of_tokens(lambda i: i), interpret)


def part(x: Float[Array, "B C W*T+L"], chips: int, tokens: int, interpret) -> Float[Array, "W B T C"]:
    """The inverse of `join` with `turned`, for `tokens` of each chip; drops the tokens behind them."""
    batch, width, _ = x.shape
    rows, whole, rest = _blocks(tokens, width * x.dtype.itemsize)
    spec = pl.BlockSpec((None, width, rows), lambda w, b, i: (b, 0, w * whole + jnp.minimum(i, whole - 1)))
    operands = {"x": (x, spec)}
    if rest:
        left = x[:, :, chips * whole * rows : chips * tokens].reshape(batch, width, chips, rest).transpose(2, 0, 3, 1)
        operands["left"] = left, pl.BlockSpec((None, None, rest, width), lambda w, b, i: (w, b, 0, 0))

    def kernel(r):
        def take():
            r.o[:rest] = r.left[...]

        if not rest:
            return _turn(r.x, r.o)
        pl.when(pl.program_id(2) < whole)(functools.partial(_turn, r.x, r.o))
        pl.when(pl.program_id(2) == whole)(take)

    shape, grid = (chips, batch, tokens, width), (chips, batch, whole + bool(rest))
    out_spec = pl.BlockSpec((None, None, rows, width), lambda w, b, i: (w, b, i, 0))
    return _call(kernel, "exchange_part", grid, operands, shape, out_spec, interpret)


def _blocks(tokens: int, row_bytes: int) -> tuple[int, int, int]:
    """(tokens of a block, whole blocks of a chip, tokens left over): the largest blocks that divide a chip's whole tiles."""
    tiles = tokens // LANES
    most = max(1, BLOCK_BYTES // (LANES * row_bytes))
    tiles_a_block = max(n for n in range(1, min(most, tiles) + 1) if tiles % n == 0)
    return tiles_a_block * LANES, tiles // tiles_a_block, tokens % LANES


def _turn(x_ref, o_ref):
    """o = x^T, `LANES` rows of x at a time, or as many columns."""
    rows, columns = x_ref.shape

    def turn_rows(at):
        o_ref[:, at] = x_ref[at, :].T

    def turn_columns(at):
        o_ref[at, :] = x_ref[:, at].T

    if rows % LANES == 0:
        in_steps(rows, LANES, turn_rows)
    else:
        in_steps(columns, LANES, turn_columns)


def _call(kernel, name: str, grid, operands: dict, shape, out_spec, interpret) -> Array:
    o = jax.ShapeDtypeStruct(shape, next(iter(operands.values()))[0].dtype)
    outputs, how = {"o": (o, out_spec)}, {"parallel": len(grid), "work": cost(o, o)}
    return call_kernel(kernel, name, grid, operands, outputs, interpret=interpret, vmem_bytes=VMEM_BYTES, **how)["o"]
