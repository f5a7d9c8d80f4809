"""Wan's transformer on TPU: where its weights lie, and its self-attention's rotation. The module is upstream's.

Queries, keys, values and the feed-forward's first projection split their outputs over `tp`, the projections after them
their inputs; the other axis of each is storage over `dp` and `sp`, gathered block by block. Activations stay split over
the sequence.
"""

from jax.sharding import PartitionSpec as P

from ...tpu.chips.sharding import ModelPlan
from ...tpu.pipelines.exports import upstream_names
from ..attention_dispatch import dispatch_attention_fn
from .transformer_wan import WanAttnProcessor, _get_qkv_projections


STORED = ("dp", "sp")


class WanProcessor:
    """Self-attention with norm and rotation in one pass; everything else is upstream's processor."""

    def __init__(self, upstream: WanAttnProcessor):
        self.upstream = upstream

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        """As upstream's. `rotary_emb`: cos and sin [1, T, 1, D], each value twice."""
        from ..attention_dispatch_flax import normed_and_rotated

        if rotary_emb is None or encoder_hidden_states is not None:
            return self.upstream(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
        query, key, value = _get_qkv_projections(attn, hidden_states, encoder_hidden_states)
        query = normed_and_rotated(query, attn.norm_q, *rotary_emb)
        key = normed_and_rotated(key, attn.norm_k, *rotary_emb)
        query, key, value = (x.unflatten(2, (attn.heads, -1)) for x in (query, key, value))
        out = dispatch_attention_fn(
            query, key, value, attn_mask=attention_mask, backend=self.upstream._attention_backend, parallel_config=None
        )
        out = attn.to_out[0](out.flatten(2, 3).type_as(query))
        return attn.to_out[1](out)


__getattr__ = upstream_names(__name__)

PLAN = ModelPlan(
    activation_spec=P("dp", "sp", None),
    batched=("hidden_states", "timestep", "encoder_hidden_states", "encoder_hidden_states_image"),
    processors={WanAttnProcessor: WanProcessor},
)
