"""CogVideoX's fun control on TPU: `CogVideoXFunControlPipeline` installs the TPU path on itself when a TPU is there (see pipeline_wan_flax.py)."""

from ...tpu.pipelines.exports import upstream_names
from ...tpu.pipelines.pipeline import self_installing
from .pipeline_cogvideox_fun_control import CogVideoXFunControlPipeline as Upstream


CogVideoXFunControlPipeline = self_installing(Upstream, __name__)
__getattr__ = upstream_names(__name__)
