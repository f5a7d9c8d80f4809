"""FLUX.1's transformer on TPU: two streams (two_streams_flax.py), both rotated.

Upstream concatenates the streams, text first, for attention, and in single blocks for all layers. Additional images (Kontext, Fill,
Control) are part of the latents. An IP-Adapter's attention, a mask, and a user's processor run upstream's code.
"""

import torch

from ...tpu.chips.sharding import BATCHED, ModelPlan
from .transformer_flux import FluxAttnProcessor, FluxSingleTransformerBlock
from .two_streams_flax import (
    LATENTS,
    REPLICATED,
    TEXT,
    TwoStreamProcessor,
    can_be_joined,
    joined_block,
    modulation,
    single_block,
)


class FluxProcessor(TwoStreamProcessor):
    """Upstream's tables have rows for both streams, text first."""

    masks_words = False

    def tables(self, rotary, words: int):
        rotary = rotary or ()
        return tuple(table[words:] for table in rotary), tuple(table[:words] for table in rotary)

    def projected(self, attn, x, added: bool):
        if not attn.fused_projections:
            return super().projected(attn, x, added)
        return (attn.to_added_qkv if added else attn.to_qkv)(x).chunk(3, dim=-1)


def _single(block, hidden_states, encoder_hidden_states, temb, image_rotary_emb=None, joint_attention_kwargs=None):
    """As upstream's: each chip's parts of both streams are one sequence if they can be, else stream by stream."""
    streams = hidden_states, encoder_hidden_states
    given = {"image_rotary_emb": image_rotary_emb, **(joint_attention_kwargs or {})}
    attn = block.attn
    kept = "forward" in vars(attn)  # by a step cache, of the result for both streams together
    if kept or not isinstance(attn.processor, FluxProcessor) or given.get("attention_mask") is not None:
        return type(block).forward(block, *streams, temb, image_rotary_emb, joint_attention_kwargs)
    parts = modulation(block.norm, temb)
    if given.keys() == {"image_rotary_emb"} and can_be_joined(attn.processor, attn, streams):
        latents, text = joined_block(block, streams, parts, image_rotary_emb)
    else:
        latents, text = single_block(block, streams, [parts] * 2, **given)
    return _within_range(text), _within_range(latents)


def _within_range(x):
    return x.clip(-65504, 65504) if x.dtype == torch.float16 else x


PLAN = ModelPlan(
    activation_spec=(TEXT, LATENTS),
    whole=True,
    batched=BATCHED,
    processors={FluxAttnProcessor: FluxProcessor},
    replicated=REPLICATED,
    methods={(FluxSingleTransformerBlock, "forward"): _single},
)
