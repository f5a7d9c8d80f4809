"""FLUX.1 image-to-image on TPU: `FluxImg2ImgPipeline` installs the TPU path on itself when a TPU is there (see pipeline_wan_flax.py)."""

from ...tpu.pipelines.pipeline import self_installing
from .pipeline_flux_flax import PLAN  # noqa: F401  read by the registry
from .pipeline_flux_img2img import FluxImg2ImgPipeline as Upstream


FluxImg2ImgPipeline = self_installing(Upstream, __name__)
