"""Mochi's transformer on TPU: padding of its text is masked in one joint attention, not removed.

Upstream removes it prompt by prompt, where its mask is false. Each length would then need its own program; with a mask all
lengths share one. The text's results are in upstream's order: those of words first, in their order, then zeros.
"""

import torch

from ...tpu.chips.sharding import INFERRED, ModelPlan
from ..attention_dispatch_flax import joint_attention
from ..attention_processor import MochiAttnProcessor2_0


class MochiProcessor:
    """As upstream's, for a mask [B, L] of words whose values are not known in the trace."""

    def __call__(self, attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb=None):
        def heads(x, norm=None):
            x = x.unflatten(2, (attn.heads, -1))
            return x if norm is None else norm(x)

        latents = [heads(attn.to_q(hidden_states), attn.norm_q), heads(attn.to_k(hidden_states), attn.norm_k)]
        if image_rotary_emb is not None:
            latents = [_rotated(x, *image_rotary_emb) for x in latents]
        latents.append(heads(attn.to_v(hidden_states)))
        text = [
            heads(attn.add_q_proj(encoder_hidden_states), attn.norm_added_q),
            heads(attn.add_k_proj(encoder_hidden_states), attn.norm_added_k),
            heads(attn.add_v_proj(encoder_hidden_states)),
        ]
        seen = attention_mask.bool()
        answer, words = (x.flatten(2, 3) for x in joint_attention(tuple(latents), tuple(text), seen))
        words = words.gather(1, torch.argsort(~seen, stable=True)[:, :, None].expand_as(words))
        hidden_states = attn.to_out[1](attn.to_out[0](answer))
        return hidden_states, attn.to_add_out(words) if hasattr(attn, "to_add_out") else words


def _rotated(x, cos, sin):
    """Neighbouring entries of x [B, T, N, D] as pairs, rotated by tables [T, N, D / 2] in float32."""
    # Slices with a step, of what a kernel wrote, take 137 of 468 ms of a step (v6e-8).
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).to(x.dtype).flatten(-2)


PLAN = ModelPlan(activation_spec=INFERRED, processors={MochiAttnProcessor2_0: lambda upstream: MochiProcessor()})
