"""HunyuanVideo-1.5 image-to-video on TPU: `HunyuanVideo15ImageToVideoPipeline` installs the TPU path on itself when a TPU is there (see pipeline_wan_flax.py)."""

from ...tpu.pipelines.exports import upstream_names
from ...tpu.pipelines.pipeline import self_installing
from .pipeline_hunyuan_video1_5_image2video import HunyuanVideo15ImageToVideoPipeline as Upstream


HunyuanVideo15ImageToVideoPipeline = self_installing(Upstream, __name__)
__getattr__ = upstream_names(__name__)
