"""Wan's VAE in pure JAX: Flax NNX, channels last, from the files of upstream's `AutoencoderKLWan`, with its results.

    vae = FlaxAutoencoderKLWan.from_pretrained("Wan-AI/Wan2.1-T2V-14B-Diffusers", subfolder="vae", dtype=jnp.bfloat16)
    latents = vae.encode(video).mode()      # video [B, F, H, W, 3] in [-1, 1]
    video = vae.decode(latents)

The loop over frames is one scan; the rest is what such VAEs share (`tpu/video/nnx/`). A caller that needs latents normalised
uses `config.latents_mean` and `config.latents_std`.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from ...tpu.video.nnx.autoencoder import Latents, Video, VideoAutoencoder
from ...tpu.video.nnx.layers import Conv, in_chunks
from .autoencoder_kl_wan import AutoencoderKLWan
from .autoencoder_kl_wan_flax import FRAMES, tiling
from .autoencoder_kl_wan_nnx_layers_flax import NAMES, Chunk, Decoder, Encoder


class FlaxAutoencoderKLWan(VideoAutoencoder):
    """Both generations of Wan's VAE: 2.1, and 2.2 with its residual blocks and patches.

    Frames of a video [B, F, H, W, 3] after the last whole four are left out, as upstream does; latents [B, f, h, w, C] are
    decoded to 4 f - 3 frames in [-1, 1]. Arguments: `VideoAutoencoder`'s. Raises ValueError for a config that cannot be.
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

    def enable_tiling(
        self,
        tile_sample_min_height: int | None = None,
        tile_sample_min_width: int | None = None,
        tile_sample_stride_height: int | None = None,
        tile_sample_stride_width: int | None = None,
    ):
        """Larger maps go in overlapping tiles, which the chips share; sizes and strides in pixels, None: as they are.

        Raises ValueError for a stride that is less than a latent or more than its tile.
        """
        height = tile_sample_min_height or self.tile_sample_min_height
        width = tile_sample_min_width or self.tile_sample_min_width
        strides = (
            tile_sample_stride_height or self.tile_sample_stride_height,
            tile_sample_stride_width or self.tile_sample_stride_width,
        )
        for size, stride in zip((height, width), strides):
            if not self.spatial_compression_ratio <= stride <= size:
                raise ValueError(
                    f"expected strides of {self.spatial_compression_ratio} pixels at least, and of a tile at most, got"
                    f" strides {strides} of tiles {(height, width)}"
                )
        self.use_tiling = True
        self.tile_sample_min_height, self.tile_sample_min_width = height, width
        self.tile_sample_stride_height, self.tile_sample_stride_width = strides

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
    """[B, F, H, W, C] -> [B, F, H / p, W / p, C p p]: of each channel's patch column by column, upstream's order."""
    batch, frames, height, width, channels = x.shape
    x = x.reshape(batch, frames, height // patch, patch, width // patch, patch, channels)
    return x.transpose(0, 1, 2, 4, 6, 5, 3).reshape(batch, frames, height // patch, width // patch, -1)


def _from_patches(x: jax.Array, patch: int) -> Video:
    batch, frames, height, width, channels = x.shape
    x = x.reshape(batch, frames, height, width, -1, patch, patch).transpose(0, 1, 2, 6, 3, 5, 4)
    return x.reshape(batch, frames, height * patch, width * patch, -1)
