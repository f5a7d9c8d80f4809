"""Wan's transformer on TPU: where its weights lie. The module is upstream's.

Queries, keys, values and the feed-forward's first projection split their outputs over `tp`, the projections after them
their inputs; the other axis of each is storage over `dp` and `sp`, gathered block by block. Activations stay split over
the sequence.
"""

from jax.sharding import PartitionSpec as P

from ...tpu.sharding import ModelPlan


STORED = ("dp", "sp")

PLAN = ModelPlan(
    rules=(
        (r"attn[12]\.(to_[qkv]|add_[kv]_proj)\.weight$", P("tp", STORED)),
        (r"attn[12]\.(to_[qkv]|add_[kv]_proj)\.bias$", P("tp")),
        (r"attn[12]\.to_out\.0\.weight$", P(STORED, "tp")),
        (r"ffn\.net\.0\.proj\.weight$", P("tp", STORED)),
        (r"ffn\.net\.0\.proj\.bias$", P("tp")),
        (r"ffn\.net\.2\.weight$", P(STORED, "tp")),
        (r"condition_embedder\..*linear_1\.weight$", P("tp", STORED)),
        (r"condition_embedder\..*linear_2\.weight$", P(STORED, "tp")),
        (r"condition_embedder\.time_proj\.weight$", P(STORED, None)),
    ),
    carry=P("dp", "sp", None),
    batched=("hidden_states", "timestep", "encoder_hidden_states", "encoder_hidden_states_image"),
)
