"""Arrays of 8-bit numbers with a scale per row: a chip multiplies twice as many of them a second as of bfloat16.

    x ~ values * scale,  scale = max |x| of the row / the largest number of the type

so that (x w^T)[m, n] ~ (values w_values^T)[m, n] * scale[m] * w_scale[n], summed in int32 or float32.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from ..chips.figures import chip_of
from .pallas import LANES, call_kernel, cost, in_steps
from .settings import Settings


# HBM traffic to round a weight and read it: 3.7 for FLUX.1 dev, replicated on v6e-8, which with 576 tokens a chip became slower.
BYTES_OF_A_WEIGHT = 4
ROWS, TILE_ROWS = 256, 32  # of a block, and of straight-line code: whole registers of 8 bits
TYPES = {"int8": (jnp.int8, 127.0), "fp8": (jnp.float8_e4m3fn, 448.0)}  # dtype, largest number


class Narrow(NamedTuple):
    """Rows of 8-bit numbers [..., K], and their scales [..., 1] in float32."""

    values: Array
    scale: Float[Array, "... 1"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


def narrowed(x: Float[Array, "... K"], kind: str) -> Narrow:
    """x as numbers of `TYPES[kind]`. Products of a row with an entry that is not finite are not finite."""
    dtype, most = TYPES[kind]
    largest = jnp.abs(x).max(-1, keepdims=True).astype(jnp.float32)  # before the cast, which XLA would keep
    largest = jnp.maximum(largest, jnp.finfo(jnp.float32).tiny * most)
    values = x.astype(jnp.float32) * (most / largest)
    return Narrow((jnp.round(values) if dtype == jnp.int8 else values).astype(dtype), largest / most)


def tpu_narrowed(x: Float[Array, "B M K"], kind: str, *, interpret: bool = False) -> Narrow:
    """`narrowed`, with one pass over x."""
    batch, rows, depth = x.shape
    dtype, _ = TYPES[kind]

    def tile(r, at):
        r.values[at, :], r.scale[at, :] = narrowed(r.x[at, :].astype(jnp.float32), kind)

    def block(columns: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, ROWS, columns), lambda i, m: (i, m, 0))

    outputs = {
        "values": (jax.ShapeDtypeStruct(x.shape, dtype), block(depth)),
        "scale": (jax.ShapeDtypeStruct((batch, rows, 1), jnp.float32), block(1)),
    }
    run = lambda r: in_steps(ROWS, TILE_ROWS, functools.partial(tile, r))  # noqa: E731
    grid, work = (batch, pl.cdiv(rows, ROWS)), cost(x, *(shape for shape, _ in outputs.values()), flops=4 * x.size)
    how = {"parallel": 2, "work": work, "interpret": interpret}
    return Narrow(**call_kernel(run, "narrow_kernel", grid, {"x": (x, block(depth))}, outputs, **how))


def takes(x: Array, w: Array, settings: Settings) -> bool:
    """Whether a layer of inputs x [..., T, K] and weights w [N, K] should use 8 bits: it is wide, and with its tokens on a chip the
    product saves more time than rounding the weights takes."""
    chip, mesh = chip_of(settings.generation), settings.mesh
    parts = 1 if mesh is None else mesh.shape["dp"] * (mesh.shape["sp"] if settings.sequence else 1)
    least = BYTES_OF_A_WEIGHT * chip.flops / chip.hbm_bandwidth
    tokens = math.prod(x.shape[:-1]) / parts
    return x.dtype == jnp.bfloat16 and x.ndim > 2 and x.shape[-2] > 1 and tokens >= least and is_wide(w)


def is_wide(w: Array) -> bool:
    """Whether weights [N, K] of a layer are wide enough for 8 bits."""
    return w.dtype == jnp.bfloat16 and w.ndim == 2 and min(w.shape) >= LANES


def narrow_product(x: Array, w: Array) -> Float[Array, "... N"]:
    """The product of values x [..., K] and w [N, K], without their scales, in float32."""
    wide = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    dimensions = (((x.ndim - 1,), (w.ndim - 1,)), ((), ()))
    how = {"precision": jax.lax.Precision.DEFAULT, "preferred_element_type": wide}
    return jax.lax.dot_general(x, w, dimensions, **how).astype(jnp.float32)
