"""Tokenizers, text and image encoders and VAEs, tiny and random, of the classes that published pipelines have.

All text is of one width (`WIDTH`) and one vocabulary, so that a denoiser's sizes need not follow its encoders'.
"""

import functools
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    Gemma2Config,
    Gemma2Model,
    GlmConfig,
    GlmModel,
    LlamaConfig,
    LlamaModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

import diffusers
from diffusers import AutoencoderKL
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker


WIDTH, VOCABULARY = 32, 1024
SPECIALS = (
    "<pad>", "</s>", "<unk>", "<bos>", "<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "[gMASK]",
    "<sop>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|end_header_id|>",
)  # fmt: skip
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def id_of(special: str) -> int:
    return SPECIALS.index(special)


@functools.cache
def _byte_pairs() -> str:
    """A byte-level vocabulary of upstream's own prompts and templates: their lengths in tokens are near the real ones."""
    folder = Path(diffusers.__file__).parent / "pipelines"
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[*SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    families = ("wan", "hunyuan_video", "qwenimage", "flux")
    tokenizer.train(
        [str(path) for family in families for path in sorted((folder / family).glob("pipeline_*.py"))], trainer
    )
    return tokenizer.to_str()


def tokenizer(length: int, before: str = "", after: str = "", pad: str = "<pad>", **kwargs) -> PreTrainedTokenizerFast:
    """A tokenizer of at most `length` tokens that puts the specials `before` and `after` around a text."""
    made = Tokenizer.from_str(_byte_pairs())
    around = [token for token in (before, after) if token]
    if around:
        made.post_processor = processors.TemplateProcessing(
            single=f"{before} $A {after}".strip(), special_tokens=[(token, id_of(token)) for token in around]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=length, unk_token="<unk>", pad_token=pad,
        **({"bos_token": before} if before else {}), **({"eos_token": after} if after else {}), **kwargs,
    )  # fmt: skip


def clip_tokenizer() -> PreTrainedTokenizerFast:
    return tokenizer(77, "<|startoftext|>", "<|endoftext|>", pad="<|endoftext|>")


def t5_tokenizer(length: int = 512) -> PreTrainedTokenizerFast:
    return tokenizer(length, after="</s>")


def chat_tokenizer(length: int = 1024) -> PreTrainedTokenizerFast:
    return tokenizer(length, pad="<|endoftext|>", chat_template=CHAT)


def clip_text(projected: bool = False, width: int = WIDTH):
    config = CLIPTextConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        projection_dim=width, bos_token_id=id_of("<|startoftext|>"), eos_token_id=id_of("<|endoftext|>"),
        pad_token_id=id_of("<|endoftext|>"),
    )  # fmt: skip
    return (CLIPTextModelWithProjection if projected else CLIPTextModel)(config).eval()


def _clip_vision_config(projection: int, size: int = 28) -> CLIPVisionConfig:
    return CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=size,
        patch_size=size // 2, projection_dim=projection,
    )  # fmt: skip


def clip_vision(projected: bool = False, size: int = 28):
    return (CLIPVisionModelWithProjection if projected else CLIPVisionModel)(_clip_vision_config(WIDTH, size)).eval()


def clip_images() -> CLIPImageProcessor:
    return CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})


def safety_checker() -> StableDiffusionSafetyChecker:
    text = CLIPTextConfig(
        vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    config = CLIPConfig(vision_config=_clip_vision_config(16).to_dict(), text_config=text.to_dict(), projection_dim=16)
    return StableDiffusionSafetyChecker(config).eval()


def siglip(width: int = 16) -> SiglipVisionModel:
    config = SiglipVisionConfig(
        hidden_size=width,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    return SiglipVisionModel(config).eval()


def siglip_images() -> SiglipImageProcessor:
    return SiglipImageProcessor(size={"height": 28, "width": 28})


def t5(cls=T5EncoderModel, width: int = WIDTH):
    config = UMT5Config if cls is UMT5EncoderModel else T5Config
    return cls(
        config(vocab_size=VOCABULARY, d_model=width, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0)
    ).eval()


def umt5(width: int = WIDTH):
    return t5(UMT5EncoderModel, width)


DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 3, "eos_token_id": 1,
}  # fmt: skip


def llama(**changes) -> LlamaModel:
    return LlamaModel(LlamaConfig(**{**DECODER, **changes})).eval()


def llava() -> LlavaForConditionalGeneration:
    """Of four patches an image."""
    config = LlavaConfig(
        vision_config=_clip_vision_config(WIDTH), text_config=LlamaConfig(**DECODER), vision_feature_layer=-1,
        image_token_index=id_of("<|image_pad|>"), pad_token_id=id_of("<pad>"),
    )  # fmt: skip
    return LlavaForConditionalGeneration(config).eval()


def gemma2() -> Gemma2Model:
    return Gemma2Model(Gemma2Config(**DECODER, head_dim=8, query_pre_attn_scalar=8, sliding_window=64)).eval()


def glm() -> GlmModel:
    return GlmModel(GlmConfig(**DECODER, head_dim=8, partial_rotary_factor=0.5)).eval()


def qwen3(causal: bool = False, layers: int = 3):
    config = Qwen3Config(**{**DECODER, "num_hidden_layers": layers}, head_dim=8)
    return (Qwen3ForCausalLM if causal else Qwen3Model)(config).eval()


def qwen25vl() -> Qwen2_5_VLForConditionalGeneration:
    rope = {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default", "rope_theta": 10000.0}
    vision = {
        "depth": 2, "hidden_size": 16, "num_heads": 2, "out_hidden_size": WIDTH, "intermediate_size": 24,
        "patch_size": 14, "spatial_merge_size": 2, "window_size": 56, "fullatt_block_indexes": [1],
        "tokens_per_second": 2, "in_channels": 3,
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config={**DECODER, "rope_scaling": rope, "rope_theta": 10000.0}, vision_config=vision,
        image_token_id=id_of("<|image_pad|>"), video_token_id=id_of("<|video_pad|>"),
        vision_start_token_id=id_of("<|vision_start|>"), vision_end_token_id=id_of("<|vision_end|>"),
    )  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def kl(channels: int = 4, **changes) -> AutoencoderKL:
    """An image VAE eight times coarser than pixels."""
    return AutoencoderKL(
        **{
            "latent_channels": channels,
            "block_out_channels": (8, 8, 8, 8),
            "down_block_types": ("DownEncoderBlock2D",) * 4,
            "up_block_types": ("UpDecoderBlock2D",) * 4,
            "layers_per_block": 1,
            "norm_num_groups": 2,
            "sample_size": 64,
            **changes,
        }
    ).eval()


def kl16(**changes) -> AutoencoderKL:
    """As FLUX.1 and Stable Diffusion 3 have it."""
    return kl(
        16, scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False, **changes
    )
