"""CogVideoX's text-to-video on TPU: `CogVideoXPipeline` installs the TPU path on itself when a TPU is there (see pipeline_wan_flax.py)."""

from ...tpu.pipelines.pipeline import self_installing
from ...tpu.pipelines.plans import PipelinePlan
from .pipeline_cogvideox import CogVideoXPipeline as Upstream


PLAN = PipelinePlan(glue="resident", guided_in_batch=True)

CogVideoXPipeline = self_installing(Upstream, __name__)
