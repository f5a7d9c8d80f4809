"""Wan's VAE in pure JAX: Flax NNX, channels last, from the files of upstream's `AutoencoderKLWan`, with its results.

    vae = FlaxAutoencoderKLWan.from_pretrained("Wan-AI/Wan2.1-T2V-14B-Diffusers", subfolder="vae", dtype=jnp.bfloat16)
    latents = vae.encode(video).mode()      # video [B, F, H, W, 3] in [-1, 1]
    video = vae.decode(latents)

The loop over frames is one scan; code that such VAEs share is in `vae_nnx_flax`. A caller that needs normalised latents uses
`config.latents_mean` and `config.latents_std`. The first chunk is as long as the others, as in `autoencoder_kl_wan_flax`.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from ...tpu.kernels.attention.api import attention
from ...tpu.kernels.video.halo import halo_shards
from . import vae_nnx_layers_flax as layers
from .autoencoder_kl_wan import AutoencoderKLWan
from .autoencoder_kl_wan_flax import FRAMES, tiling
from .vae_nnx_flax import Latents, Video, VideoAutoencoder
from .vae_nnx_layers_flax import HISTORY, Conv, Map, MidBlock, ResidualBlock, RMSNorm, in_chunks, silu


NAMES = (  # from a weight's path to its name in upstream's files
    (r"kernel$", "weight"),
    (r"\bresample_1\b", "resample.1"),
)


class Chunk(layers.Chunk):
    """One chunk of frames. The first has one frame, its last, with zeros before it."""

    def causal_pad(self, x: Map, frames: int = HISTORY) -> Map:
        return super().causal_pad(self.only_the_frame(x), frames)

    def only_the_frame(self, x: Map) -> Map:
        """x; in the first chunk all frames but the last are zeros."""
        if self.number is None or x.shape[1] == 1:
            return x
        return jnp.where((self.number > 0) | _is_last(x.shape[1]), x, 0)

    def or_the_frame(self, resampled: Map, x: Map) -> Map:
        """`resampled`, x's frames; in the first chunk zeros, and then x's last frame unchanged."""
        return jnp.where(self.number > 0, resampled, jnp.where(_is_last(resampled.shape[1]), x[:, -1:], 0))


def _is_last(frames: int) -> jax.Array:
    return (jnp.arange(frames) == frames - 1)[:, None, None, None]


class AttentionBlock(nnx.Module):
    """Self-attention of one head within each frame."""

    def __init__(self, channels: int, *, dtype, rngs: nnx.Rngs):
        self.norm = RMSNorm(channels, dtype=dtype)
        self.to_qkv = Conv(channels, 3 * channels, (1, 1, 1), dtype=dtype, rngs=rngs)
        self.proj = Conv(channels, channels, (1, 1, 1), dtype=dtype, rngs=rngs)

    def __call__(self, x: Map) -> Map:
        batch, frames, height, width, channels = x.shape
        qkv = self.to_qkv(self.norm(x)).reshape(batch * frames, 1, height * width, 3 * channels)
        q, k, v = jnp.split(qkv, 3, -1)
        k, v, mask = halo_shards().everyones(k, v)
        return self.proj(attention(q, k, v, mask=mask).reshape(x.shape)) + x


class Resample(nnx.Module):
    """Doubles or halves height and width and, with `mode` "...3d", the frames but the video's first.

    Args:
        features: channels of the result.
        mode: "upsample2d", "upsample3d", "downsample2d" or "downsample3d".
    """

    def __init__(self, channels: int, features: int, mode: str, **how):
        self.mode = mode
        stride = (1, 1, 1) if mode.startswith("up") else (1, 2, 2)
        self.resample_1 = Conv(channels, features, (1, 3, 3), stride, **how)
        if mode == "upsample3d":
            self.time_conv = Conv(channels, 2 * channels, (3, 1, 1), **how)
        elif mode == "downsample3d":
            self.time_conv = Conv(features, features, (3, 1, 1), (2, 1, 1), **how)

    def __call__(self, x: Map, chunk: Chunk) -> Map:
        in_time = self.mode.endswith("3d") and chunk.number is not None
        if self.mode.startswith("up"):
            x = self._doubled(x, chunk) if in_time else x
            return self.resample_1(x.repeat(2, axis=2).repeat(2, axis=3))
        x = self.resample_1(x)
        return chunk.or_the_frame(self.time_conv(chunk.causal_pad(x, 1)), x) if in_time else x

    def _doubled(self, x: Map, chunk: Chunk) -> Map:
        """Two frames from each one; the video's first frame is no history for the others."""
        batch, frames, *space, channels = x.shape
        y = self.time_conv(chunk.causal_pad(jnp.where(chunk.number > 0, x, 0)))
        y = jnp.moveaxis(y.reshape(batch, frames, *space, 2, channels), 4, 2)
        return chunk.or_the_frame(y.reshape(batch, 2 * frames, *space, channels), x)


