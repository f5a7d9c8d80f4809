"""Stable Diffusion 3 image-to-image on TPU: `StableDiffusion3Img2ImgPipeline` installs the TPU path on itself when a TPU is there (see pipeline_wan_flax.py)."""

from ...tpu.pipelines.pipeline import self_installing
from .pipeline_stable_diffusion_3_flax import PLAN  # noqa: F401  read by the registry
from .pipeline_stable_diffusion_3_img2img import StableDiffusion3Img2ImgPipeline as Upstream


StableDiffusion3Img2ImgPipeline = self_installing(Upstream, __name__)
