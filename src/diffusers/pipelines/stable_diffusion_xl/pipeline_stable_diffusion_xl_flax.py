"""Stable Diffusion XL on TPU: `StableDiffusionXLPipeline` installs the TPU path on itself when a TPU is there (see pipeline_wan_flax.py)."""

from ...tpu.pipelines.pipeline import self_installing
from ...tpu.pipelines.plans import PipelinePlan
from .pipeline_stable_diffusion_xl import StableDiffusionXLPipeline as Upstream


PLAN = PipelinePlan(glue="resident")

StableDiffusionXLPipeline = self_installing(Upstream, __name__)
