"""Layer or RMS norm of tokens over all channels, and operations on its result, in one pass.

The compiler takes three passes: for the mean, for the deviation and for the result. This kernel reads x once and writes once,
and rounds where upstream does.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from .pallas import LANES, SUBLANES, call_kernel, cost, in_steps, with_gradients_of
from .rows import rows_over_mesh, whole_lanes
from .settings import Settings


BLOCK_BYTES = 5 << 19  # of x, and of the result: two buffers each
LEAST_ROWS = 256  # of a chip; with fewer the compiler is no slower
# Bytes of a chip (True: narrow rows), below which rows stay in VMEM: SD 1.5's step on v6e-1 takes 5.6 ms, by the kernel 5.8.
LEAST_WIDTH, LEAST_BYTES = 1024, {True: 8 << 20, False: 2 << 20}
# In registers at once, one row of lanes of them (True: narrow rows, which wait for their sums: 32,768 of 320 columns take v6e 46 us
# by 32 rows, 31 by 64).
TILE_ROWS = {True: 64, False: 32}


@dataclass(frozen=True)
class Norm:
    """(x - mean) / sqrt(variance + eps) * weight + bias, or x / sqrt(mean(x^2) + eps) * weight.

    Attributes:
        weight, bias: of all channels, or of the D entries of a head: then each head is normalised by itself.
        centred: layer norm, not RMS.
    """

    weight: Float[Array, " C|D"] | None
    eps: float
    bias: Float[Array, " C|D"] | None = None
    centred: bool = False


Step = tuple[str, Float[Array, "B|1 1 C"]]  # a name in `OPERATIONS`, and its operand
OPERATIONS = {"times": jnp.multiply, "plus": jnp.add}


def normed(
    x: Float[Array, "B T C"], norm: Norm, settings: Settings, steps: tuple[Step, ...] = (), wide: bool = False
) -> Float[Array, "B T C"] | None:
    """The norm of x, followed by `steps`, in x's dtype, on all chips; None for a call that the kernel does not support.

    Args:
        wide: only the result is rounded; else the norm and each step are.
    """
    if not settings.own_layers or x.dtype != jnp.bfloat16 or x.ndim != 3 or not whole_lanes(x.shape[2]):
        return None
    found = rows_over_mesh(x.shape, settings)
    least = max(LEAST_ROWS, LEAST_BYTES[x.shape[2] < LEAST_WIDTH] // (2 * x.shape[2]))
    if found is None or found.rows < least and found.least > 1:
        return None
    own = [(name, a[None, None]) for name, a in (("times", norm.weight), ("plus", norm.bias)) if a is not None]
    names, vectors = zip(*own, *steps) if own or steps else ((), ())
    how = {"names": names, "own": len(own), "eps": norm.eps, "centred": norm.centred, "wide": wide}
    specs = found.spec, *(P("dp" if found.mesh is not None and len(a) > 1 else None) for a in vectors)

    def run(x, *vectors):
        return found.run(functools.partial(_of_samples, **how, interpret=settings.interpreted), (x, *vectors), specs)

    run = with_gradients_of(functools.partial(_plainly, **how), run) if settings.differentiable else run
    return run(x, *vectors)


def mean_of(parts: Iterable[Float[Array, "R L"]]) -> Float[Array, "R 1"]:
    """The mean of rows that are these parts side by side."""
    sums, width = {}, 0
    for part in parts:
        last = part.shape[-1]
        sums[last], width = sums[last] + part if last in sums else part, width + last
    return sum(total.sum(axis=-1, keepdims=True) for total in sums.values()) / width


def inverse_of(parts: Iterable[Float[Array, "R L"]], eps: float) -> Float[Array, "R 1"]:
    """1 / sqrt(mean(x^2) + eps) of such rows."""
    return lax.rsqrt(mean_of(part * part for part in parts) + eps)


def _plainly(x, *vectors, eps, centred, **how):
    rows = x.astype(jnp.float32)
    rows = rows - rows.mean(-1, keepdims=True) if centred else rows
    return _followed(rows * inverse_of([rows], eps), vectors, x.dtype, **how)


def _followed(x, vectors, dtype, names: tuple[str, ...], own: int, wide: bool):
    """The norm x in float32 with operations applied; the first `own` are the norm's weight and bias."""
    for n, (name, vector) in enumerate(zip(names, vectors)):
        if n >= own and not wide:
            x = x.astype(dtype).astype(jnp.float32)
        x = OPERATIONS[name](x, vector.astype(jnp.float32))
    return x.astype(dtype)


def _by_kernel(x, *vectors, eps, centred, interpret, **how):
    batch, tokens, width = x.shape
    tile_rows = TILE_ROWS[width < LEAST_WIDTH]
    tiles = max(1, BLOCK_BYTES // (width * x.dtype.itemsize) // tile_rows)
    block_rows = min(tiles, pl.cdiv(tokens, tile_rows)) * tile_rows
    parts = [slice(at, min(at + LANES, width)) for at in range(0, width, LANES)]

    def tile(r, rows):
        def read(part):
            return r.x[rows, part].astype(jnp.float32)

        mean = mean_of(map(read, parts)) if centred else 0.0
        inverse = inverse_of((read(part) - mean for part in parts), eps)
        for part in parts:
            there = [getattr(r, f"vector{n}")[:, part] for n in range(len(vectors))]
            r.o[rows, part] = _followed((read(part) - mean) * inverse, there, x.dtype, **how)

    spec = pl.BlockSpec((None, block_rows, width), lambda b, t: (b, t, 0))
    operands = {"x": (x, spec)}
    for n, vector in enumerate(vectors):
        place = (lambda b, t: (b, 0, 0)) if len(vector) > 1 else (lambda b, t: (0, 0, 0))
        operands[f"vector{n}"] = vector.astype(jnp.float32), pl.BlockSpec((None, 1, width), place)
    outputs = {"o": (jax.ShapeDtypeStruct(x.shape, x.dtype), spec)}
    work = {"parallel": 2, "work": cost(x, x, flops=10 * x.size), "interpret": interpret}
    grid = batch, pl.cdiv(tokens, block_rows)
    run = lambda r: in_steps(block_rows, tile_rows, functools.partial(tile, r))  # noqa: E731
    return call_kernel(run, "norm_kernel", grid, operands, outputs, **work)["o"]


def _of_samples(x, *vectors, **how):
    """As `_by_kernel`; rows of samples that fill no block are one sample's where the vectors are the same for all, in the order in
    which layers leave them (`linear`)."""
    batch, tokens, width = x.shape
    turns, short = tokens % SUBLANES != 0, tokens * width * x.dtype.itemsize < BLOCK_BYTES
    filled, alike = not (batch if turns else tokens) % SUBLANES, all(len(a) == 1 for a in vectors)
    if batch == 1 or not (short and filled and alike):
        return _by_kernel(x, *vectors, **how)
    rows = jnp.swapaxes(x, 0, 1) if turns else x
    out = _by_kernel(rows.reshape(1, -1, width), *vectors, **how).reshape(rows.shape)
    return jnp.swapaxes(out, 0, 1) if turns else out
