"""HunyuanVideo-1.5 text-to-video on TPU: `HunyuanVideo15Pipeline` installs the TPU path on itself when a TPU is there (see pipeline_wan_flax.py)."""

from ...tpu.pipelines.pipeline import self_installing
from ...tpu.pipelines.plans import PipelinePlan
from .pipeline_hunyuan_video1_5 import HunyuanVideo15Pipeline as Upstream


PLAN = PipelinePlan(glue="resident", once_per_branch=True)

HunyuanVideo15Pipeline = self_installing(Upstream, __name__)
