"""Tiny models of upstream's classes: what a constructor takes by the names of its parameters, and what a class needs beside that.

Every width of text is `WIDTH`, every head `HEAD` wide, and heads times their width is `WIDTH` again, so that models of one
pipeline fit each other without knowing of each other.
"""

import contextlib
import inspect
from collections.abc import Callable

import torch

from tiny import WIDTH


HEADS, HEAD = 2, 16
ROTARY = (4, 6, 6)

BY_NAME = {
    **dict.fromkeys(("num_layers", "n_layers", "depth", "num_hidden_layers", "num_single_layers", "num_visual_blocks"), 2),
    **dict.fromkeys(("num_refiner_layers", "n_refiner_layers", "num_text_blocks", "layers_per_block"), 1),
    **dict.fromkeys(("num_mmdit_layers", "num_single_dit_layers", "num_layerwise_text_blocks", "num_refiner_text_blocks"), 1),
    **dict.fromkeys(("num_attention_heads", "n_heads", "num_heads", "num_cross_attention_heads", "nhead"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "num_kv_heads", "text_num_attention_heads"), HEADS),
    **dict.fromkeys(("text_num_key_value_heads", "num_key_value_attention_heads"), HEADS),
    **dict.fromkeys(("attention_head_dim", "head_dim", "cross_attention_head_dim", "linear_head_dim"), HEAD),
    **dict.fromkeys(("joint_attention_dim", "text_embed_dim", "text_embed_2_dim", "text_dim", "cap_feat_dim"), WIDTH),
    **dict.fromkeys(("context_in_dim", "pooled_projection_dim", "in_text_dim", "in_text_dim2", "text_in_dim"), WIDTH),
    **dict.fromkeys(("cross_attention_dim", "caption_channels", "text_hidden_dim", "text_encoder_dim"), WIDTH),
    **dict.fromkeys(("encoder_hid_dim", "hidden_size", "dim", "model_dim", "embed_dim", "caption_projection_dim"), WIDTH),
    **dict.fromkeys(("embedding_dim", "crossattn_proj_in_channels", "encoder_hidden_states_channels"), WIDTH),
    **dict.fromkeys(("ffn_dim", "ff_dim", "intermediate_size", "ffn_hidden_size", "text_intermediate_size"), 48),
    **dict.fromkeys(("freq_dim", "time_embed_dim", "time_dim", "timestep_embed_dim", "multiple_of"), 16),
    **dict.fromkeys(("addition_time_embed_dim", "condition_dim", "adaln_lora_dim", "time_step_dim"), 8),
    **dict.fromkeys(("axes_dims_rope", "axes_dim_rope", "rope_axes_dim", "axes_dims", "rope_dim", "rope_dim_list"), ROTARY),
    "axes_lens": (1024, 64, 64),
    "mlp_ratio": 2.0,
    "rope_max_seq_len": 64,
    "image_embed_dim": 16,
    "max_size": (32, 32, 32),
    "block_out_channels": (8, 16),
    "norm_num_groups": 2,
    "sample_size": 8,
}  # fmt: skip
LARGEST = 10_000_000  # parameters

BLOCKS = {
    "layers_per_block": 1, "attention_head_dim": 2, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "sample_size": 8, "block_out_channels": (8, 16),
    "norm_num_groups": 2,
}  # fmt: skip
MOTION = {
    "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"), "norm_num_groups": 2,
    "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"), "layers_per_block": 1, "motion_num_attention_heads": 2,
}  # fmt: skip
BLOCKS_3D = {
    "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"), "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
    "attention_head_dim": 4,
}  # fmt: skip
WAN = {"num_attention_heads": 4, "attention_head_dim": 12}
WAN_VAE = {"base_dim": 6, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1, "temperal_downsample": [False, True, True]}
FOUR = (8, 8, 8, 8)
DOWN_4, UP_4 = ("DownEncoderBlock2D",) * 4, ("UpDecoderBlock2D",) * 4

