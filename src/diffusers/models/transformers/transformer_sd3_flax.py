"""Stable Diffusion 3's transformer on TPU: two streams (two_streams_flax.py) without rotation.

In 3.5 some blocks have a second attention of latents alone; 3 has no norms of queries and keys. The last block returns no text.
"""

from ...tpu.chips.sharding import BATCHED, ModelPlan
from ..attention_dispatch_flax import latent_attention
from ..attention_processor import JointAttnProcessor2_0
from .two_streams_flax import LATENTS, REPLICATED, TEXT, TwoStreamProcessor


class JointProcessor(TwoStreamProcessor):
    """Covers attention in which all streams have norms, or none; without text, of the latents alone. Upstream's uses no mask."""

    def covers(self, attn) -> bool:
        return all(norm is None for norm in self.norms(attn)) or super().covers(attn)

    def prepared(self, x, norm, tables):
        return x if norm is None else super().prepared(x, norm, tables)

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, *args, **kwargs):
        if encoder_hidden_states is not None or not self.covers(attn):
            return super().__call__(attn, hidden_states, encoder_hidden_states)
        latents = self.heads(attn, self.projected(attn, hidden_states, False), self.norms(attn)[:2], [])
        answer = latent_attention(*latents).flatten(2, 3).type_as(latents[0])
        return attn.to_out[1](attn.to_out[0](answer))


PLAN = ModelPlan(
    activation_spec=(TEXT, LATENTS),
    whole=True,
    batched=BATCHED,
    processors={JointAttnProcessor2_0: JointProcessor},
    replicated=REPLICATED,
)
