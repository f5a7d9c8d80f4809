"""Wan Animate, on TPU: `WanAnimatePipeline` installs the TPU path on itself when a TPU is there (see pipeline_wan_flax.py)."""

from ...tpu.pipelines.pipeline import self_installing
from .pipeline_wan_animate import WanAnimatePipeline as Upstream
from .pipeline_wan_flax import PLAN  # noqa: F401  read by the registry


WanAnimatePipeline = self_installing(Upstream, __name__)
