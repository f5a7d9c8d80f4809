"""HunyuanVideo image-to-video on TPU: `HunyuanVideoImageToVideoPipeline` installs the TPU path on itself when a TPU is there (see pipeline_wan_flax.py)."""

from ...tpu.pipelines.pipeline import self_installing
from .pipeline_hunyuan_video_flax import PLAN  # noqa: F401  read by the registry
from .pipeline_hunyuan_video_image2video import HunyuanVideoImageToVideoPipeline as Upstream


HunyuanVideoImageToVideoPipeline = self_installing(Upstream, __name__)
