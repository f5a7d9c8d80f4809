"""Qwen-Image image-to-image on TPU: `QwenImageImg2ImgPipeline` installs the TPU path on itself when a TPU is there (see pipeline_wan_flax.py)."""

from ...tpu.pipelines.pipeline import self_installing
from .pipeline_qwenimage_flax import PLAN  # noqa: F401  read by the registry
from .pipeline_qwenimage_img2img import QwenImageImg2ImgPipeline as Upstream


QwenImageImg2ImgPipeline = self_installing(Upstream, __name__)