def average_down(x: Map, features: int, time: int, space: int, chunk: Chunk) -> Map:
    """Wan 2.2's shortcut: means of groups of channels of blocks of `time` frames and `space` by `space` pixels."""
    x = jnp.pad(chunk.only_the_frame(x), [(0, 0), (-x.shape[1] % time, 0), (0, 0), (0, 0), (0, 0)])
    batch, frames, height, width, channels = x.shape
    x = x.reshape(batch, frames // time, time, height // space, space, width // space, space, channels)
    x = x.transpose(0, 1, 3, 5, 7, 2, 4, 6)
    return x.reshape(*x.shape[:4], features, -1).astype(jnp.float32).mean(-1).astype(x.dtype)


def duplicate_up(x: Map, features: int, time: int, space: int, chunk: Chunk) -> Map:
    """Wan 2.2's shortcut: channels repeated and laid out as blocks of `time` frames and `space` by `space` pixels."""
    batch, frames, height, width, channels = x.shape
    x = x.repeat(features * time * space * space // channels, axis=-1)
    x = x.reshape(batch, frames, height, width, features, time, space, space).transpose(0, 1, 5, 2, 6, 3, 7, 4)
    x = x.reshape(batch, frames * time, height * space, width * space, features)
    return x if chunk.number is not None else x[:, time - 1 :]


class ResidualDownBlock(nnx.Module):
    """Wan 2.2's: residual blocks and halving, plus `average_down`. `mode` None: no halving."""

    def __init__(self, channels: int, features: int, blocks: int, mode: str | None, **how):
        sizes = [channels, *(features,) * blocks]
        self.resnets = nnx.List([ResidualBlock(*pair, **how) for pair in zip(sizes, sizes[1:])])
        self.downsampler = None if mode is None else Resample(features, features, mode, **how)
        self.shortcut = features, 2 if mode == "downsample3d" else 1, 1 if mode is None else 2

    def __call__(self, x: Map, chunk: Chunk) -> Map:
        shortcut = average_down(x, *self.shortcut, chunk)
        for resnet in self.resnets:
            x = resnet(x, chunk)
        return (x if self.downsampler is None else self.downsampler(x, chunk)) + shortcut


class UpBlock(nnx.Module):
    """Residual blocks and doubling (`mode` None: no doubling); in Wan 2.2, `residual`, plus `duplicate_up`."""

    def __init__(self, channels: int, features: int, blocks: int, mode: str | None, residual: bool, **how):
        sizes = [channels, *(features,) * (blocks + 1)]
        self.resnets = nnx.List([ResidualBlock(*pair, **how) for pair in zip(sizes, sizes[1:])])
        doubling = None if mode is None else Resample(features, features if residual else features // 2, mode, **how)
        self.residual = residual
        if residual:
            self.upsampler = doubling
            self.shortcut = None if mode is None else (features, 2 if mode == "upsample3d" else 1, 2)
        else:
            self.upsamplers = nnx.List([] if doubling is None else [doubling])

    def __call__(self, x: Map, chunk: Chunk) -> Map:
        before = x
        for resnet in self.resnets:
            x = resnet(x, chunk)
        if not self.residual:
            for doubling in self.upsamplers:
                x = doubling(x, chunk)
        elif self.upsampler is not None:
            x = self.upsampler(x, chunk) + duplicate_up(before, *self.shortcut, chunk)
        return x


class Encoder(nnx.Module):
    """Frames [B, T, H, W, I] -> twice the latents' channels [B, T / 4, H / 8, W / 8, 2 C]."""

    def __init__(self, config, **how):
        dims = [config.base_dim * m for m in (1, *config.dim_mult)]
        blocks, last = config.num_res_blocks, len(config.dim_mult) - 1
        self.conv_in = Conv(config.in_channels, dims[0], **how)
        self.down_blocks = nnx.List([])
        for level, (channels, features) in enumerate(zip(dims, dims[1:])):
            mode = None if level == last else "downsample3d" if config.temperal_downsample[level] else "downsample2d"
            if config.is_residual:
                self.down_blocks.append(ResidualDownBlock(channels, features, blocks, mode, **how))
                continue
            sizes = [channels, *(features,) * blocks]
            self.down_blocks.extend(ResidualBlock(*pair, **how) for pair in zip(sizes, sizes[1:]))
            if mode is not None:
                self.down_blocks.append(Resample(features, features, mode, **how))
        self.mid_block = MidBlock(dims[-1], AttentionBlock, **how)
        self.norm_out = RMSNorm(dims[-1], dtype=how["dtype"])
        self.conv_out = Conv(dims[-1], 2 * config.z_dim, **how)

    def __call__(self, x: Map, chunk: Chunk) -> Map:
        x = self.conv_in(chunk.causal_pad(x))
        for block in self.down_blocks:
            x = block(x, chunk)
        x = self.mid_block(x, chunk)
        return self.conv_out(chunk.causal_pad(silu(self.norm_out(x))))


class Decoder(nnx.Module):
    """Latents [B, T, H, W, C] -> frames [B, 4 T, 8 H, 8 W, O]; the first latent gives one frame."""

    def __init__(self, config, **how):
        base = config.base_dim if config.decoder_base_dim is None else config.decoder_base_dim
        dims = [base * m for m in (config.dim_mult[-1], *config.dim_mult[::-1])]
        last, in_time = len(config.dim_mult) - 1, config.temperal_downsample[::-1]
        self.conv_in = Conv(config.z_dim, dims[0], **how)
        self.mid_block = MidBlock(dims[0], AttentionBlock, **how)
        self.up_blocks = nnx.List([])
        for level, (channels, features) in enumerate(zip(dims, dims[1:])):
            halved = level > 0 and not config.is_residual  # by the previous doubling
            mode = None if level == last else "upsample3d" if in_time[level] else "upsample2d"
            channels = channels // 2 if halved else channels
            self.up_blocks.append(UpBlock(channels, features, config.num_res_blocks, mode, config.is_residual, **how))
        self.norm_out = RMSNorm(dims[-1], dtype=how["dtype"])
        self.conv_out = Conv(dims[-1], config.out_channels, **how)

    def __call__(self, x: Map, chunk: Chunk) -> Map:
        x = self.mid_block(self.conv_in(chunk.causal_pad(x)), chunk)
        for block in self.up_blocks:
            x = block(x, chunk)
        return self.conv_out(chunk.causal_pad(silu(self.norm_out(x))))


class FlaxAutoencoderKLWan(VideoAutoencoder):
    """Both generations of Wan's VAE: 2.1, and 2.2 with its residual blocks and patches.

    Frames of a video [B, F, H, W, 3] after the last complete group of four are left out, as upstream does. Latents [B, f, h, w, C]
    are decoded to 4 f - 3 frames in [-1, 1]. Arguments: `VideoAutoencoder`'s. Raises ValueError for a config that is not supported.
    """

    upstream, names, tiling = AutoencoderKLWan, NAMES, tiling

    def __init__(self, config: dict, *, rngs: nnx.Rngs, **settings):
        super().__init__(config, **settings)
        config = self.config
        if config.attn_scales:
            raise ValueError(
                f"expected an empty attn_scales, got {config.attn_scales}: upstream's encoder does not run with any either"
            )
        self.patch = config.patch_size or 1
        self.spatial_compression_ratio = config.scale_factor_spatial
        self.temporal_compression_ratio = config.scale_factor_temporal
        self.video_channels, self.latent_channels = config.in_channels // self.patch**2, config.z_dim
        self.in_multiples = config.is_residual
        self.tile_sample_stride_height = self.tile_sample_stride_width = 192  # upstream's
        how, channels = {"dtype": self.dtype, "rngs": rngs}, config.z_dim
        self.encoder = Encoder(config, **how)
        self.quant_conv = Conv(2 * channels, 2 * channels, (1, 1, 1), **how)
        self.post_quant_conv = Conv(channels, channels, (1, 1, 1), **how)
        self.decoder = Decoder(config, **how)

    def _check_tiling(self, height: int, width: int, *strides: int):
        """Raises ValueError for a stride that is less than a latent or more than its tile."""
        ratio = self.spatial_compression_ratio
        if any(not ratio <= stride <= size for size, stride in zip((height, width), strides)):
            raise ValueError(
                f"expected strides of {ratio} pixels at least, and of a tile at most, got strides {strides} of tiles"
                f" {(height, width)}"
            )

    def _decode(self, z: Latents) -> Video:
        return jnp.clip(_from_patches(super()._decode(z), self.patch), -1, 1)

    def _encode(self, x: Video) -> Latents:
        return super()._encode(_to_patches(x, self.patch))

    def _decode_map(self, z: Latents) -> jax.Array:
        return in_chunks(self.decoder, self.post_quant_conv(z), 1, Chunk)

    def _encode_map(self, x: jax.Array) -> Latents:
        whole = 1 + (x.shape[1] - 1) // FRAMES * FRAMES
        return self.quant_conv(in_chunks(self.encoder, x[:, :whole], FRAMES, Chunk))


def _to_patches(x: Video, patch: int) -> jax.Array:
    """[B, F, H, W, C] -> [B, F, H / p, W / p, C p p]: each channel's patch column by column, as upstream orders it."""
    batch, frames, height, width, channels = x.shape
    x = x.reshape(batch, frames, height // patch, patch, width // patch, patch, channels)
    return x.transpose(0, 1, 2, 4, 6, 5, 3).reshape(batch, frames, height // patch, width // patch, -1)


def _from_patches(x: jax.Array, patch: int) -> Video:
    batch, frames, height, width, channels = x.shape
    x = x.reshape(batch, frames, height, width, -1, patch, patch).transpose(0, 1, 2, 6, 3, 5, 4)
    return x.reshape(batch, frames, height * patch, width * patch, -1)
