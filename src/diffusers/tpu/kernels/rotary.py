"""RMS or layer norm of queries and keys, over all heads or per head, and rotation of pairs of entries by position.

One kernel on a TPU reads x once and writes it once; XLA, given upstream's strided writes (`out[..., 0::2] = ...`), takes five
passes. Both round where upstream does: after the norm and after the rotation, each computed in float32. Sums over a head of up to 128
lanes are products with ones on the matrix unit, in bfloat16 parts; the square of a bfloat16 number is the sum of two.
"""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from .norm import Norm, inverse_of, mean_of
from .pallas import LANES, added_up, call_kernel, cost, in_steps, with_gradients_of
from .rows import rows_over_mesh
from .settings import Settings


BLOCK_ROWS = 256
LEAST_ROWS = 256  # of a chip; with fewer the compiler is no slower
TILE_ROWS = 64  # in registers at once, one head of them
# For a norm per head, by whether a head is smaller than a row of lanes: products have a long latency.
TILE_ROWS_OF_HEADS = {True: 256, False: 128}
MOST_LANES = 384  # most lanes after which heads of fewer than 128 entries end at a whole row: four heads of 96


def rotate_pairs(
    x: Float[Array, "... D"], cos: Float[Array, "... D"], sin: Float[Array, "... D"], apart: bool = False
) -> Float[Array, "... D"]:
    """(x_0, x_1) to (x_0 cos - x_1 sin, x_0 sin + x_1 cos) for every pair of neighbours, or of entries half a head apart.

    cos and sin hold each value twice, at both entries of its pair.
    """
    distance = x.shape[-1] // 2 if apart else 1
    first = _first_of_pairs(x.shape, distance, 2 * distance)
    return x * cos + jnp.where(first, -jnp.roll(x, -distance, -1), jnp.roll(x, distance, -1)) * sin


def _first_of_pairs(shape: tuple[int, ...], distance: int, of: int):
    lane = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    return lane % 2 == 0 if distance == 1 else lane % of < distance


def normed_and_rotated(
    x: Float[Array, "B T C"],
    norm: Norm,
    tables: tuple[Float[Array, "T D"] | Float[Array, "B T D"], ...],
    settings: Settings,
    apart: bool = False,
) -> Float[Array, "B T C"]:
    """x normalised, then every head of D entries rotated by the tables, cos and sin of `rotate_pairs`; in x's dtype.

    Tables are shared by all samples, or one per sample. Without tables nothing is rotated.
    """
    found = by_kernel(x, norm, tables, settings, apart)
    return _plainly(x, norm, tables, apart) if found is None else found


def by_kernel(
    x: Float[Array, "B T C"],
    norm: Norm,
    tables: tuple[Array, ...],
    settings: Settings,
    apart: bool = False,
    rounded: bool = False,
    least_bytes: int = 0,
) -> Float[Array, "B T C"] | None:
    """`normed_and_rotated` on all chips; None for a call that the kernel does not support. Heads may be split over `tp`, even if
    norm and tables cover all channels. `rounded`: before the weight, too. `least_bytes`: fewest bytes of x on a chip (TPU only)."""
    dim = tables[0].shape[-1] if tables else norm.weight.size
    lanes = math.lcm(dim, LANES)
    whole = x.shape[-1] % lanes == 0 and (dim % LANES == 0 or lanes <= MOST_LANES and norm.weight.size == dim)
    tp = 1 if settings.mesh is None else settings.mesh.shape["tp"]
    wide = bool(tables) and norm.weight.size == dim == x.shape[-1] and not (apart or norm.centred)
    wide = wide and tp > 1 and dim % (tp * LANES) == 0
    split = wide or tp > 1 and norm.weight.size == dim and x.shape[-1] % (tp * lanes) == 0
    found = rows_over_mesh(x.shape, settings, split) if settings.own_layers and whole else None
    if found is None or found.rows < min(found.least, LEAST_ROWS):
        return None
    if not settings.interpreted and found.rows * x.shape[-1] * x.dtype.itemsize < least_bytes:
        return None
    found = replace(found, spec=P(*tuple(found.spec)[:2], "tp")) if split else found
    across = "tp" if wide else None
    axes = tuple(found.spec)[-tables[0].ndim : -1] if tables and found.mesh is not None else ()
    table = P(*axes, across)
    vectors = [norm.weight] if norm.bias is None else [norm.weight, norm.bias]
    static = {"eps": norm.eps, "centred": norm.centred, "biased": len(vectors) == 2, "apart": apart, "scaled": wide}
    local = functools.partial(_by_kernel, **static, rounded=rounded, interpret=settings.interpreted)
    specs = found.spec, *(P(across) for _ in vectors), *(table for _ in tables)

    def run(x, vectors, tables):
        if not wide:
            return found.run(local, (x, *vectors, *tables), specs)
        inverse = inverse_of([x.astype(jnp.float32)], norm.eps)  # over a row's channels on all chips
        return found.run(local, (x, *vectors, *tables, inverse), (*specs, P(*tuple(found.spec)[:2], None)))

    def plain(x, vectors, tables):
        return _plainly(x, replace(norm, **dict(zip(("weight", "bias"), vectors))), tables, apart, rounded)

    run = with_gradients_of(plain, run) if settings.differentiable else run
    return run(x, vectors, tables)


