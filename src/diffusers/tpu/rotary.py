"""RMS norm, over all heads or of each, and rotation of neighbouring entries by position: what queries and keys of video models
go through.

One kernel on a TPU: it reads x once and writes it once. XLA, given upstream's strided writes (`out[..., 0::2] = ...`), takes
five passes, some of them over arrays with two entries in a row of 128. Both round where upstream does: after the norm, and
after the rotation, each computed in float32.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from .cost import cost
from .linear import LANES, rows_over_mesh
from .settings import Settings


BLOCK_ROWS = 256
TILE_ROWS = 32  # in registers at once, one head of them


def rotate_pairs(
    x: Float[Array, "... D"], cos: Float[Array, "... D"], sin: Float[Array, "... D"]
) -> Float[Array, "... D"]:
    """(x_0, x_1) to (x_0 cos - x_1 sin, x_0 sin + x_1 cos) for every pair of neighbours; cos and sin have each value twice."""
    even = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) % 2 == 0
    return x * cos + jnp.where(even, -jnp.roll(x, -1, -1), jnp.roll(x, 1, -1)) * sin


def normed_and_rotated(
    x: Float[Array, "B T C"],
    weight: Float[Array, " C|D"],
    tables: tuple[Float[Array, "T D"], ...],
    eps: float,
    settings: Settings,
) -> Float[Array, "B T C"]:
    """x / sqrt(mean(x^2) + eps) * weight, then every head of D entries rotated by the tables, cos and sin; in x's dtype.

    A weight of D entries is of each head: the mean is over its entries then, over all heads' with a weight of C. Without
    tables nothing is rotated.
    """
    interpret, dim = settings.interpreted, tables[0].shape[-1] if tables else weight.size
    found = rows_over_mesh(x.shape, settings) if settings.own_layers and dim % LANES == 0 else None
    if found is None or found.rows < found.least(interpret):
        return _plainly(x, weight, tables, eps)
    table = P(found.spec[1], None) if found.mesh is not None else P()
    run = functools.partial(_by_kernel, eps=eps, interpret=interpret)
    return found.run(run, (x, weight, *tables), (found.spec, P(), *(table for _ in tables)))


def _plainly(x, weight, tables, eps):
    wide = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, weight.size)
    wide = wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps) * weight.astype(jnp.float32)
    if not tables:
        return wide.astype(x.dtype).reshape(x.shape)
    cos, sin = tables
    heads = wide.astype(x.dtype).astype(jnp.float32).reshape(*x.shape[:-1], -1, cos.shape[-1])
    return rotate_pairs(heads, cos[:, None], sin[:, None]).astype(x.dtype).reshape(x.shape)


def _inverse(parts: list, eps: float):
    """1 / sqrt(mean(x^2) + eps) of rows that are these parts side by side."""
    squares = functools.reduce(lambda total, part: total + part * part, parts, jnp.zeros_like(parts[0]))
    return lax.rsqrt(squares.sum(axis=-1, keepdims=True) / sum(part.shape[-1] for part in parts) + eps)


def _by_kernel(x, weight, *tables, eps, interpret):
    batch, tokens, width = x.shape
    per_head = weight.size < width
    dim = tables[0].shape[-1] if tables else weight.size if per_head else LANES
    weight = jnp.tile(weight, width // weight.size)
    spec = pl.BlockSpec((None, BLOCK_ROWS, width), lambda b, t: (b, t, 0))
    table = pl.BlockSpec((BLOCK_ROWS, dim), lambda b, t: (t, 0))

    def tile(x_ref, w_ref, *refs):
        *table_refs, o_ref, n = refs
        rows = pl.ds(pl.multiple_of(n * TILE_ROWS, TILE_ROWS), TILE_ROWS)
        heads = [slice(h, h + dim) for h in range(0, width, dim)]
        inverse = None if per_head else _inverse([x_ref[rows, head].astype(jnp.float32) for head in heads], eps)
        if tables:
            cos, sin = (ref[rows, :] for ref in table_refs)
            even = lax.broadcasted_iota(jnp.int32, cos.shape, 1) % 2 == 0
        for head in heads:
            part = x_ref[rows, head].astype(jnp.float32)
            part = part * (_inverse([part], eps) if per_head else inverse) * w_ref[:, head]
            if tables:
                part = part.astype(o_ref.dtype).astype(jnp.float32)
                before, after = pltpu.roll(part, 1, 1), pltpu.roll(part, dim - 1, 1)
                part = part * cos + jnp.where(even, -after, before) * sin
            o_ref[rows, head] = part.astype(o_ref.dtype)

    def kernel(*refs):
        pl.loop(0, BLOCK_ROWS // TILE_ROWS)(functools.partial(tile, *refs))

    return pl.pallas_call(
        kernel,
        grid=(batch, pl.cdiv(tokens, BLOCK_ROWS)),
        in_specs=[spec, pl.BlockSpec((1, width), lambda b, t: (0, 0)), *(table for _ in tables)],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=cost(x, x, *tables, flops=10 * x.size),
        interpret=interpret,
        name="rotary_kernel",
    )(x, weight.astype(jnp.float32)[None], *(table.astype(jnp.float32) for table in tables))
