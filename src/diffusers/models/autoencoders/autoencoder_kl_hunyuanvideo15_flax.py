"""HunyuanVideo-1.5's VAE on TPU: upstream's module, sharded over the width of the video, all levels but the middle as one scan.

Upstream computes all frames at once. Here the levels between the middle block and the video are a scan, one latent frame per step
(`tracing.scan_chunks`): chips hold the activations of one step, whatever the length of the video. The middle block, whose attention
sees all frames so far, computes all frames at once, as they are small at that level. This module also exports the VAE without
torch, `FlaxAutoencoderKLHunyuanVideo15`.

Upstream's first chunk is one frame, repeated before itself wherever a layer looks back. Here it is as long as the other chunks
and has copies of that frame only, as do the frames that layers keep of it.
"""

import contextvars
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ...tpu.kernels.settings import bound
from ...tpu.pipelines.exports import upstream_names
from . import autoencoder_kl_hunyuanvideo15 as upstream
from .vae_maps_flax import Maps, overlapping_tiles, tracing


@dataclass
class Chunk:
    """One chunk of a scan. `number`: a traced scalar; `cache`: what layers keep for the next chunk, in the order of calls."""

    number: torch.Tensor
    cache: list
    asked: int = 0

    def or_first(self, x, first):
        """`x`, but in the first chunk `first`, repeated in time."""
        return torch.where(self.number > 0, x, first.expand_as(x))

    def convolved(self, layer, x, shortcut=None):
        """The layer's convolution of the kept frames (in the first chunk: its own frame) and x [B, C, T, H, W], plus a shortcut.
        The map's edges are repeated as padding."""
        *sides, frames, ahead = layer.time_causal_padding
        slot, before = self.asked, self.cache[self.asked]
        self.asked += 1
        before = x.new_zeros(*x.shape[:2], frames, *x.shape[3:]) if before is None else before
        longer = tracing().behind(before, x, first=self.number == 0)

        def convolved(all):
            return layer.conv(F.pad(all, (*sides, 0, ahead), mode=layer.pad_mode))

        out, self.cache[slot] = tracing().keeping_last(convolved, longer, frames, shortcut)
        return out


_chunk = contextvars.ContextVar("diffusers_tpu_hunyuan_chunk", default=None)


def _convolved(layer, x):
    """As upstream's, of a chunk after the frames kept before it."""
    chunk = _chunk.get()
    return type(layer).forward(layer, x) if chunk is None or not _looks_back(layer) else chunk.convolved(layer, x)


def _looks_back(layer) -> bool:
    return layer.time_causal_padding[4] > 0


def _residual(block, x):
    """As upstream's: norm, activation and convolution, twice, plus a shortcut."""
    chunk = _chunk.get()
    if chunk is None or type(block.conv2) is not upstream.HunyuanVideo15CausalConv3d or not _looks_back(block.conv2):
        return type(block).forward(block, x)
    shortcut = x if block.conv_shortcut is None else block.conv_shortcut(x)
    x = block.conv1(block.nonlinearity(block.norm1(x)))
    return chunk.convolved(block.conv2, block.nonlinearity(block.norm2(x)), shortcut)


