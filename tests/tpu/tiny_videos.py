"""Tiny random video pipelines of published kinds: components and settings as the published repositories have them."""

from transformers import ByT5Tokenizer

import tiny_parts as parts
import tiny_wan
from diffusers import (
    AutoencoderKLCogVideoX,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLHunyuanVideo15,
    AutoencoderKLLTXVideo,
    AutoencoderKLMochi,
    AutoencoderKLTemporalDecoder,
    ClassifierFreeGuidance,
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    CogVideoXFunControlPipeline,
    CogVideoXImageToVideoPipeline,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    DDIMScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    HunyuanSkyreelsImageToVideoPipeline,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoFramepackPipeline,
    HunyuanVideoFramepackTransformer3DModel,
    HunyuanVideoImageToVideoPipeline,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    Kandinsky5T2VPipeline,
    Kandinsky5Transformer3DModel,
    LattePipeline,
    LatteTransformer3DModel,
    LTXConditionPipeline,
    LTXPipeline,
    LTXVideoTransformer3DModel,
    MochiPipeline,
    MochiTransformer3DModel,
    MotionAdapter,
    SkyReelsV2Pipeline,
    SkyReelsV2Transformer3DModel,
    StableVideoDiffusionPipeline,
    UNetSpatioTemporalConditionModel,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanVACEPipeline,
    WanVACETransformer3DModel,
)


WIDTH = parts.WIDTH


def _text() -> dict:
    return {"tokenizer": parts.t5_tokenizer(), "text_encoder": parts.umt5()}


def _flow_unipc(shift: float = 3.0):
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)


def wan(**changes):
    return WanPipeline(
        **{
            **_text(),
            "vae": tiny_wan.vae(),
            "transformer": tiny_wan.transformer(),
            "scheduler": _flow_unipc(),
            **changes,
        }
    )


def wan_a14b():
    return wan(transformer_2=tiny_wan.transformer(), boundary_ratio=0.875)


def wan_ti2v():
    return wan(
        vae=tiny_wan.vae_22(),
        transformer=tiny_wan.transformer(in_channels=48, out_channels=48),
        expand_timesteps=True,
        scheduler=_flow_unipc(5.0),
    )


def wan_i2v():
    return WanImageToVideoPipeline(
        **_text(), vae=tiny_wan.vae(), scheduler=_flow_unipc(),
        transformer=tiny_wan.transformer(in_channels=36, image_dim=tiny_wan.IMAGE_WIDTH, added_kv_proj_dim=48),
        image_encoder=tiny_wan.image_encoder(), image_processor=tiny_wan.image_processor(),
    )  # fmt: skip


def wan_vace():
    return WanVACEPipeline(
        **_text(), vae=tiny_wan.vae(), scheduler=_flow_unipc(),
        transformer=tiny_wan.transformer(WanVACETransformer3DModel, vace_layers=[0, 2]),
    )  # fmt: skip


def skyreels_v2():
    return SkyReelsV2Pipeline(
        **_text(), vae=tiny_wan.vae(), scheduler=_flow_unipc(8.0),
        transformer=tiny_wan.transformer(SkyReelsV2Transformer3DModel),
    )  # fmt: skip


HUNYUAN = {
    "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "num_single_layers": 2,
    "num_refiner_layers": 1, "text_embed_dim": WIDTH, "pooled_projection_dim": WIDTH, "rope_axes_dim": (4, 6, 6),
    "in_channels": 4, "out_channels": 4, "mlp_ratio": 2.0,
}  # fmt: skip


def hunyuan_vae():
    return AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4
    ).eval()


def hunyuan_transformer(condition: str | None = None) -> HunyuanVideoTransformer3DModel:
    channels = {None: 4, "token_replace": 4, "latent_concat": 9}[condition]
    changes = {
        "image_condition_type": condition,
        "in_channels": channels,
        "guidance_embeds": condition != "latent_concat",
    }
    return HunyuanVideoTransformer3DModel(**HUNYUAN | changes).eval()


def hunyuan(cls=HunyuanVideoPipeline, **changes):
    return cls(
        **{
            "text_encoder": parts.llama(), "tokenizer": parts.tokenizer(512, before="<bos>"),
            "transformer": hunyuan_transformer(), "vae": hunyuan_vae(),
            "scheduler": FlowMatchEulerDiscreteScheduler(shift=7.0), "text_encoder_2": parts.clip_text(),
            "tokenizer_2": parts.clip_tokenizer(), **changes,
        }
    )  # fmt: skip