def _plainly(x, norm, tables, apart, rounded=False):
    wide = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, norm.weight.size)
    if norm.centred:
        wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + norm.eps)
    wide = (wide.astype(x.dtype).astype(jnp.float32) if rounded else wide) * norm.weight.astype(jnp.float32)
    wide = wide if norm.bias is None else wide + norm.bias.astype(jnp.float32)
    if not tables:
        return wide.astype(x.dtype).reshape(x.shape)
    dim = tables[0].shape[-1]
    if dim == x.shape[-1] and not (apart or dim % LANES):  # pairs of neighbours do not leave their row of lanes
        dim = LANES
    cos, sin = (table.reshape(*table.shape[:-1], -1, dim) for table in tables)
    heads = wide.astype(x.dtype).astype(jnp.float32).reshape(*x.shape[:-1], -1, dim)
    return _rotated(heads, cos, sin, apart, x.dtype).astype(x.dtype).reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _rotated(x, cos, sin, apart: bool, dtype):
    """`rotate_pairs`, whose result is cast to `dtype`. Its gradient is the inverse rotation, which swaps the entries of pairs by a
    product: if they are shifted by a lane instead, the compiler writes them in float32."""
    return rotate_pairs(x, cos, sin, apart)


def _rotated_back(apart, dtype, given, gradient):
    dim = gradient.shape[-1]
    trade = rotate_pairs(jnp.eye(dim), jnp.zeros(dim), -jnp.ones(dim), apart).astype(dtype)
    traded = jnp.einsum("...a,ab->...b", gradient.astype(dtype), trade, precision="highest").astype(jnp.float32)
    of_tables = jax.vjp(lambda cos, sin: rotate_pairs(given[0], cos, sin, apart), *given[1:])[1](gradient)
    return gradient * given[1] + traded * given[2], *of_tables


_rotated.defvjp(lambda x, cos, sin, apart, dtype: (rotate_pairs(x, cos, sin, apart), (x, cos, sin)), _rotated_back)


def _mean_of_heads(x, dim: int, parts: int):
    """The mean of each `dim` lanes, repeated in all of them. `parts`: as in `added_up`."""
    row, column = (lax.div(lax.broadcasted_iota(jnp.int32, (x.shape[1],) * 2, axis), dim) for axis in (0, 1))
    return added_up(x, (row == column).astype(jnp.bfloat16), parts) / dim


