"""Attention of many short sequences, e.g. of the frames at each position of a video's map.

Such a sequence fills no unit, so a product is of several: each sees itself only, of scores of all with all. Sequences lie in memory
as linear layers leave them (`kernels.linear`): one after another, [B, T, C]; or, where T ends within a register, [T, B, C].
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from ..pallas import LANES, LOG2_E, ROWS, SUBLANES, by_token, call_kernel, cost, product, round_up
from .reference import padded_to


MOST_TOKENS = LANES
MOST_APART = 32  # tokens of sequences as [T, B, C]: ROWS sequences are one product, of 512 rows
ROWS_OF_A_PRODUCT = 128
MOST_COLUMNS = (
    640  # in one grid step, if that many are whole heads and whole registers: each head is straight-line code
)
BLOCK_BYTES = 1 << 19  # of q, k, v and the result each, in one grid step
HIDDEN = -1e30


def takes(q: Float[Array, "B N T D"], k: Float[Array, "B N T D"], v: Float[Array, "B N T D"]) -> bool:
    """Whether these are several short sequences."""
    return q.shape == k.shape == v.shape and q.shape[0] > 1 and q.shape[2] <= MOST_TOKENS


@functools.partial(jax.jit, static_argnames=("scale", "interpret"), inline=True)
def attention_of_each(
    q: Float[Array, "B N T D"],
    k: Float[Array, "B N T D"],
    v: Float[Array, "B N T D"],
    *,
    scale: float,
    interpret=False,
) -> Float[Array, "B N T D"]:
    """softmax(scale q k^T) v of each sequence, in q's dtype."""
    batch, heads, tokens, dim = q.shape
    q, scale = (q, scale) if scale > 0 else (-q, -scale)
    apart = tokens % SUBLANES != 0 and tokens <= MOST_APART
    length = tokens if apart else round_up(tokens, ROWS)
    number = SUBLANES if apart else min(batch, max(ROWS_OF_A_PRODUCT // length, 1))
    read = ROWS if apart else number  # of registers of bfloat16
    q, k, v = (_laid(x, apart, length, read) for x in (q, k, v))
    width, count, rows = q.shape[2], q.shape[1 if apart else 0] // read, number * length
    least = math.lcm(dim, LANES)
    columns = max((n for n in range(least, width + 1, least) if not width % n and n <= MOST_COLUMNS), default=width)
    size = read * length * columns * q.dtype.itemsize
    inner = max(n for n in range(1, 65) if not count % n and (n == 1 or n * size <= BLOCK_BYTES))
    block = (length, inner * read, columns) if apart else (inner * read, length, columns)
    spec = pl.BlockSpec(block, lambda c, n: (0, n, c) if apart else (n, 0, c))
    place = jnp.arange(rows)
    sequence, token = (place % number, place // number) if apart else (place // length, place % length)
    hidden = jnp.where((sequence[:, None] == sequence) & (token < tokens), 0.0, HIDDEN)
    operands = {"q": (q, spec), "k": (k, spec), "v": (v, spec)}
    operands["hidden"] = hidden, pl.BlockSpec((rows, rows), lambda c, n: (0, 0))
    lanes = [slice(at, min(at + LANES, columns)) for at in range(0, columns, LANES)]
    attend = functools.partial(_of_product, dim=dim, lanes=lanes, factor=scale * LOG2_E)

    def run(r):
        @pl.loop(0, inner)
        def of_rows(n):
            some = pl.ds(pl.multiple_of(n * read, read), read)
            at = (slice(None), some) if apart else (some,)
            if not apart:
                given = ([x[*at, :, part].reshape(rows, -1) for part in lanes] for x in (r.q, r.k, r.v))
                for part, out in zip(lanes, attend(*given, r.hidden)):
                    r.o[*at, :, part] = out.astype(q.dtype).reshape(number, length, -1)
                return
            halves = [slice(0, SUBLANES), slice(SUBLANES, ROWS)]
            wide = [[x[*at, part].astype(jnp.float32) for part in lanes] for x in (r.q, r.k, r.v)]
            given = [[[x[:, half].reshape(rows, -1).astype(q.dtype) for x in xs] for xs in wide] for half in halves]
            results = [attend(*some, r.hidden) for some in given]
            for part, *two in zip(lanes, *results):
                r.o[*at, part] = jnp.concatenate([x.reshape(length, SUBLANES, -1) for x in two], 1).astype(q.dtype)

    scores = count * (read // number) * rows * rows * heads
    result = call_kernel(
        run,
        "short_attention_kernel",
        (width // columns, count // inner),
        operands,
        {"o": (jax.ShapeDtypeStruct(q.shape, q.dtype), spec)},
        parallel=2,
        work=cost(q, k, v, q, flops=4 * scores * dim, transcendentals=scores),
        interpret=interpret,
    )["o"]
    result = jnp.swapaxes(result, 0, 1) if apart else result
    return jnp.swapaxes(result[:batch, :tokens].reshape(batch, tokens, heads, dim), 1, 2)


def _of_product(q: list, k: list, v: list, hidden, *, dim: int, lanes: list[slice], factor: float) -> list:
    """Attention of the rows of one product, in float32. Arguments and result: the columns of all heads, by registers of lanes."""
    out = [None] * len(lanes)
    for first in range(0, lanes[-1].stop, dim):
        there = [n for n, part in enumerate(lanes) if part.start < first + dim and part.stop > first]

        def own(x, n: int, other):
            column = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) + lanes[n].start
            inside = (column >= first) & (column < first + dim)
            whole = first <= lanes[n].start and lanes[n].stop <= first + dim
            return x if whole else jnp.where(inside, x, other)

        scores = sum(product(own(q[n], n, 0), k[n], 1) for n in there) + hidden[...]
        weights = jnp.exp2((scores - scores.max(1, keepdims=True)) * factor)
        inverse, weights = 1 / weights.sum(1, keepdims=True), weights.astype(v[0].dtype)
        for n in there:
            result = product(weights, v[n]) * inverse
            out[n] = own(result, n, jnp.zeros_like(result) if out[n] is None else out[n])
    return out


def _laid(x: Float[Array, "B N T D"], apart: bool, length: int, number: int) -> Array:
    """[B, T, C], or [T, B, C] if `apart`, with so many tokens, and a multiple of so many sequences."""
    x = padded_to(padded_to(by_token(x), 1, length), 0, round_up(len(x), number))
    return jnp.swapaxes(x, 0, 1) if apart else x
