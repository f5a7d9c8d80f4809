"""Wan's VAE on TPU: upstream's module with its loop over frames as one scan, split over the width of the video.

Upstream decodes frame by frame and encodes four by four, its convolutions' last frames in a list. Here that is one
scanned step (`tracing.scan_chunks`), each chip on its shard of the width with its neighbours' edge columns
(`tracing.shard_width`). With tiling on, equal tiles are one mapped program and chips share them. The same VAE without torch
is `FlaxAutoencoderKLWan`, by name from here.

Upstream's first chunk is one frame, which temporal resampling leaves alone. In a video it is here as long as the others,
the frame its last: what is before it is zero wherever a layer looks back, as upstream's padding is.
"""

import contextvars
import functools

import torch

from ...tpu.chips.sharding import ModelPlan
from ...tpu.kernels.settings import bound
from ...tpu.pipelines.exports import upstream_names
from .autoencoder_kl_wan import AutoencoderKLWan, AvgDown3D, WanResample, WanUpsample, patchify, unpatchify
from .vae import DecoderOutput


FRAMES = 4  # of the video, to one of the latents after the first
HISTORY = 2  # frames that a convolution looks back

_number = contextvars.ContextVar(
    "diffusers_tpu_wan_chunk", default=None
)  # of the chunk that is computed, a traced scalar


def _only_the_frame(x):
    """x [B, C, T, H, W], of the first chunk with zeros in place of what is before its frame, the last one."""
    if _number.get() is None or x.ndim != 5 or x.shape[2] == 1:
        return x
    return torch.where((_number.get() > 0) | _is_last(x.shape[2]), x, 0)


def _is_last(frames):
    return (torch.arange(frames) == frames - 1)[:, None, None]


def _or_the_frame(resampled, x):
    """What became of x's frames; in the first chunk its last one as it is, zeros before it."""
    return torch.where(_number.get() > 0, resampled, torch.where(_is_last(resampled.shape[2]), x[:, :, -1:], 0))


def _upsample(upsample, x):
    """As upstream's, which copies pixels in float32."""
    return torch.nn.Upsample.forward(upsample, x)


def _activation(silu, x):
    """As upstream's, for what a convolution looks back at comes out of it."""
    return _only_the_frame(type(silu).forward(silu, x))


def _average_down(shortcut, x):
    """As upstream's."""
    return type(shortcut).forward(shortcut, _only_the_frame(x))


def _resample(resample, x, feat_cache=None, feat_idx=[0]):  # noqa: B006  upstream's signature
    """As upstream's: doubles or halves the frames, but for the first, and the map."""

    def in_space(x):
        return type(resample).forward(resample, x)

    if _number.get() is None or resample.mode not in ("upsample3d", "downsample3d"):
        return type(resample).forward(resample, x, feat_cache, feat_idx)
    slot = feat_idx[0]
    feat_idx[0] += 1
    if resample.mode == "downsample3d":
        x = in_space(x)
        before = torch.zeros_like(x[:, :, :1]) if feat_cache[slot] is None else feat_cache[slot]
        halved = resample.time_conv(torch.cat([before, x], 2))
        feat_cache[slot] = x[:, :, -1:]
        return _or_the_frame(halved, x)
    batch, channels, frames, height, width = x.shape
    before = x.new_zeros(batch, channels, HISTORY, height, width) if feat_cache[slot] is None else feat_cache[slot]
    doubled = resample.time_conv(x, before).reshape(batch, 2, channels, frames, height, width)
    doubled = doubled.permute(0, 2, 3, 1, 4, 5).reshape(batch, channels, 2 * frames, height, width)
    kept = torch.cat([before, x], 2)[:, :, -HISTORY:]
    feat_cache[slot] = torch.where(_number.get() > 0, kept, 0)  # the first frame is no history to it
    return in_space(_or_the_frame(doubled, x))


def _decode(vae, z, return_dict=True):
    """As upstream's: z [B, C, T, H, W] -> the video in [-1, 1], wrapped."""
    ratio = vae.spatial_compression_ratio
    if vae.use_tiling and (
        z.shape[-1] > vae.tile_sample_min_width // ratio or z.shape[-2] > vae.tile_sample_min_height // ratio
    ):
        return vae.tiled_decode(z, return_dict=return_dict)
    from ...tpu.compile.tracing import shard_width

    return _decoded(vae, shard_width(functools.partial(_decode_map, vae), z), return_dict)


