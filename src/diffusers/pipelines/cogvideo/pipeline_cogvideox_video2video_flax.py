"""CogVideoX's video-to-video on TPU: `CogVideoXVideoToVideoPipeline` installs the TPU path on itself when a TPU is there (see pipeline_wan_flax.py)."""

from ...tpu.pipelines.exports import upstream_names
from ...tpu.pipelines.pipeline import self_installing
from .pipeline_cogvideox_video2video import CogVideoXVideoToVideoPipeline as Upstream


CogVideoXVideoToVideoPipeline = self_installing(Upstream, __name__)
__getattr__ = upstream_names(__name__)
