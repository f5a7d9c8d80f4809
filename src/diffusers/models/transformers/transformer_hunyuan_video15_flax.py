"""HunyuanVideo-1.5's transformer on TPU: HunyuanVideo's two streams, and an argument that is computed before the trace.

Upstream's forward evaluates `torch.all(image_embeds == 0)`, which a trace cannot. The patched forward takes the value as the
static argument `is_t2v`.
"""

import torch

from ...tpu.chips.sharding import BATCHED, ModelPlan
from ...tpu.compile.call import asked_once
from ...tpu.pipelines.exports import upstream_names
from .transformer_hunyuan_video15 import HunyuanVideo15AttnProcessor2_0, HunyuanVideo15RotaryPosEmbed
from .transformer_hunyuan_video_flax import ACTIVATION_SPEC, tables_by_axis
from .two_streams_flax import REPLICATED, TwoStreamProcessor


def decide_is_t2v(arguments: dict) -> dict:
    """`is_t2v` from the values of `image_embeds`, unless the caller gave it."""
    image_embeds = arguments.get("image_embeds")
    if arguments.get("is_t2v") is not None or image_embeds is None:
        return {}
    return {"is_t2v": _is_zero(image_embeds)}


@asked_once
def _is_zero(tensor: torch.Tensor) -> bool:
    return not bool(tensor.any())


__getattr__ = upstream_names(__name__)

PLAN = ModelPlan(
    activation_spec=ACTIVATION_SPEC,
    batched=BATCHED,
    decide=decide_is_t2v,
    processors={HunyuanVideo15AttnProcessor2_0: TwoStreamProcessor},
    replicated=(*REPLICATED, r"^image_embedder$"),
    methods={(HunyuanVideo15RotaryPosEmbed, "forward"): tables_by_axis},
)
