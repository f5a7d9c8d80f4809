"""Kandinsky 5's transformer on TPU: its text is padded (filled_text_flax.py), norm and rotation of queries and keys are one pass.

A mask of the words is an argument of its forward and of its blocks (patch 0016). Its sharding is inferred.
"""

import torch

from ...tpu.chips.sharding import BATCHED, INFERRED, ModelPlan
from ...tpu.compile.call import asked_once
from ..attention_dispatch import dispatch_attention_fn
from ..attention_dispatch_flax import Replacement, normed_and_rotated
from .filled_text_flax import all_words, filled_up
from .transformer_kandinsky import Kandinsky5AttnProcessor


class KandinskyProcessor(Replacement):
    """Self-attention of latents or of words, or cross-attention. With sparse parameters upstream's processor runs."""

    def __call__(
        self, attn, hidden_states, encoder_hidden_states=None, rotary_emb=None, sparse_params=None, attention_mask=None
    ):
        """As upstream's. `rotary_emb`: a matrix for each pair of entries, [B, T, 1, D / 2, 2, 2], the same for all samples."""
        if sparse_params is not None:
            return self.upstream(attn, hidden_states, encoder_hidden_states, rotary_emb, sparse_params)
        seen = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query, key, value = attn.to_query(hidden_states), attn.to_key(seen), attn.to_value(seen)
        columns = () if rotary_emb is None else rotary_emb[:1, ..., 0].unbind(-1)  # of each matrix cos and sin
        turns = [column.repeat_interleave(2, -1) for column in columns]
        query = normed_and_rotated(query, attn.query_norm, *turns)
        key = normed_and_rotated(key, attn.key_norm, *turns)
        if turns:  # upstream rounds what it has rotated
            query, key = (x.to(torch.bfloat16).type_as(value) for x in (query, key))
        query, key, value = (x.unflatten(2, (attn.num_heads, -1)) for x in (query, key, value))
        backend = self.upstream._attention_backend
        out = dispatch_attention_fn(query, key, value, attn_mask=attention_mask, backend=backend, parallel_config=None)
        return attn.out_layer(out.flatten(2, 3))


def decide_text(arguments: dict) -> dict:
    """The padded text [B, L, C], its positions [L] continued over the padding, and the mask [B, 1, 1, L] of its words."""
    text, places = arguments.get("encoder_hidden_states"), arguments.get("text_rope_pos")
    if text is None or places is None or arguments.get("encoder_attention_mask") is not None:
        return {}
    filled = filled_up(text)
    missing = filled.shape[1] - text.shape[1]
    return {
        "encoder_hidden_states": filled,
        "text_rope_pos": _continued(places) if missing else places,
        "encoder_attention_mask": _of_keys(text),
    }


@asked_once
def _continued(places: torch.Tensor) -> torch.Tensor:
    missing = filled_up(places[None]).shape[1] - len(places)
    return torch.cat([places, places[-1] + torch.arange(1, missing + 1).to(places)])


@asked_once
def _of_keys(text: torch.Tensor) -> torch.Tensor:
    return all_words(text).bool()[:, None, None]


PLAN = ModelPlan(
    activation_spec=INFERRED,
    together=True,  # a script's processor knows no mask of the words
    batched=BATCHED,
    decide=decide_text,
    processors={Kandinsky5AttnProcessor: KandinskyProcessor},
)
