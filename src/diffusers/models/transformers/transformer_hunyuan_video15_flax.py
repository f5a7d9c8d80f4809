"""HunyuanVideo-1.5's transformer on TPU: where its weights lie, its joint attention, and what is decided before the trace.

Latents are split over the sequence, text is whole on every chip. Queries, keys, values and both first projections of the
feed-forwards split their outputs over `tp`, the projections after them their inputs; the other axis of each is storage over
`dp` and `sp`, gathered block by block.

Upstream's forward asks `torch.all(image_embeds == 0)`, a value that a trace does not have; it takes the answer as the
static argument `is_t2v`.
"""

import torch
from jax.sharding import PartitionSpec as P

from ...tpu.sharding import ModelPlan
from .transformer_hunyuan_video15 import HunyuanVideo15AttnProcessor2_0, HunyuanVideo15TokenRefiner


STORED = ("dp", "sp")


def decide_is_t2v(arguments: dict) -> dict:
    """`is_t2v` from the values of `image_embeds`, unless the caller gave it."""
    image_embeds = arguments.get("image_embeds")
    if arguments.get("is_t2v") is not None or image_embeds is None:
        return {}
    return {"is_t2v": bool(torch.all(image_embeds == 0))}


class HunyuanVideo15Processor:
    """Latents and text in one softmax without a concatenation; norm and rotation of the latents in one pass."""

    def __init__(self, upstream: HunyuanVideo15AttnProcessor2_0):
        self.upstream = upstream

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        """As upstream's. `attention_mask` [B, L]: of the text; `image_rotary_emb`: cos and sin [T, D]."""
        from ...tpu.bridge import joint_attention, normed_and_rotated

        if encoder_hidden_states is None or image_rotary_emb is None or attn.norm_added_q is None:
            return self.upstream(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        tables = [table[None, :, None] for table in image_rotary_emb]
        query = normed_and_rotated(attn.to_q(hidden_states), attn.norm_q, *tables)
        key = normed_and_rotated(attn.to_k(hidden_states), attn.norm_k, *tables)
        latents = [x.unflatten(2, (attn.heads, -1)) for x in (query, key, attn.to_v(hidden_states))]
        projections = attn.add_q_proj, attn.add_k_proj, attn.add_v_proj
        text = [project(encoder_hidden_states).unflatten(2, (attn.heads, -1)) for project in projections]
        text[:2] = attn.norm_added_q(text[0]), attn.norm_added_k(text[1])
        answers = joint_attention(latents, text, attention_mask, self.upstream._attention_backend)
        hidden_states, encoder_hidden_states = (x.flatten(2, 3).type_as(query) for x in answers)
        hidden_states = attn.to_out[1](attn.to_out[0](hidden_states))
        return hidden_states, attn.to_add_out(encoder_hidden_states)


def _refined(refiner, *args, **kwargs):
    """As upstream's, of text: whole on every chip, as what it is put beside."""
    from ...tpu.bridge import on_every_chip

    with on_every_chip():
        return type(refiner).forward(refiner, *args, **kwargs)


PLAN = ModelPlan(
    rules=(
        (r"attn\.(to_[qkv]|add_[qkv]_proj)\.weight$", P("tp", STORED)),
        (r"attn\.(to_[qkv]|add_[qkv]_proj)\.bias$", P("tp")),
        (r"attn\.(to_out\.0|to_add_out)\.weight$", P(STORED, "tp")),
        (r"(ff|ff_context)\.net\.0\.proj\.weight$", P("tp", STORED)),
        (r"(ff|ff_context)\.net\.0\.proj\.bias$", P("tp")),
        (r"(ff|ff_context)\.net\.2\.weight$", P(STORED, "tp")),
        (r"norm1(_context)?\.linear\.weight$", P(STORED, None)),
    ),
    carry=(P("dp", "sp", None), P("dp", None, None)),
    batched=(
        "hidden_states",
        "timestep",
        "timestep_r",
        "encoder_hidden_states",
        "encoder_attention_mask",
        "encoder_hidden_states_2",
        "encoder_attention_mask_2",
        "image_embeds",
    ),
    decide=decide_is_t2v,
    processors={HunyuanVideo15AttnProcessor2_0: HunyuanVideo15Processor},
    methods={(HunyuanVideo15TokenRefiner, "forward"): _refined},
)
