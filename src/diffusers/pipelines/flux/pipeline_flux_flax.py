"""FLUX.1 on TPU: `FluxPipeline` installs the TPU path on itself when a TPU is there (see pipeline_wan_flax.py)."""

from ...tpu.pipelines.pipeline import self_installing
from ...tpu.pipelines.plans import PipelinePlan
from .pipeline_flux import FluxPipeline as Upstream


PLAN = PipelinePlan(glue="resident")

FluxPipeline = self_installing(Upstream, __name__)
