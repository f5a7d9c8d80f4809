"""HunyuanVideo-1.5's VAE on TPU: upstream's module, its levels that change in time as one scan, split over the width of the video.

Upstream computes all frames at once. Here the levels between the middle block and the video are a scanned step of one latent
frame (`tracing.scan_chunks`): what the chips hold is a step, whatever the length of the video. The middle block, whose attention
sees all frames so far, is computed for all of them: at that level they are small. The same VAE without torch is
`FlaxAutoencoderKLHunyuanVideo15`, by name from here.

Upstream's first chunk is one frame, repeated before itself wherever a layer looks back. In a video it is here as long as the
others, all of it that frame, and what a layer keeps of it is that frame too.
"""

import contextvars
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ...tpu.kernels.settings import bound
from ...tpu.pipelines.exports import upstream_names
from .autoencoder_kl_hunyuanvideo15 import (
    AutoencoderKLHunyuanVideo15,
    HunyuanVideo15AttnBlock,
    HunyuanVideo15CausalConv3d,
    HunyuanVideo15Downsample,
    HunyuanVideo15ResnetBlock,
    HunyuanVideo15Upsample,
)
from .vae_maps_flax import Maps, overlapping_tiles


@dataclass
class Chunk:
    """One chunk of a scan: its number, a traced scalar; what layers keep for the next, in the order in which they ask."""

    number: torch.Tensor
    cache: list
    asked: int = 0

    def or_first(self, x, first):
        """`x`, in the first chunk `first` repeated in time."""
        return torch.where(self.number > 0, x, first.expand_as(x))

    def convolved(self, layer, x, shortcut=None):
        """The layer's convolution of x [B, C, T, H, W] behind the last frames before it, which in the first chunk are its frame; the
        map's edges are repeated around it. Beside a shortcut."""
        from ...tpu.compile.tracing import behind, keeping_last

        *sides, frames, ahead = layer.time_causal_padding
        slot, before = self.asked, self.cache[self.asked]
        self.asked += 1
        before = x.new_zeros(*x.shape[:2], frames, *x.shape[3:]) if before is None else before
        longer = behind(before, x, first=self.number == 0)

        def convolved(all):
            return layer.conv(F.pad(all, (*sides, 0, ahead), mode=layer.pad_mode))

        out, self.cache[slot] = keeping_last(convolved, longer, frames, shortcut)
        return out


_chunk = contextvars.ContextVar("diffusers_tpu_hunyuan_chunk", default=None)


def _convolved(layer, x):
    """As upstream's, of a chunk behind what came before it."""
    chunk = _chunk.get()
    return type(layer).forward(layer, x) if chunk is None or not _looks_back(layer) else chunk.convolved(layer, x)


def _looks_back(layer) -> bool:
    return layer.time_causal_padding[4] > 0


def _residual(block, x):
    """As upstream's: norm, activation and convolution, twice, beside a shortcut."""
    chunk = _chunk.get()
    if chunk is None or type(block.conv2) is not HunyuanVideo15CausalConv3d or not _looks_back(block.conv2):
        return type(block).forward(block, x)
    shortcut = x if block.conv_shortcut is None else block.conv_shortcut(x)
    x = block.conv1(block.nonlinearity(block.norm1(x)))
    return chunk.convolved(block.conv2, block.nonlinearity(block.norm2(x)), shortcut)


def _upsampled(layer, x):
    """As upstream's: doubles the map and, where it is asked to, all frames but the first."""
    chunk, spread = _chunk.get(), layer._dcae_upsample_rearrange
    if chunk is None or not layer.add_temporal_upsample:
        return type(layer).forward(layer, x)
    h = layer.conv(x)
    last = spread(h[:, :, -1:])
    first = last[:, : last.shape[1] // 2] + spread(_repeated(x[:, :, -1:], layer.repeats // 2))
    return chunk.or_first(spread(h + _repeated(x, layer.repeats), r1=2), first)


def _repeated(x, times: int):
    """x [B, C, T, H, W], each channel so many times; of bfloat16 as a product with ones, as chips are slow to move lanes."""
    if x.dtype != torch.bfloat16:
        return x.repeat_interleave(times, dim=1)
    channels = torch.arange(x.shape[1], device=x.device)
    ones = channels.repeat_interleave(times)[:, None] == channels
    return torch.einsum("oc,bcthw->bothw", ones.to(x.dtype), x)


def _downsampled(layer, x):
    """As upstream's: halves the map and, where it is asked to, all frames but the first."""
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
    from ...tpu.compile.tracing import attention_by_frame

    normed, frames = block.norm(x), x.shape[2]
    query, key, value = (
        layer(normed).flatten(2).transpose(1, 2).unsqueeze(1) for layer in (block.to_q, block.to_k, block.to_v)
    )
    out = attention_by_frame(query, key, value, frames)
    return block.proj_out(out.squeeze(1).transpose(1, 2).reshape(x.shape)) + x


class _Maps(Maps):
    def decode(self, vae, z):
        from ...tpu.compile.tracing import scan_chunks

        decoder = vae.decoder

        def step(hidden, cache, number):
            with bound(_chunk, None if number is None else Chunk(number, cache)):
                for block in decoder.up_blocks:
                    hidden = block(hidden)
                return decoder.conv_out(decoder.conv_act(decoder.norm_out(hidden)))

        hidden = decoder.conv_in(z) + z.repeat_interleave(decoder.repeat, dim=1)
        return scan_chunks(step, decoder.mid_block(hidden), 1, _that_keep(decoder))

    def encode(self, vae, x):
        from ...tpu.compile.tracing import scan_chunks

        encoder = vae.encoder

        def step(frames, cache, number):
            chunk = None if number is None else Chunk(number, cache)
            frames = frames if chunk is None else chunk.or_first(frames, frames[:, :, -1:])
            with bound(_chunk, chunk):
                hidden = encoder.conv_in(frames)
                for block in encoder.down_blocks:
                    hidden = block(hidden)
                return hidden

        hidden = encoder.mid_block(scan_chunks(step, x, vae.temporal_compression_ratio, _that_keep(encoder)))
        shortcut = hidden.unflatten(1, (-1, encoder.group_size)).mean(2)
        return encoder.conv_out(encoder.conv_act(encoder.norm_out(hidden))) + shortcut

    @staticmethod
    def tiling(vae, height, width, encode=False):
        """Upstream's tiles, the same for every form of this VAE."""
        factors = vae.tile_overlap_factor, vae.tile_overlap_factor
        return overlapping_tiles(vae, factors, vae.spatial_compression_ratio, height, width, encode)

    def ratio(self, vae):
        return vae.spatial_compression_ratio

    def takes(self, vae, x, encode):
        """Upstream refuses a video that is no whole number of latents."""
        return not encode or all(size % vae.spatial_compression_ratio == 0 for size in x.shape[-2:])

    def output(self, vae, sample, tiled):
        return sample


def _that_keep(model) -> int:
    return sum(isinstance(module, HunyuanVideo15CausalConv3d) for module in model.modules())


tiling = _Maps.tiling
__getattr__ = upstream_names(__name__)

PLAN = _Maps().plan(
    AutoencoderKLHunyuanVideo15,
    methods={
        (HunyuanVideo15CausalConv3d, "forward"): _convolved,
        (HunyuanVideo15ResnetBlock, "forward"): _residual,
        (HunyuanVideo15Upsample, "forward"): _upsampled,
        (HunyuanVideo15Downsample, "forward"): _downsampled,
        (HunyuanVideo15AttnBlock, "forward"): _attended,
    },
)
