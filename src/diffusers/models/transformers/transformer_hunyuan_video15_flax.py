"""HunyuanVideo-1.5's transformer on TPU: whether this is text-to-video is decided before the trace.

Upstream's forward asks `torch.all(image_embeds == 0)`, a value that a trace does not have; it takes the answer as the
static argument `is_t2v`.
"""

import torch

from ...tpu.sharding import ModelPlan


def decide_is_t2v(arguments: dict) -> dict:
    """`is_t2v` from the values of `image_embeds`, unless the caller gave it."""
    image_embeds = arguments.get("image_embeds")
    if arguments.get("is_t2v") is not None or image_embeds is None:
        return {}
    return {"is_t2v": bool(torch.all(image_embeds == 0))}


PLAN = ModelPlan(decide=decide_is_t2v)
