"""HunyuanVideo text-to-video on TPU: `HunyuanVideoPipeline` installs the TPU path on itself when a TPU is there (see pipeline_wan_flax.py)."""

from ...tpu.pipelines.pipeline import self_installing
from ...tpu.pipelines.plans import PipelinePlan
from .pipeline_hunyuan_video import HunyuanVideoPipeline as Upstream


PLAN = PipelinePlan(glue="resident")

HunyuanVideoPipeline = self_installing(Upstream, __name__)