def _decode_map(vae, z):
    from ...tpu.compile.tracing import scan_chunks

    def step(frame, cache, number):
        first = {"first_chunk": number is None} if vae.config.get("is_residual") else {}
        with bound(_number, number):
            return vae.decoder(frame, feat_cache=cache, feat_idx=[0], **first)

    return scan_chunks(step, vae.post_quant_conv(z), 1, vae._cached_conv_counts["decoder"])


def _decoded(vae, sample, return_dict):
    sample = torch.clamp(unpatchify(sample, patch_size=_patch(vae)), min=-1.0, max=1.0)
    return DecoderOutput(sample=sample) if return_dict else (sample,)


def _encode(vae, x):
    """As upstream's: a video [B, 3, T, H, W] -> the posterior's parameters. Frames after the last whole four are left out."""
    from ...tpu.compile.tracing import shard_width

    height, width = x.shape[-2:]
    patch = _patch(vae)
    x = patchify(x, patch_size=patch)
    if vae.use_tiling and (width > vae.tile_sample_min_width or height > vae.tile_sample_min_height):
        return vae.tiled_encode(x)
    return shard_width(functools.partial(_encode_map, vae), x, multiple=vae.spatial_compression_ratio // patch)


def _encode_map(vae, x):
    from ...tpu.compile.tracing import scan_chunks

    def step(frames, cache, number):
        with bound(_number, number):
            return vae.encoder(frames, feat_cache=cache, feat_idx=[0])

    whole = 1 + (x.shape[2] - 1) // FRAMES * FRAMES
    return vae.quant_conv(scan_chunks(step, x[:, :, :whole], FRAMES, vae._cached_conv_counts["encoder"]))


def tiled_decode(vae, z, return_dict=True):
    """As upstream's: overlapping tiles decoded by themselves, blended where they overlap."""
    return _decoded(vae, tiles_decoded(vae, z), return_dict)


def tiles_decoded(vae, z):
    """The video in its patches, of any values."""
    from ...tpu.compile.tracing import in_tiles

    return in_tiles(functools.partial(_decode_map, vae), z, decode_tiling(vae, *z.shape[-2:]))


def tiled_encode(vae, x):
    """As upstream's, of a patchified video."""
    from ...tpu.compile.tracing import in_tiles

    return in_tiles(functools.partial(_encode_map, vae), x, encode_tiling(vae, *x.shape[-2:]))


def decode_tiling(vae, height, width):
    """Upstream's tiles for latents of this size, before pixels leave their patches; the same for every form of this VAE."""
    from ...tpu.video.tiles import Tiling

    return Tiling.by_strides(vae, (height, width), _patch(vae))


def encode_tiling(vae, height, width):
    """Upstream's tiles for a video of this size in patches."""
    from ...tpu.video.tiles import Tiling

    return Tiling.by_strides(vae, (height, width), _patch(vae), encode=True)


def _patch(vae):
    return vae.config.get("patch_size") or 1


def plan_of_wans(vae: type, resample: type, upsample: type, **more) -> ModelPlan:
    """The plan of a class whose layers are those of Wan's VAE, under these names; `more` of its own as `ModelPlan` has it."""
    methods = {
        (vae, "_decode"): _decode,
        (vae, "_encode"): _encode,
        (vae, "tiled_decode"): tiled_decode,
        (vae, "tiled_encode"): tiled_encode,
        (resample, "forward"): _resample,
        (upsample, "forward"): _upsample,
        (torch.nn.SiLU, "forward"): _activation,
        **more.pop("methods", {}),
    }
    return ModelPlan(parallel=True, entries=("forward", "encode", "decode"), methods=methods, axes=5, **more)


__getattr__ = upstream_names(__name__)

PLAN = plan_of_wans(
    AutoencoderKLWan,
    WanResample,
    WanUpsample,
    methods={(AvgDown3D, "forward"): _average_down},
    remark="upstream's module, scanned over frames, is the default on every chip: its form in plain JAX becomes the same"
    " convolutions and is no faster (diffusers-tpu bench vae)",
)
