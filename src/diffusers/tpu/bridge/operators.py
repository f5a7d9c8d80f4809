"""Operators that torchax 0.0.13 lacks or gets wrong for diffusers; each one has a test that fails without it."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torchax.ops import mappings
from torchax.tensor import Tensor

from ..kernels import convolution as convolution_kernel
from ..kernels import depthwise
from ..kernels.attention.api import attention
from ..kernels.kept import layer_result
from ..kernels.settings import current, using
from ..kernels.video.chunks import Behind
from ..kernels.video.convolution import by_columns
from ..kernels.video.halo import NotByShards, halo_shards, shard_width
from ..kernels.video.norm import normed
from . import indexing, joined, layers, norms, resizing, views
from .layers import how_it_lies
from .made_of import made_of, operands


aten = torch.ops.aten


def register(env):
    """Register every operator of this file in the environment."""

    def over(ours, function):  # ours, with torchax's operator as its first argument
        return functools.partial(ours, env._get_op_or_decomp(function).func)

    ours = {
        F.scaled_dot_product_attention: scaled_dot_product_attention,
        aten.scaled_dot_product_attention: scaled_dot_product_attention,
        F.interpolate: over(resizing.interpolate, F.interpolate),
        F.pad: over(_pad, F.pad),
        torch.cat: joined.cat,
        F.layer_norm: norms.layer_norm,
        F.rms_norm: norms.rms_norm,
        F.group_norm: group_norm,
        aten.convolution.default: over(_at_its_precision, aten.convolution.default),
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


WITH_NEIGHBOURS = "columns of the neighbours stand beside a shard already, rows at its ends are to be repeated"


def joined_in_time(environment, frames: Behind) -> Tensor:
    """Frames [B, C, t, H, W] after earlier ones; records `frames`, to which a convolution adds the neighbours' columns itself."""
    return made_of(Tensor(frames.joined(), environment), joined_in_time, frames)


def _with_neighbours(input, split, left: int, right: int, repeated: bool = False) -> jax.Array:
    """`HaloShards.with_neighbours` of a tensor. One of `joined_in_time` becomes a slice of the result: memory holds it once."""
    (behind,) = operands(input, joined_in_time) or (None,)
    beside = split.with_neighbours(behind or input.jax(), left, right, repeated=repeated)
    if behind:
        input._elem = beside[..., left : left + input.shape[-1]]
    return beside


def _product(plain, *factors, **kwargs):
    """torchax's product; `check_kinds` refuses integers beside floats, which torchax would convert."""
    arrays = [x.jax() for x in factors]
    layers.check_kinds(*arrays)
    return Tensor(plain(*arrays, **kwargs), factors[0]._env)


def _einsum(plain, equation, *factors):
    factors = factors[0] if isinstance(factors[0], (list, tuple)) else factors
    layers.check_kinds(*(x.jax() for x in factors))
    return Tensor(plain(equation, *(x.jax() for x in factors)), factors[0]._env)


