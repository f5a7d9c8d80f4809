"""What is special about upstream's classes on the TPU: one table from their names to the files beside them that say so."""

import importlib
import inspect
from dataclasses import dataclass

import torch

from ...models.modeling_utils import ModelMixin
from ..chips.sharding import ModelPlan
from .declared import declared_plan


# Where the plan of an upstream class is: a module whose PLAN says what is special about it on the TPU.
PLANS = {
    "WanTransformer3DModel": "diffusers.models.transformers.transformer_wan_flax",
    "HunyuanVideo15Transformer3DModel": "diffusers.models.transformers.transformer_hunyuan_video15_flax",
    "HunyuanVideoTransformer3DModel": "diffusers.models.transformers.transformer_hunyuan_video_flax",
    "HunyuanVideoFramepackTransformer3DModel": "diffusers.models.transformers.transformer_hunyuan_video_framepack_flax",
    "FluxTransformer2DModel": "diffusers.models.transformers.transformer_flux_flax",
    "QwenImageTransformer2DModel": "diffusers.models.transformers.transformer_qwenimage_flax",
    "SD3Transformer2DModel": "diffusers.models.transformers.transformer_sd3_flax",
    "LTXVideoTransformer3DModel": "diffusers.models.transformers.transformer_ltx_flax",
    "MochiTransformer3DModel": "diffusers.models.transformers.transformer_mochi_flax",
    "CogVideoXTransformer3DModel": "diffusers.models.transformers.cogvideox_transformer_3d_flax",
    "AutoencoderKL": "diffusers.models.autoencoders.autoencoder_kl_flax",
    "AutoencoderKLFlux2": "diffusers.models.autoencoders.autoencoder_kl_flux2_flax",
    "AutoencoderKLCogVideoX": "diffusers.models.autoencoders.autoencoder_kl_cogvideox_flax",
    "AutoencoderKLHunyuanVideo15": "diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15_flax",
    "AutoencoderKLLTXVideo": "diffusers.models.autoencoders.autoencoder_kl_ltx_flax",
    "AutoencoderKLQwenImage": "diffusers.models.autoencoders.autoencoder_kl_qwenimage_flax",
    "AutoencoderKLWan": "diffusers.models.autoencoders.autoencoder_kl_wan_flax",
    "WanVACETransformer3DModel": "diffusers.models.transformers.transformer_wan_vace_flax",
    "WanAnimateTransformer3DModel": "diffusers.models.transformers.transformer_wan_animate_flax",
    "HunyuanVideo15Pipeline": "diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5_flax",
    "HunyuanVideo15ImageToVideoPipeline": "diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5_image2video_flax",
    "HunyuanVideoPipeline": "diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video_flax",
    "HunyuanVideoImageToVideoPipeline": "diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video_image2video_flax",
    "HunyuanVideoFramepackPipeline": "diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video_framepack_flax",
    "HunyuanSkyreelsImageToVideoPipeline": "diffusers.pipelines.hunyuan_video.pipeline_hunyuan_skyreels_image2video_flax",
    "CogVideoXPipeline": "diffusers.pipelines.cogvideo.pipeline_cogvideox_flax",
    "CogVideoXImageToVideoPipeline": "diffusers.pipelines.cogvideo.pipeline_cogvideox_image2video_flax",
    "CogVideoXVideoToVideoPipeline": "diffusers.pipelines.cogvideo.pipeline_cogvideox_video2video_flax",
    "CogVideoXFunControlPipeline": "diffusers.pipelines.cogvideo.pipeline_cogvideox_fun_control_flax",
    "FluxPipeline": "diffusers.pipelines.flux.pipeline_flux_flax",
    "FluxImg2ImgPipeline": "diffusers.pipelines.flux.pipeline_flux_img2img_flax",
    "FluxInpaintPipeline": "diffusers.pipelines.flux.pipeline_flux_inpaint_flax",
    "FluxKontextPipeline": "diffusers.pipelines.flux.pipeline_flux_kontext_flax",
    "FluxKontextInpaintPipeline": "diffusers.pipelines.flux.pipeline_flux_kontext_inpaint_flax",
    "FluxFillPipeline": "diffusers.pipelines.flux.pipeline_flux_fill_flax",
    "FluxControlPipeline": "diffusers.pipelines.flux.pipeline_flux_control_flax",
    "FluxControlImg2ImgPipeline": "diffusers.pipelines.flux.pipeline_flux_control_img2img_flax",
    "FluxControlInpaintPipeline": "diffusers.pipelines.flux.pipeline_flux_control_inpaint_flax",
    "FluxControlNetPipeline": "diffusers.pipelines.flux.pipeline_flux_controlnet_flax",
    "LTXPipeline": "diffusers.pipelines.ltx.pipeline_ltx_flax",
    "LTXImageToVideoPipeline": "diffusers.pipelines.ltx.pipeline_ltx_image2video_flax",
    "LTXConditionPipeline": "diffusers.pipelines.ltx.pipeline_ltx_condition_flax",
    "QwenImagePipeline": "diffusers.pipelines.qwenimage.pipeline_qwenimage_flax",
    "QwenImageImg2ImgPipeline": "diffusers.pipelines.qwenimage.pipeline_qwenimage_img2img_flax",
    "QwenImageInpaintPipeline": "diffusers.pipelines.qwenimage.pipeline_qwenimage_inpaint_flax",
    "StableDiffusion3Pipeline": "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3_flax",
    "StableDiffusion3Img2ImgPipeline": "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3_img2img_flax",
    "StableDiffusion3InpaintPipeline": "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3_inpaint_flax",
    "StableDiffusionXLPipeline": "diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl_flax",
    "WanPipeline": "diffusers.pipelines.wan.pipeline_wan_flax",
    "WanImageToVideoPipeline": "diffusers.pipelines.wan.pipeline_wan_i2v_flax",
    "WanVideoToVideoPipeline": "diffusers.pipelines.wan.pipeline_wan_video2video_flax",
    "WanVACEPipeline": "diffusers.pipelines.wan.pipeline_wan_vace_flax",
    "WanAnimatePipeline": "diffusers.pipelines.wan.pipeline_wan_animate_flax",
}
FLAX = {  # upstream class: where its form in plain JAX is, under the name with Flax before it
    "AutoencoderKLWan": "diffusers.models.autoencoders.autoencoder_kl_wan_nnx_flax",
    "AutoencoderKLHunyuanVideo15": "diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15_nnx_flax",
    "AutoencoderKLCogVideoX": "diffusers.models.autoencoders.autoencoder_kl_cogvideox_nnx_flax",
}
VAE_ENTRIES = ("encode", "decode")


