"""HunyuanVideo's transformer on TPU: blocks of two streams that are never concatenated.

Its streams are those of two_streams_flax.py; upstream's single blocks concatenate them. If the first frame has a modulation of its
own (image-to-video by token replacement), each token selects its modulation, so that the sharded sequence is not sliced.
"""

import torch
from jax.sharding import PartitionSpec as P

from ...tpu.chips.sharding import BATCHED, STORAGE_AXES, ModelPlan
from . import transformer_hunyuan_video as upstream
from .two_streams_flax import LATENTS, REPLICATED, TEXT, TwoStreamProcessor, modulation, parts_of, single_block


class HunyuanVideoProcessor(TwoStreamProcessor):
    """Upstream's mask [B, 1, 1, T + L] covers latents and text; no latent is masked."""

    def seen(self, attention_mask, tokens: int):
        return attention_mask[:, 0, 0, tokens:]


def tables_by_axis(embed, hidden_states):
    """As upstream's cos and sin [T, D] of [B, C, F, H, W]: each axis' columns are computed for its positions, not all tokens."""
    steps = embed.patch_size_t, embed.patch_size, embed.patch_size
    sizes = [size // step for size, step in zip(hidden_states.shape[2:], steps)]
    columns, parts = 0, []
    for axis, (size, dim) in enumerate(zip(sizes, embed.rope_dim)):
        shape = [size * step if n == axis else step for n, step in enumerate(steps)]
        of_axis = type(embed).forward(embed, hidden_states.new_empty(1, 1, *shape))
        place = [size if n == axis else 1 for n in range(3)]
        parts.append([table[:, columns : columns + dim].reshape(*place, dim).expand(*sizes, dim) for table in of_axis])
        columns += dim
    return tuple(torch.cat(tables, dim=3).flatten(0, 2) for tables in zip(*parts))


def _single(block, hidden_states, encoder_hidden_states, temb, attention_mask=None, image_rotary_emb=None, *rest):
    """As upstream's, stream by stream. `rest`: the modulation of the first frame, and how many tokens that is."""
    of_latents = of_text = modulation(block.norm, temb)
    if isinstance(block, upstream.HunyuanVideoTokenReplaceSingleTransformerBlock):
        of_latents = _replaced(block.norm, temb, *rest, hidden_states)
    streams, attention = (hidden_states, encoder_hidden_states), {"image_rotary_emb": image_rotary_emb}
    return single_block(block, streams, [of_latents, of_text], attention_mask=attention_mask, **attention)


def _replaced_double(
    block, hidden_states, encoder_hidden_states, temb, attention_mask=None, freqs_cis=None, replaced=None, first=None
):
    """As upstream's, for a first frame whose tokens have their own modulation."""
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = _replaced(block.norm1, temb, replaced, first, hidden_states)
    text, *of_text = block.norm1_context(encoder_hidden_states, emb=temb)
    text_gate, text_shift, text_scale, text_gate_mlp = (x[:, None] for x in of_text)
    answer, text_answer = block.attn(
        hidden_states=block.norm1.norm(hidden_states) * (1 + scale) + shift,
        encoder_hidden_states=text,
        attention_mask=attention_mask,
        image_rotary_emb=freqs_cis,
    )
    hidden_states = hidden_states + answer * gate
    encoder_hidden_states = encoder_hidden_states + text_answer * text_gate
    normed = block.norm2(hidden_states) * (1 + scale_mlp) + shift_mlp
    text = block.norm2_context(encoder_hidden_states) * (1 + text_scale) + text_shift
    return hidden_states + gate_mlp * block.ff(normed), encoder_hidden_states + text_gate_mlp * block.ff_context(text)


def _replaced(norm, temb, replaced, first, tokens) -> tuple:
    """The parts of `modulation`, each [B, T, C]: of `replaced` for the `first` tokens, of `temb` for the others."""
    place = torch.arange(tokens.shape[1], device=tokens.device)[None, :, None]
    own, others = (norm.linear(norm.silu(of))[:, None] for of in (replaced, temb))
    return parts_of(norm, torch.where(place < first, own, others))


ACTIVATION_SPEC = LATENTS, TEXT
SINGLE = r"^single_transformer_blocks\..*\b"

PLAN = ModelPlan(
    # `proj_out` takes the outputs of attention and feed-forward, concatenated.
    rules=(
        (SINGLE + r"(to_[qkv]|proj_mlp)\.weight$", P("tp", STORAGE_AXES)),
        (SINGLE + r"(to_[qkv]|proj_mlp)\.bias$", P("tp")),
        (SINGLE + r"proj_out\.weight$", P(STORAGE_AXES, "tp")),
    ),
    activation_spec=ACTIVATION_SPEC,
    batched=BATCHED,
    processors={upstream.HunyuanVideoAttnProcessor2_0: HunyuanVideoProcessor},
    replicated=REPLICATED,
    methods={
        (upstream.HunyuanVideoRotaryPosEmbed, "forward"): tables_by_axis,
        (upstream.HunyuanVideoSingleTransformerBlock, "forward"): _single,
        (upstream.HunyuanVideoTokenReplaceSingleTransformerBlock, "forward"): _single,
        (upstream.HunyuanVideoTokenReplaceTransformerBlock, "forward"): _replaced_double,
    },
)
