"""Convolutions, and padding as they take it: `register` of `operators` puts them in torchax's place."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torchax.tensor import Tensor

from ..kernels import convolution as convolution_kernel
from ..kernels import depthwise
from ..kernels.kept import layer_result
from ..kernels.settings import current, using
from ..kernels.video.chunks import Behind
from ..kernels.video.convolution import by_columns
from ..kernels.video.halo import NotByShards, halo_shards, shard_width
from . import layers
from .layers import how_it_lies
from .made_of import made_of, operands


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


def padded(torchax_pad, input, pad, mode="constant", value=None):
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


def convolution(torchax_convolution, *args):
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
        if current().chips > 1 or x.dtype == jnp.bfloat16:  # a linear layer of tokens, whose positions chips share
            tokens, of_token = (
                Tensor(array, input._env) for array in (jnp.moveaxis(x, 1, -1), w.reshape(w.shape[:2]))
            )
            with using(replace(current(), linear="bfloat16")):  # `TPUConfig.linear` is of linear layers alone
                return Tensor(jnp.moveaxis(layers.linear(tokens, of_token, bias).jax(), -1, 1), input._env)
    if simple and stride == taps != (1,) * axes and not any(map(any, widths)):
        return Tensor(_by_patches(x, w, b).astype(x.dtype), input._env)
    of_videos = axes == 3 and split is None and stride == (1,) * axes
    if simple and (axes == 2 or of_videos) and widths[-1] in ((0, 0), (taps[-1] // 2,) * 2):
        lines, zeros = jnp.moveaxis(x, 1, -1), (*widths[:-1], (0, 0))[:2]
        lines = lines if of_videos else lines[:, :, None]
        of_stack = how_it_lies(weight).get("layers")
        of_stack = None if of_stack is None else (_by_lines(of_stack[0], axes), of_stack[1])
        how = {"edge": widths[-1][0], "zeros": zeros, "layers": of_stack, "fill": axes == 2}
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
