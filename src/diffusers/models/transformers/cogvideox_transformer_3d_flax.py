"""CogVideoX's transformer on TPU: where its weights lie, and blocks whose two streams are never one.

Latents are split over the sequence, text is whole on every chip; both go through the same weights. Projections and the first
layer of a feed-forward split their outputs over `tp`, those after them their inputs; the other axis of each is storage over
`dp` and `sp`, gathered block by block. Upstream concatenates the streams for attention and again for the feed-forward; here
each token's layers are computed in its own stream (see two_streams_flax.py).
"""

from ...tpu.chips.sharding import ModelPlan
from ...tpu.pipelines.exports import upstream_names
from ..attention_processor import CogVideoXAttnProcessor2_0
from .cogvideox_transformer_3d import CogVideoXBlock
from .two_streams_flax import LATENTS, TEXT, TwoStreamProcessor


class CogVideoXProcessor(TwoStreamProcessor):
    """Rotation is of the latents alone."""

    masks_words = False


def _block(block, hidden_states, encoder_hidden_states, temb, image_rotary_emb=None, attention_kwargs=None):
    """As upstream's, stream by stream."""
    from ...tpu.compile.tracing import on_every_chip

    normed, text, gate, text_gate = block.norm1(hidden_states, encoder_hidden_states, temb)
    given = {"image_rotary_emb": image_rotary_emb, **(attention_kwargs or {})}
    answer, text_answer = block.attn1(hidden_states=normed, encoder_hidden_states=text, **given)
    hidden_states = hidden_states + gate * answer
    encoder_hidden_states = encoder_hidden_states + text_gate * text_answer
    normed, text, gate, text_gate = block.norm2(hidden_states, encoder_hidden_states, temb)
    hidden_states = hidden_states + gate * block.ff(normed)
    with on_every_chip():
        encoder_hidden_states = encoder_hidden_states + text_gate * block.ff(text)
    return hidden_states, encoder_hidden_states


__getattr__ = upstream_names(__name__)

PLAN = ModelPlan(
    activation_spec=(LATENTS, TEXT),
    processors={CogVideoXAttnProcessor2_0: CogVideoXProcessor},
    methods={(CogVideoXBlock, "forward"): _block},
)
