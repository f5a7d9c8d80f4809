"""LTX-2's transformer on TPU: norm and rotation of queries and keys in one pass, also with their channels sharded over `tp`.

The sharding is inferred. Rotation is over all channels, not over each head, with tables per sample: cos and sin [B, T, C].
"""

import functools

from ...tpu.chips.sharding import INFERRED, ModelPlan
from ..attention_dispatch_flax import Replacement, RotatingNorms
from .transformer_ltx2 import LTX2AudioVideoAttnProcessor, LTX2PerturbedAttnProcessor


class LTX2Processor(Replacement):
    """Upstream's processor, with norms that also rotate pairs of neighbouring entries."""

    @functools.wraps(LTX2AudioVideoAttnProcessor.__call__)  # upstream passes what the signature names
    def __call__(
        self,
        attn,
        hidden_states,
        encoder_hidden_states=None,
        attention_mask=None,
        query_rotary_emb=None,
        key_rotary_emb=None,
        **perturbed,
    ):
        queries, keys = query_rotary_emb, key_rotary_emb
        norms = attn.norm_q, attn.norm_k
        if queries is not None and attn.rope_type == "interleaved" and all(norm.weight is not None for norm in norms):
            tables = [[x[:, :, None] for x in turns] for turns in (queries, queries if keys is None else keys)]
            attn, queries, keys = RotatingNorms(attn, *tables), None, None
        return self.upstream(attn, hidden_states, encoder_hidden_states, attention_mask, queries, keys, **perturbed)


class LTX2PerturbedProcessor(LTX2Processor):
    """`LTX2Processor` for attention that can be perturbed."""

    @functools.wraps(LTX2PerturbedAttnProcessor.__call__)
    def __call__(self, *given, **named):
        return super().__call__(*given, **named)


PLAN = ModelPlan(
    activation_spec=INFERRED,
    processors={
        LTX2AudioVideoAttnProcessor: LTX2Processor,
        LTX2PerturbedAttnProcessor: LTX2PerturbedProcessor,
    },
)
