"""CogVideoX's transformer on TPU: its sharding, and blocks whose two streams are never concatenated.

Latents are sharded over the sequence, text is replicated; both use the same weights. Projections and the first layer of a
feed-forward shard their outputs over `tp`, the layers after them their inputs. The other axis of each weight is stored over
`dp` and `sp` and gathered block by block. Upstream concatenates the streams for attention and again for the feed-forward; here
each token's layers are computed in its own stream (see two_streams_flax.py).
"""

from ...tpu.chips.sharding import ModelPlan
from ...tpu.compile.tracing import on_every_chip
from ...tpu.pipelines.exports import upstream_names
from ..attention_processor import CogVideoXAttnProcessor2_0
from .cogvideox_transformer_3d import CogVideoXBlock
from .two_streams_flax import LATENTS, TEXT, TwoStreamProcessor


class CogVideoXProcessor(TwoStreamProcessor):
    """Only the latents are rotated."""

    masks_words = False


def _block(block, hidden_states, encoder_hidden_states, temb, image_rotary_emb=None, attention_kwargs=None):
    """As upstream's, stream by stream."""
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
