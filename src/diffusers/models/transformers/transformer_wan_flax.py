"""Wan's transformer on TPU: its sharding, and its self-attention's rotation. The module is upstream's.

Queries, keys, values and the feed-forward's first projection shard their outputs over `tp`, the projections after them their
inputs. The other axis of each weight is stored over `dp` and `sp` and gathered block by block. Activations stay sharded over
the sequence.
"""

from ...tpu.chips.sharding import BATCHED, TOKENS, ModelPlan
from ...tpu.pipelines.exports import upstream_names
from ..attention_dispatch_flax import Replacement, RotatingNorms
from .transformer_wan import WanAttnProcessor


class WanProcessor(Replacement):
    """Self-attention with norm and rotation in one pass; everything else is upstream's processor."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        """As upstream's. `rotary_emb`: cos and sin [1, T, 1, D], each value twice."""
        if rotary_emb is not None and encoder_hidden_states is None:
            attn, rotary_emb = RotatingNorms(attn, rotary_emb, rotary_emb), None
        return self.upstream(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)


__getattr__ = upstream_names(__name__)

PLAN = ModelPlan(activation_spec=TOKENS, batched=BATCHED, processors={WanAttnProcessor: WanProcessor})
