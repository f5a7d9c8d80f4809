"""Operators that torchax 0.0.13 lacks or gets wrong for diffusers; each one has a test that fails without it."""

import functools

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from torchax.ops import mappings
from torchax.tensor import Tensor

from ..kernels.attention.api import attention
from ..kernels.video.halo import NotByShards, halo_shards
from ..kernels.video.norm import normed
from . import convolutions, indexing, joined, layers, norms, resizing, views


aten = torch.ops.aten


def register(env):
    """Register every operator of this file in the environment."""

    def over(ours, function):  # ours, with torchax's operator as its first argument
        return functools.partial(ours, env._get_op_or_decomp(function).func)

    ours = {
        F.scaled_dot_product_attention: scaled_dot_product_attention,
        aten.scaled_dot_product_attention: scaled_dot_product_attention,
        F.interpolate: over(resizing.interpolate, F.interpolate),
        F.pad: over(convolutions.padded, F.pad),
        torch.cat: joined.cat,
        F.layer_norm: norms.layer_norm,
        F.rms_norm: norms.rms_norm,
        F.group_norm: group_norm,
        aten.convolution.default: over(convolutions.convolution, aten.convolution.default),
        aten._is_all_true.default: is_all_true,
        aten.copy_.default: copy_,
        aten.cumsum_.default: lambda x, dim, dtype=None: x.copy_(x.cumsum(dim, dtype=dtype)),
        aten._softmax.default: lambda x, dim, half_to_float: softmax(x, dim, torch.float32 if half_to_float else None),
        aten.softmax.int: softmax,
    }
    for overload in (aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default):
        ours[overload] = over(_mean_of_windows, overload)
    for overload in (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.matmul.default):
        ours[overload] = over(_product, overload)
    ours[torch.einsum] = over(_einsum, torch.einsum)
    for overload in (aten.silu.default, aten.gelu.default, aten.sigmoid.default):
        ours[overload] = functools.partial(layers.activated, overload, over(_in_float32, overload))
    for overload in (
        *(aten.sum.default, aten.sum.dim_IntList, aten.nansum.default, aten.mean.default, aten.mean.dim),
        *(aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dtype, aten.norm.ScalarOpt_dim_dtype),
        *(aten.prod.default, aten.prod.dim_int, aten.cumsum.default, aten.cumprod.default),
    ):
        ours[overload] = functools.partial(_cast_before, env._get_op_or_decomp(overload))
    squeezes = aten.squeeze_.default, aten.squeeze_.dim, aten.squeeze_.dims
    for operator, *overloads in (
        (aten.unsqueeze, aten.unsqueeze_.default),
        (aten.squeeze, *squeezes),
        (aten.transpose, aten.transpose_.default),
        (aten.t, aten.t_.default),
    ):
        ours |= dict.fromkeys(overloads, functools.partial(views.shaped_in_place, operator))
    ours[aten.sum.dim_IntList] = functools.partial(norms.summed, ours[aten.sum.dim_IntList])
    for function, operator in ours.items():
        env.override_op_definition(function, operator)
    indexing.register(env, over)
    layers.register(env)
    Tensor.type_as, Tensor.new_tensor = type_as, new_tensor


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """torch's SDPA on the TPU path: any leading axes, every argument as in torch; dropout draws as torch does on the CPU."""
    if dropout_p:
        if attn_mask is not None and attn_mask.dtype == torch.bool:  # this operator of torch would add it
            attn_mask = torch.where(attn_mask, 0.0, -torch.inf).to(query.dtype)
        by_torch = aten._scaled_dot_product_attention_math
        return by_torch(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
    env = query._env
    q, k, v = (x.jax() for x in (query, key, value))
    mask = None if attn_mask is None else attn_mask.jax()
    lead = jnp.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    if 0 in (*q.shape, *k.shape, *v.shape):
        return Tensor(jnp.zeros((*lead, *q.shape[-3:-1], v.shape[-1]), q.dtype), env)
    q4, k4, v4 = (_four_axes(x, lead) for x in (q, k, v))
    if mask is not None and (mask.ndim > 4 or len(lead) > 1 and mask.ndim == 4):
        mask = jnp.broadcast_to(mask, (*lead, *mask.shape[-3:])).reshape(-1, *mask.shape[-3:])
    if halo_shards() is not None and not halo_shards().keys_here:
        if mask is not None or is_causal:
            raise NotByShards("expected attention over a split map without a mask, got one")
        k4, v4, mask = halo_shards().everyones(k4, v4)
    out = attention(q4, k4, v4, mask=mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    return Tensor(out.reshape(*lead, *q.shape[-3:-1], v.shape[-1]) if q.ndim != 4 else out, env)


def _four_axes(x: jax.Array, lead: tuple[int, ...]) -> jax.Array:
    if x.ndim == 4 and lead == x.shape[:-3]:
        return x
    x = x[None] if x.ndim == 2 else x
    return jnp.broadcast_to(x, (*lead, *x.shape[-3:])).reshape(-1, *x.shape[-3:])


def group_norm(input, num_groups, weight=None, bias=None, eps=1e-5):
    """Layer norm over each group of channels of [N, C, ...] in float32; on a shard with the statistics of the whole map."""
    shape = input.shape
    if shape[1] % num_groups:
        raise ValueError(f"expected channels that {num_groups} groups divide, got input {list(shape)}")
    if halo_shards() is not None:
        return Tensor(_normed_shard(input.jax(), num_groups, weight, bias, eps), input._env)
    x = input.jax().astype(jnp.float32).reshape(shape[0], num_groups, shape[1] // num_groups, *shape[2:])
    x = norms.standardised(x, tuple(range(2, x.ndim)), eps).reshape(shape)
    return norms.affine(input, x, weight, bias, trailing=len(shape) - 2)


def _normed_shard(x: jax.Array, groups: int, weight, bias, eps: float) -> jax.Array:
    """Group norm of a shard [N, C, H, W], of its frames [N, C, T, H, W], or of its flattened positions [N, C, H * W]."""
    rows_and_columns = halo_shards().of_positions(x.shape[2]) if x.ndim == 3 else x.shape[-2:]
    maps = jnp.moveaxis(x.reshape(*x.shape[:2], -1, *rows_and_columns), 1, -1)
    weight = jnp.ones(x.shape[1]) if weight is None else weight.jax()
    bias = jnp.zeros(x.shape[1]) if bias is None else bias.jax()
    return jnp.moveaxis(normed(maps, weight, bias, groups, eps), -1, 1).reshape(x.shape)


def _product(plain, *factors, **kwargs):
    """torchax's product; `check_kinds` refuses integers beside floats, which torchax would convert."""
    arrays = [x.jax() for x in factors]
    layers.check_kinds(*arrays)
    return Tensor(plain(*arrays, **kwargs), factors[0]._env)


def _einsum(plain, equation, *factors):
    factors = factors[0] if isinstance(factors[0], (list, tuple)) else factors
    layers.check_kinds(*(x.jax() for x in factors))
    return Tensor(plain(equation, *(x.jax() for x in factors)), factors[0]._env)


def _in_float32(jax_function, x, *args, **kwargs):
    """The operator computed in float32 and rounded once, as torch does it; JAX rounds every step inside."""
    array = x.jax()
    wide = array.astype(jnp.float32) if array.dtype in (jnp.bfloat16, jnp.float16) else array
    result = jax_function(wide, *args, **kwargs)
    return Tensor(result.astype(array.dtype) if wide is not array else result, x._env)


def _cast_before(operator, x, *args, dtype=None, **kwargs):
    """A reduction whose tensor is first cast to `dtype`, as in torch; integers of fewer bits to int32. torchax ignores `dtype`, or
    raises, and sums in 8 or 16 bits."""
    array = x.jax()
    if dtype is not None or (jnp.issubdtype(array.dtype, jnp.integer) and array.itemsize < 4):
        array = array.astype(jnp.int32 if dtype is None else mappings.t2j_dtype(dtype))
    if operator.is_jax_function:
        return Tensor(operator.func(array, *args, **kwargs), x._env)
    return operator.func(Tensor(array, x._env), *args, **kwargs)


def _mean_of_windows(
    plain, x, size, stride=(), padding=(0,), ceil_mode=False, count_include_pad=True, divisor_override=None
):
    """torchax's; with `ceil_mode` a window may end beyond the map. Its mean is of entries inside, and of padding if that counts."""
    array, stride, padding = x.jax(), stride or size, list(padding)
    if not ceil_mode:
        result = plain(array, size, stride, padding, ceil_mode, count_include_pad, divisor_override)
        return Tensor(result, x._env)
    sums = plain(array.astype(jnp.float32), size, stride, padding, True, True, 1)
    inside, around = jnp.ones(array.shape[-len(size) :]), [(pad, pad) for pad in padding]
    counted = jnp.pad(inside, around, constant_values=float(count_include_pad))
    # Padding that is part of a map may begin one more window.
    counts = plain(counted[None], size, stride, [0], True, True, 1)[:, *map(slice, sums.shape[-len(size) :])]
    return Tensor((sums / (divisor_override or counts)).astype(array.dtype), x._env)


def copy_(x, source, non_blocking=False):
    """Write the values of `source`, broadcast to x's shape, into x; torchax also changes x's shape."""
    x._elem = jnp.broadcast_to(x._env.moved(source).jax().astype(x.jax().dtype), x.shape)
    return x


def is_all_true(x):
    """The test of `torch._check_tensor_all`. For traced values it is assumed to hold, as in `torch.compile`."""
    if isinstance(x.jax(), jax.core.Tracer):
        with jax.ensure_compile_time_eval():
            return Tensor(jnp.ones((), jnp.bool_), x._env)
    return Tensor(x.jax().all(), x._env)


def softmax(x, dim, dtype=None):
    """Softmax in float32, returned in `dtype`, which torchax ignores."""
    array = x.jax()
    result = jax.nn.softmax(array.astype(jnp.promote_types(array.dtype, jnp.float32)), axis=dim)
    return Tensor(result.astype(array.dtype if dtype is None else mappings.t2j_dtype(dtype)), x._env)


def type_as(self, other):
    """The tensor in other's dtype; a new tensor if that differs, where torchax changes `self` in place."""
    if self.dtype == other.dtype:
        return self
    if joined.is_joined(self):
        return self.to(other.dtype)
    return layers.cast(self, Tensor(self.jax().astype(mappings.t2j_dtype(other.dtype)), self._env))


def new_tensor(self, data, *, dtype=None, device=None, requires_grad=False):
    """A tensor of the values of `data`, where torch's would have none, on its meta device."""
    return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device, requires_grad=requires_grad)
