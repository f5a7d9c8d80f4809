"""Wan Animate's transformer on TPU: as Wan's, with pose and face as further inputs. Its upstream processor is a copy of Wan's."""

from dataclasses import replace

from ...tpu.pipelines.exports import upstream_names
from . import transformer_wan_flax
from .transformer_wan_animate import WanAttnProcessor


__getattr__ = upstream_names(__name__)

PLAN = replace(transformer_wan_flax.PLAN, processors={WanAttnProcessor: transformer_wan_flax.WanProcessor})
