"""FLUX.1 Fill on TPU: `FluxFillPipeline` installs the TPU path on itself when a TPU is there (see pipeline_wan_flax.py)."""

from ...tpu.pipelines.pipeline import self_installing
from .pipeline_flux_fill import FluxFillPipeline as Upstream
from .pipeline_flux_flax import PLAN  # noqa: F401  read by the registry


FluxFillPipeline = self_installing(Upstream, __name__)
