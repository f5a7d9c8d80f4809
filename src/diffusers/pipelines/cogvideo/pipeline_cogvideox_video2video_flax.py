"""CogVideoX's video-to-video on TPU: a `CogVideoXVideoToVideoPipeline` that installs the TPU path, as in pipeline_wan_flax.py."""

from ...tpu.pipelines.exports import upstream_names


__getattr__ = upstream_names(__name__)
