"""Framepack's transformer on TPU: HunyuanVideo's blocks; padding of its text is masked, not cut off.

Upstream cuts it off if the batch is one, at a length that depends on values, which a trace does not have. The patched forward
takes the static argument `mask_text`.
"""

import dataclasses

from .transformer_hunyuan_video_flax import PLAN as HUNYUAN_VIDEO


def decide_mask_text(arguments: dict) -> dict:
    """`mask_text`, unless the caller gave it."""
    return {} if arguments.get("mask_text") else {"mask_text": True}


PLAN = dataclasses.replace(HUNYUAN_VIDEO, decide=decide_mask_text)
