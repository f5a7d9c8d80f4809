"""Stable Diffusion 3 inpainting on TPU: `StableDiffusion3InpaintPipeline` installs the TPU path on itself when a TPU is there (see pipeline_wan_flax.py)."""

from ...tpu.pipelines.pipeline import self_installing
from .pipeline_stable_diffusion_3_flax import PLAN  # noqa: F401  read by the registry
from .pipeline_stable_diffusion_3_inpaint import StableDiffusion3InpaintPipeline as Upstream


StableDiffusion3InpaintPipeline = self_installing(Upstream, __name__)
