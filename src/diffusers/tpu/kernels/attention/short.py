"""Attention of many short sequences, e.g. of the frames at each position of a video's map.

One sequence would leave units idle, so each product is of several, in which each sees itself only. They lie in memory as linear
layers leave them (`kernels.linear`): one after another, [B, T, C]; or, where T ends within a register, [T, B, C].
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from ..pallas import LANES, LOG2_E, ROWS, SUBLANES, by_token, call_kernel, cost, product, round_up, vmem_room
from .reference import padded_to


MOST_TOKENS = LANES
MOST_APART = 32  # tokens of [T, B, C]: a product is of the SUBLANES sequences in a register, of at most 256 rows
ROWS_OF_A_PRODUCT = {True: 256, False: 128}  # of [B, T, C]; True: no head lies across registers of lanes
MOST_COLUMNS = 640  # in one grid step, where these are whole heads and registers: each head is straight-line code
BLOCK_BYTES = 1 << 19  # of q, k, v and the result, in one grid step
HIDDEN = -1e30


def takes(q: Float[Array, "B N T D"], k: Float[Array, "B N T D"], v: Float[Array, "B N T D"]) -> bool:
    """Whether these are several short sequences."""
    return q.shape == k.shape == v.shape and q.shape[0] > 1 and q.shape[2] <= MOST_TOKENS


@functools.partial(jax.jit, static_argnames=("scale", "generation", "interpret"), inline=True)
def attention_of_each(
    q: Float[Array, "B N T D"],
    k: Float[Array, "B N T D"],
    v: Float[Array, "B N T D"],
    *,
    scale: float,
    generation: str | None = None,
    interpret=False,
) -> Float[Array, "B N T D"]:
    """softmax(scale q k^T) v of each sequence, in q's dtype."""
    batch, heads, tokens, dim = q.shape
    apart = tokens % SUBLANES != 0 and tokens <= MOST_APART
    length = tokens if apart else round_up(tokens, SUBLANES)
    rows_wanted = ROWS_OF_A_PRODUCT[0 in (LANES % dim, dim % LANES)]
    number = SUBLANES if apart else min(batch, max(rows_wanted // length, 1))
    read = ROWS if apart else number  # sequences at once: a register of bfloat16 has two of float32's
    q, k, v = (_laid(x, apart, length, read) for x in (q, k, v))
    width, count, rows = q.shape[2], q.shape[1 if apart else 0] // read, number * length
    least = math.lcm(dim, LANES)
    columns = max((n for n in range(least, width + 1, least) if not width % n and n <= MOST_COLUMNS), default=width)
    size = read * length * columns * q.dtype.itemsize
    inner = max(n for n in range(1, 65) if not count % n and (n == 1 or n * size <= BLOCK_BYTES))
    block = (length, inner * read, columns) if apart else (inner * read, length, columns)
    spec = pl.BlockSpec(block, lambda c, n: (0, n, c) if apart else (n, 0, c))
    operands = {"q": (q, spec), "k": (k, spec), "v": (v, spec)}
    hidden = _hidden(apart, number, length, tokens)
    operands["hidden"] = hidden, pl.BlockSpec(hidden.shape, lambda c, n: (0, 0))
    lanes = [slice(at, min(at + LANES, columns)) for at in range(0, columns, LANES)]
    products = [slice(0, SUBLANES), slice(SUBLANES, ROWS)] if apart else [slice(None)]
    wide = jnp.float32 if apart or length % ROWS else q.dtype  # whose registers have as many rows as a product's parts
    attend = functools.partial(_of_product, dim=dim, lanes=lanes, factor=scale * LOG2_E)

    def run(r):
        @pl.loop(0, inner)
        def of_rows(n):
            some = pl.ds(pl.multiple_of(n * read, read), read)
            at = (slice(None), some) if apart else (some, slice(None))

            def given(x, those):  # by registers of lanes
                parts = (x[*at, part].astype(wide)[:, those] for part in lanes)
                return [part.reshape(rows, -1).astype(q.dtype) for part in parts]

            results = [attend(*(given(x, those) for x in (r.q, r.k, r.v)), r.hidden) for those in products]
            for part, *out in zip(lanes, *results):
                out = [x.reshape(length if apart else number, -1, x.shape[1]) for x in out]
                r.o[*at, part] = jnp.concatenate(out, 1).astype(q.dtype)

    scores = count * len(products) * rows * rows * heads
    result = call_kernel(
        run,
        "short_attention_kernel",
        (width // columns, count // inner),
        operands,
        {"o": (jax.ShapeDtypeStruct(q.shape, q.dtype), spec)},
        parallel=2,
        work=cost(q, k, v, q, flops=4 * scores * dim, transcendentals=scores),
        interpret=interpret,
        vmem_bytes=vmem_room(generation),
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
            whole = first <= lanes[n].start and lanes[n].stop <= first + dim
            return x if whole else jnp.where((column >= first) & (column < first + dim), x, other)

        scores = sum(product(own(q[n], n, 0), k[n], 1) for n in there) * factor + hidden[...]
        weights = jnp.exp2(scores - scores.max(1, keepdims=True))
        inverse, weights = 1 / weights.sum(1, keepdims=True), weights.astype(v[0].dtype)
        for n in there:
            result = product(weights, v[n]) * inverse
            out[n] = own(result, n, jnp.zeros_like(result) if out[n] is None else out[n])
    return out


def _hidden(apart: bool, number: int, length: int, tokens: int) -> Float[Array, "R R"]:
    """`HIDDEN` for each row's keys of other sequences, and for padding behind the tokens; zero for its own."""
    place = jnp.arange(number * length)
    sequence, token = (place % number, place // number) if apart else (place // length, place % length)
    return jnp.where((sequence[:, None] == sequence) & (token < tokens), 0.0, HIDDEN)


def _laid(x: Float[Array, "B N T D"], apart: bool, length: int, number: int) -> Array:
    """[B, T, C], or [T, B, C] if `apart`, with so many tokens, and a multiple of so many sequences."""
    x = padded_to(padded_to(by_token(x), 1, length), 0, round_up(len(x), number))
    return jnp.swapaxes(x, 0, 1) if apart else x
