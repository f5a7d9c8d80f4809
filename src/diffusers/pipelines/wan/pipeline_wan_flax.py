"""Wan text-to-video on TPU: `WanPipeline` installs the TPU path on itself when a TPU is there.

    from diffusers.pipelines.wan.pipeline_wan_flax import WanPipeline

`from diffusers import WanPipeline` does the same through `from_pretrained` and `.to`; this is the class by name. The files
beside it do it for Wan's other pipelines, whose loops are this one's.
"""

from ...tpu.pipelines.pipeline import self_installing
from ...tpu.pipelines.plans import PipelinePlan
from .pipeline_wan import WanPipeline as UpstreamWanPipeline


PLAN = PipelinePlan(glue="resident", once_per_branch=True)

WanPipeline = self_installing(UpstreamWanPipeline, __name__)
