"""Tiny pipelines that make pictures, of random weights and the real classes; modular ones among them."""

import torch
from transformers import (
    CLIPImageProcessor,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    T5Config,
    T5EncoderModel,
)

import tiny
from diffusers import (
    AutoencoderKL,
    ClassifierFreeGuidance,
    ControlNetModel,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)


WORDS = "a red circle moving left"
BLOCKS = {
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "attention_head_dim": (2, 4),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "transformer_layers_per_block": (1, 2),
    "projection_class_embeddings_input_dim": 80,  # 6 * 8 and 32 of the pooled text
    "cross_attention_dim": 64,
}


def clip_tokenizer():
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    return tiny.words_tokenizer(WORDS, ("<pad>", "<s>", "</s>", "<unk>"), model_max_length=16, **special)


def clip(cls=CLIPTextModel):
    config = CLIPTextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=37, num_hidden_layers=3, num_attention_heads=4,
        projection_dim=32, max_position_embeddings=16, bos_token_id=1, eos_token_id=2, hidden_act="gelu",
    )  # fmt: skip
    return cls(config).eval()


def vae(**changes):
    config = {
        "block_out_channels": (8, 16), "in_channels": 3, "out_channels": 3, "latent_channels": 4, "norm_num_groups": 4,
        "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2, "sample_size": 32,
    }  # fmt: skip
    return AutoencoderKL(**{**config, **changes}).eval()


def unet():
    return UNet2DConditionModel(
        **BLOCKS, sample_size=16, in_channels=4, out_channels=4, up_block_types=("CrossAttnUpBlock2D", "UpBlock2D")
    ).eval()


def controlnet(scale: float = 0.5):
    """With weights in its last layers, which upstream begins with zeros."""
    net = ControlNetModel(**BLOCKS, conditioning_embedding_out_channels=(8, 16)).eval()
    for layer in (*net.controlnet_down_blocks, net.controlnet_mid_block):
        torch.nn.init.normal_(layer.weight, std=scale)
    return net


def sdxl(cls=StableDiffusionXLPipeline, seed: int = 0, **components):
    torch.manual_seed(seed)
    parts = {
        "text_encoder": clip(),
        "text_encoder_2": clip(CLIPTextModelWithProjection),
        "tokenizer": clip_tokenizer(),
        "tokenizer_2": clip_tokenizer(),
        "unet": unet(),
        "vae": vae(),
        "scheduler": EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            timestep_spacing="leading",
            steps_offset=1,
        ),
        "add_watermarker": False,
    }
    return _quiet(cls(**{**parts, **components}))


def image_encoder():
    config = CLIPVisionConfig(
        hidden_size=32, projection_dim=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4,
        image_size=32, patch_size=16,
    )  # fmt: skip
    return CLIPVisionModelWithProjection(config).eval()


def image_processor():
    return CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})


def ip_adapter(unet, tokens: int = 4) -> dict:
    """Weights of an IP-Adapter for this UNet and `image_encoder`, as its files hold them."""
    width, weights = unet.config.cross_attention_dim, {}
    crossed = [name for name in unet.attn_processors if "attn2" in name]
    for number, name in enumerate(crossed):
        features = unet.get_submodule(name.removesuffix(".processor")).to_k.out_features
        for part in ("to_k_ip", "to_v_ip"):
            weights[f"{2 * number + 1}.{part}.weight"] = torch.randn(features, width) * 0.3
    projection = {
        "proj.weight": torch.randn(tokens * width, 32) * 0.3,
        "proj.bias": torch.zeros(tokens * width),
        "norm.weight": torch.ones(width),
        "norm.bias": torch.zeros(width),
    }
    return {"image_proj": projection, "ip_adapter": weights}


def flux(seed: int = 0):
    torch.manual_seed(seed)
    transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8), guidance_embeds=True,
    )  # fmt: skip
    t5 = T5EncoderModel(T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)).eval()
    return _quiet(
        FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(), transformer=transformer.eval(), text_encoder_2=t5,
            text_encoder=clip(), tokenizer=clip_tokenizer(), tokenizer_2=tiny.t5_tokenizer(),
            vae=vae(latent_channels=1, shift_factor=0.0609, scaling_factor=1.5035),
        )
    )  # fmt: skip


def modular_sdxl(seed: int = 0, components_manager=None):
    from diffusers import StableDiffusionXLAutoBlocks

    pipe = StableDiffusionXLAutoBlocks().init_pipeline(components_manager=components_manager)
    parts = {k: v for k, v in sdxl(seed=seed).components.items() if k in pipe.components and v is not None}
    pipe.update_components(**parts, guider=ClassifierFreeGuidance(guidance_scale=5.0))
    return pipe


def modular_wan(seed: int = 0, components_manager=None):
    from diffusers import WanBlocks

    pipe = WanBlocks().init_pipeline(components_manager=components_manager)
    parts = {k: v for k, v in tiny.wan(seed=seed).components.items() if k in pipe.components and v is not None}
    pipe.update_components(**parts, guider=ClassifierFreeGuidance(guidance_scale=4.0))
    return pipe


def _quiet(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe


def arguments(**changes) -> dict:
    """Arguments of a small call of SDXL or Flux, fresh generator included."""
    given = {"prompt": WORDS, "num_inference_steps": 2, "output_type": "np", "height": 32, "width": 32}
    return {**given, "generator": torch.Generator().manual_seed(11), **changes}
