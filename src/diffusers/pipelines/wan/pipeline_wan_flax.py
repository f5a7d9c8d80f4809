"""Wan text-to-video on TPU: `WanPipeline` installs the TPU path on itself when a TPU is there.

    from diffusers.pipelines.wan.pipeline_wan_flax import WanPipeline, WanPipelineOutput

`from diffusers import WanPipeline` does the same through `from_pretrained` and `.to`; this is the class by name. Other names
are those of upstream's `pipeline_wan`.
"""

from ...tpu.pipelines.exports import upstream_names


__getattr__ = upstream_names(__name__)
