"""Qwen-Image inpainting on TPU: `QwenImageInpaintPipeline` installs the TPU path on itself when a TPU is there (see pipeline_wan_flax.py)."""

from ...tpu.pipelines.pipeline import self_installing
from .pipeline_qwenimage_flax import PLAN  # noqa: F401  read by the registry
from .pipeline_qwenimage_inpaint import QwenImageInpaintPipeline as Upstream


QwenImageInpaintPipeline = self_installing(Upstream, __name__)
