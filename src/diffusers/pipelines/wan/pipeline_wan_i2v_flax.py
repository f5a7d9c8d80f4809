"""Wan image-to-video, first and last frame too, on TPU: `WanImageToVideoPipeline` installs the TPU path on itself when a TPU is there (see pipeline_wan_flax.py)."""

from ...tpu.pipelines.exports import upstream_names


__getattr__ = upstream_names(__name__)
