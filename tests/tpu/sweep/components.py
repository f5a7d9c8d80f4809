"""A component of a pipeline from the annotation of its parameter, or from what `recipes.json` says of it."""

import inspect
import types
import typing

import torch
import transformers
from shrinking import filled, of_transformers, tiny

import diffusers
import tiny as parts
from diffusers import ModelMixin, SchedulerMixin
from diffusers.pipelines.deprecated.paint_by_example.image_encoder import PaintByExampleImageEncoder
from diffusers.pipelines.kolors.text_encoder import ChatGLMModel
from diffusers.pipelines.latent_diffusion.pipeline_latent_diffusion import LDMBertModel  # noqa: F401
from diffusers.schedulers import KarrasDiffusionSchedulers


BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


class Passes:
    """In place of a checker of texts and videos that upstream wants installed: everything passes."""

    def to(self, *args, **kwargs):
        return self

    def check_text_safety(self, text):
        return True

    def check_video_safety(self, video):
        return video


def bert_tokenizer(length: int = 77):
    return parts.tokenizer(length, before="<bos>", after="</s>")


def llama_tokenizer(length: int = 512):
    return parts.tokenizer(length, before="<bos>")


def glm_tokenizer():
    """ChatGLM's gives positions too."""
    tokenizer = parts.tokenizer(256)
    tokenizer.padding_side = "left"
    tokenizer.model_input_names = ["input_ids", "attention_mask", "position_ids"]

    class WithPositions(type(tokenizer)):
        def __call__(self, *args, **kwargs):
            found = super().__call__(*args, **kwargs)
            found["position_ids"] = torch.clamp(found["attention_mask"].cumsum(-1) - 1, min=0)
            return found

    tokenizer.__class__ = WithPositions
    return tokenizer


def qwen_vl_processor():
    """Of text and pictures, without videos: those want torchvision."""
    processor = object.__new__(transformers.Qwen2_5_VLProcessor)
    processor.tokenizer, processor.chat_template = parts.chat_tokenizer(), parts.CHAT
    processor.image_processor = transformers.Qwen2VLImageProcessor(
        patch_size=14, merge_size=2, min_pixels=28 * 28, max_pixels=56 * 56
    )
    for kind in ("image", "video"):
        setattr(processor, f"{kind}_token", f"<|{kind}_pad|>")
        setattr(processor, f"{kind}_token_id", parts.id_of(f"<|{kind}_pad|>"))
    return processor


def clip_by_example():
    config = transformers.CLIPVisionConfig(
        hidden_size=parts.WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14,
    )  # fmt: skip
    return filled(PaintByExampleImageEncoder(config, proj_size=parts.WIDTH).eval())


def chat_glm():
    """Upstream leaves its parameters as memory is."""
    made = of_transformers(ChatGLMModel)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.1)
    return made


def t5_gemma_encoder():
    return of_transformers(transformers.T5GemmaEncoderModel).encoder


def prior():
    made = tiny(diffusers.PriorTransformer)
    made.clip_std.data.fill_(0.5)
    return made


def target_properties():
    return {"target_names": ["albedo", "roughness"]}


def scheduler_of(cls: type, **known):
    return lambda **changes: cls(**{**known, **changes})


def makers(make, *names: str) -> dict:
    return dict.fromkeys(names, make)


