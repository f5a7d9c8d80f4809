"""Configurations of published models, as facts: build the real pipelines on torch's meta device, offline.

Every figure comes from a public source: upstream's conversion scripts, the defaults of the model classes (diffusers
0.42.1, transformers 5.23), the published config files and model cards. A value that equals the class's default is
repeated only where a reader looks for it. The dicts are shared between models: copy before changing one.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """One published model.

    `components`: name -> (class, config). For diffusers classes the config is that of `from_config`, for transformers
    models that of `cls.config_class`, for image processors the constructor's; tokenizers carry none. A component that
    is None in model_index.json is left out.
    `settings`: further `__init__` arguments of the pipeline. `call`: the model card's call, without prompt and image;
    what the card leaves out is the pipeline's default.
    `tiled`: the card's script calls `pipe.vae.enable_tiling()`.
    `tokens`: text tokens each tokenizer pads to in that call (Qwen-Image pads to its longest prompt: its limit).
    """

    pipeline: str
    components: dict[str, tuple[str, dict]]
    settings: dict
    call: dict
    tokens: dict[str, int]
    source: str
    tiled: bool = False


# Text encoders

# google/umt5-xxl: 24 layers of 64 heads; the vocabulary is padded to 256384.
UMT5_XXL = {
    "vocab_size": 256384,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_decoder_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}

# google/t5-v1_1-xxl
T5_XXL = {
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_decoder_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}

# google/byt5-small with the colour and font tokens of Glyph-SDXL-v2: 384 -> 1510 (comfyanonymous/ComfyUI,
# comfy/text_encoders/byt5_config_small_glyph.json)
BYT5 = {
    "vocab_size": 1510,
    "d_model": 1472,
    "d_kv": 64,
    "d_ff": 3584,
    "num_layers": 12,
    "num_decoder_layers": 4,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}

# openai/clip-vit-large-patch14, the text tower; with eos_token_id 2 transformers pools at the largest token id.
CLIP_L = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "projection_dim": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 77,
    "bos_token_id": 0,
    "eos_token_id": 2,
}

# laion/CLIP-ViT-bigG-14-laion2B-39B-b160k, the text tower
CLIP_BIG_G = {
    **CLIP_L,
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "projection_dim": 1280,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "hidden_act": "gelu",
}

# Qwen/Qwen2.5-VL-7B-Instruct, the language model
QWEN25_VL_7B_TEXT = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
}

# The same with its vision tower
QWEN25_VL_7B = {
    "text_config": QWEN25_VL_7B_TEXT,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "tie_word_embeddings": False,
}


# Image encoders

# laion/CLIP-ViT-H-14-laion2B-s32B-b79K, the vision tower: 257 tokens of an image
CLIP_H_VISION = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "projection_dim": 1024,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
    "hidden_act": "gelu",
}
CLIP_IMAGES = {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}}

# google/siglip-so400m-patch14-384 as in FLUX.1-Redux: 729 tokens of an image
SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
}
SIGLIP_IMAGES = {"size": {"height": 384, "width": 384}}


# Autoencoders

# fmt: off
WAN_VAE_21 = {
    "base_dim": 96,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "temperal_downsample": [False, True, True],
    "latents_mean": [
        -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
        0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
    ],
    "latents_std": [
        2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
        3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
    ],
}  # 8 x 8 pixels and 4 frames per latent; AutoencoderKLQwenImage is this one too

WAN_VAE_22 = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "temperal_downsample": [False, True, True],
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_temporal": 4,
    "scale_factor_spatial": 16,
    "latents_mean": [
        -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557,
        -0.1382, 0.0542, 0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825,
        -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
        -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230,
        -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748,
        0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
    ],
    "latents_std": [
        0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013,
        0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978,
        0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
        0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093,
        0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887,
        0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
    ],
}
# fmt: on

HUNYUAN_VAE_15 = {
    "latent_channels": 32,
    "block_out_channels": [128, 256, 512, 1024, 1024],
    "layers_per_block": 2,
    "spatial_compression_ratio": 16,
    "temporal_compression_ratio": 4,
    "scaling_factor": 1.03682,
}

COGVIDEOX_VAE = {
    "latent_channels": 16,
    "block_out_channels": [128, 256, 256, 512],
    "layers_per_block": 3,
    "temporal_compression_ratio": 4,
    "sample_height": 480,
    "sample_width": 720,
    "scaling_factor": 0.7,
}

FLUX_VAE = {
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "latent_channels": 16,
    "sample_size": 1024,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}

SD3_VAE = {**FLUX_VAE, "scaling_factor": 1.5305, "shift_factor": 0.0609}

SDXL_VAE = {
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "latent_channels": 4,
    "sample_size": 1024,
    "scaling_factor": 0.13025,
    "force_upcast": True,
}

# LTX-Video 0.9.0: 32 x 32 pixels and 8 frames per latent
LTX_VAE_090 = {
    "latent_channels": 128,
    "block_out_channels": [128, 256, 512, 512],
    "decoder_block_out_channels": [128, 256, 512, 512],
    "layers_per_block": [4, 3, 3, 3, 4],
    "decoder_layers_per_block": [4, 3, 3, 3, 4],
    "spatio_temporal_scaling": [True, True, True, False],
    "decoder_spatio_temporal_scaling": [True, True, True, False],
    "decoder_inject_noise": [False, False, False, False, False],
    "upsample_residual": [False, False, False, False],
    "upsample_factor": [1, 1, 1, 1],
    "timestep_conditioning": False,
    "patch_size": 4,
    "patch_size_t": 1,
    "resnet_norm_eps": 1e-06,
    "scaling_factor": 1.0,
    "encoder_causal": True,
    "decoder_causal": False,
}


# Transformers

WAN_14B = {
    "patch_size": [1, 2, 2],
    "num_attention_heads": 40,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "ffn_dim": 13824,
    "num_layers": 40,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "eps": 1e-06,
    "rope_max_seq_len": 1024,
}
WAN_1_3B = {**WAN_14B, "num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
WAN_5B = {
    **WAN_14B,
    "num_attention_heads": 24,
    "in_channels": 48,
    "out_channels": 48,
    "ffn_dim": 14336,
    "num_layers": 30,
}
WAN_21_I2V_14B = {**WAN_14B, "in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
WAN_22_I2V_14B = {**WAN_14B, "in_channels": 36}

HUNYUAN_15 = {
    "in_channels": 65,
    "out_channels": 32,
    "num_attention_heads": 16,
    "attention_head_dim": 128,
    "num_layers": 54,
    "num_refiner_layers": 2,
    "mlp_ratio": 4.0,
    "patch_size": 1,
    "patch_size_t": 1,
    "qk_norm": "rms_norm",
    "text_embed_dim": 3584,
    "text_embed_2_dim": 1472,
    "image_embed_dim": 1152,
    "rope_theta": 256.0,
    "rope_axes_dim": [16, 56, 56],
    "target_size": 640,
    "task_type": "t2v",
    "use_meanflow": False,
}

COGVIDEOX_2B = {
    "num_attention_heads": 30,
    "attention_head_dim": 64,
    "in_channels": 16,
    "out_channels": 16,
    "time_embed_dim": 512,
    "text_embed_dim": 4096,
    "num_layers": 30,
    "sample_width": 90,
    "sample_height": 60,
    "sample_frames": 49,
    "patch_size": 2,
    "temporal_compression_ratio": 4,
    "max_text_seq_length": 226,
    "spatial_interpolation_scale": 1.875,
    "temporal_interpolation_scale": 1.0,
    "use_rotary_positional_embeddings": False,
}
COGVIDEOX_5B = {
    **COGVIDEOX_2B,
    "num_attention_heads": 48,
    "num_layers": 42,
    "use_rotary_positional_embeddings": True,
}
COGVIDEOX_15_5B = {
    **COGVIDEOX_5B,
    "sample_width": 300,
    "sample_height": 300,
    "sample_frames": 81,
    "patch_size_t": 2,
    "patch_bias": False,
}

FLUX_12B = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
    "axes_dims_rope": [16, 56, 56],
}

QWEN_IMAGE_20B = {
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 60,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 3584,
    "guidance_embeds": False,
    "axes_dims_rope": [16, 56, 56],
}

SD35_LARGE = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 38,
    "attention_head_dim": 64,
    "num_attention_heads": 38,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 2432,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 192,
    "dual_attention_layers": [],
    "qk_norm": "rms_norm",
}
SD35_MEDIUM = {
    **SD35_LARGE,
    "num_layers": 24,
    "num_attention_heads": 24,
    "caption_projection_dim": 1536,
    "pos_embed_max_size": 384,
    "dual_attention_layers": [*range(13)],
}

SDXL_UNET = {
    "sample_size": 128,
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "block_out_channels": [320, 640, 1280],
    "layers_per_block": 2,
    "transformer_layers_per_block": [1, 2, 10],
    "attention_head_dim": [5, 10, 20],
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}

LTX_2B = {
    "in_channels": 128,
    "out_channels": 128,
    "patch_size": 1,
    "patch_size_t": 1,
    "num_attention_heads": 32,
    "attention_head_dim": 64,
    "cross_attention_dim": 2048,
    "num_layers": 28,
    "activation_fn": "gelu-approximate",
    "qk_norm": "rms_norm_across_heads",
    "norm_elementwise_affine": False,
    "norm_eps": 1e-06,
    "caption_channels": 4096,
    "attention_bias": True,
    "attention_out_bias": True,
}


# Schedulers

WAN_UNIPC = {
    "num_train_timesteps": 1000,
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "flow_shift": 3.0,
}

COGVIDEOX_DDIM = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "clip_sample": False,
    "set_alpha_to_one": True,
    "prediction_type": "v_prediction",
    "timestep_spacing": "trailing",
    "rescale_betas_zero_snr": True,
    "snr_shift_scale": 1.0,
}


# Pipelines


def _wan(transformer: dict, flow_shift: float = 3.0, vae: dict = WAN_VAE_21) -> dict[str, tuple[str, dict]]:
    return {
        "tokenizer": ("transformers.T5TokenizerFast", {}),
        "text_encoder": ("transformers.UMT5EncoderModel", UMT5_XXL),
        "vae": ("diffusers.AutoencoderKLWan", vae),
        "scheduler": ("diffusers.UniPCMultistepScheduler", {**WAN_UNIPC, "flow_shift": flow_shift}),
        "transformer": ("diffusers.WanTransformer3DModel", transformer),
    }


_WAN_IMAGE_ENCODER = {
    "image_encoder": ("transformers.CLIPVisionModelWithProjection", CLIP_H_VISION),
    "image_processor": ("transformers.CLIPImageProcessor", CLIP_IMAGES),
}


def _hunyuan(task: str, target_size: int, shift: float) -> dict[str, tuple[str, dict]]:
    return {
        "text_encoder": ("transformers.Qwen2_5_VLTextModel", QWEN25_VL_7B_TEXT),
        "tokenizer": ("transformers.Qwen2TokenizerFast", {}),
        "transformer": (
            "diffusers.HunyuanVideo15Transformer3DModel",
            {**HUNYUAN_15, "target_size": target_size, "task_type": task},
        ),
        "vae": ("diffusers.AutoencoderKLHunyuanVideo15", HUNYUAN_VAE_15),
        "scheduler": ("diffusers.FlowMatchEulerDiscreteScheduler", {"shift": shift}),
        "text_encoder_2": ("transformers.T5EncoderModel", BYT5),
        "tokenizer_2": ("transformers.ByT5Tokenizer", {}),
        "guider": ("diffusers.ClassifierFreeGuidance", {"guidance_scale": 6.0}),
    }


_HUNYUAN_IMAGE_ENCODER = {
    "image_encoder": ("transformers.SiglipVisionModel", SIGLIP),
    "feature_extractor": ("transformers.SiglipImageProcessor", SIGLIP_IMAGES),
}


def _cogvideox(transformer: dict, vae: dict, scheduler: dict) -> dict[str, tuple[str, dict]]:
    return {
        "tokenizer": ("transformers.T5Tokenizer", {}),
        "text_encoder": ("transformers.T5EncoderModel", T5_XXL),
        "vae": ("diffusers.AutoencoderKLCogVideoX", vae),
        "transformer": ("diffusers.CogVideoXTransformer3DModel", transformer),
        "scheduler": ("diffusers.CogVideoXDDIMScheduler", scheduler),
    }


def _flux(transformer: dict, scheduler: dict) -> dict[str, tuple[str, dict]]:
    return {
        "scheduler": ("diffusers.FlowMatchEulerDiscreteScheduler", scheduler),
        "vae": ("diffusers.AutoencoderKL", FLUX_VAE),
        "text_encoder": ("transformers.CLIPTextModel", CLIP_L),
        "tokenizer": ("transformers.CLIPTokenizer", {}),
        "text_encoder_2": ("transformers.T5EncoderModel", T5_XXL),
        "tokenizer_2": ("transformers.T5TokenizerFast", {}),
        "transformer": ("diffusers.FluxTransformer2DModel", transformer),
    }


def _sd35(transformer: dict) -> dict[str, tuple[str, dict]]:
    return {
        "transformer": ("diffusers.SD3Transformer2DModel", transformer),
        "scheduler": ("diffusers.FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
        "vae": ("diffusers.AutoencoderKL", SD3_VAE),
        "text_encoder": ("transformers.CLIPTextModelWithProjection", CLIP_L),
        "tokenizer": ("transformers.CLIPTokenizer", {}),
        "text_encoder_2": ("transformers.CLIPTextModelWithProjection", CLIP_BIG_G),
        "tokenizer_2": ("transformers.CLIPTokenizer", {}),
        "text_encoder_3": ("transformers.T5EncoderModel", T5_XXL),
        "tokenizer_3": ("transformers.T5TokenizerFast", {}),
    }


_WAN_SOURCE = "huggingface/diffusers, scripts/convert_wan_to_diffusers.py; model card; "
_HUNYUAN_SOURCE = (
    "huggingface/diffusers, scripts/convert_hunyuan_video1_5_to_diffusers.py and "
    "docs/source/en/api/pipelines/hunyuan_video15.md; model_index.json"
)
_COGVIDEOX_SOURCE = "huggingface/diffusers, scripts/convert_cogvideox_to_diffusers.py; model card; "
_SD35_SOURCE = "huggingface/diffusers, scripts/convert_sd3_to_diffusers.py; published configs; model card"
_SD35_TOKENS = {"tokenizer": 77, "tokenizer_2": 77, "tokenizer_3": 256}
_FLUX_SOURCE = "huggingface/diffusers, scripts/convert_flux_to_diffusers.py; published configs; model card"

# The text encoder of HunyuanVideo-1.5 sees 108 tokens of template and 1000 of prompt; the transformer the 1000.
_HUNYUAN_TOKENS = {"tokenizer": 1108, "tokenizer_2": 256}

MODELS: dict[str, Published] = {
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": Published(
        pipeline="WanPipeline",
        components=_wan(WAN_1_3B),
        settings={},
        call={"height": 480, "width": 832, "num_frames": 81, "num_inference_steps": 50, "guidance_scale": 5.0},
        tokens={"tokenizer": 512},
        source=_WAN_SOURCE + "Wan-Video/Wan2.1",
    ),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": Published(
        pipeline="WanPipeline",
        components=_wan(WAN_14B),
        settings={},
        call={"height": 720, "width": 1280, "num_frames": 81, "num_inference_steps": 50, "guidance_scale": 5.0},
        tokens={"tokenizer": 512},
        source=_WAN_SOURCE + "Wan-Video/Wan2.1",
    ),
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": Published(
        pipeline="WanImageToVideoPipeline",
        components={**_wan(WAN_21_I2V_14B), **_WAN_IMAGE_ENCODER},
        settings={},
        call={"height": 480, "width": 832, "num_frames": 81, "num_inference_steps": 50, "guidance_scale": 5.0},
        tokens={"tokenizer": 512},
        source=_WAN_SOURCE + "Wan-Video/Wan2.1",
    ),
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": Published(
        pipeline="WanImageToVideoPipeline",
        components={**_wan(WAN_21_I2V_14B, flow_shift=5.0), **_WAN_IMAGE_ENCODER},
        settings={},
        call={"height": 720, "width": 1280, "num_frames": 81, "num_inference_steps": 50, "guidance_scale": 5.0},
        tokens={"tokenizer": 512},
        source=_WAN_SOURCE + "Wan-Video/Wan2.1; flow_shift after upstream's WanPipeline example (5 at 720P)",
    ),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": Published(
        pipeline="WanPipeline",
        components={**_wan(WAN_14B), "transformer_2": ("diffusers.WanTransformer3DModel", WAN_14B)},
        settings={"boundary_ratio": 0.875},
        call={
            "height": 720,
            "width": 1280,
            "num_frames": 81,
            "num_inference_steps": 40,
            "guidance_scale": 4.0,
            "guidance_scale_2": 3.0,
        },
        tokens={"tokenizer": 512},
        source=_WAN_SOURCE + "Wan-Video/Wan2.2",
    ),
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": Published(
        pipeline="WanImageToVideoPipeline",
        components={**_wan(WAN_22_I2V_14B), "transformer_2": ("diffusers.WanTransformer3DModel", WAN_22_I2V_14B)},
        settings={"boundary_ratio": 0.9},
        call={"height": 480, "width": 832, "num_frames": 81, "num_inference_steps": 40, "guidance_scale": 3.5},
        tokens={"tokenizer": 512},
        source=_WAN_SOURCE + "Wan-Video/Wan2.2",
    ),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": Published(
        pipeline="WanPipeline",
        components=_wan(WAN_5B, flow_shift=5.0, vae=WAN_VAE_22),
        settings={"expand_timesteps": True},
        call={"height": 704, "width": 1280, "num_frames": 121, "num_inference_steps": 50, "guidance_scale": 5.0},
        tokens={"tokenizer": 512},
        source=_WAN_SOURCE + "Wan-Video/Wan2.2",
    ),
    # The image-to-video pipeline takes its size from the image; one of 16:9 gives the text-to-video sizes.
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": Published(
        pipeline="HunyuanVideo15Pipeline",
        components=_hunyuan("t2v", 640, 5.0),
        settings={},
        call={"height": 480, "width": 848, "num_frames": 121, "num_inference_steps": 50},
        tokens=_HUNYUAN_TOKENS,
        source=_HUNYUAN_SOURCE,
        tiled=True,
    ),
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v": Published(
        pipeline="HunyuanVideo15Pipeline",
        components=_hunyuan("t2v", 960, 9.0),
        settings={},
        call={"height": 720, "width": 1280, "num_frames": 121, "num_inference_steps": 50},
        tokens=_HUNYUAN_TOKENS,
        source=_HUNYUAN_SOURCE,
        tiled=True,
    ),
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v": Published(
        pipeline="HunyuanVideo15ImageToVideoPipeline",
        components={**_hunyuan("i2v", 640, 5.0), **_HUNYUAN_IMAGE_ENCODER},
        settings={},
        call={"num_frames": 121, "num_inference_steps": 50},
        tokens=_HUNYUAN_TOKENS,
        source=_HUNYUAN_SOURCE,
        tiled=True,
    ),
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_i2v": Published(
        pipeline="HunyuanVideo15ImageToVideoPipeline",
        components={**_hunyuan("i2v", 960, 7.0), **_HUNYUAN_IMAGE_ENCODER},
        settings={},
        call={"num_frames": 121, "num_inference_steps": 50},
        tokens=_HUNYUAN_TOKENS,
        source=_HUNYUAN_SOURCE,
        tiled=True,
    ),
    "THUDM/CogVideoX-2b": Published(
        pipeline="CogVideoXPipeline",
        components=_cogvideox(
            COGVIDEOX_2B,
            {**COGVIDEOX_VAE, "scaling_factor": 1.15258426},
            {**COGVIDEOX_DDIM, "snr_shift_scale": 3.0},
        ),
        settings={},
        call={"height": 480, "width": 720, "num_frames": 49, "num_inference_steps": 50, "guidance_scale": 6.0},
        tokens={"tokenizer": 226},
        source=_COGVIDEOX_SOURCE + "published configs",
    ),
    "THUDM/CogVideoX-5b": Published(
        pipeline="CogVideoXPipeline",
        components=_cogvideox(COGVIDEOX_5B, COGVIDEOX_VAE, COGVIDEOX_DDIM),
        settings={},
        call={"height": 480, "width": 720, "num_frames": 49, "num_inference_steps": 50, "guidance_scale": 6.0},
        tokens={"tokenizer": 226},
        source=_COGVIDEOX_SOURCE + "published configs",
    ),
    "THUDM/CogVideoX1.5-5B": Published(
        pipeline="CogVideoXPipeline",
        components=_cogvideox(COGVIDEOX_15_5B, {**COGVIDEOX_VAE, "invert_scale_latents": True}, COGVIDEOX_DDIM),
        settings={},
        call={"height": 768, "width": 1360, "num_frames": 81, "num_inference_steps": 50, "guidance_scale": 6.0},
        tokens={"tokenizer": 226},
        source=_COGVIDEOX_SOURCE + "zai-org/CogVideo (resolution)",
    ),
    "black-forest-labs/FLUX.1-dev": Published(
        pipeline="FluxPipeline",
        components=_flux(FLUX_12B, {"shift": 3.0, "use_dynamic_shifting": True}),
        settings={},
        call={
            "height": 1024,
            "width": 1024,
            "num_inference_steps": 50,
            "guidance_scale": 3.5,
            "max_sequence_length": 512,
        },
        tokens={"tokenizer": 77, "tokenizer_2": 512},
        source=_FLUX_SOURCE,
    ),
    "black-forest-labs/FLUX.1-schnell": Published(
        pipeline="FluxPipeline",
        components=_flux({**FLUX_12B, "guidance_embeds": False}, {"shift": 1.0, "use_dynamic_shifting": False}),
        settings={},
        call={
            "height": 1024,
            "width": 1024,
            "num_inference_steps": 4,
            "guidance_scale": 0.0,
            "max_sequence_length": 256,
        },
        tokens={"tokenizer": 77, "tokenizer_2": 256},
        source=_FLUX_SOURCE,
    ),
    "Qwen/Qwen-Image": Published(
        pipeline="QwenImagePipeline",
        components={
            "scheduler": (
                "diffusers.FlowMatchEulerDiscreteScheduler",
                {
                    "shift": 1.0,
                    "use_dynamic_shifting": True,
                    "base_shift": 0.5,
                    "max_shift": 0.9,
                    "base_image_seq_len": 256,
                    "max_image_seq_len": 8192,
                    "shift_terminal": 0.02,
                    "time_shift_type": "exponential",
                },
            ),
            "vae": ("diffusers.AutoencoderKLQwenImage", WAN_VAE_21),
            "text_encoder": ("transformers.Qwen2_5_VLForConditionalGeneration", QWEN25_VL_7B),
            "tokenizer": ("transformers.Qwen2Tokenizer", {}),
            "transformer": ("diffusers.QwenImageTransformer2DModel", QWEN_IMAGE_20B),
        },
        settings={},
        # Guidance needs a negative prompt: the card passes a space.
        call={
            "height": 928,
            "width": 1664,
            "num_inference_steps": 50,
            "true_cfg_scale": 4.0,
            "negative_prompt": " ",
        },
        tokens={"tokenizer": 1058},  # 34 of template; the transformer sees at most 512 of the rest
        source="QwenLM/Qwen-Image, README.md; published configs; upstream's class defaults",
    ),
    "stabilityai/stable-diffusion-3.5-large": Published(
        pipeline="StableDiffusion3Pipeline",
        components=_sd35(SD35_LARGE),
        settings={},
        call={"height": 1024, "width": 1024, "num_inference_steps": 28, "guidance_scale": 3.5},
        tokens=_SD35_TOKENS,
        source=_SD35_SOURCE,
    ),
    "stabilityai/stable-diffusion-3.5-medium": Published(
        pipeline="StableDiffusion3Pipeline",
        components=_sd35(SD35_MEDIUM),
        settings={},
        call={"height": 1024, "width": 1024, "num_inference_steps": 40, "guidance_scale": 4.5},
        tokens=_SD35_TOKENS,
        source=_SD35_SOURCE,
    ),
    "stabilityai/stable-diffusion-xl-base-1.0": Published(
        pipeline="StableDiffusionXLPipeline",
        components={
            "vae": ("diffusers.AutoencoderKL", SDXL_VAE),
            "text_encoder": ("transformers.CLIPTextModel", CLIP_L),
            "text_encoder_2": ("transformers.CLIPTextModelWithProjection", CLIP_BIG_G),
            "tokenizer": ("transformers.CLIPTokenizer", {}),
            "tokenizer_2": ("transformers.CLIPTokenizer", {}),
            "unet": ("diffusers.UNet2DConditionModel", SDXL_UNET),
            "scheduler": (
                "diffusers.EulerDiscreteScheduler",
                {
                    "num_train_timesteps": 1000,
                    "beta_start": 0.00085,
                    "beta_end": 0.012,
                    "beta_schedule": "scaled_linear",
                    "prediction_type": "epsilon",
                    "interpolation_type": "linear",
                    "timestep_spacing": "leading",
                    "steps_offset": 1,
                },
            ),
        },
        settings={"force_zeros_for_empty_prompt": True},
        call={"height": 1024, "width": 1024, "num_inference_steps": 50, "guidance_scale": 5.0},
        tokens={"tokenizer": 77, "tokenizer_2": 77},
        source="published configs; upstream's defaults of the call",
    ),
    "Lightricks/LTX-Video": Published(  # the diffusers layout at the repository's root is version 0.9.0
        pipeline="LTXPipeline",
        components={
            "scheduler": (
                "diffusers.FlowMatchEulerDiscreteScheduler",
                {
                    "shift": 1.0,
                    "use_dynamic_shifting": True,
                    "base_shift": 0.95,
                    "max_shift": 2.05,
                    "base_image_seq_len": 1024,
                    "max_image_seq_len": 4096,
                    "shift_terminal": 0.1,
                },
            ),
            "vae": ("diffusers.AutoencoderKLLTXVideo", LTX_VAE_090),
            "text_encoder": ("transformers.T5EncoderModel", T5_XXL),
            "tokenizer": ("transformers.T5Tokenizer", {}),
            "transformer": ("diffusers.LTXVideoTransformer3DModel", LTX_2B),
        },
        settings={},
        call={"height": 480, "width": 704, "num_frames": 161, "num_inference_steps": 50, "guidance_scale": 3.0},
        tokens={"tokenizer": 128},
        source="huggingface/diffusers, scripts/convert_ltx_to_diffusers.py (0.9.0); published configs; LTXPipeline",
    ),
}

ALIASES: dict[str, str] = {
    "wan2.1-t2v-1.3b": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    "wan2.1-t2v-14b": "Wan-AI/Wan2.1-T2V-14B-Diffusers",
    "wan2.1-i2v-14b-480p": "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
    "wan2.1-i2v-14b-720p": "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers",
    "wan2.2-t2v-a14b": "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
    "wan2.2-i2v-a14b": "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
    "wan2.2-ti2v-5b": "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
    "hunyuanvideo-1.5-480p-t2v": "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
    "hunyuanvideo-1.5-720p-t2v": "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v",
    "hunyuanvideo-1.5-480p-i2v": "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v",
    "hunyuanvideo-1.5-720p-i2v": "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_i2v",
    "hunyuanvideo-community/HunyuanVideo-1.5-480p_t2v": "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
    "hunyuanvideo-community/HunyuanVideo-1.5-480p_i2v": "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v",
    "cogvideox-2b": "THUDM/CogVideoX-2b",
    "cogvideox-5b": "THUDM/CogVideoX-5b",
    "cogvideox1.5-5b": "THUDM/CogVideoX1.5-5B",
    "zai-org/CogVideoX-2b": "THUDM/CogVideoX-2b",
    "zai-org/CogVideoX-5b": "THUDM/CogVideoX-5b",
    "zai-org/CogVideoX1.5-5B": "THUDM/CogVideoX1.5-5B",
    "flux.1-dev": "black-forest-labs/FLUX.1-dev",
    "flux.1-schnell": "black-forest-labs/FLUX.1-schnell",
    "qwen-image": "Qwen/Qwen-Image",
    "sdxl": "stabilityai/stable-diffusion-xl-base-1.0",
    "stable-diffusion-3.5-large": "stabilityai/stable-diffusion-3.5-large",
    "stable-diffusion-3.5-medium": "stabilityai/stable-diffusion-3.5-medium",
    "ltx-video": "Lightricks/LTX-Video",
}
