"""CogVideoX's VAE in Flax NNX, with upstream's weights and results, for programs in plain JAX.

    vae = FlaxAutoencoderKLCogVideoX.from_pretrained("THUDM/CogVideoX1.5-5B", subfolder="vae", dtype=jnp.bfloat16)
    latents = vae.encode(video).mode()      # video [B, F, H, W, 3] in [-1, 1]
    video = vae.decode(latents)             # latents [B, f, H / 8, W / 8, 16]

Batches of frames are upstream's: two of the latents or eight of the video, the remainder with the first. Group norms use the
statistics of a batch. The batches are a scan. Code that such VAEs share is in `vae_nnx_flax`. A caller that needs normalised
latents uses `config.scaling_factor`.
"""

import functools

import jax.numpy as jnp
from flax import nnx

from ...tpu.kernels.video.chunks import causal_pad
from ...tpu.kernels.video.norm import normed, normed_by_place, repeated_in_time
from ...tpu.kernels.video.tiles import tiles_meet
from . import vae_nnx_layers_flax as layers
from .autoencoder_kl_cogvideox import AutoencoderKLCogVideoX
from .autoencoder_kl_cogvideox_flax import spatial_ratio, tiling
from .vae_nnx_flax import Latents, Video, VideoAutoencoder
from .vae_nnx_layers_flax import Conv, Map, in_chunks, one_after_another, silu


NAMES = (  # from a weight's path to its name in upstream's files
    (r"kernel$", "weight"),
    # Upstream wraps these in a module that pads.
    (r"\b(conv1|conv2|conv_y|conv_b|conv_in|conv_out)\.(weight|bias)$", r"\1.conv.\2"),
    (r"\b(down|up)_blocks\.(\d+)\.resamplers\b", r"\1_blocks.\2.\1samplers"),
)
NORM_EPS = 1e-6  # upstream's, where its config has none


class Chunk(layers.Chunk):
    """One batch of frames. The padding before the video's first frame repeats that frame."""

    def behind(self, x: Map, frames: int, kept: Map | None) -> Map:
        return causal_pad(x, kept, frames)


class GroupNorm(nnx.Module):
    """Group norm with the statistics of all frames and the whole map."""

    def __init__(self, channels: int, groups: int, eps: float, *, dtype):
        self.weight, self.bias = nnx.Param(jnp.ones((channels,), dtype)), nnx.Param(jnp.zeros((channels,), dtype))
        self.groups, self.eps = groups, eps

    def __call__(self, x: Map, latents: Latents | None = None) -> Map:
        return normed(x, self.weight[...], self.bias[...], self.groups, self.eps)


class SpatialNorm(nnx.Module):
    """Group norm, scaled and shifted by the latents at each position."""

    def __init__(self, channels: int, groups: int, latents: int, **how):
        self.norm_layer = GroupNorm(channels, groups, NORM_EPS, dtype=how["dtype"])
        self.conv_y, self.conv_b = (Conv(latents, channels, (1, 1, 1), **how) for _ in range(2))

    def __call__(self, x: Map, latents: Latents) -> Map:
        norm = self.norm_layer
        affine = norm.weight[...], norm.bias[...], norm.groups, norm.eps
        return normed_by_place(x, *affine, self.conv_y(latents), self.conv_b(latents))


class ResidualBlock(nnx.Module):
    """Norm, SiLU and convolution, twice, plus a shortcut. `latents`: channels of the latents that condition norms; 0: none do."""

    def __init__(self, channels: int, features: int, groups: int, eps: float, latents: int, **how):
        def norm(size):
            if latents:
                return SpatialNorm(size, groups, latents, **how)
            return GroupNorm(size, groups, eps, dtype=how["dtype"])

        self.norm1, self.conv1 = norm(channels), Conv(channels, features, **how)
        self.norm2, self.conv2 = norm(features), Conv(features, features, **how)
        self.conv_shortcut = None if channels == features else Conv(channels, features, (1, 1, 1), **how)

    def __call__(self, x: Map, chunk: Chunk, latents: Latents | None) -> Map:
        def half(norm_and_conv, x, chunk):
            norm, conv = norm_and_conv
            return conv(chunk.causal_pad(silu(norm(x, latents))))

        halves = [(self.norm1, self.conv1), (self.norm2, self.conv2)]
        if self.conv_shortcut is None:
            return one_after_another(half, halves, x, chunk) + x
        shortcut = self.conv_shortcut(x)
        for one in halves:
            x = half(one, x, chunk)
        return x + shortcut


