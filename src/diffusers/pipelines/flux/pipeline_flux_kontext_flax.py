"""FLUX.1 Kontext on TPU: `FluxKontextPipeline` installs the TPU path on itself when a TPU is there (see pipeline_wan_flax.py)."""

from ...tpu.pipelines.pipeline import self_installing
from .pipeline_flux_flax import PLAN  # noqa: F401  read by the registry
from .pipeline_flux_kontext import FluxKontextPipeline as Upstream


FluxKontextPipeline = self_installing(Upstream, __name__)