FLOW_EULER = scheduler_of(diffusers.FlowMatchEulerDiscreteScheduler, shift=3.0)
MAKERS = {
    "CLIPTextModel": parts.clip_text,
    "CLIPTextModelWithProjection": parts.clip_text_projected,
    "CLIPVisionModel": parts.clip_vision,
    "CLIPVisionModelWithProjection": parts.clip_vision_projected,
    **makers(parts.clip_images, "CLIPImageProcessor", "CLIPImageProcessorPil", "CLIPProcessor"),
    "CLIPTokenizer": parts.clip_tokens,
    "T5EncoderModel": parts.t5,
    "UMT5EncoderModel": parts.umt5,
    **makers(parts.tokens, "T5Tokenizer", "PreTrainedTokenizerBase", "AutoTokenizer"),
    **makers(parts.chat_tokenizer, "Qwen2Tokenizer", "Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor", "AutoProcessor"),
    "Qwen2_5_VLForConditionalGeneration": parts.qwen25vl,
    "Qwen2_5_VLTextModel": parts.qwen25,
    "CosmosSafetyChecker": Passes,
    "T5GemmaEncoder": t5_gemma_encoder,
    "PaintByExampleImageEncoder": clip_by_example,
    "UnCLIPScheduler": scheduler_of(
        diffusers.UnCLIPScheduler, variance_type="fixed_small_log", prediction_type="sample", clip_sample=True, clip_sample_range=5.0
    ),
    **makers(FLOW_EULER, "SchedulerMixin", "FlowMatchEulerDiscreteScheduler"),
    "ClassifierFreeGuidance": lambda: diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
    "Qwen3ForCausalLM": parts.qwen3_causal,
    "Qwen3Model": parts.qwen3,
    "Gemma2PreTrainedModel": parts.gemma2,
    "GemmaPreTrainedModel": lambda: of_transformers(transformers.GemmaModel),
    "GemmaTokenizer": lambda: llama_tokenizer(300),
    "GlmModel": parts.glm,
    "LlamaModel": parts.llama,
    **makers(llama_tokenizer, "LlamaTokenizer", "TokenizersBackend"),
    "LlavaForConditionalGeneration": parts.llava,
    "SiglipVisionModel": parts.siglip,
    **makers(parts.siglip_images, "SiglipImageProcessor", "SiglipImageProcessorPil"),
    "StableDiffusionSafetyChecker": parts.safety_checker,
    "ByT5Tokenizer": transformers.ByT5Tokenizer,
    **makers(bert_tokenizer, "BertTokenizer", "RobertaTokenizer", "XLMRobertaTokenizer", "GPT2Tokenizer"),
    "ChatGLMModel": chat_glm,
    "ChatGLMTokenizer": glm_tokenizer,
    "DPTImageProcessorPil": lambda: transformers.DPTImageProcessor(size={"height": 32, "width": 32}),
    "KarrasDiffusionSchedulers": scheduler_of(diffusers.DDIMScheduler, **BETAS, steps_offset=1, clip_sample=False),
}  # fmt: skip


def component(hint, change):
    """Of what a recipe says: changes to what the annotation makes, `_class_name` for another class, or a maker's name after an @."""
    if isinstance(change, str) and change.startswith("@"):
        name = change[1:]
        return (globals().get(name) or getattr(parts, name))()
    if not isinstance(change, dict):
        return change
    if "_class_name" in change:
        return of_class(**change)
    for cls in candidates(hint):
        if cls.__name__ in MAKERS:
            return MAKERS[cls.__name__](**change)
        if issubclass(cls, KarrasDiffusionSchedulers):
            return MAKERS["KarrasDiffusionSchedulers"](**change)
        if issubclass(cls, SchedulerMixin) and cls is not SchedulerMixin:
            takes = inspect.signature(cls.__init__).parameters
            return cls(**{**{name: value for name, value in BETAS.items() if name in takes}, **change})
        if issubclass(cls, ModelMixin):
            return tiny(cls, **change)
        if issubclass(cls, transformers.PreTrainedModel) and getattr(cls, "config_class", None):
            return of_transformers(cls, **change)
    raise TypeError(f"expected an annotation of which a component can be made, got {hint}")


def of_class(_class_name: str, **sizes):
    cls = globals().get(_class_name) or getattr(diffusers, _class_name, None) or getattr(transformers, _class_name)
    if issubclass(cls, ModelMixin):
        return tiny(cls, **sizes)
    return of_transformers(cls, **sizes) if issubclass(cls, transformers.PreTrainedModel) else cls(**sizes)


def candidates(hint) -> list[type]:
    """The classes that an annotation names, of a union each."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [cls for arg in typing.get_args(hint) for cls in candidates(arg)]
    return [hint] if isinstance(hint, type) and hint is not type(None) else []
