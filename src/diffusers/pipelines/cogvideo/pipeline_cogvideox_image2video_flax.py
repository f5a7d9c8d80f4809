"""CogVideoX's image-to-video on TPU: `CogVideoXImageToVideoPipeline` installs the TPU path on itself when a TPU is there (see pipeline_wan_flax.py)."""

from ...tpu.pipelines.pipeline import self_installing
from ...tpu.pipelines.plans import PipelinePlan
from .pipeline_cogvideox_image2video import CogVideoXImageToVideoPipeline as Upstream


PLAN = PipelinePlan(glue="resident", guided_in_batch=True)

CogVideoXImageToVideoPipeline = self_installing(Upstream, __name__)