def hunyuan_i2v():
    return hunyuan(
        HunyuanVideoImageToVideoPipeline, text_encoder=parts.llava(), image_processor=parts.clip_images(),
        transformer=hunyuan_transformer("token_replace"),
    )  # fmt: skip


def hunyuan_skyreels_i2v():
    """As published: channels of the image beside the video's, guidance by a second call."""
    transformer = HunyuanVideoTransformer3DModel(**HUNYUAN | {"in_channels": 8})
    return hunyuan(HunyuanSkyreelsImageToVideoPipeline, transformer=transformer.eval())


def framepack():
    return HunyuanVideoFramepackTransformer3DModel(
        **HUNYUAN, guidance_embeds=True, has_image_proj=True, image_proj_dim=16, has_clean_x_embedder=True
    ).eval()


def hunyuan_framepack():
    return hunyuan(HunyuanVideoFramepackPipeline, transformer=framepack(), **siglip_parts())


def siglip_parts() -> dict:
    """Of a repository that is loaded by subfolder only."""
    return {"feature_extractor": parts.siglip_images(), "image_encoder": parts.siglip()}


def _hunyuan15_parts(task: str) -> dict:
    return {
        "text_encoder": parts.qwen25vl().model.language_model, "tokenizer": parts.chat_tokenizer(), "tokenizer_2": ByT5Tokenizer(),
        "transformer": HunyuanVideo15Transformer3DModel(
            in_channels=9, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=3,
            num_refiner_layers=1, mlp_ratio=2.0, text_embed_dim=WIDTH, text_embed_2_dim=WIDTH, image_embed_dim=16,
            rope_axes_dim=(4, 6, 6), target_size=64, task_type=task,
        ).eval(),
        "vae": AutoencoderKLHunyuanVideo15(
            latent_channels=4, block_out_channels=(8, 8, 8, 8, 8), layers_per_block=1, spatial_compression_ratio=16,
            temporal_compression_ratio=4, downsample_match_channel=False, upsample_match_channel=False,
        ).eval(),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=7.0), "text_encoder_2": parts.t5(),
        "guider": ClassifierFreeGuidance(guidance_scale=6.0),
    }  # fmt: skip


def hunyuan15():
    return HunyuanVideo15Pipeline(**_hunyuan15_parts("t2v"))


def hunyuan15_i2v():
    return HunyuanVideo15ImageToVideoPipeline(
        **_hunyuan15_parts("i2v"), image_encoder=parts.siglip(), feature_extractor=parts.siglip_images()
    )


def cogvideox(
    cls=CogVideoXPipeline, scheduler=CogVideoXDDIMScheduler, inputs: int = 4, rotary: bool = True, **changes
):
    return cls(
        tokenizer=parts.t5_tokenizer(226), text_encoder=parts.t5(),
        vae=AutoencoderKLCogVideoX(
            down_block_types=("CogVideoXDownBlock3D",) * 4, up_block_types=("CogVideoXUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=2,
            temporal_compression_ratio=4,
        ).eval(),
        transformer=CogVideoXTransformer3DModel(
            num_attention_heads=2, attention_head_dim=16, in_channels=inputs, out_channels=4, time_embed_dim=4,
            text_embed_dim=WIDTH, num_layers=3, sample_width=12, sample_height=8, sample_frames=9,
            use_rotary_positional_embeddings=rotary, **changes,
        ).eval(),
        scheduler=scheduler(
            beta_end=0.012, beta_schedule="scaled_linear", beta_start=0.00085, prediction_type="v_prediction",
            rescale_betas_zero_snr=True, snr_shift_scale=1.0, timestep_spacing="trailing",
        ),
    )  # fmt: skip


def cogvideox_2b():
    return cogvideox(rotary=False)


def cogvideox_5b():
    return cogvideox(scheduler=CogVideoXDPMScheduler)


def cogvideox_15():
    return cogvideox(patch_size_t=2, patch_bias=False)


def cogvideox_i2v():
    return cogvideox(CogVideoXImageToVideoPipeline, CogVideoXDPMScheduler, 8, use_learned_positional_embeddings=True)


def cogvideox_control():
    return cogvideox(CogVideoXFunControlPipeline, CogVideoXDPMScheduler, 8)


def ltx(cls=LTXPipeline, timestep: bool = False):
    return cls(
        scheduler=FlowMatchEulerDiscreteScheduler(shift_terminal=0.1) if timestep else FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024,
            max_image_seq_len=4096, shift_terminal=0.1,
        ),
        vae=AutoencoderKLLTXVideo(
            latent_channels=8, block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8),
            layers_per_block=(1, 1, 1, 1, 1), decoder_layers_per_block=(1, 1, 1, 1, 1), timestep_conditioning=timestep,
        ).eval(),
        text_encoder=parts.t5(), tokenizer=parts.t5_tokenizer(),
        transformer=LTXVideoTransformer3DModel(
            in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
            num_layers=3, caption_channels=WIDTH,
        ).eval(),
    )  # fmt: skip


