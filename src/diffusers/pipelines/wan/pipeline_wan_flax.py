"""Wan text-to-video on TPU: `WanPipeline` installs the TPU path on each instance if the path is active.

    from diffusers.pipelines.wan.pipeline_wan_flax import WanPipeline, WanPipelineOutput

`from diffusers import WanPipeline` does the same through `from_pretrained` and `.to`. Other names of this module are those of
upstream's `pipeline_wan`.
"""

from ...tpu.pipelines.exports import upstream_names


__getattr__ = upstream_names(__name__)
