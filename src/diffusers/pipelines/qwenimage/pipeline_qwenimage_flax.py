"""Qwen-Image on TPU: `QwenImagePipeline` installs the TPU path on itself when a TPU is there (see pipeline_wan_flax.py)."""

from ...tpu.pipelines.pipeline import self_installing
from ...tpu.pipelines.plans import PipelinePlan
from .pipeline_qwenimage import QwenImagePipeline as Upstream


PLAN = PipelinePlan(glue="resident", once_per_branch=True)

QwenImagePipeline = self_installing(Upstream, __name__)
