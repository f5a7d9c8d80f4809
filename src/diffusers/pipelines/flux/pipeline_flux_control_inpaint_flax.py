"""FLUX.1 Control inpainting on TPU: `FluxControlInpaintPipeline` installs the TPU path on itself when a TPU is there (see pipeline_wan_flax.py)."""

from ...tpu.pipelines.pipeline import self_installing
from .pipeline_flux_control_inpaint import FluxControlInpaintPipeline as Upstream
from .pipeline_flux_flax import PLAN  # noqa: F401  read by the registry


FluxControlInpaintPipeline = self_installing(Upstream, __name__)
