"""Tiny pipelines of random weights, of the real classes, built without a network: the subjects of the fidelity tests."""

import functools

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    ByT5Tokenizer,
    PreTrainedTokenizerFast,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from diffusers import (
    AutoencoderKLCogVideoX,
    AutoencoderKLHunyuanVideo15,
    AutoencoderKLWan,
    ClassifierFreeGuidance,
    CogVideoXDDIMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)


CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def with_uneven_norms(module: torch.nn.Module) -> torch.nn.Module:
    """The module; its norms, which are all alike while they are new, have weights and biases of their own."""
    for part in module.modules():
        if "norm" in type(part).__name__.lower():
            for parameter in part.parameters(recurse=False):
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return module


def words_tokenizer(text: str, specials: tuple[str, ...], **kwargs) -> PreTrainedTokenizerFast:
    """A word-level tokenizer over the words of `text`."""
    vocabulary = {word: index for index, word in enumerate((*specials, *sorted(set(text.split()))))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=specials[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if "</s>" in specials:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A </s>", special_tokens=[("</s>", vocabulary["</s>"])]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=specials[-1], **kwargs)


def t5_tokenizer() -> PreTrainedTokenizerFast:
    return words_tokenizer("a red circle moving left", ("<pad>", "</s>", "<unk>"), pad_token="<pad>", eos_token="</s>")


def wan(seed: int = 0, layers: int = 3, heads: int = 4) -> WanPipeline:
    torch.manual_seed(seed)
    return WanPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=UMT5EncoderModel(
            UMT5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
        ).eval(),
        vae=AutoencoderKLWan(
            base_dim=6, z_dim=16, dim_mult=[1, 2, 2, 2], num_res_blocks=1, temperal_downsample=[False, True, True]
        ).eval(),
        transformer=with_uneven_norms(
            WanTransformer3DModel(
                num_attention_heads=heads,
                attention_head_dim=12,
                text_dim=32,
                freq_dim=32,
                ffn_dim=64,
                num_layers=layers,
                rope_max_seq_len=64,
            ).eval()
        ),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    )


def _hunyuan_parts(seed: int, task: str) -> dict:
    torch.manual_seed(seed)
    text = "You are a helpful assistant. a red circle moving left <|im_start|>system <|im_start|>user <|im_end|>"
    return {
        "text_encoder": Qwen2_5_VLTextModel(
            Qwen2_5_VLTextConfig(
                vocab_size=256,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                rope_scaling={"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"},
                rope_theta=10000.0,
            )
        ).eval(),
        "tokenizer": words_tokenizer(
            text, ("<|endoftext|>", "<unk>"), pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
        ),
        "transformer": HunyuanVideo15Transformer3DModel(
            in_channels=9,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=3,
            num_refiner_layers=1,
            mlp_ratio=2.0,
            text_embed_dim=32,
            text_embed_2_dim=32,
            image_embed_dim=16,
            rope_axes_dim=(4, 6, 6),
            target_size=32,
            task_type=task,
        ).eval(),
        "vae": AutoencoderKLHunyuanVideo15(
            latent_channels=4,
            block_out_channels=(8, 8, 8, 8, 8),
            layers_per_block=1,
            spatial_compression_ratio=16,
            temporal_compression_ratio=4,
            downsample_match_channel=False,
            upsample_match_channel=False,
        ).eval(),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=7.0),
        "text_encoder_2": T5EncoderModel(
            T5Config(vocab_size=384, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
        ).eval(),
        "tokenizer_2": ByT5Tokenizer(),
        "guider": ClassifierFreeGuidance(guidance_scale=3.0),
    }


def hunyuan15(seed: int = 0) -> HunyuanVideo15Pipeline:
    pipe = HunyuanVideo15Pipeline(**_hunyuan_parts(seed, "t2v"))
    return _shortened(pipe)


def hunyuan15_i2v(seed: int = 0) -> HunyuanVideo15ImageToVideoPipeline:
    pipe = HunyuanVideo15ImageToVideoPipeline(
        **_hunyuan_parts(seed, "i2v"),
        image_encoder=SiglipVisionModel(
            SiglipVisionConfig(
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=28,
                patch_size=14,
            )
        ).eval(),
        feature_extractor=SiglipImageProcessor(size={"height": 28, "width": 28}),
    )
    return _shortened(pipe)


def _shortened(pipe):
    """The pipeline with token counts of a test: they are attributes, not configuration, upstream."""
    pipe.tokenizer_max_length, pipe.tokenizer_2_max_length, pipe.vision_num_semantic_tokens = 20, 12, 4
    pipe.prompt_template_encode_start_idx = 3
    return pipe


def short_texts(patch):
    """From here on every HunyuanVideo-1.5 pipeline has these token counts, those that are loaded too; `patch` undoes it."""
    for cls in (HunyuanVideo15Pipeline, HunyuanVideo15ImageToVideoPipeline):
        patch.setattr(cls, "__init__", _then_shortened(cls.__init__))


def _then_shortened(init):
    @functools.wraps(init)
    def run(self, *args, **kwargs):
        init(self, *args, **kwargs)
        _shortened(self)

    return run


def cogvideox(seed: int = 0) -> CogVideoXPipeline:
    torch.manual_seed(seed)
    return CogVideoXPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=T5EncoderModel(
            T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
        ).eval(),
        vae=AutoencoderKLCogVideoX(
            down_block_types=("CogVideoXDownBlock3D",) * 4,
            up_block_types=("CogVideoXUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=2,
            temporal_compression_ratio=4,
        ).eval(),
        transformer=CogVideoXTransformer3DModel(
            num_attention_heads=4,
            attention_head_dim=16,
            in_channels=4,
            out_channels=4,
            time_embed_dim=4,
            text_embed_dim=32,
            num_layers=3,
            sample_width=4,
            sample_height=4,
            sample_frames=9,
            patch_size=2,
            temporal_compression_ratio=4,
            max_text_seq_length=16,
            use_rotary_positional_embeddings=True,
        ).eval(),
        scheduler=CogVideoXDDIMScheduler(),
    )


GLYPHS = 'a red circle moving "left"'  # quoted words go through the second text encoder

ARGUMENTS = {
    "wan": {"height": 32, "width": 48, "num_frames": 5, "guidance_scale": 4.0, "max_sequence_length": 24},
    "hunyuan15": {"height": 32, "width": 48, "num_frames": 5, "prompt": GLYPHS},
    "hunyuan15_i2v": {"num_frames": 5},
    "cogvideox": {"height": 32, "width": 32, "num_frames": 5, "guidance_scale": 4.0, "max_sequence_length": 16},
}


def arguments(name: str, steps: int = 3) -> dict:
    """Arguments of a small call of the pipeline called `name`, fresh generator included."""
    given = {
        "prompt": "a red circle moving left",
        "num_inference_steps": steps,
        "output_type": "np",
        "generator": torch.Generator().manual_seed(11),
        **ARGUMENTS[name],
    }
    if name == "hunyuan15_i2v":
        import PIL.Image

        given["image"] = PIL.Image.effect_noise((48, 32), 60).convert("RGB")
    return given


BUILDERS = {"wan": wan, "hunyuan15": hunyuan15, "hunyuan15_i2v": hunyuan15_i2v, "cogvideox": cogvideox}
