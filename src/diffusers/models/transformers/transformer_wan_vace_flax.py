"""Wan VACE's transformer on TPU: as Wan's. The control's blocks return a hint each, which the latents' blocks use."""

from ...tpu.pipelines.exports import upstream_names
from .transformer_wan_flax import PLAN  # noqa: F401


__getattr__ = upstream_names(__name__)
