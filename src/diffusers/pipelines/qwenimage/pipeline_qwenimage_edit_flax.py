"""Qwen-Image Edit on TPU: `QwenImageEditPipeline` installs the TPU path on itself when a TPU is there (see pipeline_wan_flax.py)."""

from ...tpu.pipeline import self_installing
from .pipeline_qwenimage_edit import QwenImageEditPipeline as Upstream
from .pipeline_qwenimage_flax import PLAN  # noqa: F401  read by the registry


QwenImageEditPipeline = self_installing(Upstream, __name__)
