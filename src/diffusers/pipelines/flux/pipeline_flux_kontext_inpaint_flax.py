"""FLUX.1 Kontext inpainting on TPU: `FluxKontextInpaintPipeline` installs the TPU path on itself when a TPU is there (see pipeline_wan_flax.py)."""

from ...tpu.pipelines.pipeline import self_installing
from .pipeline_flux_flax import PLAN  # noqa: F401  read by the registry
from .pipeline_flux_kontext_inpaint import FluxKontextInpaintPipeline as Upstream


FluxKontextInpaintPipeline = self_installing(Upstream, __name__)
