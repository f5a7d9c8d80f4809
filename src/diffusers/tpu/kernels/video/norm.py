"""Group norm of a map that may be sharded: statistics are of the whole map, without padding."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from ..pallas import LANES, ROWS, SUBLANES, call_kernel, cost, vmem_room, with_gradients_of
from ..settings import Settings, current
from .chunks import full_places
from .halo import halo_shards


Map = Float[Array, "B T H W C"]


def moments(x: Map, groups: int) -> tuple[Float[Array, "B G"], Float[Array, "B G"]]:
    """Mean and variance in float32 of each group of neighbouring channels, over all frames of the batch and the whole map.

    x is read once. The mean of its first column is subtracted before summing, to reduce cancellation. The sums of chips and
    channels are combined by Chan, Golub and LeVeque's formula for the variance of parts.
    """
    split, spread = halo_shards(), (1, 2, 3)
    pivot = x[:, :, :, :1].astype(jnp.float32).mean(spread)
    left = x.astype(jnp.float32) - pivot[:, None, None, None]
    own = None if split is None else split.own_positions(x.shape[2], x.shape[3])
    full = full_places(x.shape[1])
    count = jnp.float32(x[0, ..., 0].size)
    if own is not None:
        left = jnp.where(own[..., None], left, 0)
        count = x.shape[1] * own.sum(dtype=jnp.float32)
    if full is not None:
        left = jnp.where(full[:, None, None, None], left, 0)
        count = count * full.mean(dtype=jnp.float32)
    first, second = left.sum(spread), (left * left).sum(spread)
    mean = first / jnp.maximum(count, 1)
    parts = second - first * mean  # of each channel, the sum of squares around its mean
    means = (mean + pivot).reshape(len(x), groups, -1)
    everyone = (lambda a: a) if split is None or not split.axes else lambda a: lax.psum(a, split.axes)
    total = everyone(count) * means.shape[-1]
    whole = everyone(count * means.sum(-1)) / total
    around = parts.reshape(means.shape).sum(-1) + count * jnp.square(means - whole[..., None]).sum(-1)
    return whole, everyone(around) / total


def _group_norm(x: Map, weight, bias, groups: int, eps: float) -> tuple[Map, Map]:
    """(factor, summand) of each channel in float32: x normed is x * factor + summand."""
    mean, variance = (jnp.repeat(a, x.shape[-1] // groups, 1) for a in moments(x, groups))
    factor = lax.rsqrt(variance + eps) * weight.astype(jnp.float32)
    summand = bias.astype(jnp.float32) - mean * factor
    return factor[:, None, None, None], summand[:, None, None, None]


def normed(x: Map, weight, bias, groups: int, eps: float) -> Map:
    """Group norm of x, in its dtype. `weight`, `bias`: [C]."""
    factor, summand = _group_norm(x, weight, bias, groups, eps)
    return (x.astype(jnp.float32) * factor + summand).astype(x.dtype)


def normed_by_place(
    x: Map,
    weight,
    bias,
    groups: int,
    eps: float,
    scale: Float[Array, "B t h w C"],
    shift: Float[Array, "B t h w C"],
    silu: bool = False,
) -> Map:
    """Group norm of x, times `scale` plus `shift`, which are coarser maps: each of their positions applies to a block of x.

    If the number of frames is odd, the first is a block of its own. `silu`: it is applied to the rounded result.
    """
    factor, summand = _group_norm(x, weight, bias, groups, eps)
    scale, shift = (a.astype(jnp.float32) for a in (scale, shift))
    factor, summand = factor * scale, summand * scale + shift
    # The layout of convolutions: along the width a block is broadcast without a copy.
    columns, settings = x.transpose(0, 3, 1, 2, 4), current()
    factor, summand = (repeated_in_time(a, x.shape[1]).transpose(0, 3, 1, 2, 4) for a in (factor, summand))
    run = functools.partial(_applied, silu=silu)
    aligned = x.dtype == jnp.bfloat16 and not columns.shape[3] % ROWS and not columns.shape[4] % LANES
    if settings.own_layers and settings.chips == 1 and aligned:
        kernel = functools.partial(_applied_by_kernel, silu=silu, settings=settings)
        run = with_gradients_of(run, kernel) if settings.differentiable else kernel
    return run(columns, factor, summand).transpose(0, 2, 3, 1, 4)


def _applied(x: Float[Array, "B W T H C"], factor: Float[Array, "B w T h C"], summand, silu: bool):
    """x times `factor` plus `summand`, broadcast from coarser maps, then SiLU if `silu`."""
    factor, summand = (_with_rows(a, x.shape[3])[:, :, None] for a in (factor, summand))
    wide = x.reshape(len(x), factor.shape[1], -1, *x.shape[2:]).astype(jnp.float32) * factor + summand
    return _rounded(wide, x.dtype, silu).reshape(x.shape)


def _applied_by_kernel(x, factor, summand, silu: bool, settings: Settings):
    """`_applied` in one pass: the compiler writes the broadcast coarse maps, in float32, and reads them again."""
    batch, columns, frames, rows, channels = x.shape
    if rows != SUBLANES * factor.shape[3]:  # else a row of the coarse map covers whole registers
        factor, summand = (_with_rows(a, rows) for a in (factor, summand))
    across, coarse = columns // factor.shape[1], factor.shape[3]

    def of_block(r):
        def of_column(column):
            def spread(a):
                if coarse == rows:
                    return a[...]
                return jnp.broadcast_to(a[...][:, None], (coarse, SUBLANES, channels)).reshape(rows, channels)

            wide = r.x[column].astype(jnp.float32) * spread(r.factor) + spread(r.summand)
            r.o[column] = _rounded(wide, x.dtype, silu)

        pl.loop(0, across)(of_column)

    block = pl.BlockSpec((None, across, None, rows, channels), lambda b, w, t: (b, w, t, 0, 0))
    of_coarse = pl.BlockSpec((None, None, None, coarse, channels), lambda b, w, t: (b, w, t, 0, 0))
    return call_kernel(
        of_block,
        "norm_kernel_by_place",
        (batch, columns // across, frames),
        {"x": (x, block), "factor": (factor, of_coarse), "summand": (summand, of_coarse)},
        {"o": (jax.ShapeDtypeStruct(x.shape, x.dtype), block)},
        parallel=3,
        work=cost(x, x, factor, summand, flops=4 * x.size, transcendentals=2 * x.size * silu),
        interpret=settings.interpreted,
        vmem_bytes=vmem_room(settings.generation),  # tall maps need more than the default
    )["o"]


def _rounded(wide, dtype, silu: bool):
    out = wide.astype(dtype)
    return jax.nn.silu(out.astype(jnp.float32)).astype(dtype) if silu else out


def _with_rows(x, rows: int):
    """A coarse map repeated to `rows` rows."""
    return x if x.shape[3] == rows else jnp.repeat(x, rows // x.shape[3], 3)


def repeated_in_time(x: Map, frames: int) -> Map:
    """x repeated to `frames` frames: each equally often, except that of an odd number of frames the first stays one."""
    if frames == x.shape[1]:
        return x
    first = frames % 2 if frames > 1 else 0
    rest = x[:, first:]
    return jnp.concatenate([x[:, :first], jnp.repeat(rest, (frames - first) // rest.shape[1], 1)], 1)
