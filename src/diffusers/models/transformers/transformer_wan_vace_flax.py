"""Wan VACE's transformer on TPU: as Wan's. The control's blocks return a hint each, which the latents' blocks use."""

from dataclasses import replace

from ...tpu.pipelines.exports import upstream_names
from . import transformer_wan_flax


__getattr__ = upstream_names(__name__)

PLAN = replace(transformer_wan_flax.PLAN, batched=(*transformer_wan_flax.PLAN.batched, "control_hidden_states"))
