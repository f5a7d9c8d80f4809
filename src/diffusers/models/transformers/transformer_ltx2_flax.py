"""LTX-2's transformer on TPU: norm and rotation of queries and keys in one pass, also where chips of `tp` have parts of their channels.

The layout is inferred. Rotation is of all channels, not of a head, and has tables of each sample: cos and sin [B, T, C].
"""

import functools

from ...tpu.chips.sharding import INFERRED, ModelPlan
from .transformer_ltx2 import LTX2AudioVideoAttnProcessor, LTX2PerturbedAttnProcessor


class LTX2Processor:
    """Upstream's processor, whose rotation of neighbours is its norms'."""

    def __init__(self, upstream):
        self.upstream = upstream

    @functools.wraps(LTX2AudioVideoAttnProcessor.__call__)  # upstream's attention gives what the signature names
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
        from ..attention_dispatch_flax import RotatingNorms

        queries, keys = query_rotary_emb, key_rotary_emb
        norms = attn.norm_q, attn.norm_k
        if queries is not None and attn.rope_type == "interleaved" and all(norm.weight is not None for norm in norms):
            tables = [[x[:, :, None] for x in turns] for turns in (queries, queries if keys is None else keys)]
            attn, queries, keys = RotatingNorms(attn, *tables), None, None
        return self.upstream(attn, hidden_states, encoder_hidden_states, attention_mask, queries, keys, **perturbed)


class LTX2PerturbedProcessor(LTX2Processor):
    """The same of attention that can be perturbed."""

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
