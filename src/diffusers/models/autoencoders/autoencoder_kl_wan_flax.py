"""Wan's VAE on TPU: upstream's module with its loop over frames as one scan, sharded over the width of the video.

Upstream decodes one frame and encodes four frames at a time, with its convolutions' last frames in a list. Here that is a step
of a scan (`tracing.scan_chunks`). This module also exports the VAE without torch, `FlaxAutoencoderKLWan`.

Upstream's first chunk is one frame, which temporal resampling does not change. Here it is as long as the other chunks, and the
frame is its last. Frames before it are zero wherever a layer looks back, as upstream's padding is.
"""

import contextvars

import torch

from ...tpu.chips.sharding import ModelPlan
from ...tpu.kernels.settings import bound
from ...tpu.kernels.video.tiles import Tiling
from ...tpu.pipelines.exports import upstream_names
from . import autoencoder_kl_wan as upstream
from .vae_maps_flax import Maps, tracing


FRAMES = 4  # of the video, per latent frame after the first
HISTORY = 2  # frames that a convolution looks back

# The number of the current chunk, a traced scalar.
_number = contextvars.ContextVar("diffusers_tpu_wan_chunk", default=None)


def _only_the_frame(x):
    """x [B, C, T, H, W]; in the first chunk all frames but the last are zeros."""
    if _number.get() is None or x.ndim != 5 or x.shape[2] == 1:
        return x
    return torch.where((_number.get() > 0) | _is_last(x.shape[2]), x, 0)


def _is_last(frames):
    return (torch.arange(frames) == frames - 1)[:, None, None]


def _or_the_frame(resampled, x):
    """`resampled`, x's frames; in the first chunk zeros, and then x's last frame unchanged."""
    return torch.where(_number.get() > 0, resampled, torch.where(_is_last(resampled.shape[2]), x[:, :, -1:], 0))


def _activation(silu, x):
    """As upstream's, with zeros before the video's first frame, as convolutions look back at this output."""
    return _only_the_frame(type(silu).forward(silu, x))


def _residual(block, x, feat_cache=None, feat_idx=[0]):  # noqa: B006  upstream's signature
    """As upstream's: two convolutions plus a shortcut."""
    convolutions = {type(block.conv1), type(block.conv2)}
    if feat_cache is None or _number.get() is None or convolutions != {upstream.WanCausalConv3d}:
        return type(block).forward(block, x, feat_cache, feat_idx)
    shortcut = block.conv_shortcut(x)
    x = _looking_back(block.conv1, block.nonlinearity(block.norm1(x)), feat_cache, feat_idx)
    x = block.dropout(block.nonlinearity(block.norm2(x)))
    return _looking_back(block.conv2, x, feat_cache, feat_idx, shortcut)


def _looking_back(conv, x, feat_cache, feat_idx, shortcut=None):
    """The convolution of the kept frames and x, three taps each way, plus a shortcut."""
    slot = feat_idx[0]
    feat_idx[0] += 1
    before, (batch, channels, _, *size) = feat_cache[slot], x.shape
    longer = tracing().behind(x.new_zeros(batch, channels, HISTORY, *size) if before is None else before, x)

    def convolved(frames):
        return torch.nn.Conv3d.forward(conv, torch.nn.functional.pad(frames, (1, 1, 1, 1)))

    out, feat_cache[slot] = tracing().keeping_last(convolved, longer, HISTORY, shortcut)
    return out


def _average_down(shortcut, x):
    return type(shortcut).forward(shortcut, _only_the_frame(x))


def _resample(resample, x, feat_cache=None, feat_idx=[0]):  # noqa: B006  upstream's signature
    """As upstream's: doubles or halves the map and, in the modes "...3d", the frames but the first."""

    def in_space(x):
        if resample.mode.startswith("upsample"):
            return tracing().doubled(resample.resample[1], x)
        return type(resample).forward(resample, x)

    if resample.mode == "upsample2d":
        return in_space(x)
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
    feat_cache[slot] = torch.where(_number.get() > 0, kept, 0)  # the first frame is not kept
    return in_space(_or_the_frame(doubled, x))


class WanMaps(Maps):
    """For Wan's VAE, and those with its layers."""

    def decode(self, vae, z):
        def step(frame, cache, number):
            first = {"first_chunk": number is None} if vae.config.get("is_residual") else {}
            with bound(_number, number):
                return vae.decoder(frame, feat_cache=cache, feat_idx=[0], **first)

        return tracing().scan_chunks(step, vae.post_quant_conv(z), 1, vae._cached_conv_counts["decoder"])

    def encode(self, vae, x):
        """Frames after the last complete group of four are left out."""

        def step(frames, cache, number):
            with bound(_number, number):
                return vae.encoder(frames, feat_cache=cache, feat_idx=[0])

        whole = 1 + (x.shape[2] - 1) // FRAMES * FRAMES
        return vae.quant_conv(tracing().scan_chunks(step, x[:, :, :whole], FRAMES, vae._cached_conv_counts["encoder"]))

    @staticmethod
    def tiling(vae, height, width, encode=False):
        """Upstream's tiles; the VAE without torch uses them too."""
        return Tiling.by_strides(vae, (height, width), _patch(vae), encode)

    def ratio(self, vae):
        return vae.spatial_compression_ratio // _patch(vae)

    def patched(self, vae, x):
        return upstream.patchify(x, patch_size=_patch(vae))

    def output(self, vae, sample, tiled, return_dict=True):
        sample = torch.clamp(upstream.unpatchify(sample, patch_size=_patch(vae)), min=-1.0, max=1.0)
        return super().output(vae, sample, tiled, return_dict)

    def plan_of(self, vae: type, resample: type, upsample: type, methods: dict = {}, **more) -> ModelPlan:
        """The plan of a class whose layers are of these classes."""
        layers = {
            (resample, "forward"): _resample,
            (upsample, "forward"): torch.nn.Upsample.forward,  # upstream's copies pixels in float32
            (torch.nn.SiLU, "forward"): _activation,
        }
        return self.plan(vae, layers | methods, **more)


tiling = WanMaps.tiling


def _patch(vae):
    return vae.config.get("patch_size") or 1


__getattr__ = upstream_names(__name__)

PLAN = WanMaps().plan_of(
    upstream.AutoencoderKLWan,
    upstream.WanResample,
    upstream.WanUpsample,
    methods={(upstream.AvgDown3D, "forward"): _average_down, (upstream.WanResidualBlock, "forward"): _residual},
    remark="upstream's module, scanned over frames, is the default on every chip: its form in plain JAX becomes the same"
    " convolutions and is no faster (diffusers-tpu bench vae)",
)
