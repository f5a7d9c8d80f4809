"""`F.interpolate`, where torchax lacks a mode or returns another dtype. torch itself says of which entries each value is made."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from torchax.tensor import Tensor

from .views import plain


def interpolate(
    torchax_interpolate,
    input,
    size=None,
    scale_factor=None,
    mode="nearest",
    align_corners=None,
    recompute_scale_factor=None,
    antialias=False,
):
    """torch's `F.interpolate`. `nearest` and `nearest-exact` keep the input's dtype; torchax's dtypes disagree in bfloat16.

    `antialias` filters as torch does; torchax does not support it.
    """
    x = input.jax()
    filtered = antialias and mode in ("bilinear", "bicubic")
    if not filtered and mode not in ("nearest", "nearest-exact"):
        rest = (size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
        return Tensor(torchax_interpolate(x, *rest), input._env)
    spatial = x.shape[2:]
    sizes, factors = (n if isinstance(n, (tuple, list)) else (n,) * len(spatial) for n in (size, scale_factor))
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32)) if filtered else x
    for axis, (wanted, factor) in enumerate(zip(sizes, factors), start=2):
        how = {"size": wanted if wanted is None else int(wanted), "scale_factor": factor, "mode": mode}
        how["recompute_scale_factor"] = recompute_scale_factor
        y = _filtered(y, axis, align_corners=align_corners, **how) if filtered else _nearest(y, axis, **how)
    return Tensor(y.astype(x.dtype), input._env)


def _filtered(x: jax.Array, axis: int, size, scale_factor, **how) -> jax.Array:
    """Maps resized along an axis: each value is a weighted mean of what it covers."""
    length = x.shape[axis]
    size, scale_factor = size and (size, length), scale_factor and (scale_factor, 1)
    with plain():
        weights = F.interpolate(torch.eye(length)[None, None], size, scale_factor, **how, antialias=True)[0, 0].numpy()
    return jnp.moveaxis(jnp.tensordot(x, weights, (axis, 1)), -1, axis)


def _nearest(x: jax.Array, axis: int, **how) -> jax.Array:
    length = x.shape[axis]
    with plain():
        places = F.interpolate(torch.arange(length, dtype=torch.float32).view(1, 1, -1), **how)
        places = places.int().flatten().numpy()
    times, rest = divmod(len(places), length)
    if rest == 0 and np.array_equal(places, np.repeat(np.arange(length), times)):
        return jnp.repeat(x, times, axis=axis)
    return jnp.take(x, places, axis=axis)
