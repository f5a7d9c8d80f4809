"""Group norm of a map that may lie over chips: statistics are of the whole map's own positions."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .chunks import full_places
from .halo import halo_shards


Map = Float[Array, "B T H W C"]


def moments(x: Map, groups: int) -> tuple[Float[Array, "B G"], Float[Array, "B G"]]:
    """Mean and variance in float32 of each group of neighbouring channels, over all frames of the batch and the whole map.

    Read once: sums are of what is left of x without the mean of its first column, so that they cancel little, and what chips
    and channels have is put together by Chan, Golub and LeVeque's formula for the variance of parts.
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
    x: Map, weight, bias, groups: int, eps: float, scale: Float[Array, "B t h w C"], shift: Float[Array, "B t h w C"]
) -> Map:
    """Group norm of x, times `scale` plus `shift`, which are of a coarser map: each of its positions is of a block of x.

    A first frame of an odd number of them is a block of its own.
    """
    factor, summand = _group_norm(x, weight, bias, groups, eps)
    scale, shift = (a.astype(jnp.float32) for a in (scale, shift))
    factor, summand = factor * scale, summand * scale + shift
    factor, summand = (_spread(a, x.shape[1], x.shape[2]).transpose(0, 3, 1, 2, 4) for a in (factor, summand))
    # As convolutions have them: the width is where a block is spread without a copy.
    columns = x.transpose(0, 3, 1, 2, 4)
    columns = columns.reshape(len(x), factor.shape[1], -1, *columns.shape[2:])
    out = (columns.astype(jnp.float32) * factor[:, :, None] + summand[:, :, None]).astype(x.dtype)
    return out.reshape(len(x), -1, *out.shape[3:]).transpose(0, 2, 3, 1, 4)


def _spread(x, frames: int, height: int):
    """A coarse map with these frames and rows."""
    x = repeated_in_time(x, frames)
    return x if x.shape[2] == height else jnp.repeat(x, height // x.shape[2], 2)


def repeated_in_time(x: Map, frames: int) -> Map:
    """So many frames: each as often as the others, the first of an odd number of them once."""
    if frames == x.shape[1]:
        return x
    first = frames % 2 if frames > 1 else 0
    rest = x[:, first:]
    return jnp.concatenate([x[:, :first], jnp.repeat(rest, (frames - first) // rest.shape[1], 1)], 1)
