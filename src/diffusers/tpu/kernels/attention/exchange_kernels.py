"""What is sent and what comes in the exchange of `exchange`, written once: columns cut, and pieces of all chips joined and turned.

XLA takes two passes to cut columns into pieces, one a chip to join pieces, and one more to turn tokens to lanes. These
kernels take one pass of memory each.

Joined, every chip's tokens begin at a whole tile of `LANES`: what is left of each chip's (`rest`) comes after all of them.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from ..pallas import LANES, cost


BLOCK_BYTES = 4 << 20  # of one array in VMEM: there are two, or three with what is left of chips' tokens
VMEM_BYTES = 3 * 2 * BLOCK_BYTES + (8 << 20)  # of each two buffers, and the compiler's own


def takes(x: Float[Array, "B N T D"], ways: int, in_order: bool) -> bool:
    """Whether heads [B, N, T, D] can go this way: whole tiles, and an order of tokens that may be changed or is not."""
    _, heads, tokens, dim = x.shape
    return heads // ways * dim % LANES == 0 and tokens >= LANES and not (in_order and tokens % LANES)


def cut(x: Float[Array, "B T C"], ways: int, interpret) -> Float[Array, "W B T C/W"]:
    """Columns in `ways` pieces."""
    batch, tokens, columns = x.shape
    return _columns(x, (ways, batch, tokens, columns // ways), interpret, "exchange_cut")


def paste(pieces: Float[Array, "W B T C"], interpret) -> Float[Array, "B T W*C"]:
    """The way back of `cut`."""
    ways, batch, tokens, width = pieces.shape
    return _columns(pieces, (batch, tokens, ways * width), interpret, "exchange_paste")


def _columns(x, shape: tuple[int, ...], interpret, name: str) -> Array:
    """x [B, T, C] as pieces [W, B, T, C / W], or pieces as x: whichever has this shape."""
    cuts = len(shape) == 4
    ways, batch, tokens, width = shape if cuts else x.shape
    rows = max(16, BLOCK_BYTES // (ways * width * x.dtype.itemsize) // LANES * LANES)
    whole = pl.BlockSpec((None, rows, ways * width), lambda b, t: (b, t, 0))
    pieces = pl.BlockSpec((ways, None, rows, width), lambda b, t: (0, b, t, 0))

    def kernel(x_ref, o_ref):
        for n in range(ways):
            columns = slice(n * width, (n + 1) * width)
            if cuts:
                o_ref[n] = x_ref[:, columns]
            else:
                o_ref[:, columns] = x_ref[n]

    specs = (whole, pieces) if cuts else (pieces, whole)
    return _call(kernel, (batch, pl.cdiv(tokens, rows)), specs[:1], specs[1], shape, [x], interpret, name)


def join(
    pieces: Float[Array, "W B T C"], turned: bool, interpret, behind: Float[Array, "B L C"] | None = None
) -> Array:
    """Tokens of all chips and `behind` them others, [B, W T + L, C], or [B, C, W T + L] if they are turned to lanes."""
    ways, batch, tokens, width = pieces.shape
    rows, whole, rest = _blocks(tokens, width * pieces.dtype.itemsize)
    rest = ways * rest + (0 if behind is None else behind.shape[1])
    last = -(-rest // rows)  # blocks of what is left

    def place(b, i):
        i = jnp.minimum(i, ways * whole - 1)
        return lax.div(i, whole), b, lax.rem(i, whole), 0

    def turn(shape):
        return (shape[0], shape[2], shape[1]) if turned else shape

    def of_tokens(index):
        shape = turn((None, rows, width))
        return pl.BlockSpec(shape, lambda b, i: turn((b, index(i), 0)))

    operands, specs = [pieces], [pl.BlockSpec((None, None, rows, width), place)]
    if rest:
        left = jnp.moveaxis(pieces[:, :, whole * rows :], 0, 1).reshape(batch, -1, width)
        left = left if behind is None else jnp.concatenate([left, behind], 1)
        left = jnp.pad(left, ((0, 0), (0, last * rows - rest), (0, 0)))
        operands.append(jnp.swapaxes(left, 1, 2) if turned else left)
        specs.append(of_tokens(lambda i: jnp.maximum(i - ways * whole, 0)))

    def kernel(x_ref, *refs):
        *left, o_ref = refs

        def take(ref):
            o_ref[...] = ref[...]

        own = functools.partial(_turn if turned else lambda x_ref, _: take(x_ref), x_ref, o_ref)
        if not left:
            return own()
        pl.when(pl.program_id(1) < ways * whole)(own)
        pl.when(pl.program_id(1) >= ways * whole)(functools.partial(take, *left))

    shape = turn((batch, ways * whole * rows + rest, width))
    grid, out_spec = (batch, ways * whole + last), of_tokens(lambda i: i)
    return _call(kernel, grid, specs, out_spec, shape, operands, interpret, "exchange_join")


def part(x: Float[Array, "B C W*T+L"], ways: int, tokens: int, interpret) -> Float[Array, "W B T C"]:
    """The way back of `join`, turned, for `tokens` of each chip; what stood behind them is left."""
    batch, width, _ = x.shape
    rows, whole, rest = _blocks(tokens, width * x.dtype.itemsize)
    operands = [x]
    specs = [pl.BlockSpec((None, width, rows), lambda w, b, i: (b, 0, w * whole + jnp.minimum(i, whole - 1)))]
    if rest:
        left = x[:, :, ways * whole * rows : ways * tokens].reshape(batch, width, ways, rest)
        operands.append(left.transpose(2, 0, 3, 1))
        specs.append(pl.BlockSpec((None, None, rest, width), lambda w, b, i: (w, b, 0, 0)))

    def kernel(x_ref, *refs):
        *left, o_ref = refs
        if not left:
            _turn(x_ref, o_ref)
            return
        pl.when(pl.program_id(2) < whole)(lambda: _turn(x_ref, o_ref))

        @pl.when(pl.program_id(2) == whole)
        def _():
            o_ref[:rest] = left[0][...]

    out_spec = pl.BlockSpec((None, None, rows, width), lambda w, b, i: (w, b, i, 0))
    shape, grid = (ways, batch, tokens, width), (ways, batch, whole + bool(rest))
    return _call(kernel, grid, specs, out_spec, shape, operands, interpret, "exchange_part")


def _blocks(tokens: int, row_bytes: int) -> tuple[int, int, int]:
    """(tokens of a block, whole blocks of a chip, tokens left): the largest blocks that divide a chip's whole tiles."""
    tiles = tokens // LANES
    most = max(1, BLOCK_BYTES // (LANES * row_bytes))
    tiles_a_block = max(n for n in range(1, min(most, tiles) + 1) if tiles % n == 0)
    return tiles_a_block * LANES, tiles // tiles_a_block, tokens % LANES


def _turn(x_ref, o_ref):
    """o = x^T, a tile of `LANES` rows of each at a time."""
    rows, columns = x_ref.shape
    step = math.gcd(rows, LANES)

    @pl.loop(0, rows // step)
    def _(n):
        at = pl.ds(pl.multiple_of(n * step, step), step)
        o_ref[:, at] = x_ref[at, :].T


def _call(kernel, grid, in_specs, out_spec, shape, operands: list, interpret, name: str) -> Array:
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_spec,
        out_shape=jax.ShapeDtypeStruct(shape, operands[0].dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * len(grid), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=cost(operands[0], operands[0]),
        interpret=interpret,
        name=name,
    )(*operands)
