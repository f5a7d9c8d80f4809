"""A component of a pipeline from the annotation of its parameter: models by `tiny`, the rest by the makers here."""

import inspect
import types
import typing

import numpy as np
import PIL.Image
import torch
import transformers
from shrinking import WIDTH, filled, small, tiny

import diffusers
import tiny as parts
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, ModelMixin, SchedulerMixin
from diffusers.schedulers import KarrasDiffusionSchedulers


FRAMES = 9
BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
CONFIG = {
    **parts.DECODER, "num_hidden_layers": 2, "head_dim": 8, "num_layers": 2, "n_embd": WIDTH, "n_layer": 2, "n_head": 2,
    "n_positions": 64, "projection_dim": WIDTH, "max_position_embeddings": 2048, "type_vocab_size": 2, "sliding_window": 64,
    "query_pre_attn_scalar": 8,
}  # fmt: skip


def language_model(cls: type, **changes):
    """A tiny model of transformers of this class: of its configuration what `CONFIG` knows by name."""
    config = cls.config_class
    known = inspect.signature(config.__init__).parameters.keys() | vars(config()).keys()
    wanted = {**{name: value for name, value in CONFIG.items() if name in known}, **changes}
    return small(lambda: cls(config(**wanted)).eval(), cls)


def qwen3_vl(cls: type, **changes):
    config = cls.config_class
    text = {
        **parts.DECODER,
        "num_hidden_layers": 2,
        "head_dim": 8,
        "rope_scaling": {"mrope_section": [1, 1, 2], "rope_type": "default"},
    }
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "num_heads": 2,
        "out_hidden_size": WIDTH,
        "intermediate_size": 24,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    }
    ids = {
        "image_token_id": parts.id_of("<|image_pad|>"),
        "video_token_id": parts.id_of("<|video_pad|>"),
        "vision_start_token_id": parts.id_of("<|vision_start|>"),
        "vision_end_token_id": parts.id_of("<|vision_end|>"),
    }
    return filled(cls(config(text_config={**text, **changes}, vision_config=vision, **ids)).eval())


def bert_tokenizer(length: int = 77):
    return parts.tokenizer(length, before="<bos>", after="</s>")


def llama_tokenizer(length: int = 512):
    return parts.tokenizer(length, before="<bos>")


def no_check(*args, **kwargs):
    """In place of a checker of texts and videos that upstream wants installed: everything passes."""

    class Passes:
        def to(self, *args, **kwargs):
            return self

        def check_text_safety(self, text):
            return True

        def check_video_safety(self, video):
            return video

    return Passes()


def vocoder():
    return transformers.SpeechT5HifiGan(
        transformers.SpeechT5HifiGanConfig(
            model_in_dim=16, sampling_rate=16000, upsample_initial_channel=16, upsample_rates=[2, 2],
            upsample_kernel_sizes=[4, 4], resblock_kernel_sizes=[3, 7], resblock_dilation_sizes=[[1, 3, 5], [1, 3, 5]],
            normalize_before=False,
        )
    ).eval()  # fmt: skip


def clap_text():
    config = transformers.ClapTextConfig(
        vocab_size=parts.VOCABULARY, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        projection_dim=WIDTH, pad_token_id=1,
    )  # fmt: skip
    return transformers.ClapTextModelWithProjection(config).eval()


def dpt():
    config = transformers.DPTConfig(
        hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=24, image_size=32, patch_size=16,
        backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8, readout_type="project",
    )  # fmt: skip
    return transformers.DPTForDepthEstimation(config).eval()


def qwen_vl_processor():
    """Of text and pictures, without videos: those want torchvision."""
    processor = object.__new__(transformers.Qwen2_5_VLProcessor)
    processor.tokenizer = parts.chat_tokenizer()
    processor.image_processor = transformers.Qwen2VLImageProcessor(
        patch_size=14, merge_size=2, min_pixels=28 * 28, max_pixels=56 * 56
    )
    processor.chat_template = parts.CHAT
    processor.image_token, processor.video_token = "<|image_pad|>", "<|video_pad|>"
    processor.image_token_id, processor.video_token_id = map(
        parts.id_of, (processor.image_token, processor.video_token)
    )
    return processor


def ldm_bert():
    from diffusers.pipelines.latent_diffusion.pipeline_latent_diffusion import LDMBertConfig, LDMBertModel

    return LDMBertModel(
        LDMBertConfig(
            vocab_size=parts.VOCABULARY, d_model=WIDTH, encoder_layers=2, encoder_ffn_dim=48, encoder_attention_heads=2, head_dim=16,
            max_position_embeddings=77,
        )
    ).eval()  # fmt: skip