def _by_kernel(x, weight, *others, eps, centred, biased, apart, interpret, scaled=False, rounded=False):
    """`rounded`: as in `by_kernel`. `scaled`: the last operand [B, T, 1] has a factor per row; x has a part of its channels."""
    batch, tokens, width = x.shape
    scale, others = (others[-1:], others[:-1]) if scaled else ((), others)
    vectors, tables = ([weight, others[0]], others[1:]) if biased else ([weight], others)
    per_head = weight.size < width
    dim = tables[0].shape[-1] if tables else weight.size if per_head else LANES
    distance = (dim // 2 if apart else 1, dim)
    wide = dim > LANES and bool(tables) and not apart and not per_head  # pairs of neighbours stay in a row of lanes
    small, lanes = dim < LANES, LANES if wide else math.lcm(dim, LANES)
    by_products = per_head and dim <= LANES
    # wide tables: both in float32, with two buffers, take 4 MiB of VMEM; at least a tile
    block_rows = max(TILE_ROWS, (1 << 18) // dim // TILE_ROWS * TILE_ROWS) if wide else BLOCK_ROWS
    vectors = [jnp.tile(vector, width // vector.size) for vector in vectors]
    tables = [jnp.tile(table, (*(1,) * (table.ndim - 1), lanes // dim)) for table in tables] if small else tables
    tile_rows = TILE_ROWS_OF_HEADS[small] if by_products and lanes == LANES else TILE_ROWS
    block_rows = min(block_rows, pl.cdiv(tokens, tile_rows) * tile_rows)
    grid, b, t = (batch, pl.cdiv(tokens, block_rows)), 0, 1
    if wide:  # a block of tables is read once for the batch
        grid, b, t = grid[::-1], 1, 0

    def normed(part, of_row):
        """One part of a row, normalised. `of_row`: mean and inverse deviation of the row, if the norm is over all parts."""
        if by_products:
            half = x.dtype == jnp.bfloat16
            if centred:
                part = part - _mean_of_heads(part, dim, 1 if half else 3)
            return part * lax.rsqrt(_mean_of_heads(part * part, dim, 2 if half else 3) + eps)
        mean, inverse = of_row
        if centred:
            part = part - (mean_of([part]) if per_head else mean)
        return part * (inverse_of([part], eps) if per_head else inverse)

    def tile(r, rows):
        heads = [slice(h, h + lanes) for h in range(0, width, lanes)]
        mean = inverse = None
        if not per_head:
            parts = [r.x[rows, head].astype(jnp.float32) for head in heads]
            mean = mean_of(parts) if centred else None
            inverse = (
                r.scale[rows, :] if scaled else inverse_of([part - mean for part in parts] if centred else parts, eps)
            )
        if tables and not wide:
            cos, sin = r.cos[rows, :], r.sin[rows, :]
        first = _first_of_pairs((tile_rows, lanes), *distance) if tables else None
        for head in heads:
            part = normed(r.x[rows, head].astype(jnp.float32), (mean, inverse))
            part = (part.astype(x.dtype).astype(jnp.float32) if rounded else part) * r.weight[:, head]
            if biased:
                part = part + r.bias[:, head]
            if wide:
                turn = pl.ds(head.start % dim, lanes)
                cos, sin = r.cos[rows, turn], r.sin[rows, turn]
            if tables:
                part = part.astype(x.dtype).astype(jnp.float32)
                before, after = pltpu.roll(part, distance[0], 1), pltpu.roll(part, lanes - distance[0], 1)
                part = part * cos + jnp.where(first, -after, before) * sin
            r.o[rows, head] = part.astype(x.dtype)

    run = lambda r: in_steps(block_rows, tile_rows, functools.partial(tile, r))  # noqa: E731
    spec = pl.BlockSpec((None, block_rows, width), lambda *at: (at[b], at[t], 0))
    vector = pl.BlockSpec((1, width), lambda *at: (0, 0))
    table = pl.BlockSpec((block_rows, max(dim, lanes)), lambda *at: (at[t], 0))
    if tables and tables[0].ndim == 3:
        table = pl.BlockSpec((None, block_rows, max(dim, lanes)), lambda *at: (at[b], at[t], 0))
    of_rows = pl.BlockSpec((None, block_rows, 1), lambda *at: (at[b], at[t], 0))
    operands = {"x": (x, spec)}
    operands |= {name: (one.astype(jnp.float32)[None], vector) for name, one in zip(("weight", "bias"), vectors)}
    operands |= {name: (one.astype(jnp.float32), table) for name, one in zip(("cos", "sin"), tables)}
    operands |= {"scale": (one, of_rows) for one in scale}
    outputs = {"o": (jax.ShapeDtypeStruct(x.shape, x.dtype), spec)}
    how = {"parallel": 2, "work": cost(x, x, *tables, flops=10 * x.size), "interpret": interpret}
    return call_kernel(run, "rotary_kernel", grid, operands, outputs, **how)["o"]
