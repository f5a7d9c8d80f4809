"""The VAE of Stable Diffusion, SDXL, SD3 and Flux on TPU: upstream's module, sharded over the width of the image.

A batch that `dp` divides is sharded over it. Group norms use the statistics of the whole map, and the middle block's attention sees
all keys of it. A module whose blocks or attention processors are not known to compute on a shard is left to the compiler.
"""

from dataclasses import replace

import torch

from ...tpu.chips.sharding import ModelPlan
from ...tpu.compile.tracing.video import doubled
from ...tpu.kernels.settings import current
from ...tpu.kernels.video.tiles import Tiling
from ..attention_processor import Attention, AttnProcessor, AttnProcessor2_0, FusedAttnProcessor2_0
from ..unets.unet_2d_blocks import AttnDownEncoderBlock2D, AttnUpDecoderBlock2D, DownEncoderBlock2D, UpDecoderBlock2D
from ..upsampling import Upsample2D
from .autoencoder_kl import AutoencoderKL
from .vae_maps_flax import Maps


BLOCKS = {DownEncoderBlock2D, AttnDownEncoderBlock2D, UpDecoderBlock2D, AttnUpDecoderBlock2D}
PROCESSORS = {AttnProcessor2_0, FusedAttnProcessor2_0}  # they call SDPA, which handles shards


def upsampled(layer, hidden_states, output_size=None, *args, **kwargs):
    """As upstream's: doubles the map and convolves it."""
    conv = getattr(layer, "conv", None)
    doubles = layer.interpolate and layer.norm is None and output_size is None
    plain = type(conv) is torch.nn.Conv2d and (conv.kernel_size, conv.padding_mode) == ((3, 3), "zeros")
    plain = plain and conv.weight.dtype == hidden_states.dtype  # else a hook of the layer may cast it
    if doubles and plain and conv.bias is not None and current().chips == 1:
        return doubled(conv, hidden_states)
    return type(layer).forward(layer, hidden_states, output_size, *args, **kwargs)


class _Maps(Maps):
    tiled_encode = "_tiled_encode"

    def decode(self, vae, z):
        return vae.decoder(z if vae.post_quant_conv is None else vae.post_quant_conv(z))

    def encode(self, vae, x):
        moments = vae.encoder(x)
        return moments if vae.quant_conv is None else vae.quant_conv(moments)

    def tiling(self, vae, height, width, encode=False):
        size, result = vae.tile_latent_min_size, vae.tile_sample_min_size
        size, result = (result, size) if encode else (size, result)
        tiling = Tiling.overlapping((size,) * 2, (result,) * 2, (vae.tile_overlap_factor,) * 2, whole=(0, 0))
        rows, columns = (len(range(0, n, stride)) for n, stride in zip((height, width), tiling.strides))
        return replace(tiling, whole=(rows * tiling.kept[0], columns * tiling.kept[1]))  # upstream crops nothing

    def takes(self, vae, x, encode):
        """Whether every layer of the encoder and the decoder computes on a shard what it computes on the map."""
        blocks = {type(block) for block in (*vae.encoder.down_blocks, *vae.decoder.up_blocks)}
        processors = {type(m.processor) for m in vae.modules() if isinstance(m, Attention)}
        return blocks <= BLOCKS and processors <= PROCESSORS


def plan_of_images(vae: type) -> ModelPlan:
    """The plan of a class whose encoder and decoder are those of `AutoencoderKL`."""
    processors = {AttnProcessor: lambda processor: AttnProcessor2_0()}  # the same attention
    return _Maps().plan(vae, {(Upsample2D, "forward"): upsampled}, processors=processors, axes=4)


PLAN = plan_of_images(AutoencoderKL)