def ltx_095():
    return ltx(LTXConditionPipeline, timestep=True)


def mochi():
    return MochiPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
        vae=AutoencoderKLMochi(
            encoder_block_out_channels=(32, 32, 32, 32), decoder_block_out_channels=(32, 32, 32, 32),
            layers_per_block=(1, 1, 1, 1, 1),
        ).eval(),
        text_encoder=parts.t5(), tokenizer=parts.t5_tokenizer(256), force_zeros_for_empty_prompt=True,
        transformer=MochiTransformer3DModel(
            num_attention_heads=2, attention_head_dim=16, num_layers=3, pooled_projection_dim=16, text_embed_dim=WIDTH,
            time_embed_dim=16,
        ).eval(),
    )  # fmt: skip


def kandinsky5():
    return Kandinsky5T2VPipeline(
        transformer=Kandinsky5Transformer3DModel(
            in_visual_dim=4, out_visual_dim=4, in_text_dim=WIDTH, in_text_dim2=WIDTH, time_dim=16, model_dim=32,
            ff_dim=48, num_text_blocks=1, num_visual_blocks=2, axes_dims=(4, 6, 6),
        ).eval(),
        vae=hunyuan_vae(), text_encoder=parts.qwen25vl(), tokenizer=parts.chat_tokenizer(),
        text_encoder_2=parts.clip_text(), tokenizer_2=parts.clip_tokenizer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
    )  # fmt: skip


def svd():
    return StableVideoDiffusionPipeline(
        vae=AutoencoderKLTemporalDecoder(
            block_out_channels=(32, 32, 32, 32), down_block_types=("DownEncoderBlock2D",) * 4, sample_size=64
        ).eval(),
        image_encoder=parts.clip_vision(projected=True, size=224),
        unet=UNetSpatioTemporalConditionModel(
            block_out_channels=(32, 32), down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"), layers_per_block=1,
            num_attention_heads=(2, 4), cross_attention_dim=WIDTH, addition_time_embed_dim=16,
            projection_class_embeddings_input_dim=48, sample_size=8,
        ).eval(),
        scheduler=EulerDiscreteScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", prediction_type="v_prediction",
            timestep_spacing="leading", timestep_type="continuous", use_karras_sigmas=True, sigma_max=700.0,
            sigma_min=0.002, steps_offset=1, interpolation_type="linear",
        ),
        feature_extractor=parts.clip_images(),
    )  # fmt: skip


def motion_adapter():
    return MotionAdapter(
        block_out_channels=(8, 16), motion_layers_per_block=1, motion_num_attention_heads=2, motion_norm_num_groups=2,
        use_motion_mid_block=False,
    ).eval()  # fmt: skip


def latte():
    return LattePipeline(
        tokenizer=parts.t5_tokenizer(120), text_encoder=parts.t5(), vae=parts.kl(),
        transformer=LatteTransformer3DModel(
            num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2,
            cross_attention_dim=32, attention_bias=True, sample_size=8, patch_size=2, activation_fn="gelu-approximate",
            num_embeds_ada_norm=1000, norm_type="ada_norm_single", norm_elementwise_affine=False, norm_eps=1e-6,
            caption_channels=WIDTH, video_length=16,
        ).eval(),
        scheduler=DDIMScheduler(beta_start=0.0001, beta_end=0.02, beta_schedule="linear", clip_sample=False),
    )  # fmt: skip
