"""FLUX.1 Control image-to-image on TPU: `FluxControlImg2ImgPipeline` installs the TPU path on itself when a TPU is there (see pipeline_wan_flax.py)."""

from ...tpu.pipelines.pipeline import self_installing
from .pipeline_flux_control_img2img import FluxControlImg2ImgPipeline as Upstream
from .pipeline_flux_flax import PLAN  # noqa: F401  read by the registry


FluxControlImg2ImgPipeline = self_installing(Upstream, __name__)
