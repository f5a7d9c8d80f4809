"""`F.interpolate`, where torchax lacks a mode or returns another dtype."""

import jax
import jax.numpy as jnp
import numpy as np
from torchax.tensor import Tensor


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
    filtered = antialias and mode in REACH
    if not filtered and mode not in ("nearest", "nearest-exact"):
        rest = (size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
        return Tensor(torchax_interpolate(x, *rest), input._env)
    spatial = x.shape[2:]
    factors = scale_factor if isinstance(scale_factor, (tuple, list)) else (scale_factor,) * len(spatial)
    sizes = size if isinstance(size, (tuple, list)) else (size,) * len(spatial)
    targets = [int(n * f) if wanted is None else int(wanted) for n, wanted, f in zip(spatial, sizes, factors)]
    if filtered:
        return Tensor(_filtered(x, targets, factors, mode, align_corners, recompute_scale_factor), input._env)
    for axis, (length, target, factor) in enumerate(zip(spatial, targets, factors), start=2):
        ratio = length / target if factor is None or recompute_scale_factor else 1.0 / factor
        x = _nearest(x, axis, target, ratio, 0.5 if mode == "nearest-exact" else 0.0)
    return Tensor(x, input._env)


REACH = {"bilinear": 1.0, "bicubic": 2.0}  # how far a filter reaches to each side


def _filtered(x: jax.Array, targets: list[int], factors, mode: str, align_corners, recompute) -> jax.Array:
    """Maps [N, C, H, W] resized to `targets`: each value is a weighted mean of what it covers (ATen, UpSampleKernel.cpp)."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    for axis, (length, target, factor) in enumerate(zip(x.shape[2:], targets, factors), start=2):
        if align_corners:
            step = (length - 1) / (target - 1) if target > 1 else 0.0
        else:
            step = length / target if factor is None or recompute else 1 / factor
        wide = jnp.moveaxis(jnp.tensordot(wide, _filter(length, target, step, mode), (axis, 1)), -1, axis)
    return wide.astype(x.dtype)


def _filter(length: int, target: int, step: float, mode: str) -> np.ndarray:
    """Weights [target, length]; each row sums to 1."""
    spread = max(step, 1.0)
    reach, centres = REACH[mode] * spread, step * (np.arange(target) + 0.5)
    first = np.maximum((centres - reach + 0.5).astype(int), 0)[:, None]
    last = np.minimum((centres + reach + 0.5).astype(int), length)[:, None]
    places = np.arange(length)
    away = np.abs((places + 0.5 - centres[:, None]) / spread)
    near = 1 - away if mode == "bilinear" else ((1.5 * away - 2.5) * away) * away + 1
    far = 0 if mode == "bilinear" else ((-0.5 * away + 2.5) * away - 4) * away + 2
    weights = np.where(away < 1, near, np.where(away < REACH[mode], far, 0)) * ((first <= places) & (places < last))
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)


def _nearest(x: jax.Array, axis: int, target: int, ratio: float, offset: float) -> jax.Array:
    length = x.shape[axis]
    if target % length == 0 and ratio == length / target:
        return jnp.repeat(x, target // length, axis=axis)
    index = jnp.floor((jnp.arange(target) + offset) * ratio).astype(jnp.int32)
    return jnp.take(x, jnp.minimum(index, length - 1), axis=axis)