def clip_by_example():
    from diffusers.pipelines.deprecated.paint_by_example.image_encoder import PaintByExampleImageEncoder

    config = transformers.CLIPVisionConfig(
        hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14,
    )  # fmt: skip
    return filled(PaintByExampleImageEncoder(config, proj_size=WIDTH).eval())


def t5_gemma():
    config = transformers.T5GemmaModuleConfig(
        **{**parts.DECODER, "num_hidden_layers": 2, "head_dim": 8, "sliding_window": 64}
    )
    whole = transformers.T5GemmaConfig(encoder=config, decoder=config, is_encoder_decoder=False)
    return filled(transformers.T5GemmaEncoderModel(whole).eval())


def mistral3(cls: type, **changes):
    text = transformers.MistralConfig(**{**parts.DECODER, "num_hidden_layers": 2, "head_dim": 8, **changes})
    vision = transformers.PixtralVisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
        head_dim=8,
    )
    return filled(cls(transformers.Mistral3Config(text_config=text, vision_config=vision)).eval())


def gemma3():
    text = {**parts.DECODER, "num_hidden_layers": 2, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 64}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return filled(transformers.Gemma3ForConditionalGeneration(config).eval())


def multilingual_clip():
    from diffusers.pipelines.kandinsky.text_encoder import MCLIPConfig, MultilingualCLIP

    return MultilingualCLIP(
        MCLIPConfig(
            vocab_size=parts.VOCABULARY, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            transformerDimensions=WIDTH, numDims=WIDTH,
        )
    ).eval()  # fmt: skip


def roberta_series():
    from diffusers.pipelines.deprecated.alt_diffusion.modeling_roberta_series import (
        RobertaSeriesConfig,
        RobertaSeriesModelWithTransformation,
    )

    config = RobertaSeriesConfig(
        vocab_size=parts.VOCABULARY, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        project_dim=WIDTH, max_position_embeddings=128, type_vocab_size=1, pad_token_id=0,
    )  # fmt: skip
    return RobertaSeriesModelWithTransformation(config).eval()


