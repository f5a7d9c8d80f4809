"""What is special about upstream's classes on the TPU.

A model's plan is `PLAN` of the module beside its own: that of `diffusers.models.transformers.transformer_wan` lies in
`transformer_wan_flax`, its form in plain JAX, if there is one, in `..._nnx_flax`. Plans of pipelines are rows of `PIPELINES`.
"""

import functools
import importlib.util
import inspect
from dataclasses import dataclass

import torch

from ...models.modeling_utils import ModelMixin
from ..chips.sharding import ModelPlan
from .declared import declared_plan


VAE_ENTRIES = ("encode", "decode")
FLAX = (
    "AutoencoderKLWan",
    "AutoencoderKLHunyuanVideo15",
    "AutoencoderKLCogVideoX",
)  # of these there is a form in plain JAX


@dataclass(frozen=True)
class PipelinePlan:
    """What is special about one pipeline class on the TPU.

    Args:
        glue: "resident" if upstream's loop is known to run on device tensors.
        once_per_branch: the denoiser is called once per guidance branch, not with all of them in one batch.
        guided_in_batch: it is called with all branches in one batch, which `dp` splits as the plan of the model says.
    """

    glue: str = "host"
    once_per_branch: bool = False
    guided_in_batch: bool = False

    def branches(self, pipe=None) -> int:
        """Guidance branches of a step, which `dp` can hold side by side. A guider says how many; without one two."""
        if self.guided_in_batch:
            return 2
        guider = getattr(pipe, "guider", None)
        branches = 2 if guider is None else guider.num_conditions if guider._enabled else 1
        return branches if self.once_per_branch else 1


ON_DEVICE = PipelinePlan("resident")
ONCE_PER_BRANCH = PipelinePlan("resident", once_per_branch=True)
GUIDED_IN_BATCH = PipelinePlan("resident", guided_in_batch=True)

PIPELINES = {  # of upstream's classes
    "WanPipeline": ONCE_PER_BRANCH,
    "WanImageToVideoPipeline": ONCE_PER_BRANCH,
    "WanVideoToVideoPipeline": ONCE_PER_BRANCH,
    "WanVACEPipeline": ONCE_PER_BRANCH,
    "WanAnimatePipeline": ONCE_PER_BRANCH,
    "HunyuanVideo15Pipeline": ONCE_PER_BRANCH,
    "HunyuanVideo15ImageToVideoPipeline": ONCE_PER_BRANCH,
    "CogVideoXPipeline": GUIDED_IN_BATCH,
    "CogVideoXImageToVideoPipeline": GUIDED_IN_BATCH,
    "CogVideoXVideoToVideoPipeline": GUIDED_IN_BATCH,
    "CogVideoXFunControlPipeline": GUIDED_IN_BATCH,
    "HunyuanVideoPipeline": ON_DEVICE,
    "HunyuanVideoImageToVideoPipeline": ON_DEVICE,
    "HunyuanVideoFramepackPipeline": ON_DEVICE,
    "HunyuanSkyreelsImageToVideoPipeline": ON_DEVICE,
    "LTXPipeline": GUIDED_IN_BATCH,
    "LTXImageToVideoPipeline": GUIDED_IN_BATCH,
    "LTXConditionPipeline": GUIDED_IN_BATCH,
    "FluxPipeline": ON_DEVICE,
    "FluxImg2ImgPipeline": ON_DEVICE,
    "FluxInpaintPipeline": ON_DEVICE,
    "FluxKontextPipeline": ON_DEVICE,
    "FluxKontextInpaintPipeline": ON_DEVICE,
    "FluxFillPipeline": ON_DEVICE,
    "FluxControlPipeline": ON_DEVICE,
    "FluxControlImg2ImgPipeline": ON_DEVICE,
    "FluxControlInpaintPipeline": ON_DEVICE,
    "FluxControlNetPipeline": ON_DEVICE,
    "QwenImagePipeline": ONCE_PER_BRANCH,
    "QwenImageImg2ImgPipeline": ONCE_PER_BRANCH,
    "QwenImageInpaintPipeline": ONCE_PER_BRANCH,
    "StableDiffusion3Pipeline": GUIDED_IN_BATCH,
    "StableDiffusion3Img2ImgPipeline": GUIDED_IN_BATCH,
    "StableDiffusion3InpaintPipeline": GUIDED_IN_BATCH,
    "StableDiffusionXLPipeline": ON_DEVICE,
}


def pipeline_plan(cls: type) -> PipelinePlan:
    """The row of the first of the class's bases that has one; upstream's loop runs on the host where none has."""
    rows = (PIPELINES.get(base.__name__) for base in cls.__mro__ if base.__module__.startswith("diffusers."))
    return next(filter(None, rows), PipelinePlan())


def model_plan(cls: type) -> ModelPlan | None:
    """`PLAN` beside the first of the class's bases that has one there; None where none has."""
    bases = (base for base in cls.__mro__ if issubclass(base, ModelMixin) and base.__module__.startswith("diffusers."))
    return next(filter(None, (_plan_beside(base.__module__) for base in bases)), None)


@functools.cache
def _plan_beside(module: str) -> ModelPlan | None:
    name = f"{module}_flax"
    return None if importlib.util.find_spec(name) is None else importlib.import_module(name).PLAN


def flax_class(name: str) -> type:
    """The form in plain JAX of upstream's class of this name. Raises ValueError where there is none."""
    if name not in FLAX:
        raise ValueError(f"expected a class that has a form in plain JAX ({', '.join(FLAX)}), got {name}")
    upstream = getattr(importlib.import_module("diffusers"), name)
    return getattr(importlib.import_module(f"{upstream.__module__}_nnx_flax"), f"Flax{name}")


def module_plan(module: torch.nn.Module) -> ModelPlan:
    """The plan of the module's class; of a class without one, its entry methods and what upstream declares of it."""
    plan = model_plan(type(module))
    if plan is not None:
        return plan
    if not isinstance(module, ModelMixin):
        return ModelPlan(decide=_without_cache if _fills_a_cache(module) else None)
    is_autoencoder = all(hasattr(module, entry) for entry in VAE_ENTRIES)
    return ModelPlan(entries=("forward", *VAE_ENTRIES)) if is_autoencoder else declared_plan(module)


def _without_cache(arguments: dict) -> dict:
    """A text encoder reads its prompt once: the key-value cache that a language model would fill is never read."""
    given = {**arguments.get("kwargs", {}), **arguments}
    return {} if given.get("use_cache") is not None else {"use_cache": False}


def _fills_a_cache(module: torch.nn.Module) -> bool:
    parameters = inspect.signature(module.forward).parameters
    hands_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return "use_cache" in parameters or ("past_key_values" in parameters and hands_on)
