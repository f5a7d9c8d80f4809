"""HunyuanVideo-1.5's VAE in pure JAX: Flax NNX, channels last, from the files of upstream's class, with its results.

    vae = FlaxAutoencoderKLHunyuanVideo15.from_pretrained(MODEL, subfolder="vae", dtype=jnp.bfloat16)
    latents = vae.encode(video).mode()      # video [B, 4 f - 3, H, W, 3] in [-1, 1]
    video = vae.decode(latents)             # latents [B, f, H / 16, W / 16, 32]

The levels between the middle block and the video are a scan, one latent frame per step. The middle block computes all frames, and
the first chunk is as long as the others, as in `autoencoder_kl_hunyuanvideo15_flax`. Code that such VAEs share is in
`vae_nnx_flax`. A caller that needs normalised latents uses `config.scaling_factor`.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx

from ...tpu.kernels.video.halo import attention_by_frame
from ...tpu.kernels.video.tiles import tiles_meet
from . import vae_nnx_layers_flax as layers
from .autoencoder_kl_hunyuanvideo15 import AutoencoderKLHunyuanVideo15
from .autoencoder_kl_hunyuanvideo15_flax import tiling
from .vae_nnx_flax import Latents, Video, VideoAutoencoder
from .vae_nnx_layers_flax import Conv, Level, Map, MidBlock, ResidualBlock, RMSNorm, in_chunks, silu


NAMES = (  # from a weight's path to its name in upstream's files
    (r"kernel$", "weight"),
    (r"\b(conv|conv1|conv2|conv_in|conv_out)\.(weight|bias)$", r"\1.conv.\2"),  # upstream wraps it and pads
    (r"\b(down|up)_blocks\.(\d+)\.resamplers\b", r"\1_blocks.\2.\1samplers"),
)


class Chunk(layers.Chunk):
    """One chunk of frames. The first has copies of one frame, which is also the padding before it."""

    def behind(self, x: Map, frames: int, kept: Map | None) -> Map:
        first = jnp.broadcast_to(x[:, :1], (x.shape[0], frames, *x.shape[2:]))
        return jnp.concatenate([first if kept is None else self.or_first(kept, first), x], 1)

    def or_first(self, x: Map, first: Map) -> Map:
        """`x`, but in the first chunk `first`, repeated in time."""
        return first if self.number is None else jnp.where(self.number > 0, x, first)


def packed(x: Map, time: int = 1) -> Map:
    """Moves blocks of `time` frames and 2 by 2 pixels into channels, the position in the block as the slower index."""
    batch, frames, height, width, channels = x.shape
    x = x.reshape(batch, frames // time, time, height // 2, 2, width // 2, 2, channels)
    return x.transpose(0, 1, 3, 5, 2, 4, 6, 7).reshape(batch, frames // time, height // 2, width // 2, -1)


def spread(x: Map, time: int = 1) -> Map:
    """Moves channels into blocks of `time` frames and 2 by 2 pixels, in the order of `packed`."""
    batch, frames, height, width, channels = x.shape
    x = x.reshape(batch, frames, height, width, time, 2, 2, channels // (4 * time))
    return x.transpose(0, 1, 4, 2, 5, 3, 6, 7).reshape(batch, frames * time, height * 2, width * 2, -1)


def averaged(x: Map, features: int) -> Map:
    """Means of `features` groups of neighbouring channels, in float32."""
    return x.reshape(*x.shape[:4], features, -1).astype(jnp.float32).mean(-1).astype(x.dtype)


def repeated(x: Map, features: int) -> Map:
    """Each channel repeated, to `features` channels in all."""
    return x.repeat(features // x.shape[-1], axis=-1)


def block_size(fine: int, coarse: int, in_time: bool) -> int:
    """How many positions of a map of `fine` channels become one position of a map of `coarse` channels.

    Raises ValueError for channels that do not divide so.
    """
    size = 8 if in_time else 4
    if coarse % size or 4 * fine % coarse:
        raise ValueError(
            f"expected block_out_channels of which the coarser of two levels that follow each other is a multiple of {size}"
            f" and divides four times the finer, got {fine} and {coarse}"
        )
    return size


class Downsample(nnx.Module):
    """Halves height and width and, with `in_time`, the frames but the video's first; plus a shortcut of averaged channels."""

    def __init__(self, channels: int, features: int, in_time: bool, **how):
        self.features, self.in_time = features, in_time
        self.conv = Conv(channels, features // block_size(channels, features, in_time), **how)

    def __call__(self, x: Map, chunk: Chunk) -> Map:
        y = self.conv(chunk.causal_pad(x))
        if not self.in_time:
            return packed(y) + averaged(packed(x), self.features)
        first = packed(y[:, -1:])
        first = jnp.concatenate([first, first], -1) + averaged(packed(x[:, -1:]), self.features)
        if chunk.number is None:
            return first
        return chunk.or_first(packed(y, 2) + averaged(packed(x, 2), self.features), first)


class Upsample(nnx.Module):
    """Doubles height and width and, with `in_time`, the frames but the video's first; plus a shortcut of repeated channels."""

    def __init__(self, channels: int, features: int, in_time: bool, **how):
        self.features, self.in_time = features, in_time
        self.conv = Conv(channels, features * block_size(features, channels, in_time), **how)

    def __call__(self, x: Map, chunk: Chunk) -> Map:
        y = self.conv(chunk.causal_pad(x))
        if not self.in_time:
            return spread(y) + repeated(spread(x), self.features)
        first = spread(y[:, -1:])[..., : self.features] + repeated(spread(x[:, -1:]), self.features)
        if chunk.number is None:
            return first
        return chunk.or_first(spread(y, 2) + repeated(spread(x, 2), self.features), first)


class AttentionBlock(nnx.Module):
    """Self-attention of one head in which a frame sees itself and those before it."""

    def __init__(self, channels: int, **how):
        self.norm = RMSNorm(channels, dtype=how["dtype"])
        for name in ("to_q", "to_k", "to_v", "proj_out"):
            setattr(self, name, Conv(channels, channels, (1, 1, 1), **how))

    def __call__(self, x: Map) -> Map:
        normed, (batch, frames, *_, channels) = self.norm(x), x.shape
        q, k, v = (to(normed).reshape(batch, 1, -1, channels) for to in (self.to_q, self.to_k, self.to_v))
        return self.proj_out(attention_by_frame(q, k, v, frames).reshape(x.shape)) + x


def levels(dims, blocks: int, resampled: int, matched: bool, make: Callable, **how) -> nnx.List:
    """A level per width in `dims`. The first `resampled` end with `make`(level, width, features): the next width if `matched`."""
    found, channels = nnx.List([]), dims[0]
    for level, features in enumerate(dims):
        resampler, after = None, features
        if level < resampled:
            after = dims[level + 1] if matched else features
            resampler = make(level, features, after)
        found.append(Level(functools.partial(ResidualBlock, **how), channels, features, blocks, resampler))
        channels = after
    return found


class Encoder(nnx.Module):
    """Frames [B, T, H, W, I] -> maps for the middle block [B, T / 4, H / 16, W / 16, M]. `moments` is for all frames at once."""

    def __init__(self, config, **how):
        dims, latents = config.block_out_channels, 2 * config.latent_channels
        halvings, in_time = _halvings(config)
        self.conv_in = Conv(config.in_channels, dims[0], **how)

        def halved(level, channels, features):
            return Downsample(channels, features, level >= halvings - in_time, **how)

        matched = config.downsample_match_channel
        self.down_blocks = levels(dims, config.layers_per_block, halvings, matched, halved, **how)
        self.mid_block = MidBlock(dims[-1], AttentionBlock, **how)
        self.norm_out = RMSNorm(dims[-1], dtype=how["dtype"])
        self.conv_out = Conv(dims[-1], latents, **how)

    def __call__(self, x: Map, chunk: Chunk) -> Map:
        x = chunk.or_first(x, x[:, -1:])
        x = self.conv_in(chunk.causal_pad(x))
        for block in self.down_blocks:
            x = block(x, chunk)
        return x

    def moments(self, x: Map, chunk: Chunk) -> Latents:
        """The middle block and last layers, for all frames: twice the latents' channels."""
        x = self.mid_block(x, chunk)
        shortcut = averaged(x, self.conv_out.bias.shape[0])
        return self.conv_out(chunk.causal_pad(silu(self.norm_out(x)))) + shortcut


class Decoder(nnx.Module):
    """Maps of the middle block [B, T, H, W, M] -> frames [B, 4 T, 16 H, 16 W, O]; the first map gives one frame."""

    def __init__(self, config, **how):
        dims = config.block_out_channels[::-1]
        doublings, in_time = _halvings(config)
        self.conv_in = Conv(config.latent_channels, dims[0], **how)
        self.mid_block = MidBlock(dims[0], AttentionBlock, **how)

        def doubled(level, channels, features):
            return Upsample(channels, features, level < in_time, **how)

        matched = config.upsample_match_channel
        self.up_blocks = levels(dims, config.layers_per_block + 1, doublings, matched, doubled, **how)
        self.norm_out = RMSNorm(dims[-1], dtype=how["dtype"])
        self.conv_out = Conv(dims[-1], config.out_channels, **how)

    def middle(self, z: Latents, chunk: Chunk) -> Map:
        """The middle block's maps for all latents."""
        x = self.conv_in(chunk.causal_pad(z))
        return self.mid_block(x + repeated(z, x.shape[-1]), chunk)

    def __call__(self, x: Map, chunk: Chunk) -> Map:
        for block in self.up_blocks:
            x = block(x, chunk)
        return self.conv_out(chunk.causal_pad(silu(self.norm_out(x))))


def _halvings(config) -> tuple[int, int]:
    """How many levels halve the map, and how many of these, the coarsest, halve the frames too."""
    space, time = config.spatial_compression_ratio, config.temporal_compression_ratio
    return space.bit_length() - 1, time.bit_length() - 1


class FlaxAutoencoderKLHunyuanVideo15(VideoAutoencoder):
    """HunyuanVideo-1.5's VAE.

    Videos [B, F, H, W, 3] have 4 f - 3 frames and a height and width of multiples of 16; latents [B, f, h, w, C] are decoded
    to as many. As upstream's, these are not clipped to [-1, 1]. Arguments: `VideoAutoencoder`'s. Raises ValueError for a config
    that is not supported.
    """

    upstream, names, tiling = AutoencoderKLHunyuanVideo15, NAMES, tiling

    def __init__(self, config: dict, *, rngs: nnx.Rngs, **settings):
        super().__init__(config, **settings)
        config = self.config
        _check_config(config)
        self.spatial_compression_ratio = config.spatial_compression_ratio
        self.temporal_compression_ratio = config.temporal_compression_ratio
        self.video_channels, self.latent_channels = config.in_channels, config.latent_channels
        self.in_multiples = True
        latents = self.tile_sample_min_height // self.spatial_compression_ratio
        self.tile_latent_min_height = self.tile_latent_min_width = latents
        self.tile_overlap_factor = 0.25  # upstream's
        how = {"dtype": self.dtype, "rngs": rngs, "repeated": True}
        self.encoder, self.decoder = Encoder(config, **how), Decoder(config, **how)

    def _check_tiling(self, height: int, width: int, latent_height: int, latent_width: int, factor: float):
        """Raises ValueError for tiles of latents that do not match those of the video, and for tiles that leave gaps."""
        ratio = self.spatial_compression_ratio
        for size, latent in ((height, latent_height), (width, latent_width)):
            if size != ratio * latent:
                raise ValueError(
                    f"expected tiles of {ratio} pixels to each of their latents, got {size} pixels and {latent} latents:"
                    " enable_tiling(...) takes sizes of both"
                )
            if not tiles_meet(size, ratio, factor):
                raise ValueError(
                    f"expected a tile_overlap_factor of whole latents, below all {latent} of a tile, got {factor}: it would"
                    " leave gaps between tiles"
                )

    def _check_video(self, frames: int, height: int, width: int):
        super()._check_video(frames, height, width)
        ratio = self.temporal_compression_ratio
        if (frames - 1) % ratio:
            raise ValueError(f"expected one frame and a multiple of {ratio} more, got {frames} frames")

    def _decode_map(self, z: Latents) -> Video:
        return in_chunks(self.decoder, self.decoder.middle(z, Chunk(None, [])), 1, Chunk)

    def _encode_map(self, x: Video) -> Latents:
        x = in_chunks(self.encoder, x, self.temporal_compression_ratio, Chunk)
        return self.encoder.moments(x, Chunk(None, []))


def _check_config(config):
    space, time = ratios = config.spatial_compression_ratio, config.temporal_compression_ratio
    if any(ratio < 1 or ratio & (ratio - 1) for ratio in ratios) or time > space:
        raise ValueError(
            f"expected compression ratios of powers of two, that in time at most that in space, got {ratios}"
        )
    dims, latents = config.block_out_channels, config.latent_channels
    levels = _halvings(config)[0] + (config.downsample_match_channel or config.upsample_match_channel)
    if len(dims) < levels or dims[-1] % (2 * latents):
        raise ValueError(
            f"expected at least {levels} block_out_channels for a ratio of {space}, the last a multiple of"
            f" {2 * latents}, got {dims}"
        )