@dataclass(frozen=True)
class PipelinePlan:
    """What is special about one pipeline class on the TPU.

    Args:
        glue: "resident" if upstream's loop is known to run on device tensors.
        once_per_branch: the denoiser is called once per guidance branch, not with all of them in one batch.
        guided_in_batch: it is called with both branches in one batch, which `dp` splits as the plan of the model says.
    """

    glue: str = "host"
    once_per_branch: bool = False
    guided_in_batch: bool = False

    def in_pairs(self, pipe=None) -> bool:
        """Are there two of what a call computes, so that dp 2 is of use? A guider says how many branches there are; without one two."""
        if self.guided_in_batch:
            return True
        guider = getattr(pipe, "guider", None)
        branches = 2 if guider is None else guider.num_conditions if guider._enabled else 1
        return self.once_per_branch and branches % 2 == 0


def plan_of(cls: type, default):
    """The plan of the first class in cls's bases that has one, else `default`."""
    for base in cls.__mro__:
        if base.__name__ in PLANS and base.__module__.startswith("diffusers."):
            return importlib.import_module(PLANS[base.__name__]).PLAN
    return default


def flax_class(name: str) -> type:
    """The form in plain JAX of upstream's class of this name. Raises ValueError where there is none."""
    if name not in FLAX:
        raise ValueError(f"expected a class that has a form in plain JAX ({', '.join(FLAX)}), got {name}")
    return getattr(importlib.import_module(FLAX[name]), f"Flax{name}")


def module_plan(module: torch.nn.Module) -> ModelPlan:
    """The plan of the module's class; of a class without one, its entry methods and what upstream declares of it."""
    plan = plan_of(type(module), None)
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
