"""Wan image-to-video, also by first and last frame, on TPU: its pipeline installs the TPU path, as in pipeline_wan_flax.py."""

from ...tpu.pipelines.exports import upstream_names


__getattr__ = upstream_names(__name__)