def chat_glm():
    from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig, ChatGLMModel

    made = ChatGLMModel(
        ChatGLMConfig(
            num_layers=2, padded_vocab_size=parts.VOCABULARY, hidden_size=WIDTH, ffn_hidden_size=48, kv_channels=16,
            num_attention_heads=2, seq_length=256, multi_query_attention=True, multi_query_group_num=1, rmsnorm=True,
            add_qkv_bias=True, apply_query_key_layer_scaling=True, post_layer_norm=True, original_rope=True,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():  # upstream leaves them as memory is
        for parameter in made.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.1)
    return made


class GlmTokens:
    """ChatGLM's tokenizer gives positions too."""

    def __new__(cls):
        tokenizer = parts.tokenizer(256)
        tokenizer.padding_side = "left"
        tokenizer.model_input_names = ["input_ids", "attention_mask", "position_ids"]
        plain = type(tokenizer).__call__

        class WithPositions(type(tokenizer)):
            def __call__(self, *args, **kwargs):
                found = plain(self, *args, **kwargs)
                found["position_ids"] = torch.clamp(found["attention_mask"].cumsum(-1) - 1, min=0)
                return found

        tokenizer.__class__ = WithPositions
        return tokenizer


MAKERS = {
    "CLIPTextModel": parts.clip_text,
    "CLIPTextModelWithProjection": parts.clip_text_projected,
    "CLIPVisionModel": parts.clip_vision,
    "CLIPVisionModelWithProjection": parts.clip_vision_projected,
    "CLIPImageProcessor": parts.clip_images,
    "CLIPImageProcessorPil": parts.clip_images,
    "CLIPProcessor": parts.clip_images,
    "CLIPTokenizer": parts.clip_tokens,
    "T5EncoderModel": parts.t5,
    "UMT5EncoderModel": parts.umt5,
    "T5Tokenizer": parts.tokens,
    "Qwen2Tokenizer": parts.chat_tokenizer,
    "Qwen2_5_VLForConditionalGeneration": parts.qwen25vl,
    "Qwen2_5_VLTextModel": parts.qwen25,
    "Qwen2VLProcessor": parts.chat_tokenizer,
    "Qwen2_5_VLProcessor": parts.chat_tokenizer,
    "CosmosSafetyChecker": no_check,
    "Mistral3Model": lambda **changes: mistral3(transformers.Mistral3Model, **changes),
    "Mistral3ForConditionalGeneration": lambda **changes: mistral3(transformers.Mistral3ForConditionalGeneration, **changes),
    "Gemma3ForConditionalGeneration": gemma3,
    "AutoProcessor": parts.chat_tokenizer,
    "Qwen3VLProcessor": parts.chat_tokenizer,
    "T5GemmaEncoder": lambda: t5_gemma().encoder,
    "T5GemmaEncoderModel": t5_gemma,
    "PaintByExampleImageEncoder": clip_by_example,
    "UnCLIPScheduler": lambda: diffusers.UnCLIPScheduler(
        variance_type="fixed_small_log", prediction_type="sample", clip_sample=True, clip_sample_range=5.0
    ),
    "SchedulerMixin": lambda: FlowMatchEulerDiscreteScheduler(shift=3.0),
    "ClassifierFreeGuidance": lambda: diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
    "Qwen3ForCausalLM": parts.qwen3_causal,
    "Qwen3Model": parts.qwen3,
    "Qwen3VLForConditionalGeneration": lambda **changes: qwen3_vl(transformers.Qwen3VLForConditionalGeneration, **changes),
    "Qwen3VLModel": lambda **changes: qwen3_vl(transformers.Qwen3VLModel, **changes),
    "Gemma2PreTrainedModel": parts.gemma2,
    "GemmaPreTrainedModel": lambda: language_model(transformers.GemmaModel),
    "GemmaTokenizer": lambda: llama_tokenizer(300),
    "GlmModel": parts.glm,
    "LlamaModel": parts.llama,
    "LlamaTokenizer": llama_tokenizer,
    "LlavaForConditionalGeneration": parts.llava,
    "SiglipVisionModel": parts.siglip,
    "SiglipImageProcessor": parts.siglip_images,
    "SiglipImageProcessorPil": parts.siglip_images,
    "StableDiffusionSafetyChecker": parts.safety_checker,
    "ByT5Tokenizer": transformers.ByT5Tokenizer,
    "BertTokenizer": bert_tokenizer,
    "RobertaTokenizer": bert_tokenizer,
    "XLMRobertaTokenizer": bert_tokenizer,
    "GPT2Tokenizer": bert_tokenizer,
    "TokenizersBackend": llama_tokenizer,
    "PreTrainedTokenizerBase": parts.tokens,
    "AutoTokenizer": parts.tokens,
    "ChatGLMModel": chat_glm,
    "ChatGLMTokenizer": GlmTokens,
    "SpeechT5HifiGan": vocoder,
    "ClapTextModelWithProjection": clap_text,
    "DPTForDepthEstimation": dpt,
    "DPTImageProcessorPil": lambda: transformers.DPTImageProcessor(size={"height": 32, "width": 32}),
    "MultilingualCLIP": multilingual_clip,
    "RobertaSeriesModelWithTransformation": roberta_series,
    "FlowMatchEulerDiscreteScheduler": lambda **changes: FlowMatchEulerDiscreteScheduler(**{"shift": 3.0, **changes}),
    "KarrasDiffusionSchedulers": lambda **changes: DDIMScheduler(**{**BETAS, "steps_offset": 1, "clip_sample": False, **changes}),
}  # fmt: skip


def candidates(hint) -> list[type]:
    """The classes that an annotation names, of a union each."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [cls for arg in typing.get_args(hint) for cls in candidates(arg)]
    return [hint] if isinstance(hint, type) and hint is not type(None) else []


def component(hint, changes: dict):
    """A component of the first class of the annotation that one can be made of. Raises TypeError where there is none."""
    for cls in candidates(hint):
        if cls.__name__ in MAKERS:
            return MAKERS[cls.__name__](**changes)
        if issubclass(cls, KarrasDiffusionSchedulers):
            return MAKERS["KarrasDiffusionSchedulers"](**changes)
        if issubclass(cls, SchedulerMixin) and cls is not SchedulerMixin:
            takes = inspect.signature(cls.__init__).parameters
            return cls(**{**{name: value for name, value in BETAS.items() if name in takes}, **changes})
        if issubclass(cls, ModelMixin):
            return tiny(cls, **changes)
        if issubclass(cls, transformers.PreTrainedModel) and getattr(cls, "config_class", None):
            return language_model(cls, **changes)
    raise TypeError(f"expected an annotation of which a component can be made, got {hint}")


def noise_image(seed: int, height: int, width: int) -> PIL.Image.Image:
    return PIL.Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def noise_mask(seed: int, height: int, width: int) -> PIL.Image.Image:
    """White where a picture is to be made anew."""
    return noise_image(seed + 1, height, width).convert("L").point(lambda value: 255 * (value > 127))


def noise_video(seed: int, height: int, width: int) -> list[PIL.Image.Image]:
    return [noise_image(seed + frame, height, width) for frame in range(FRAMES)]


def of(name: str) -> type:
    """Upstream's class of this name."""
    return getattr(diffusers, name)
