"""Layers of video VAEs in Flax NNX, channels last: maps are [B, T, H, W, C], kernels [T, H, W, I, O].

A weight's path is its name in upstream's files after a model's rules (`vae_nnx_weights_flax.torch_name`). Frames come in chunks
(`in_chunks`), the width may be sharded: layers get earlier frames from a `Chunk`, neighbouring columns from `halo_shards()`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from ...tpu.kernels.settings import current
from ...tpu.kernels.video.chunks import scan_batches, scan_chunks
from ...tpu.kernels.video.convolution import by_columns, doubled_by_lines
from ...tpu.kernels.video.halo import halo_shards


Map = Float[Array, "B T H W C"]

HISTORY = 2  # frames that a convolution looks back
NORM_EPS = 1e-12  # of torch's `normalize`


class Chunk:
    """One chunk of frames that passes through the layers. A model's subclass defines what comes before the first frame.

    Args:
        number: of the chunk, a traced scalar; None if it has all frames of the video.
        kept: what the layers kept of the previous chunk, in the order of their calls; `keeps`: the same of this chunk.
    """

    def __init__(self, number: jax.Array | None, kept: list[jax.Array]):
        self.number, self.keeps = number, []
        self._kept = iter(kept)

    def causal_pad(self, x: Map, frames: int = HISTORY) -> Map:
        """x after the last `frames` frames of the previous chunk."""
        x = self.behind(x, frames, self.kept())
        self.keeps.append(x[:, -frames:])
        return x

    def kept(self):
        """What the calling layer kept of the previous chunk, None without one. Each layer calls it once, in the same order."""
        return next(self._kept, None)

    def behind(self, x: Map, frames: int, kept: Map | None) -> Map:
        """x after `frames` frames: those `kept`, or zeros before the first."""
        before = jnp.zeros_like(x, shape=(x.shape[0], frames, *x.shape[2:])) if kept is None else kept
        return jnp.concatenate([before, x], 1)


def in_chunks(layers: Callable, x: Map, size: int, chunk: type[Chunk] = Chunk, batches: bool = False) -> Map:
    """Applies `layers` (map, chunk) to chunks of `size` frames by `scan_chunks`, or `scan_batches`; raises as they do."""

    def step(frames, kept, number=None):
        this = chunk(number, kept or [])
        return layers(frames, this), this.keeps

    return scan_batches(step, x, size) if batches else scan_chunks(step, x, size, [])


def one_after_another(call: Callable, parts: list, x: Map, chunk: Chunk) -> Map:
    """Applies equal parts, modules or tuples of them, one after another, as a scan. `call`: (part, x, chunk) -> a map as x."""
    if not parts:
        return x
    graphdef, states = nnx.split(parts[0])[0], [nnx.split(part)[1] for part in parts]

    def one(x, state_and_kept):
        state, kept = state_and_kept
        this = type(chunk)(chunk.number, kept or [])
        return call(nnx.merge(graphdef, state), x, this), this.keeps

    stacked = jax.tree.map(lambda *weights: jnp.stack(weights), *states)
    x, keeps = lax.scan(one, x, (stacked, chunk.kept()))
    chunk.keeps.append(keeps)
    return x


class Conv(nnx.Module):
    """A convolution, summed in float32 with its bias and rounded once. Time is not padded.

    Height and width are padded by half the kernel, with zeros or the map's `repeated` edge; for stride 2 only below and right.
    """

    def __init__(self, channels: int, features: int, size=(3, 3, 3), stride=(1, 1, 1), *, repeated=False, dtype, rngs):
        make = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")  # torch's
        self.kernel = nnx.Param(make(rngs.params(), (*size, channels, features), dtype))
        self.bias = nnx.Param(jnp.zeros((features,), dtype))
        self.stride, self.repeated = stride, repeated

    def __call__(self, x: Map) -> Map:
        w, b, (_, *size) = self.kernel[...], self.bias[...], self.kernel.shape[:3]
        rows, columns = ((k // 2, k // 2) if s == 1 else (0, k - s) for k, s in zip(size, self.stride[1:]))
        padded = halo_shards().with_neighbours(x, *columns, axis=3, repeated=self.repeated)
        if self.stride[2] == 1:
            y = by_columns(padded.transpose(0, 3, 1, 2, 4), w, b, [(0, 0), rows], self.stride[:2], self.repeated)
            return y.transpose(0, 2, 3, 1, 4)
        if self.repeated:
            padded, rows = jnp.pad(padded, [(0, 0), (0, 0), rows, (0, 0), (0, 0)], mode="edge"), (0, 0)
        y = lax.conv_general_dilated(
            padded.reshape(-1, *padded.shape[2:]),
            w[0],
            window_strides=self.stride[1:],
            padding=[rows, (0, 0)],
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            precision=current().convolutions,
            preferred_element_type=jnp.float32,
        )
        return (y + b).astype(x.dtype).reshape(*x.shape[:2], *y.shape[1:])

    def doubled(self, x: Map) -> Map:
        """The convolution of x with height and width doubled by repetition, for a kernel [1, 3, 3] padded with zeros."""
        padded = halo_shards().with_neighbours(x, 1, 1, axis=3)
        y = doubled_by_lines(padded.transpose(0, 3, 1, 2, 4), self.kernel[0].swapaxes(0, 1), self.bias[...])
        return y.transpose(0, 2, 3, 1, 4)


class RMSNorm(nnx.Module):
    """x / |x| * sqrt(C) * gamma over channels in float32."""

    def __init__(self, channels: int, *, dtype):
        self.gamma = nnx.Param(jnp.ones((channels,), dtype))

    def __call__(self, x: Map) -> Map:
        wide = x.astype(jnp.float32)
        length = jnp.sqrt((wide * wide).sum(-1, keepdims=True))
        return (wide / jnp.maximum(length, NORM_EPS) * x.shape[-1] ** 0.5 * self.gamma[...]).astype(x.dtype)


def silu(x: Map) -> Map:
    """x / (1 + exp(-x)) in float32."""
    return jax.nn.silu(x.astype(jnp.float32)).astype(x.dtype)


class ResidualBlock(nnx.Module):
    """Norm, SiLU and convolution, twice, plus a shortcut. `how`: arguments of its convolutions."""

    def __init__(self, channels: int, features: int, **how):
        self.norm1 = RMSNorm(channels, dtype=how["dtype"])
        self.conv1 = Conv(channels, features, **how)
        self.norm2 = RMSNorm(features, dtype=how["dtype"])
        self.conv2 = Conv(features, features, **how)
        self.conv_shortcut = None if channels == features else Conv(channels, features, (1, 1, 1), **how)

    def __call__(self, x: Map, chunk: Chunk) -> Map:
        shortcut = x if self.conv_shortcut is None else self.conv_shortcut(x)
        x = self.conv1(chunk.causal_pad(silu(self.norm1(x))))
        return self.conv2(chunk.causal_pad(silu(self.norm2(x)))) + shortcut


class Level(nnx.Module):
    """Residual blocks at one size, each `make`(channels, features), and a resampling module, if any."""

    def __init__(self, make: Callable, channels: int, features: int, blocks: int, resampler: nnx.Module | None):
        sizes = [channels, *(features,) * blocks]
        self.resnets = nnx.List([make(*pair) for pair in zip(sizes, sizes[1:])])
        self.resamplers = nnx.List([] if resampler is None else [resampler])

    def __call__(self, x: Map, chunk: Chunk) -> Map:
        for layer in (*self.resnets, *self.resamplers):
            x = layer(x, chunk)
        return x


class MidBlock(nnx.Module):
    """A residual block, a model's `attention` (a map to a map), another residual block."""

    def __init__(self, channels: int, attention: type[nnx.Module], **how):
        self.resnets = nnx.List([ResidualBlock(channels, channels, **how) for _ in range(2)])
        self.attentions = nnx.List([attention(channels, **how)])

    def __call__(self, x: Map, chunk: Chunk) -> Map:
        return self.resnets[1](self.attentions[0](self.resnets[0](x, chunk)), chunk)
