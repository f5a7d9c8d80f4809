"""Qwen-Image Layered on TPU: `QwenImageLayeredPipeline` installs the TPU path on itself when a TPU is there (see pipeline_wan_flax.py)."""

from ...tpu.pipeline import self_installing
from .pipeline_qwenimage_flax import PLAN  # noqa: F401  read by the registry
from .pipeline_qwenimage_layered import QwenImageLayeredPipeline as Upstream


QwenImageLayeredPipeline = self_installing(Upstream, __name__)
