"""Qwen-Image's transformer on TPU: two streams (two_streams_flax.py), both rotated, with padding of the text masked.

Upstream's rotations are complex numbers in tables of 4096 positions. Here they are cos and sin [T, 2, D], each axis' columns made
from its own positions, so that the chips get tables per axis, not per token. Texts are padded (filled_text_flax.py).
"""

import torch

from ...tpu.chips.sharding import BATCHED, ModelPlan
from ...tpu.kernels.settings import current
from .filled_text_flax import all_words, filled_up
from .transformer_qwenimage import (
    QwenDoubleStreamAttnProcessor2_0,
    QwenEmbedLayer3DRope,
    QwenEmbedRope,
    QwenImageTransformerBlock,
)
from .two_streams_flax import LATENTS, TEXT, TwoStreamProcessor


class QwenProcessor(TwoStreamProcessor):
    """Upstream's mask [B, L] covers the text."""

    def tables(self, rotary, words: int):
        return ((), ()) if rotary is None else tuple(table.unbind(1) for table in rotary)

    def __call__(
        self,
        attn,
        hidden_states,
        encoder_hidden_states=None,
        encoder_hidden_states_mask=None,
        attention_mask=None,
        image_rotary_emb=None,
    ):
        if attention_mask is not None or not self.covers(attn):
            given = encoder_hidden_states_mask, attention_mask, _as_numbers(image_rotary_emb)
            return self.upstream(attn, hidden_states, encoder_hidden_states, *given)
        return super().__call__(
            attn, hidden_states, encoder_hidden_states, encoder_hidden_states_mask, image_rotary_emb
        )


def decide_text(arguments: dict) -> dict:
    """The padded texts [B, L, C], and the padded mask of true words; without a mask all words are true."""
    text, mask = arguments.get("encoder_hidden_states"), arguments.get("encoder_hidden_states_mask")
    if text is None:
        return {}
    mask = all_words(text) if mask is None else filled_up(mask)
    return {"encoder_hidden_states": filled_up(text), "encoder_hidden_states_mask": mask}


def _wide(turns):
    """Cos and sin [T, 2, D] of complex numbers [T, D / 2] on the host, each value repeated for both entries of its pair."""
    return torch.stack([turns.real, turns.imag], 1).repeat_interleave(2, 2)


def _as_numbers(rotary):
    """Upstream's complex numbers [T, D / 2] of both tables."""
    return rotary and tuple(torch.complex(*table.unflatten(2, (-1, 2))[..., 0].unbind(1)) for table in rotary)


def _by_axis(method: str):
    """Replaces an embedding's `method` for the rotations of a grid (frames, height, width); computes them axis by axis."""

    def run(embed, *given):
        *sizes, device = given  # upstream's calls name none of them
        sizes, index, parts = sizes[:3], sizes[3:], []
        upstream = getattr(type(embed), method)
        for axis, size in enumerate(sizes):
            turns = upstream(embed, *(size if n == axis else 1 for n in range(3)), *index)
            table = _wide(turns.split([dim // 2 for dim in embed.axes_dim], 1)[axis]).to(device)
            place = [size if n == axis else 1 for n in range(3)]
            parts.append(table.reshape(*place, 2, -1).expand(*sizes, -1, -1))
        return torch.cat(parts, 4).flatten(0, 2)

    return run


def _of_places(embed, device):
    """Tables of the positions from 0, and of negative ones, by `_wide`. They stay on the host; the chips get the text's rows."""
    return _wide(embed.pos_freqs), _wide(embed.neg_freqs)


def _tables(embed, *args, **kwargs):
    """As upstream's: tables of the latents [T, 2, D], and of the text [L, 2, D]."""
    latents, text = type(embed).forward(embed, *args, **kwargs)
    return latents, text.to(latents.device)


def _modulate(block, x, mod_params, index=None):
    """As upstream's. `index` [b, T]: which of two modulations a latent has, in one of the batched calls."""
    if index is not None:
        index = torch.nn.functional.pad(index, (0, current().pad_tokens)).repeat(x.shape[0] // index.shape[0], 1)
    return type(block)._modulate(block, x, mod_params, index)


PLAN = ModelPlan(
    activation_spec=(TEXT, LATENTS),
    whole=True,
    together=True,
    batched=(*BATCHED, "attention_kwargs"),
    decide=decide_text,
    processors={QwenDoubleStreamAttnProcessor2_0: QwenProcessor},
    replicated=(r"^txt_(norm|in)$", r"\btxt_(norm\d|mlp)$"),
    methods={
        (QwenImageTransformerBlock, "_modulate"): _modulate,
        (QwenEmbedRope, "forward"): _tables,
        (QwenEmbedRope, "_get_device_freqs"): _of_places,
        (QwenEmbedRope, "_compute_video_freqs"): _by_axis("_compute_video_freqs"),
        (QwenEmbedLayer3DRope, "forward"): _tables,
        (QwenEmbedLayer3DRope, "_get_device_freqs"): _of_places,
        (QwenEmbedLayer3DRope, "_compute_video_freqs"): _by_axis("_compute_video_freqs"),
        (QwenEmbedLayer3DRope, "_compute_condition_freqs"): _by_axis("_compute_condition_freqs"),
    },
)
