"""Wan text-to-video on TPU: `WanPipeline` installs the TPU path on itself when a TPU is there.

    from diffusers.pipelines.wan.pipeline_wan_flax import WanPipeline

`from diffusers import WanPipeline` does the same through `from_pretrained` and `.to`; this is the class by name.
"""

from ... import tpu
from ...tpu.pipeline import PipelinePlan, TPUPipelineMixin
from .pipeline_wan import WanPipeline as UpstreamWanPipeline


PLAN = PipelinePlan(glue="resident", guided_by_pairs=True)


class WanPipeline(TPUPipelineMixin, UpstreamWanPipeline):
    __doc__ = UpstreamWanPipeline.__doc__

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if tpu.is_active():
            tpu.install(self)