def _upsampled(layer, x):
    """As upstream's: doubles the map and, with `add_temporal_upsample`, all frames but the first."""
    chunk, spread = _chunk.get(), layer._dcae_upsample_rearrange
    if chunk is None or not layer.add_temporal_upsample:
        return type(layer).forward(layer, x)
    h = layer.conv(x)
    last = spread(h[:, :, -1:])
    first = last[:, : last.shape[1] // 2] + spread(_repeated(x[:, :, -1:], layer.repeats // 2))
    return chunk.or_first(spread(h + _repeated(x, layer.repeats), r1=2), first)


def _repeated(x, times: int):
    """x [B, C, T, H, W] with each channel repeated; bfloat16 by a product with ones, as chips are slow to move lanes."""
    if x.dtype != torch.bfloat16:
        return x.repeat_interleave(times, dim=1)
    channels = torch.arange(x.shape[1], device=x.device)
    ones = channels.repeat_interleave(times)[:, None] == channels
    return torch.einsum("oc,bcthw->bothw", ones.to(x.dtype), x)


def _downsampled(layer, x):
    """As upstream's: halves the map and, with `add_temporal_downsample`, all frames but the first."""
    chunk, packed = _chunk.get(), layer._dcae_downsample_rearrange
    if chunk is None or not layer.add_temporal_downsample:
        return type(layer).forward(layer, x)
    h = layer.conv(x)
    first, rest = packed(h[:, :, -1:]), packed(h, r1=2)

    def mean(x, size):
        return x.unflatten(1, (rest.shape[1], size)).mean(2)

    first = torch.cat([first, first], 1) + mean(packed(x[:, :, -1:]), layer.group_size // 2)
    return chunk.or_first(rest + mean(packed(x, r1=2), layer.group_size), first)


def _attended(block, x):
    """As upstream's: a frame sees itself and those before it."""
    normed, frames = block.norm(x), x.shape[2]
    query, key, value = (
        layer(normed).flatten(2).transpose(1, 2).unsqueeze(1) for layer in (block.to_q, block.to_k, block.to_v)
    )
    out = tracing().attention_by_frame(query, key, value, frames)
    return block.proj_out(out.squeeze(1).transpose(1, 2).reshape(x.shape)) + x


class _Maps(Maps):
    def decode(self, vae, z):
        decoder = vae.decoder

        def step(hidden, cache, number):
            with bound(_chunk, None if number is None else Chunk(number, cache)):
                for block in decoder.up_blocks:
                    hidden = block(hidden)
                return decoder.conv_out(decoder.conv_act(decoder.norm_out(hidden)))

        hidden = decoder.conv_in(z) + z.repeat_interleave(decoder.repeat, dim=1)
        return tracing().scan_chunks(step, decoder.mid_block(hidden), 1, _that_keep(decoder))

    def encode(self, vae, x):
        encoder = vae.encoder

        def step(frames, cache, number):
            chunk = None if number is None else Chunk(number, cache)
            frames = frames if chunk is None else chunk.or_first(frames, frames[:, :, -1:])
            with bound(_chunk, chunk):
                hidden = encoder.conv_in(frames)
                for block in encoder.down_blocks:
                    hidden = block(hidden)
                return hidden

        hidden = encoder.mid_block(tracing().scan_chunks(step, x, vae.temporal_compression_ratio, _that_keep(encoder)))
        shortcut = hidden.unflatten(1, (-1, encoder.group_size)).mean(2)
        return encoder.conv_out(encoder.conv_act(encoder.norm_out(hidden))) + shortcut

    @staticmethod
    def tiling(vae, height, width, encode=False):
        """Upstream's tiles; the VAE without torch uses them too."""
        factors = vae.tile_overlap_factor, vae.tile_overlap_factor
        return overlapping_tiles(vae, factors, vae.spatial_compression_ratio, height, width, encode)

    def ratio(self, vae):
        return vae.spatial_compression_ratio

    def takes(self, vae, x, encode):
        """False for a video whose sides are no whole number of latents, which upstream refuses."""
        return not encode or all(size % vae.spatial_compression_ratio == 0 for size in x.shape[-2:])

    def output(self, vae, sample, tiled):
        return sample


def _that_keep(model) -> int:
    return sum(isinstance(module, upstream.HunyuanVideo15CausalConv3d) for module in model.modules())


tiling = _Maps.tiling
__getattr__ = upstream_names(__name__)

PLAN = _Maps().plan(
    upstream.AutoencoderKLHunyuanVideo15,
    methods={
        (upstream.HunyuanVideo15CausalConv3d, "forward"): _convolved,
        (upstream.HunyuanVideo15ResnetBlock, "forward"): _residual,
        (upstream.HunyuanVideo15Upsample, "forward"): _upsampled,
        (upstream.HunyuanVideo15Downsample, "forward"): _downsampled,
        (upstream.HunyuanVideo15AttnBlock, "forward"): _attended,
    },
)
