"""Operators that torchax 0.0.13 lacks or gets wrong for diffusers; each one has a test that fails without it."""

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from torchax.ops import mappings
from torchax.tensor import Tensor

from ..attention.api import attention


def register(env):
    """Put every operator of this file into the environment."""
    env.override_op_definition(F.scaled_dot_product_attention, scaled_dot_product_attention)
    env.override_op_definition(torch.ops.aten.scaled_dot_product_attention, scaled_dot_product_attention)
    env.override_op_definition(F.interpolate, _interpolate(env))
    for function, norm in ((F.layer_norm, layer_norm), (F.rms_norm, rms_norm), (F.group_norm, group_norm)):
        env.override_op_definition(function, norm)
    Tensor.type_as = type_as


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """torch's SDPA on the TPU path: any leading axes, every argument with torch's meaning.

    Raises NotImplementedError for dropout, which inference has not.
    """
    if dropout_p:
        raise NotImplementedError(f"expected dropout_p 0 on the TPU path, got {dropout_p}; call .eval() on the model")
    env = query._env
    q, k, v = (x.jax() for x in (query, key, value))
    mask = None if attn_mask is None else attn_mask.jax()
    lead = jnp.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    q4, k4, v4 = (_four_axes(x, lead) for x in (q, k, v))
    if mask is not None and mask.ndim > 4:
        mask = jnp.broadcast_to(mask, (*lead, *mask.shape[-3:])).reshape(-1, *mask.shape[-3:])
    out = attention(q4, k4, v4, mask=mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    return Tensor(out.reshape(*q.shape[:-1], v.shape[-1]) if q.ndim != 4 else out, env)


def _four_axes(x: jax.Array, lead: tuple[int, ...]) -> jax.Array:
    if x.ndim == 4 and lead == x.shape[:-3]:
        return x
    x = x[None] if x.ndim == 2 else x
    return jnp.broadcast_to(x, (*lead, *x.shape[-3:])).reshape(-1, *x.shape[-3:])


def layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    """(x - mean) / sqrt(variance + eps) * weight + bias in float32, as torch computes it; torchax rounds every step."""
    axes = tuple(range(-len(normalized_shape), 0))
    x = input.jax().astype(jnp.float32)
    x = x - x.mean(axes, keepdims=True)
    x = x * jax.lax.rsqrt((x * x).mean(axes, keepdims=True) + eps)
    return _affine(input, x, weight, bias)


def rms_norm(input, normalized_shape, weight=None, eps=None):
    """x / sqrt(mean(x^2) + eps) * weight in float32."""
    axes = tuple(range(-len(normalized_shape), 0))
    x = input.jax().astype(jnp.float32)
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    return _affine(input, x * jax.lax.rsqrt((x * x).mean(axes, keepdims=True) + eps), weight, None)


def group_norm(input, num_groups, weight=None, bias=None, eps=1e-5):
    """Layer norm over each group of channels of [N, C, ...] in float32."""
    shape = input.shape
    if shape[1] % num_groups:
        raise ValueError(f"expected channels that {num_groups} groups divide, got input {list(shape)}")
    x = input.jax().astype(jnp.float32).reshape(shape[0], num_groups, shape[1] // num_groups, *shape[2:])
    axes = tuple(range(2, x.ndim))
    x = x - x.mean(axes, keepdims=True)
    x = (x * jax.lax.rsqrt((x * x).mean(axes, keepdims=True) + eps)).reshape(shape)
    return _affine(input, x, weight, bias, trailing=len(shape) - 2)


def _affine(input, x: jax.Array, weight, bias, trailing: int = 0):
    if weight is not None:
        x = x * weight.jax().reshape(*weight.shape, *(1,) * trailing)
    if bias is not None:
        x = x + bias.jax().reshape(*bias.shape, *(1,) * trailing)
    return Tensor(x.astype(input.jax().dtype), input._env)


def type_as(self, other):
    """A new tensor in other's dtype. torchax changes `self` in place, and with it every other name of the tensor."""
    return self._env.j2t_iso(self.jax().astype(mappings.t2j_dtype(other.dtype)))


def _interpolate(env):
    """`nearest` and `nearest-exact` in the input's dtype: torchax's way returns dtypes that disagree in bfloat16."""
    torchax_interpolate = env._get_op_or_decomp(F.interpolate).func

    def interpolate(
        input,
        size=None,
        scale_factor=None,
        mode="nearest",
        align_corners=None,
        recompute_scale_factor=None,
        antialias=False,
    ):
        x = input.jax()
        if mode not in ("nearest", "nearest-exact"):
            rest = (size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
            return Tensor(torchax_interpolate(x, *rest), input._env)
        spatial = x.shape[2:]
        factors = scale_factor if isinstance(scale_factor, (tuple, list)) else (scale_factor,) * len(spatial)
        sizes = size if isinstance(size, (tuple, list)) else (size,) * len(spatial)
        for axis, (length, wanted, factor) in enumerate(zip(spatial, sizes, factors), start=2):
            target = int(length * factor) if wanted is None else int(wanted)
            ratio = length / target if factor is None or recompute_scale_factor else 1.0 / factor
            x = _nearest(x, axis, target, ratio, 0.5 if mode == "nearest-exact" else 0.0)
        return Tensor(x, input._env)

    return interpolate


def _nearest(x: jax.Array, axis: int, target: int, ratio: float, offset: float) -> jax.Array:
    length = x.shape[axis]
    if target % length == 0 and ratio == length / target:
        return jnp.repeat(x, target // length, axis=axis)
    index = jnp.floor((jnp.arange(target) + offset) * ratio).astype(jnp.int32)
    return jnp.take(x, jnp.minimum(index, length - 1), axis=axis)