def _pad(torchax_pad, input, pad, mode="constant", value=None):
    """`F.pad`. Zeros are recorded, for a convolution to pad itself. Along a split width neighbours' columns replace the padding."""
    x, split = input.jax(), halo_shards()
    if split is not None and mode == "replicate" and len(pad) == 2 * (x.ndim - 2) and max(pad[:2]) <= 1:
        widths = [(0, 0)] * 2 + list(zip(pad[-2::-2], pad[-1::-2]))
        beside = _with_neighbours(input, split, *widths[-1], repeated=True)
        padded = jnp.pad(beside, [*widths[:-1], (0, 0)], mode="edge")
        return made_of(Tensor(padded, input._env), WITH_NEIGHBOURS, beside, widths[2:-1])
    if mode != "constant" or value not in (None, 0) or min(pad, default=0) < 0:
        if split is not None and any(pad[:2]):
            raise NotByShards(f"expected zeros around a split map, got {pad} of mode {mode!r}, value {value}")
        return Tensor(torchax_pad(x, pad, mode, value), input._env)
    widths = [(0, 0)] * (x.ndim - len(pad) // 2) + list(zip(pad[-2::-2], pad[-1::-2]))
    padded = x if split is None else split.with_neighbours(x, *widths[-1])
    padded = jnp.pad(padded, widths if split is None else [*widths[:-1], (0, 0)])
    return made_of(Tensor(padded, input._env), F.pad, input, x, widths)


def _at_its_precision(torchax_convolution, *args):
    with jax.default_matmul_precision(current().convolutions):
        compute = functools.partial(_convolution, torchax_convolution)
        result, w = _by_images(compute, *args), args[1]
        result = compute(*args) if result is None else result
    if math.prod(w.shape[2:]) == 1 or not current().differentiable:
        return result
    return Tensor(layer_result(result.jax(), w[0].numel()), result._env)


def _by_images(compute: Callable, input, weight, bias, stride, *others) -> Tensor | None:
    """The result of `compute` with whole images distributed over all chips; None where most chips would get none, or for patches.

    The partitioner would split the maps for each convolution anew, and exchange halos.
    """
    settings, count = current(), len(input)
    patches = tuple(stride) == tuple(weight.shape[2:])
    if settings.chips == 1 or halo_shards() is not None or input.ndim != 4 or patches or 2 * count < settings.chips:
        return None

    def local(*arrays):
        with using(replace(settings, mesh=None)):
            given = (None if array is None else Tensor(array, input._env) for array in arrays)
            return compute(*given, stride, *others).jax()

    over = P(settings.mesh.axis_names)
    run = jax.shard_map(local, mesh=settings.mesh, in_specs=(over, P(), P()), out_specs=over, check_vma=False)
    x = jnp.pad(input.jax(), [(0, -count % settings.chips), *[(0, 0)] * 3])
    return Tensor(run(x, weight.jax(), None if bias is None else bias.jax())[:count], input._env)


def _convolution(
    torchax_convolution, input, weight, bias, stride, padding, dilation, transposed, output_padding, groups
):
    """Convolution summed in float32 with its bias and rounded once; transposed ones are torchax's, in float32."""
    x, w = input.jax(), weight.jax()
    b = None if bias is None else bias.jax()
    split = halo_shards()
    if transposed or x.ndim != w.ndim:
        if split is not None:
            raise NotByShards("expected a convolution of a split map, got a transposed one")
        wide = [a.astype(jnp.promote_types(a.dtype, jnp.float32)) for a in (x, w)]
        apart = groups if transposed and groups < x.shape[1] else 1  # torchax mixes groups of several channels
        how = None, stride, padding, dilation, transposed, output_padding, groups // apart
        pieces = zip(jnp.split(wide[0], apart, 1), jnp.split(wide[1], apart))
        result = jnp.concatenate([torchax_convolution(*piece, *how) for piece in pieces], 1)
        result = result if b is None else result + b.astype(result.dtype).reshape(-1, *(1,) * (w.ndim - 2))
        return Tensor(result.astype(x.dtype), input._env)
    axes = w.ndim - 2
    stride, padding, dilation = (tuple(s) * (axes if len(s) == 1 else 1) for s in (stride, padding, dilation))
    padded, x, widths = operands(input, F.pad) or (input, x, [(0, 0)] * x.ndim)
    padded = padded if padded.jax() is x else Tensor(x, input._env)  # it was written to since
    widths = [(p + left, p + right) for p, (left, right) in zip(padding, widths[2:])]
    beside, repeated = operands(input, WITH_NEIGHBOURS) or (None, [])
    if split is not None and w.shape[-1] > 1 and beside is None:
        if widths[-1] == (0, 0):
            raise NotByShards("expected a convolution of a split map to be padded along the width, got one without")
        x, widths[-1] = _with_neighbours(padded, split, *widths[-1]), (0, 0)
    simple, taps = dilation == (1,) * axes and groups == 1, w.shape[2:]
    if split is not None and stride == (1,) * axes and simple and not (axes == 2 and x.dtype == jnp.bfloat16):
        rows_repeated = axes == 3 and repeated == [(0, 0), (1, 1)] and not any(map(any, widths))
        x, widths = (beside, [*repeated, (0, 0)]) if rows_repeated else (x, widths)
        how = x, w, b, widths[:-1], rows_repeated
        result = Tensor(_by_columns(*how), input._env)
        return layers.takes_residual(result, lambda residual: _by_columns(*how, residual))
    if dilation == stride == (1,) * axes and groups == x.shape[1] == len(w) > 1:
        if split is not None or current().chips == 1:
            return Tensor(_by_channel(x, w, b, widths), input._env)
        if axes == 2 and taps[0] % 2 and widths[0] == (taps[0] // 2,) * 2 and x.shape[2] >= current().chips * taps[0]:
            return Tensor(_by_channel_of_rows(x, w, b, widths), input._env)
    if split is None and simple and math.prod((*stride, *taps)) == 1 and not any(map(any, widths)):
        if (result := layers.by_position(padded, weight, b)) is not None:
            return result
        if current().chips > 1:  # they share the positions: a linear layer of tokens
            tokens, of_token = (
                Tensor(array, input._env) for array in (jnp.moveaxis(x, 1, -1), w.reshape(w.shape[:2]))
            )
            return Tensor(jnp.moveaxis(layers.linear(tokens, of_token, bias).jax(), -1, 1), input._env)
    if simple and stride == taps != (1,) * axes and not any(map(any, widths)):
        return Tensor(_by_patches(x, w, b).astype(x.dtype), input._env)
    of_videos = axes == 3 and split is None and stride == (1,) * axes
    if simple and (axes == 2 or of_videos) and widths[-1] in ((0, 0), (taps[-1] // 2,) * 2):
        lines = jnp.pad(jnp.moveaxis(x, 1, -1), [(0, 0), *widths[:-1], (0, 0), (0, 0)])
        lines = lines if of_videos else lines[:, :, None]
        of_stack = how_it_lies(weight).get("layers")
        of_stack = None if of_stack is None else (_by_lines(of_stack[0], axes), of_stack[1])
        how = {"edge": widths[-1][0], "layers": of_stack, "fill": axes == 2}
        large = convolution_kernel.convolution(lines, _by_lines(w, axes), b, current(), **how)
        if large is not None:  # computed at every position: of strides, which a UNet has few of, some are not used
            large = large if of_videos else large[:, :: stride[0], 0, :: stride[1]]
            return Tensor(jnp.moveaxis(large, -1, 1), input._env)
    wide, numbers = jnp.promote_types(x.dtype, jnp.float32), jax.lax.ConvDimensionNumbers(*[(*range(w.ndim),)] * 3)
    grouped = {"dimension_numbers": numbers, "feature_group_count": groups, "preferred_element_type": wide}
    result = jax.lax.conv_general_dilated(x, w, stride, widths, rhs_dilation=dilation, **grouped)
    result = result if b is None else result + b.reshape(-1, *(1,) * axes)
    return Tensor(result.astype(x.dtype), input._env)


def _by_lines(w, axes: int):
    """Weights [..., O, C, h, w] of maps, or [..., O, C, t, h, w], as [..., h or t, 1 or h, w, O, C]: the same layout on a TPU."""
    w = jnp.moveaxis(w, (-axes - 2, -axes - 1), (-2, -1))
    return w if axes == 3 else w[..., None, :, :, :]


def _by_channel(x, w, b, widths):
    """A depthwise convolution; XLA's uses only a few rows of the matrix units."""
    y = depthwise.by_channel(jnp.moveaxis(x, 1, -1), jnp.moveaxis(w[:, 0], 0, -1), b, widths, current())
    return jnp.moveaxis(y, -1, 1)


def _by_channel_of_rows(x, w, b, widths):
    """`_by_channel` of maps whose rows all chips share. The partitioner would exchange nine slices, or write a padded map."""
    edge = widths[0][0]

    def on_shard(columns):
        rows = halo_shards().with_neighbours(columns, edge, edge).swapaxes(2, 3)
        return _by_channel(rows, w, b, widths)[:, :, edge : rows.shape[2] - edge].swapaxes(2, 3)

    return shard_width(on_shard, x.swapaxes(2, 3)).swapaxes(2, 3)


def _by_patches(x, w, b):
    """A convolution whose patches do not overlap, as a matrix product summed in float32.

    Where the map is small the partitioner fails on it as a convolution of bfloat16 summed in float32.
    """
    sizes = w.shape[2:]
    x = x[(..., *(slice(length // size * size) for length, size in zip(x.shape[2:], sizes)))]
    x = x.reshape(*x.shape[:2], *(n for length, size in zip(x.shape[2:], sizes) for n in (length // size, size)))
    contracted, wide = [(1, *range(3, x.ndim, 2)), (1, *range(2, w.ndim))], jnp.promote_types(x.dtype, jnp.float32)
    y = jax.lax.dot_general(x, w, (contracted, ((), ())), preferred_element_type=wide)
    return jnp.moveaxis(y if b is None else y + b, -1, 1)


def _by_columns(x, w, b, widths, repeated=False, residual=None):
    """A convolution [N, C, (T,) H, W] of stride 1 as `by_columns` computes it."""
    if x.ndim == 4:  # independent maps, computed as the frames of one video
        residual = None if residual is None else residual.swapaxes(0, 1)[None]
        out = _by_columns(x.swapaxes(0, 1)[None], w[:, :, None], b, [(0, 0), *widths], residual=residual)
        return out[0].swapaxes(0, 1)
    columns, by_tap = x.transpose(0, 4, 2, 3, 1), w.transpose(2, 3, 4, 1, 0)
    residual = None if residual is None else residual.transpose(0, 4, 2, 3, 1)
    out = by_columns(columns, by_tap, b, widths, repeated=repeated, residual=residual)
    return out.transpose(0, 4, 2, 3, 1)


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
    plain, x, size, stride=(), padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None
):
    """torchax's; with `ceil_mode` a window may end beyond the map. Its mean is of entries inside, and of padding if that counts."""
    array = x.jax()
    if not ceil_mode:
        result = plain(array, size, stride or size, padding, ceil_mode, count_include_pad, divisor_override)
        return Tensor(result, x._env)
    axes = len(size)
    stride, padding = (list(n) * (axes if len(n) == 1 else 1) for n in (stride or size, padding or [0]))
    behind = []
    for length, window, step, pad in zip(array.shape[-axes:], size, stride, padding):
        # The last window has to begin within the map, or in the padding before it.
        last = -(-(length + 2 * pad - window) // step) * step
        last -= step if last >= length + pad else 0
        behind.append(max(last + window - length - 2 * pad, 0))
    ones, none = (1,) * (array.ndim - axes), [(0, 0)] * (array.ndim - axes)

    def sums(array, widths):
        return jax.lax.reduce_window(array, 0.0, jax.lax.add, (*ones, *size), (*ones, *stride), [*none, *widths])

    around = [(pad, pad + more) for pad, more in zip(padding, behind)]
    counted = jnp.pad(
        jnp.ones(array.shape[-axes:]), [(pad, pad) for pad in padding], constant_values=float(count_include_pad)
    )
    counts = divisor_override or sums(counted.reshape(*ones, *counted.shape), [(0, more) for more in behind])
    return Tensor((sums(array.astype(jnp.float32), around) / counts).astype(array.dtype), x._env)


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
