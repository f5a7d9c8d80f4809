"""LTX-Video's transformer on TPU: its sharding, and its self-attention's rotation. The module is upstream's.

Weights and tokens are sharded as Wan's. Rotation is over all channels, not over each head: cos and sin [T, C], the same for every
item of a batch unless a pipeline gives each item's token positions (`video_coords`).
"""

from ...tpu.chips.sharding import BATCHED, TOKENS, ModelPlan
from ..attention_dispatch_flax import Replacement, RotatingNorms
from .transformer_ltx import LTXVideoAttnProcessor, LTXVideoRotaryPosEmbed


class LTXProcessor(Replacement):
    """Self-attention with norm and rotation in one pass; everything else is upstream's processor."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        """As upstream's. `image_rotary_emb`: cos and sin [1, T, C], each value twice, or [B, T, C]."""
        own = encoder_hidden_states is None and attention_mask is None and image_rotary_emb is not None
        if own and len(image_rotary_emb[0]) == 1:
            tables = [table[:, :, None] for table in image_rotary_emb]
            attn, image_rotary_emb = RotatingNorms(attn, tables, tables), None
        return self.upstream(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)


def _tables(embed, hidden_states, *args, **kwargs):
    """As upstream's, for one item of the batch, unless `video_coords` have all items."""
    return type(embed).forward(embed, hidden_states[:1], *args, **kwargs)


PLAN = ModelPlan(
    activation_spec=TOKENS,
    batched=BATCHED,
    processors={LTXVideoAttnProcessor: LTXProcessor},
    methods={(LTXVideoRotaryPosEmbed, "forward"): _tables},
)
