"""Wan video-to-video, on TPU: `WanVideoToVideoPipeline` installs the TPU path on itself when a TPU is there (see pipeline_wan_flax.py)."""

from ...tpu.pipelines.exports import upstream_names
from ...tpu.pipelines.pipeline import self_installing
from .pipeline_wan_video2video import WanVideoToVideoPipeline as Upstream


WanVideoToVideoPipeline = self_installing(Upstream, __name__)
__getattr__ = upstream_names(__name__)