class Downsample(nnx.Module):
    """Halves height and width and, with `in_time`, the frames but the first of an odd number, by averaging pairs."""

    def __init__(self, channels: int, in_time: bool, **how):
        self.in_time = in_time
        self.conv = Conv(channels, channels, (1, 3, 3), (1, 2, 2), **how)

    def __call__(self, x: Map) -> Map:
        if self.in_time:
            first = x.shape[1] % 2
            rest = x[:, first:].astype(jnp.float32).reshape(x.shape[0], -1, 2, *x.shape[2:]).mean(2)
            x = jnp.concatenate([x[:, :first], rest.astype(x.dtype)], 1)
        return self.conv(x)


class Upsample(nnx.Module):
    """Doubles height and width and, with `in_time`, the frames but the first of an odd number."""

    def __init__(self, channels: int, in_time: bool, **how):
        self.in_time = in_time
        self.conv = Conv(channels, channels, (1, 3, 3), **how)

    def __call__(self, x: Map) -> Map:
        y, frames = self.conv.doubled(x), x.shape[1]  # equal frames are convolved once
        return repeated_in_time(y, 2 * frames - frames % 2) if self.in_time else y


class Level(layers.Level):
    """Residual blocks at one size, as one scan but for a first that changes the channels, then resampling."""

    def __call__(self, x: Map, chunk: Chunk, latents: Latents | None = None) -> Map:
        resnets = list(self.resnets)
        if resnets[0].conv_shortcut is not None:
            x = resnets.pop(0)(x, chunk, latents)
        x = one_after_another(lambda resnet, x, chunk: resnet(x, chunk, latents), resnets, x, chunk)
        return self.resamplers[0](x) if self.resamplers else x


class Encoder(nnx.Module):
    """Frames [B, T, H, W, I] -> twice the latents' channels [B, T / 4, H / 8, W / 8, 2 C]."""

    def __init__(self, config, **how):
        dims, channels = config.block_out_channels, config.block_out_channels[0]
        block = functools.partial(ResidualBlock, groups=config.norm_num_groups, latents=0, **how)
        self.conv_in = Conv(config.in_channels, channels, **how)
        self.down_blocks = nnx.List([])
        for level, features in enumerate(dims):
            resampler = Downsample(features, level < _in_time(config), **how) if level < len(dims) - 1 else None
            make = functools.partial(block, eps=config.norm_eps)
            self.down_blocks.append(Level(make, channels, features, config.layers_per_block, resampler))
            channels = features
        self.mid_block = Level(functools.partial(block, eps=NORM_EPS), channels, channels, 2, None)
        self.norm_out = GroupNorm(channels, config.norm_num_groups, NORM_EPS, dtype=how["dtype"])
        self.conv_out = Conv(channels, 2 * config.latent_channels, **how)

    def __call__(self, x: Map, chunk: Chunk) -> Latents:
        x = self.conv_in(chunk.causal_pad(x))
        for block in (*self.down_blocks, self.mid_block):
            x = block(x, chunk)
        return self.conv_out(chunk.causal_pad(silu(self.norm_out(x))))


class Decoder(nnx.Module):
    """Latents [B, T, H, W, C] -> frames [B, 4 T, 8 H, 8 W, O]; the first of an odd number of latents gives one frame."""

    def __init__(self, config, **how):
        dims, latents = config.block_out_channels[::-1], config.latent_channels
        channels, groups = dims[0], config.norm_num_groups
        block = functools.partial(ResidualBlock, groups=groups, eps=NORM_EPS, latents=latents, **how)
        self.conv_in = Conv(latents, channels, **how)
        self.mid_block = Level(block, channels, channels, 2, None)
        self.up_blocks = nnx.List([])
        for level, features in enumerate(dims):
            resampler = Upsample(features, level < _in_time(config), **how) if level < len(dims) - 1 else None
            self.up_blocks.append(Level(block, channels, features, config.layers_per_block + 1, resampler))
            channels = features
        self.norm_out = SpatialNorm(channels, groups, latents, **how)
        self.conv_out = Conv(channels, config.out_channels, **how)

    def __call__(self, latents: Latents, chunk: Chunk) -> Map:
        x = self.conv_in(chunk.causal_pad(latents))
        for block in (self.mid_block, *self.up_blocks):
            x = block(x, chunk, latents)
        return self.conv_out(chunk.causal_pad(silu(self.norm_out(x, latents))))


