"""Wan Animate, on TPU: `WanAnimatePipeline` installs the TPU path on itself when a TPU is there (see pipeline_wan_flax.py)."""

from ...tpu.pipelines.exports import upstream_names


__getattr__ = upstream_names(__name__)
