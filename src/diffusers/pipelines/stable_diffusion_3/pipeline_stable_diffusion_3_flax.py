"""Stable Diffusion 3 on TPU: `StableDiffusion3Pipeline` installs the TPU path on itself when a TPU is there (see pipeline_wan_flax.py)."""

from ...tpu.pipelines.pipeline import self_installing
from ...tpu.pipelines.plans import PipelinePlan
from .pipeline_stable_diffusion_3 import StableDiffusion3Pipeline as Upstream


PLAN = PipelinePlan(glue="resident", guided_in_batch=True)

StableDiffusion3Pipeline = self_installing(Upstream, __name__)
