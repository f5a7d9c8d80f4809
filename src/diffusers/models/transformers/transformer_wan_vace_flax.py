"""Wan VACE's transformer on TPU: as Wan's; the control's blocks give a hint each, and the latents' blocks go on from it."""

from dataclasses import replace

from ...tpu.pipelines.exports import upstream_names
from . import transformer_wan_flax


__getattr__ = upstream_names(__name__)

PLAN = replace(transformer_wan_flax.PLAN, batched=(*transformer_wan_flax.PLAN.batched, "control_hidden_states"))
