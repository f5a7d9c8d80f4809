"""The VAE of Stable Diffusion, SDXL, SD3 and Flux on TPU: upstream's module, split over the width of the image.

Each chip computes its shard of the width with its neighbours' edge columns (`tracing.shard_width`), a batch that `dp` divides
lies over it; group norms have the statistics of the whole map, and the middle's attention sees all of its keys. With tiling
on, equal tiles are one mapped program and chips share them. A module whose blocks or attention processors are not known to
compute on a shard is left to the compiler.
"""

import functools
from dataclasses import replace

from ...tpu.chips.sharding import ModelPlan
from ..attention_processor import Attention, AttnProcessor, AttnProcessor2_0, FusedAttnProcessor2_0
from ..unets.unet_2d_blocks import AttnDownEncoderBlock2D, AttnUpDecoderBlock2D, DownEncoderBlock2D, UpDecoderBlock2D
from ..upsampling import Upsample2D
from .autoencoder_kl import AutoencoderKL
from .vae import DecoderOutput


BLOCKS = {DownEncoderBlock2D, AttnDownEncoderBlock2D, UpDecoderBlock2D, AttnUpDecoderBlock2D}
PROCESSORS = {AttnProcessor2_0, FusedAttnProcessor2_0}  # by SDPA, which knows of shards


def works_on_slabs(vae) -> bool:
    """Whether every layer of the encoder and the decoder computes on a shard what it computes on the map."""
    blocks = {type(block) for block in (*vae.encoder.down_blocks, *vae.decoder.up_blocks)}
    processors = {type(m.processor) for m in vae.modules() if isinstance(m, Attention)}
    return blocks <= BLOCKS and processors <= PROCESSORS


def _upsampled(layer, x, output_size=None):
    """As upstream's: doubles the map and convolves it."""
    from ...tpu.compile.tracing import doubled, on_a_shard

    if not on_a_shard() or output_size is not None:
        return type(layer).forward(layer, x, output_size)
    return doubled(layer.conv, x)


def _decode(vae, z, return_dict=True):
    """As upstream's: z [B, C, H, W] -> the image, wrapped."""
    from ...tpu.compile.tracing import in_tiles, shard_width

    if not works_on_slabs(vae):
        return type(vae)._decode(vae, z, return_dict)
    decode = functools.partial(_decode_map, vae)
    if vae.use_tiling and max(z.shape[-2:]) > vae.tile_latent_min_size:
        sample = in_tiles(decode, z, decode_tiling(vae, *z.shape[-2:]))
    else:
        sample = shard_width(decode, z)
    return DecoderOutput(sample=sample) if return_dict else (sample,)


def _decode_map(vae, z):
    return vae.decoder(z if vae.post_quant_conv is None else vae.post_quant_conv(z))


def _encode(vae, x):
    """As upstream's: an image [B, 3, H, W] -> the posterior's parameters."""
    from ...tpu.compile.tracing import in_tiles, shard_width

    if not works_on_slabs(vae):
        return type(vae)._encode(vae, x)
    encode = functools.partial(_encode_map, vae)
    if vae.use_tiling and max(x.shape[-2:]) > vae.tile_sample_min_size:
        return in_tiles(encode, x, encode_tiling(vae, *x.shape[-2:]))
    return shard_width(encode, x, multiple=spatial_ratio(vae))


def _encode_map(vae, x):
    moments = vae.encoder(x)
    return moments if vae.quant_conv is None else vae.quant_conv(moments)


def spatial_ratio(vae) -> int:
    return 2 ** (len(vae.config.block_out_channels) - 1)


def decode_tiling(vae, height, width):
    """Upstream's tiles for latents of this size."""
    return _tiling(vae, vae.tile_latent_min_size, vae.tile_sample_min_size, height, width)


def encode_tiling(vae, height, width):
    """Upstream's tiles for an image of this size."""
    return _tiling(vae, vae.tile_sample_min_size, vae.tile_latent_min_size, height, width)


def _tiling(vae, size, result, height, width):
    from ...tpu.video.tiles import Tiling

    tiling = Tiling.overlapping((size,) * 2, (result,) * 2, (vae.tile_overlap_factor,) * 2, whole=(0, 0))
    rows, columns = (len(range(0, n, stride)) for n, stride in zip((height, width), tiling.strides))
    return replace(tiling, whole=(rows * tiling.kept[0], columns * tiling.kept[1]))  # upstream cuts nothing off


def plan_of_images(vae: type) -> ModelPlan:
    """The plan of a class whose encoder and decoder are those of `AutoencoderKL`."""
    return ModelPlan(
        parallel=True,
        entries=("forward", "encode", "decode"),
        processors={AttnProcessor: lambda processor: AttnProcessor2_0()},  # the same attention
        methods={(vae, "_decode"): _decode, (vae, "_encode"): _encode, (Upsample2D, "forward"): _upsampled},
        axes=4,
    )


PLAN = plan_of_images(AutoencoderKL)
