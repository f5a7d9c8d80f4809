"""LTX-Video from an image on TPU: `LTXImageToVideoPipeline` installs the TPU path on itself when a TPU is there (see pipeline_wan_flax.py)."""

from ...tpu.pipelines.pipeline import self_installing
from ...tpu.pipelines.plans import PipelinePlan
from .pipeline_ltx_image2video import LTXImageToVideoPipeline as Upstream


PLAN = PipelinePlan(glue="resident", guided_in_batch=True)

LTXImageToVideoPipeline = self_installing(Upstream, __name__)