def _in_time(config) -> int:
    """How many levels resample the frames too: the finest of the encoder, the coarsest of the decoder."""
    return int(config.temporal_compression_ratio).bit_length() - 1


class FlaxAutoencoderKLCogVideoX(VideoAutoencoder):
    """CogVideoX's VAE.

    Videos [B, F, H, W, 3] have a height and width of multiples of 8 and as a rule 4 f - 3 frames; latents [B, f, h, w, C] are
    decoded to as many. As upstream's, these are not clipped to [-1, 1]. Arguments: `VideoAutoencoder`'s. Raises ValueError for a
    config that is not supported.
    """

    upstream, names, tiling = AutoencoderKLCogVideoX, NAMES, tiling

    def __init__(self, config: dict, *, rngs: nnx.Rngs, **settings):
        super().__init__(config, **settings)
        config = self.config
        _check_config(config)
        self.spatial_compression_ratio = spatial_ratio(self)
        self.temporal_compression_ratio = config.temporal_compression_ratio
        self.video_channels, self.latent_channels = config.in_channels, config.latent_channels
        self.in_multiples = True
        self.num_latent_frames_batch_size, self.num_sample_frames_batch_size = 2, 8  # upstream's
        self.tile_sample_min_height, self.tile_sample_min_width = config.sample_height // 2, config.sample_width // 2
        self.tile_overlap_factor_height, self.tile_overlap_factor_width = 1 / 6, 1 / 5  # upstream's
        how = {"dtype": self.dtype, "rngs": rngs}
        self.encoder, self.decoder = Encoder(config, **how), Decoder(config, **how)

    @property
    def tile_latent_min_height(self) -> int:
        return self.tile_sample_min_height // self.spatial_compression_ratio

    @property
    def tile_latent_min_width(self) -> int:
        return self.tile_sample_min_width // self.spatial_compression_ratio

    def _check_tiling(self, height: int, width: int, *factors: float):
        """Raises ValueError for tiles that leave gaps."""
        ratio = self.spatial_compression_ratio
        for size, factor in zip((height, width), factors):
            if size % ratio or not tiles_meet(size, ratio, factor):
                raise ValueError(
                    f"expected tiles of multiples of {ratio} pixels and overlap factors of whole latents, got {size} pixels and"
                    f" {factor:.3g}: it would leave gaps between tiles"
                )

    def _decode_map(self, z: Latents) -> Video:
        return in_chunks(self.decoder, z, self.num_latent_frames_batch_size, Chunk, batches=True)

    def _encode_map(self, x: Video) -> Latents:
        return in_chunks(self.encoder, x, self.num_sample_frames_batch_size, Chunk, batches=True)


def _check_config(config):
    ratio, dims, groups = config.temporal_compression_ratio, config.block_out_channels, config.norm_num_groups
    if ratio != int(ratio) or int(ratio) & (int(ratio) - 1) or ratio > 2 ** (len(dims) - 1):
        raise ValueError(
            f"expected a temporal_compression_ratio of a power of two, at most {2 ** (len(dims) - 1)}, got {ratio}"
        )
    if any(size % groups for size in dims):
        raise ValueError(f"expected block_out_channels of multiples of norm_num_groups {groups}, got {dims}")
    if config.use_quant_conv or config.use_post_quant_conv or config.act_fn != "silu":
        raise ValueError(
            "expected a config without quant_conv and post_quant_conv, with act_fn silu, as published ones are, got"
            f" use_quant_conv {config.use_quant_conv}, use_post_quant_conv {config.use_post_quant_conv}, act_fn {config.act_fn!r}"
        )
