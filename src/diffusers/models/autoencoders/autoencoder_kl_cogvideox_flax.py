"""CogVideoX's VAE on TPU: upstream's module, its loop over batches of frames as one scan, sharded over the width of the video.

Upstream decodes two latent frames at a time and encodes eight frames of the video, the remainder with the first batch; convolutions
pass their last frames to the next batch. Here the batches are one scan (`tracing.scan_batches`); group norms use the statistics of
the whole map. Equal residual blocks are scanned too. This module also exports the VAE without torch, `FlaxAutoencoderKLCogVideoX`.

The decoder's norms are scaled and shifted by the latents at each position. Upstream enlarges the latents to the map's size and
convolves them then. Here they are convolved first, which is pointwise, and the result is enlarged.
"""

import torch
import torch.nn.functional as F

from ...tpu.pipelines.exports import upstream_names
from ..downsampling import CogVideoXDownsample3D
from ..upsampling import CogVideoXUpsample3D
from . import autoencoder_kl_cogvideox as upstream
from .vae_maps_flax import Maps, overlapping_tiles, spatial_ratio, tracing


def _convolved(layer, inputs, conv_cache=None, shortcut=None):
    """As upstream's: (the convolution of the kept frames and the inputs, plus a shortcut; the last frames, to be kept)."""
    back, upstreams = layer.time_kernel_size - 1, layer.pad_mode == "replicate"
    if back and not upstreams:
        return tracing().keeping_last(layer.conv, tracing().causal_pad(inputs, conv_cache, back), back, shortcut)
    out, kept = type(layer).forward(layer, inputs, conv_cache) if upstreams else (layer.conv(inputs), None)
    return out if shortcut is None else out + shortcut, kept


def _spatial_norm(norm, f, zq, conv_cache=None, silu=False):
    """As upstream's: f normed, then scaled and shifted by the latents at each position."""
    return tracing().normed_by_place(norm.norm_layer, f, norm.conv_y.conv(zq), norm.conv_b.conv(zq), silu), None


def _residual(block, inputs, temb=None, zq=None, conv_cache=None):
    """As upstream's: norm, SiLU and convolution, twice, plus a shortcut."""
    if type(block.conv2) is not upstream.CogVideoXCausalConv3d:
        return type(block).forward(block, inputs, temb, zq, conv_cache)
    silu = zq is not None and type(block.nonlinearity) is torch.nn.SiLU

    def activated(norm, x):
        x = norm(x) if zq is None else norm(x, zq, silu=silu)[0]
        return x if silu else block.nonlinearity(x)

    first, second = conv_cache or (None, None)
    shortcut = inputs if block.in_channels == block.out_channels else block.conv_shortcut(inputs)
    x, first = block.conv1(activated(block.norm1, inputs), conv_cache=first)
    x, second = _convolved(block.conv2, activated(block.norm2, x), second, shortcut)
    return x, [first, second]


def _level(block, hidden_states, temb=None, zq=None, conv_cache=None):
    """As upstream's: residual blocks, as one scan but for a first that changes the channels, then resampling."""
    cache, keeps = conv_cache or {}, {}
    resnets = list(block.resnets)
    if resnets[0].in_channels != resnets[0].out_channels:
        first = resnets.pop(0)
        hidden_states, keeps["first"] = first(hidden_states, temb, zq, conv_cache=cache.get("first"))
    if resnets:

        def call(resnet, x, kept):
            return resnet(x, temb, zq, conv_cache=kept)

        hidden_states, keeps["alike"] = tracing().scan_alike(call, resnets, hidden_states, cache.get("alike"))
    for name in ("downsamplers", "upsamplers"):
        for resample in getattr(block, name, None) or ():
            hidden_states = resample(hidden_states)
    return hidden_states, keeps


def _upsampled(layer, x):
    """As upstream's: doubles the map and, with `compress_time`, all frames but the first of an odd number."""
    x = tracing().doubled(layer.conv, x)  # equal frames are convolved once
    if not layer.compress_time or x.shape[2] == 1:
        return x
    first = x.shape[2] % 2
    return torch.cat([x[:, :, :first], x[:, :, first:].repeat_interleave(2, 2)], 2)


def _downsampled(layer, x):
    """As upstream's: halves the map and, with `compress_time`, all frames but the first of an odd number."""
    if layer.compress_time:
        first = x.shape[2] % 2
        rest = x[:, :, first:].unflatten(2, (-1, 2)).float().mean(3).to(x.dtype)
        x = torch.cat([x[:, :, :first], rest], 2)
    maps = layer.conv(F.pad(x.transpose(1, 2).flatten(0, 1), (0, 1, 0, 1)))
    return maps.unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)


class _Maps(Maps):
    def decode(self, vae, z):
        def step(latents, cache):
            if vae.post_quant_conv is not None:
                latents = vae.post_quant_conv(latents)
            return vae.decoder(latents, conv_cache=cache)

        return tracing().scan_batches(step, z, vae.num_latent_frames_batch_size)

    def encode(self, vae, x):
        def step(frames, cache):
            moments, cache = vae.encoder(frames, conv_cache=cache)
            return moments if vae.quant_conv is None else vae.quant_conv(moments), cache

        return tracing().scan_batches(step, x, vae.num_sample_frames_batch_size)

    @staticmethod
    def tiling(vae, height, width, encode=False):
        """Upstream's tiles; the VAE without torch uses them too."""
        factors = vae.tile_overlap_factor_height, vae.tile_overlap_factor_width
        return overlapping_tiles(vae, factors, spatial_ratio(vae), height, width, encode)


tiling = _Maps.tiling
__getattr__ = upstream_names(__name__)

PLAN = _Maps().plan(
    upstream.AutoencoderKLCogVideoX,
    methods={
        (upstream.CogVideoXCausalConv3d, "forward"): _convolved,
        (upstream.CogVideoXSafeConv3d, "forward"): torch.nn.Conv3d.forward,  # upstream's splits large inputs, for GPUs
        (upstream.CogVideoXSpatialNorm3D, "forward"): _spatial_norm,
        (upstream.CogVideoXResnetBlock3D, "forward"): _residual,
        (upstream.CogVideoXDownBlock3D, "forward"): _level,
        (upstream.CogVideoXMidBlock3D, "forward"): _level,
        (upstream.CogVideoXUpBlock3D, "forward"): _level,
        (CogVideoXUpsample3D, "forward"): _upsampled,
        (CogVideoXDownsample3D, "forward"): _downsampled,
    },
)
