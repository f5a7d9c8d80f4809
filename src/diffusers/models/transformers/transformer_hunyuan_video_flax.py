"""HunyuanVideo's transformer on TPU: where its weights lie, and blocks of two streams that are never one.

Latents are split over the sequence, text is whole on every chip. Queries, keys, values and the first projections of the
feed-forwards split their outputs over `tp`, the projections after them their inputs; the other axis of each is storage over
`dp` and `sp`, gathered block by block. Upstream's single blocks concatenate both; here each token's
layers are computed in its own stream, and attention takes the two as they are. Where a model's first frame has a modulation of
its own (image-to-video by token replacement), each token picks its modulation; nothing is cut out of the split sequence.

`TwoStreamProcessor` is what models of this kind have in common: upstream's joint attention processors differ in their masks.
"""

import torch
from jax.sharding import PartitionSpec as P

from ...tpu.sharding import ModelPlan
from .transformer_hunyuan_video import (
    HunyuanVideoAttnProcessor2_0,
    HunyuanVideoRotaryPosEmbed,
    HunyuanVideoSingleTransformerBlock,
    HunyuanVideoTokenReplaceSingleTransformerBlock,
    HunyuanVideoTokenReplaceTransformerBlock,
)


STORED = ("dp", "sp")


class TwoStreamProcessor:
    """Latents and text in one softmax without a concatenation; norm and rotation of the latents in one pass.

    Text has projections of its own (`add_q_proj`, ..., `to_add_out`), or those of the latents.
    """

    def __init__(self, upstream):
        self.upstream = upstream

    def seen(self, attention_mask, tokens: int):
        """Which words are no padding [B, L], of upstream's mask for a sequence of so many latents; None: all."""
        return attention_mask

    def prepared(self, x, norm, tables):
        """Queries or keys [B, T, C]: normed, and rotated by tables [1, T, 1, D], if any."""
        from ...tpu.bridge import normed_and_rotated

        return normed_and_rotated(x, norm, *tables)

    def tells_fill(self, attn) -> bool:
        """Whether latents may be followed by some that are none (`Settings.fill`): those of attention of two streams."""
        return None not in (attn.norm_q, *self._norms(attn))

    def _norms(self, attn):
        """Of the text's queries and keys."""
        return (attn.norm_q, attn.norm_k) if attn.add_q_proj is None else (attn.norm_added_q, attn.norm_added_k)

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        """As upstream's. `image_rotary_emb`: cos and sin [T, D]."""
        from ...tpu.bridge import filled, joint_attention, on_every_chip
        from ...tpu.settings import current

        own, norms = attn.add_q_proj is None, self._norms(attn)
        if encoder_hidden_states is None or None in (attn.norm_q, *norms):
            return self.upstream(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        tables = [filled(table)[None, :, None] for table in image_rotary_emb or ()]
        query = self.prepared(attn.to_q(hidden_states), attn.norm_q, tables)
        key = self.prepared(attn.to_k(hidden_states), attn.norm_k, tables)
        latents = [x.unflatten(2, (attn.heads, -1)) for x in (query, key, attn.to_v(hidden_states))]
        added = attn.add_q_proj, attn.add_k_proj, attn.add_v_proj
        projections = (attn.to_q, attn.to_k, attn.to_v) if own else added
        with on_every_chip():
            text = [project(encoder_hidden_states) for project in projections]
            text[:2] = (self.prepared(x, norm, ()) for norm, x in zip(norms, text))
        text = [x.unflatten(2, (attn.heads, -1)) for x in text]
        seen = None if attention_mask is None else self.seen(attention_mask, hidden_states.shape[1] - current().fill)
        answers = joint_attention(latents, text, seen, getattr(self.upstream, "_attention_backend", None))
        hidden_states, encoder_hidden_states = (x.flatten(2, 3).type_as(query) for x in answers)
        out = getattr(attn, "to_out", None)
        if out is not None:
            hidden_states = out[1](out[0](hidden_states))
        out = out[0] if own and out is not None else getattr(attn, "to_add_out", None)
        if out is not None:
            with on_every_chip():
                encoder_hidden_states = out(encoder_hidden_states)
        return hidden_states, encoder_hidden_states


class HunyuanVideoProcessor(TwoStreamProcessor):
    """Upstream's mask [B, 1, 1, T + L] is of latents and text; all latents take part."""

    def seen(self, attention_mask, tokens: int):
        return attention_mask[:, 0, 0, tokens:]


def tables_by_axis(embed, hidden_states):
    """As upstream's cos and sin [T, D] of [B, C, F, H, W]: each axis' columns computed of its own places, not of all tokens."""
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
    from ...tpu.bridge import on_every_chip

    streams = hidden_states, encoder_hidden_states
    if isinstance(block, HunyuanVideoTokenReplaceSingleTransformerBlock):
        modulations = [_modulation(block.norm, temb, *rest, hidden_states), _modulation(block.norm, temb)]
    else:
        modulations = [_modulation(block.norm, temb)] * 2
    normed = [block.norm.norm(x) * (1 + scale) + shift for x, (shift, scale, _) in zip(streams, modulations)]
    answers = block.attn(
        hidden_states=normed[0],
        encoder_hidden_states=normed[1],
        attention_mask=attention_mask,
        image_rotary_emb=image_rotary_emb,
    )
    latents, text = zip(normed, answers, streams, modulations)
    with on_every_chip():
        text = _single_end(block, *text)
    return _single_end(block, *latents), text


def _single_end(block, x, answer, own, modulation):
    """Of one stream, what comes after attention."""
    wide = torch.cat([answer, block.act_mlp(block.proj_mlp(x))], dim=2)
    return modulation[-1] * block.proj_out(wide) + own


def _replaced_double(
    block, hidden_states, encoder_hidden_states, temb, attention_mask=None, freqs_cis=None, replaced=None, first=None
):
    """As upstream's, where the first frame's tokens have a modulation of their own."""
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = _modulation(block.norm1, temb, replaced, first, hidden_states)
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


def _modulation(norm, temb, replaced=None, first=None, tokens=None):
    """Shift, scale and gate of a modulated norm, once or twice, each [B, 1, C]; `replaced` for the `first` of `tokens`: [B, T, C]."""
    of_all = norm.linear(norm.silu(temb))[:, None]
    if replaced is not None:
        place = torch.arange(tokens.shape[1], device=tokens.device)[None, :, None]
        of_all = torch.where(place < first, norm.linear(norm.silu(replaced))[:, None], of_all)
    return of_all.chunk(norm.linear.out_features // norm.linear.in_features, dim=2)


RULES = (
    (r"attn\.(to_[qkv]|add_[qkv]_proj)\.weight$", P("tp", STORED)),
    (r"attn\.(to_[qkv]|add_[qkv]_proj)\.bias$", P("tp")),
    (r"attn\.(to_out\.0|to_add_out)\.weight$", P(STORED, "tp")),
    (r"((ff|ff_context)\.net\.0\.proj|proj_mlp)\.weight$", P("tp", STORED)),
    (r"((ff|ff_context)\.net\.0\.proj|proj_mlp)\.bias$", P("tp")),
    (r"((ff|ff_context)\.net\.2|single_transformer_blocks\..+\.proj_out)\.weight$", P(STORED, "tp")),
    (r"norm(1|1_context)?\.linear\.weight$", P(STORED, None)),
)

TEXT = (r"^context_embedder(_2)?$", r"\bff_context$")  # whole on every chip, as what it is put beside

CARRY = P("dp", "sp", None), P("dp", None, None)

PLAN = ModelPlan(
    rules=RULES,
    carry=CARRY,
    batched=(
        "hidden_states",
        "timestep",
        "encoder_hidden_states",
        "encoder_attention_mask",
        "pooled_projections",
        "guidance",
        "image_embeds",
        "latents_clean",
        "latents_history_2x",
        "latents_history_4x",
    ),
    processors={HunyuanVideoAttnProcessor2_0: HunyuanVideoProcessor},
    whole=TEXT,
    methods={
        (HunyuanVideoRotaryPosEmbed, "forward"): tables_by_axis,
        (HunyuanVideoSingleTransformerBlock, "forward"): _single,
        (HunyuanVideoTokenReplaceSingleTransformerBlock, "forward"): _single,
        (HunyuanVideoTokenReplaceTransformerBlock, "forward"): _replaced_double,
    },
)
