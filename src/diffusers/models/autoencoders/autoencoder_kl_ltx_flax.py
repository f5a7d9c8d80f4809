"""LTX-Video's VAE on TPU: upstream's module, sharded over the width of the video, with equal residual blocks as scans.

Upstream computes all frames at once, and so does this. A latent is 32 x 32 pixels and 8 frames, so that a layer's output for a
whole video is at most 0.76 GB (121 frames of 512 x 768, bfloat16). Each chip has its shard of the width (`tracing.shard_width`),
equal tiles are one mapped program. Upstream's code runs a decoder that draws noise in its forward (0.9.1), which no program can.
"""

import functools
import math

import torch

from ...tpu.chips.sharding import ModelPlan
from ...tpu.compile.tracing.video import in_tiles, scan_alike, shard_width
from ...tpu.kernels.video.halo import halo_shards
from ...tpu.kernels.video.tiles import Tiling
from . import autoencoder_kl_ltx as upstream
from .vae import DecoderOutput


def _level(block, hidden_states, temb=None, generator=None):
    """As upstream's: resampling and changes of channels, before or after residual blocks, which are one scan."""
    if halo_shards() is None:
        return type(block).forward(block, hidden_states, temb, generator)
    parts = {**block._modules}
    if parts.get("conv_in") is not None:
        hidden_states = block.conv_in(hidden_states, temb)
    if parts.get("time_embedder") is not None:
        size = {"resolution": None, "aspect_ratio": None, "batch_size": len(hidden_states)}
        temb = block.time_embedder(temb.flatten(), **size, hidden_dtype=hidden_states.dtype)
        temb = temb.view(len(hidden_states), -1, 1, 1, 1)
    for upsampler in parts.get("upsamplers") or ():
        hidden_states = upsampler(hidden_states)
    if len(block.resnets):
        resnets = list(block.resnets)
        hidden_states, _ = scan_alike(lambda resnet, x, _: (resnet(x, temb), None), resnets, hidden_states, None)
    for downsampler in parts.get("downsamplers") or ():
        hidden_states = downsampler(hidden_states)
    return hidden_states if parts.get("conv_out") is None else block.conv_out(hidden_states, temb)


def _draws(decoder) -> bool:
    blocks = (m for m in decoder.modules() if isinstance(m, upstream.LTXVideoResnetBlock3d))
    return any(block.per_channel_scale1 is not None for block in blocks)


def _decoded(decoder, hidden_states, temb=None):
    """As upstream's: latents [B, C, T, H, W] and, for a conditioned decoder, timesteps [B] -> the video."""
    decode = functools.partial(type(decoder).forward, decoder)
    if halo_shards() is not None or _draws(decoder):
        return decode(hidden_states, temb)
    return shard_width(decode, hidden_states, beside=() if temb is None else (temb,))


def _encoded(encoder, hidden_states):
    """As upstream's: a video [B, 3, T, H, W] -> the posterior's parameters."""
    encode = functools.partial(type(encoder).forward, encoder)
    ratio = spatial_ratio(encoder)
    if halo_shards() is not None or hidden_states.shape[-1] % ratio:
        return encode(hidden_states)
    return shard_width(encode, hidden_states, multiple=ratio)


def spatial_ratio(encoder) -> int:
    """Columns of the video per column of the latents."""
    strided = (m for m in encoder.modules() if isinstance(m, (torch.nn.Conv3d, upstream.LTXVideoDownsampler3d)))
    return encoder.patch_size * math.prod(m.stride[-1] for m in strided)


def tiled_decode(vae, z, temb=None, return_dict=True):
    """As upstream's: overlapping tiles are decoded separately and blended where they overlap."""
    if _draws(vae.decoder):
        return type(vae).tiled_decode(vae, z, temb, return_dict)
    sample = in_tiles(lambda tile: vae.decoder(tile, temb), z, Tiling.by_strides(vae, z.shape[-2:]))
    return DecoderOutput(sample=sample) if return_dict else (sample,)


def tiled_encode(vae, x):
    """As upstream's. Tiles whose edges cut a latent are left to upstream, which encodes them one by one."""
    tiling = Tiling.by_strides(vae, x.shape[-2:], encode=True)
    if any(size % spatial_ratio(vae.encoder) for size in (*tiling.sizes, *tiling.strides, *x.shape[-2:])):
        return type(vae).tiled_encode(vae, x)
    return in_tiles(vae.encoder, x, tiling)


PLAN = ModelPlan(
    parallel=True,
    entries=("forward", "encode", "decode"),
    axes=5,
    methods={
        (upstream.AutoencoderKLLTXVideo, "tiled_decode"): tiled_decode,
        (upstream.AutoencoderKLLTXVideo, "tiled_encode"): tiled_encode,
        (upstream.LTXVideoDecoder3d, "forward"): _decoded,
        (upstream.LTXVideoEncoder3d, "forward"): _encoded,
        (upstream.LTXVideoDownBlock3D, "forward"): _level,
        (upstream.LTXVideo095DownBlock3D, "forward"): _level,
        (upstream.LTXVideoMidBlock3d, "forward"): _level,
        (upstream.LTXVideoUpBlock3d, "forward"): _level,
    },
)