BY_CLASS = {
    "UNet2DConditionModel": BLOCKS,
    "UNet2DModel": {**BLOCKS, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
    "ControlNetModel": {**BLOCKS, "conditioning_embedding_out_channels": (8, 8, 8, 16)},
    "ControlNetUnionModel": {
        **BLOCKS, "conditioning_embedding_out_channels": (8, 8, 8, 16), "num_trans_channel": 8, "num_trans_head": 2,
        "num_proj_channel": 8,
    },
    "ControlNetXSAdapter": {
        "block_out_channels": (2, 4), "base_block_out_channels": (8, 16), "num_attention_heads": 2,
        "conditioning_embedding_out_channels": (8, 8, 8, 16), "max_norm_num_groups": 2,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    },
    "SparseControlNetModel": {
        **MOTION, "attention_head_dim": 2, "conditioning_embedding_out_channels": (8, 8, 8, 16),
    },
    "UNetMotionModel": MOTION,
    "MotionAdapter": {
        "motion_layers_per_block": 1, "motion_num_attention_heads": 2, "motion_norm_num_groups": 2,
        "use_motion_mid_block": False,
    },
    "UNet3DConditionModel": BLOCKS_3D,
    "I2VGenXLUNet": BLOCKS_3D,
    "UNetSpatioTemporalConditionModel": {
        "block_out_channels": (32, 32), "num_attention_heads": (2, 4), "projection_class_embeddings_input_dim": 24,
        "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
    },
    "UNet1DModel": {
        "block_out_channels": (32, 32, 32), "sample_size": 512, "sample_rate": 16000, "extra_in_channels": 64,
        "norm_num_groups": 8,
    },
    "T2IAdapter": {"channels": [8, 16], "num_res_blocks": 1},
    "Kandinsky3UNet": {"block_out_channels": (16, 32, 64, 128), "layers_per_block": 1, "attention_head_dim": 4, "groups": 2, "time_embedding_dim": 16},
    "AutoencoderKL": {
        "block_out_channels": FOUR, "down_block_types": DOWN_4, "up_block_types": UP_4, "sample_size": 64,
    },
    "AutoencoderKLFlux2": {"block_out_channels": FOUR, "sample_size": 64, "latent_channels": 8},
    "AsymmetricAutoencoderKL": {"down_block_out_channels": (8,), "up_block_out_channels": (8,)},
    "AutoencoderKLTemporalDecoder": {"block_out_channels": (32,) * 4, "down_block_types": DOWN_4, "sample_size": 64},
    "AutoencoderTiny": {
        "encoder_block_out_channels": FOUR, "decoder_block_out_channels": FOUR, "num_encoder_blocks": (1, 1, 1, 1),
        "num_decoder_blocks": (1, 1, 1, 1),
    },
    "AutoencoderDC": {
        "latent_channels": 4, "attention_head_dim": 4, "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
        "decoder_block_types": ("ResBlock", "EfficientViTBlock"), "encoder_block_out_channels": (8, 8),
        "decoder_block_out_channels": (8, 8), "encoder_layers_per_block": (1, 1), "decoder_layers_per_block": (1, 1),
        "encoder_qkv_multiscales": ((), (5,)), "decoder_qkv_multiscales": ((), (5,)), "downsample_block_type": "Conv",
        "upsample_block_type": "interpolate",
    },
    "AutoencoderKLWan": WAN_VAE,
    "AutoencoderKLQwenImage": WAN_VAE,
    "AutoencoderKLHunyuanVideo": {"latent_channels": 4, "block_out_channels": FOUR},
    "AutoencoderKLHunyuanVideo15": {
        "latent_channels": 4, "block_out_channels": (8,) * 5, "downsample_match_channel": False, "upsample_match_channel": False,
    },
    "AutoencoderKLHunyuanImage": {
        "in_channels": 3, "out_channels": 3, "latent_channels": 4, "block_out_channels": (32,) * 4, "spatial_compression_ratio": 8, "scaling_factor": 0.75,
        "downsample_match_channel": False, "upsample_match_channel": False, "sample_size": 64, "layers_per_block": 1,
    },
    "AutoencoderKLHunyuanImageRefiner": {
        "latent_channels": 4, "block_out_channels": (8,) * 5, "downsample_match_channel": False, "upsample_match_channel": False,
    },
    "AutoencoderKLCogVideoX": {"latent_channels": 4, "block_out_channels": FOUR},
    "AutoencoderKLLTXVideo": {
        "latent_channels": 8, "block_out_channels": FOUR, "decoder_block_out_channels": FOUR,
        "layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 5,
    },
    "AutoencoderKLMochi": {
        "encoder_block_out_channels": (32,) * 4, "decoder_block_out_channels": (32,) * 4, "layers_per_block": (1,) * 5,
    },
    "AutoencoderKLAllegro": {"block_out_channels": FOUR, "sample_size": 64},
    "AutoencoderKLMagvit": {
        "norm_num_groups": 2, "block_out_channels": [8, 8, 8], "latent_channels": 4,
        "down_block_types": ["SpatialDownBlock3D", "SpatialTemporalDownBlock3D", "SpatialTemporalDownBlock3D"],
        "up_block_types": ["SpatialUpBlock3D", "SpatialTemporalUpBlock3D", "SpatialTemporalUpBlock3D"],
    },
    "AutoencoderKLCosmos": {
        "encoder_block_out_channels": (8, 8, 8, 8), "decode_block_out_channels": (8, 8, 8, 8), "num_layers": 1,
        "attention_resolutions": (8,), "resolution": 64, "latent_channels": 4,
    },
    "AutoencoderOobleck": {
        "encoder_hidden_size": 8, "downsampling_ratios": [2, 4, 4], "channel_multiples": [1, 2, 4], "decoder_channels": 8,
        "decoder_input_channels": 8, "sampling_rate": 1600,
    },
    "VQModel": {
        "block_out_channels": FOUR, "num_vq_embeddings": 32, "latent_channels": 4,
        "down_block_types": DOWN_4, "up_block_types": UP_4, "vq_embed_dim": 4,
    },
    "PaellaVQModel": {"bottleneck_blocks": 1, "embed_dim": 8, "num_vq_embeddings": 32},
    "FluxTransformer2DModel": {"guidance_embeds": True},
    "Flux2Transformer2DModel": {
        "in_channels": 32, "axes_dims_rope": (4, 4, 4, 4), "timestep_guidance_channels": 16, "joint_attention_dim": 3 * WIDTH,
    },
    "ChromaTransformer2DModel": {"approximator_num_channels": 16, "approximator_hidden_dim": 32, "approximator_layers": 1},
    "SD3Transformer2DModel": {"joint_attention_dim": 2 * WIDTH, "pooled_projection_dim": 2 * WIDTH, "pos_embed_max_size": 16},
    "SD3ControlNetModel": {
        "joint_attention_dim": 2 * WIDTH, "pooled_projection_dim": 2 * WIDTH, "pos_embed_max_size": 16, "num_layers": 1,
    },
    "PixArtTransformer2DModel": {
        "sample_size": 128, "norm_num_groups": 1, "caption_channels": WIDTH, "num_attention_heads": 4, "attention_head_dim": 12,
        "cross_attention_dim": 48,
    },
    "DiTTransformer2DModel": {"out_channels": 8},
    "AuraFlowTransformer2DModel": {"pos_embed_max_size": 64},
    "SanaTransformer2DModel": {"in_channels": 4, "out_channels": 4, "sample_size": 32},
    "SanaControlNetModel": {"in_channels": 4, "out_channels": 4, "sample_size": 32, "num_layers": 1},
    "SanaVideoTransformer3DModel": {"sample_size": 8, "attention_head_dim": 12, "num_attention_heads": 4, "num_cross_attention_heads": 4, "cross_attention_head_dim": 12, "cross_attention_dim": 48},
    "Lumina2Transformer2DModel": {"num_kv_heads": 1, "axes_lens": (300, 64, 64)},
    "LuminaNextDiT2DModel": {"num_kv_heads": 1},
    "CogView3PlusTransformer2DModel": {"pos_embed_max_size": 32, "condition_dim": 4},
    "CogView4Transformer2DModel": {"pos_embed_max_size": 32, "condition_dim": 4, "rope_axes_dim": (16, 16), "sample_size": 16, "num_attention_heads": 2},
    "CogVideoXTransformer3DModel": {
        "in_channels": 4, "out_channels": 4, "time_embed_dim": 4, "sample_width": 12, "sample_height": 8, "sample_frames": 9,
    },
    "WanTransformer3DModel": WAN, "WanVACETransformer3DModel": {**WAN, "vace_layers": [0, 1]},
    "SkyReelsV2Transformer3DModel": WAN, "ChronoEditTransformer3DModel": WAN, "AnyFlowTransformer3DModel": WAN,
    "AnyFlowFARTransformer3DModel": {**WAN, "chunk_partition": (1, 2)},
    "WanAnimateTransformer3DModel": {
        **WAN, "image_dim": 16, "added_kv_proj_dim": 48, "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8},
        "motion_encoder_size": 16, "motion_style_dim": 8, "motion_dim": 4, "motion_encoder_dim": 16,
        "face_encoder_hidden_dim": 16, "face_encoder_num_heads": 2, "inject_face_latents_blocks": 2,
    },
    "HeliosTransformer3DModel": {**WAN, "rope_dim": (4, 4, 4)},
    "HunyuanVideoTransformer3DModel": {"in_channels": 4, "out_channels": 4},
    "HunyuanVideoFramepackTransformer3DModel": {
        "in_channels": 4, "out_channels": 4, "has_image_proj": True, "image_proj_dim": 16, "has_clean_x_embedder": True,
    },
    "HunyuanVideo15Transformer3DModel": {"in_channels": 9, "out_channels": 4, "target_size": 64},
    "HunyuanImageTransformer2DModel": {"in_channels": 4, "out_channels": 4, "rope_axes_dim": (8, 8), "text_embed_2_dim": WIDTH},
    "HunyuanDiT2DModel": {
        "in_channels": 4, "patch_size": 2, "hidden_size": HEADS * HEAD, "cross_attention_dim_t5": WIDTH,
        "activation_fn": "gelu-approximate",
    },
    "HunyuanDiT2DControlNetModel": {
        "in_channels": 4, "patch_size": 2, "hidden_size": HEADS * HEAD, "cross_attention_dim_t5": WIDTH,
        "transformer_num_layers": 4,
    },
    "LTXVideoTransformer3DModel": {"in_channels": 8, "out_channels": 8, "num_layers": 2, "cross_attention_dim": 32},
    "MochiTransformer3DModel": {"pooled_projection_dim": 16},
    "LatteTransformer3DModel": {
        "num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "out_channels": 8, "cross_attention_dim": WIDTH,
        "caption_channels": WIDTH, "patch_size": 2, "activation_fn": "gelu-approximate", "num_embeds_ada_norm": 1000,
        "norm_type": "ada_norm_single", "norm_elementwise_affine": False, "norm_eps": 1e-6, "attention_bias": True,
    },
    "AllegroTransformer3DModel": {"sample_height": 8, "sample_width": 8, "sample_frames": 4, "attention_head_dim": 24, "cross_attention_dim": 48},
    "EasyAnimateTransformer3DModel": {"in_channels": 4, "out_channels": 4, "patch_size": 2, "mmdit_layers": 2, "attention_head_dim": 32, "num_attention_heads": 2},
    "CosmosTransformer3DModel": {"num_attention_heads": 2, "attention_head_dim": 32, "concat_padding_mask": False},
    "CosmosControlNetModel": {"model_channels": 64, "num_attention_heads": 2, "attention_head_dim": 32, "n_controlnet_blocks": 1},
    "QwenImageControlNetModel": {"num_layers": 1},
    "LongCatAudioDiTTransformer": {"dit_dim": WIDTH, "dit_depth": 2, "dit_heads": 2, "dit_text_dim": WIDTH, "latent_dim": 8},
    "LongCatAudioDiTVae": {
        "channels": 4, "c_mults": [1, 2], "strides": [2, 4], "latent_dim": 8, "encoder_latent_dim": 16, "downsampling_ratio": 8,
        "sample_rate": 800,
    },
    "AutoencoderKLLTX2Video": {
        "latent_channels": 8, "block_out_channels": (8, 8, 16, 16), "decoder_block_out_channels": (8, 16, 32),
        "decoder_spatial_padding_mode": "zeros",
        "layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 4,
    },
    "AutoencoderKLLTX2Audio": {"base_channels": 8, "num_res_blocks": 1, "latent_channels": 2, "mel_bins": 16},
    "LTX2Vocoder": {"in_channels": 32, "hidden_channels": 32},
    "LTX2TextConnectors": {
        "caption_channels": WIDTH, "text_proj_in_factor": 3, "video_hidden_dim": WIDTH, "audio_hidden_dim": WIDTH,
        **{f"{kind}_connector_{name}": value for kind in ("video", "audio") for name, value in {
            "num_attention_heads": HEADS, "attention_head_dim": HEAD, "num_layers": 1, "num_learnable_registers": 16,
        }.items()},
    },
    "LTX2VideoTransformer3DModel": {
        "in_channels": 8, "out_channels": 8, "cross_attention_dim": WIDTH, "audio_cross_attention_dim": WIDTH,
        "audio_in_channels": 8,
        "audio_out_channels": 8,
        "audio_num_attention_heads": HEADS, "audio_attention_head_dim": HEAD,
    },
    "LTX2LatentUpsamplerModel": {"in_channels": 8, "mid_channels": 32, "num_blocks_per_stage": 1},
    "DreamLiteUNetModel": {"block_out_channels": (8, 8, 16), "layers_per_block": 1, "attention_head_dim": 4},
    "QwenImage21Transformer2DModel": {"mlp_ratio": 2, "in_channels": 16, "out_channels": 16},
    "AutoencoderKLQwenImage21": {
        "base_dim": 4, "decoder_base_dim": 4, "num_res_blocks": 1, "z_dim": 16, "latents_mean": [0.0] * 16, "latents_std": [1.0] * 16,
    },
    "ErnieImageTransformer2DModel": {"in_channels": 32, "out_channels": 32},
    "StableAudio3DiTModel": {"cond_token_dim": WIDTH, "global_cond_dim": WIDTH, "io_channels": 16, "local_add_cond_dim": 17, "num_memory_tokens": 4, "timestep_features_dim": 16},
    "StableAudio3DurationEmbedder": {"output_dim": WIDTH, "fourier_dim": 16},
    "AutoencoderSAME": {
        "patch_size": 16, "encoder_channels": 16, "encoder_c_mults": (1,), "encoder_strides": (2,), "encoder_transformer_depths": (1,),
        "latent_dim": 16, "dim_heads": 8, "sampling_rate": 1600,
    },
    "Krea2Transformer2DModel": {"num_text_layers": 2},
    "ShapERenderer": {
        "param_shapes": ((8, 93), (8, 8), (8, 8), (8, 8)), "d_latent": 16, "d_hidden": 8, "n_hidden_layers": 3,
        "insert_direction_at": 2,
    },
    "PRXTransformer2DModel": {"axes_dim": (8, 8)},
    "OmniGenTransformer2DModel": {
        "vocab_size": 1024, "pad_token_id": 0, "pos_embed_max_size": 16, "max_position_embeddings": 4096,
        "rope_scaling": {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8, "type": "su"},
    },
    "UVit2DModel": {
        "cond_embed_dim": WIDTH, "micro_cond_encode_dim": 8, "micro_cond_embed_dim": 40, "encoder_hidden_size": WIDTH,
        "vocab_size": 33, "codebook_size": 32, "in_channels": WIDTH, "block_out_channels": WIDTH, "num_res_blocks": 1,
        "block_num_heads": 2,
    },
    "StableAudioDiTModel": {
        "in_channels": 8, "out_channels": 8, "sample_size": 32, "global_states_input_dim": 2 * WIDTH, "cross_attention_input_dim": WIDTH,
        "time_proj_dim": 16,
    },
    "StableAudioProjectionModel": {"text_encoder_dim": WIDTH, "conditioning_dim": WIDTH, "min_value": 0, "max_value": 512},
    "StableCascadeUNet": {
        "block_out_channels": (8, 16), "num_attention_heads": (2, 2), "down_num_layers_per_block": (1, 1),
        "up_num_layers_per_block": (1, 1), "conditioning_dim": 16, "clip_text_pooled_in_channels": WIDTH, "timestep_ratio_embedding_dim": 16,
    },
    "WuerstchenDiffNeXt": {
        "c_cond": WIDTH, "c_hidden": [8, 16], "nhead": [-1, 2], "blocks": [1, 1], "level_config": ["CT", "CTA"],
        "inject_effnet": [False, True], "clip_embd": WIDTH, "effnet_embd": 16,
    },
    "WuerstchenPrior": {"c": WIDTH, "c_cond": WIDTH, "depth": 1, "nhead": 2},
    "LTXLatentUpsamplerModel": {"in_channels": 8, "mid_channels": 32, "num_blocks_per_stage": 1},
    "UnCLIPTextProjModel": {"clip_embeddings_dim": WIDTH, "time_embed_dim": 32, "cross_attention_dim": WIDTH},
    "ZImageControlNetModel": {"control_layers_places": [0, 1], "control_refiner_layers_places": [0], "control_in_dim": 16},
    "Transformer2DModel": {
        "num_vector_embeds": 32, "attention_head_dim": 16, "norm_num_groups": 8, "num_embeds_ada_norm": 12, "sample_size": 8,
        "activation_fn": "geglu-approximate", "cross_attention_dim": WIDTH,
    },
    "ReduxImageEncoder": {"redux_dim": 16},
    "HiDreamImageTransformer2DModel": {
        "in_channels": 16, "patch_size": 2, "caption_channels": [WIDTH, WIDTH], "text_emb_dim": 2 * WIDTH, "llama_layers": [0, 1],
        "axes_dims_rope": (8, 8), "max_resolution": (32, 32), "num_layers": 1, "num_single_layers": 1,
    },
    "AudioLDM2ProjectionModel": {"text_encoder_dim": WIDTH, "text_encoder_1_dim": WIDTH, "langauge_model_dim": WIDTH},
}  # fmt: skip


def tiny(cls: type, **changes) -> torch.nn.Module:
    """A tiny model of this class with random weights; `changes` are what it is given beside what its class and names say."""
    takes = inspect.signature(cls.__init__).parameters
    of_class = BY_CLASS.get(cls.__name__, {})  # several share what some of them do not take
    wanted = {**{name: value for name, value in of_class.items() if name in takes}, **changes}
    for name, parameter in takes.items():
        if name in BY_NAME and parameter.default is not None:  # None: off
            wanted.setdefault(name, BY_NAME[name])
    return small(lambda: cls(**wanted).eval(), cls)


def small(make: Callable[[], torch.nn.Module], cls: type) -> torch.nn.Module:
    """What `make` makes, filled; it is first made without memory. Raises TypeError where it would not be tiny."""
    with contextlib.suppress(RuntimeError, NotImplementedError), torch.device("meta"):  # constructors that want values
        numbers = sum(parameter.numel() for parameter in make().parameters())
        if numbers > LARGEST:
            raise TypeError(
                f"expected a tiny model, got {numbers / 1e6:.0f} million parameters: of {cls.__name__} too little is known"
            )
    return filled(make())


def filled(model: torch.nn.Module) -> torch.nn.Module:
    """The model; parameters that upstream begins with one number all over, or leaves as memory is, have values of their own.

    What begins with zeros (a ControlNet's last layers, gates of a block) would hide what comes before it.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            uneven = not torch.isfinite(parameter).all() or parameter.abs().max() > 1e3
            if uneven or (parameter.numel() > 1 and (parameter == parameter.flatten()[0]).all()):
                one = 1.0 if not uneven and parameter.flatten()[0] == 1 else 0.0
                parameter.copy_(one + 0.2 * torch.randn_like(parameter))
    return model
