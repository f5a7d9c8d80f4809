"""Layer or RMS norm of tokens over all channels, scaled and shifted, in one pass.

The compiler takes three: for the mean, for the deviation and for the result. This kernel reads x once and writes once, and
rounds where upstream does.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from .linear import rows_over_mesh
from .pallas import LANES, call_kernel, cost, with_gradients_of
from .settings import Settings


BLOCK_BYTES = 5 << 19  # of x, and of the result: two buffers each
LEAST_ROWS = 256  # a chip; with fewer the compiler's way is no slower
TILE_ROWS = 32  # in registers at once, one row of lanes of them


@dataclass(frozen=True)
class Norm:
    """(x - mean) / sqrt(variance + eps) * weight + bias, or x / sqrt(mean(x^2) + eps) * weight.

    Attributes:
        weight, bias: of all channels, or of the D entries of a head: then each head is normed by itself.
        centred: layer norm, not RMS.
    """

    weight: Float[Array, " C|D"] | None
    eps: float
    bias: Float[Array, " C|D"] | None = None
    centred: bool = False


Vector = Float[Array, "B|1 1 C"]


def normed(
    x: Float[Array, "B T C"],
    norm: Norm,
    settings: Settings,
    scale: Vector | None = None,
    shift: Vector | None = None,
    wide=False,
) -> Float[Array, "B T C"] | None:
    """norm(x) * scale + shift in x's dtype, on all chips; None where the kernel does not take it.

    Args:
        wide: nothing is rounded before the end; else the norm is, and what is scaled.
    """
    if not settings.own_layers or x.dtype != jnp.bfloat16 or x.ndim != 3 or x.shape[2] % LANES:
        return None
    found = rows_over_mesh(x.shape, settings)
    if found is None or found.rows < min(found.least, LEAST_ROWS):
        return None
    vectors = {"weight": norm.weight, "bias": norm.bias, "scale": scale, "shift": shift}
    vectors = {name: a if a is None or a.ndim == 3 else a[None, None] for name, a in vectors.items()}
    names = [name for name, a in vectors.items() if a is not None]
    given = [vectors[name] for name in names]
    how = {"names": names, "eps": norm.eps, "centred": norm.centred, "wide": wide}
    specs = found.spec, *(P("dp" if found.mesh is not None and len(a) > 1 else None) for a in given)

    def run(x, *given):
        return found.run(functools.partial(_by_kernel, **how, interpret=settings.interpreted), (x, *given), specs)

    return (with_gradients_of(functools.partial(_plainly, **how), run) if settings.differentiable else run)(x, *given)


def mean_of(parts: Sequence[Float[Array, "R L"]]) -> Float[Array, "R 1"]:
    """Of rows that are these parts side by side."""
    return functools.reduce(jnp.add, parts).sum(axis=-1, keepdims=True) / sum(part.shape[-1] for part in parts)


def inverse_of(parts: Sequence[Float[Array, "R L"]], eps: float) -> Float[Array, "R 1"]:
    """1 / sqrt(mean(x^2) + eps) of such rows."""
    squares = functools.reduce(lambda total, part: total + part * part, parts, jnp.zeros_like(parts[0]))
    return lax.rsqrt(squares.sum(axis=-1, keepdims=True) / sum(part.shape[-1] for part in parts) + eps)


def _plainly(x, *given, names, eps, centred, wide):
    rows = x.astype(jnp.float32)
    rows = rows - rows.mean(-1, keepdims=True) if centred else rows
    return _followed(rows * inverse_of([rows], eps), dict(zip(names, given)), x.dtype, wide)


def _followed(x, vectors: dict, dtype, wide: bool):
    """The norm x in float32, with what is done to it."""

    def rounded(x):
        return x if wide else x.astype(dtype).astype(jnp.float32)

    for name, follow, last in (
        ("weight", jnp.multiply, False), ("bias", jnp.add, True), ("scale", jnp.multiply, True), ("shift", jnp.add, True)
    ):  # fmt: skip
        if name in vectors:
            x = follow(x, vectors[name].astype(jnp.float32))
        x = rounded(x) if last else x
    return x.astype(dtype)


def _by_kernel(x, *given, names, eps, centred, wide, interpret):
    batch, tokens, width = x.shape
    block_rows = max(1, BLOCK_BYTES // (width * x.dtype.itemsize) // TILE_ROWS) * TILE_ROWS
    parts = [slice(at, at + LANES) for at in range(0, width, LANES)]

    def tile(r, n):
        rows = pl.ds(pl.multiple_of(n * TILE_ROWS, TILE_ROWS), TILE_ROWS)

        def read(part):
            return r.x[rows, part].astype(jnp.float32)

        mean = mean_of([read(part) for part in parts]) if centred else 0.0
        inverse = inverse_of([read(part) - mean for part in parts], eps)
        for part in parts:
            vectors = {name: getattr(r, name)[:, part] for name in names}
            r.o[rows, part] = _followed((read(part) - mean) * inverse, vectors, x.dtype, wide)

    spec = pl.BlockSpec((None, block_rows, width), lambda b, t: (b, t, 0))
    operands = {"x": (x, spec)}
    for name, vector in zip(names, given):
        place = (lambda b, t: (b, 0, 0)) if len(vector) > 1 else (lambda b, t: (0, 0, 0))
        operands[name] = vector.astype(jnp.float32), pl.BlockSpec((None, 1, width), place)
    outputs = {"o": (jax.ShapeDtypeStruct(x.shape, x.dtype), spec)}
    how = {"parallel": 2, "work": cost(x, x, flops=10 * x.size), "interpret": interpret}
    grid = batch, pl.cdiv(tokens, block_rows)
    run = lambda r: pl.loop(0, block_rows // TILE_ROWS)(functools.partial(tile, r))  # noqa: E731
    return call_kernel(run, "norm_kernel", grid, operands, outputs, **how)["o"]
