"""Tiny random image pipelines of published kinds: components and settings as the published repositories have them."""

import tiny_parts as parts
from diffusers import (
    AuraFlowPipeline,
    AuraFlowTransformer2DModel,
    AutoencoderDC,
    AutoencoderKLQwenImage,
    CogView4Pipeline,
    CogView4Transformer2DModel,
    ControlNetModel,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxControlNetModel,
    FluxFillPipeline,
    FluxKontextPipeline,
    FluxPipeline,
    FluxPriorReduxPipeline,
    FluxTransformer2DModel,
    KandinskyV22Pipeline,
    KandinskyV22PriorPipeline,
    LatentConsistencyModelPipeline,
    LCMScheduler,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
    PixArtAlphaPipeline,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    PNDMScheduler,
    PriorTransformer,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
    SD3ControlNetModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLInstructPix2PixPipeline,
    StableDiffusionXLPipeline,
    T2IAdapter,
    UnCLIPScheduler,
    UNet2DConditionModel,
    VQModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from diffusers.pipelines.flux.modeling_flux import ReduxImageEncoder


WIDTH = parts.WIDTH
BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
BLOCKS = {
    "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 2,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
}  # fmt: skip
SHIFTED = {"base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256, "max_image_seq_len": 4096}


def unet(**changes):
    return UNet2DConditionModel(
        **{
            **BLOCKS, "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "sample_size": 8,
            "cross_attention_dim": WIDTH, "attention_head_dim": 2, **changes,
        }
    ).eval()  # fmt: skip


def sd(**changes):
    """Stable Diffusion 1.5, its checker of pictures included."""
    return StableDiffusionPipeline(
        **{
            "vae": parts.kl(), "text_encoder": parts.clip_text(), "tokenizer": parts.clip_tokenizer(), "unet": unet(),
            "scheduler": PNDMScheduler(**BETAS, skip_prk_steps=True, steps_offset=1),
            "safety_checker": parts.safety_checker(), "feature_extractor": parts.clip_images(), **changes,
        }
    )  # fmt: skip


def lcm():
    return LatentConsistencyModelPipeline(
        vae=parts.kl(), text_encoder=parts.clip_text(), tokenizer=parts.clip_tokenizer(),
        unet=unet(time_cond_proj_dim=16), scheduler=LCMScheduler(**BETAS, original_inference_steps=50),
        safety_checker=parts.safety_checker(), feature_extractor=parts.clip_images(),
    )  # fmt: skip


def controlnet(**changes):
    return ControlNetModel(
        **{
            **BLOCKS, "cross_attention_dim": WIDTH, "attention_head_dim": 2,
            "conditioning_embedding_out_channels": (8, 8, 8, 16), **changes,
        }
    ).eval()  # fmt: skip


def _xl(texts: int = 2) -> dict:
    """What a UNet of SDXL takes beside text: the pooled text and six numbers, each of eight features."""
    return {
        "addition_embed_type": "text_time", "addition_time_embed_dim": 8, "transformer_layers_per_block": (1, 2),
        "projection_class_embeddings_input_dim": 8 * (6 if texts == 2 else 5) + WIDTH, "use_linear_projection": True,
        "cross_attention_dim": texts * WIDTH, "attention_head_dim": (2, 4),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    }  # fmt: skip


def unet_xl(texts: int = 2, **changes):
    return unet(**_xl(texts), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), **changes)


def sdxl(cls=StableDiffusionXLPipeline, **unet_changes):
    return cls(
        vae=parts.kl(scaling_factor=0.13025, force_upcast=True), text_encoder=parts.clip_text(),
        tokenizer=parts.clip_tokenizer(), text_encoder_2=parts.clip_text(projected=True),
        tokenizer_2=parts.clip_tokenizer(), unet=unet_xl(**unet_changes),
        scheduler=EulerDiscreteScheduler(**BETAS, timestep_spacing="leading", steps_offset=1),
    )  # fmt: skip


def sdxl_refiner():
    return StableDiffusionXLImg2ImgPipeline(
        vae=parts.kl(scaling_factor=0.13025, force_upcast=True), text_encoder=None, tokenizer=None,
        text_encoder_2=parts.clip_text(projected=True), tokenizer_2=parts.clip_tokenizer(), unet=unet_xl(1),
        scheduler=EulerDiscreteScheduler(**BETAS, timestep_spacing="leading", steps_offset=1),
        requires_aesthetics_score=True, force_zeros_for_empty_prompt=False,
    )  # fmt: skip


def sdxl_pix2pix():
    return sdxl(StableDiffusionXLInstructPix2PixPipeline, in_channels=8)


def sdxl_controlnet():
    return controlnet(**_xl())


def adapter_xl():
    return T2IAdapter(
        in_channels=1, channels=[8, 16], num_res_blocks=1, downscale_factor=16, adapter_type="full_adapter_xl"
    ).eval()


def adapter():
    return T2IAdapter(in_channels=3, channels=[8, 16], num_res_blocks=1, downscale_factor=8, adapter_type="full_adapter").eval()


def sd3():
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=8, in_channels=16, num_layers=3, attention_head_dim=8, num_attention_heads=4,
            joint_attention_dim=2 * WIDTH, caption_projection_dim=32, pooled_projection_dim=2 * WIDTH,
            pos_embed_max_size=16,
        ).eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), vae=parts.kl16(),
        text_encoder=parts.clip_text(projected=True), tokenizer=parts.clip_tokenizer(),
        text_encoder_2=parts.clip_text(projected=True), tokenizer_2=parts.clip_tokenizer(),
        text_encoder_3=parts.t5(width=2 * WIDTH), tokenizer_3=parts.t5_tokenizer(),
    )  # fmt: skip


def sd3_controlnet():
    return SD3ControlNetModel(
        sample_size=8, in_channels=16, num_layers=1, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=2 * WIDTH, caption_projection_dim=32, pooled_projection_dim=2 * WIDTH, pos_embed_max_size=16,
    ).eval()  # fmt: skip


FLUX = {
    "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2,
    "joint_attention_dim": WIDTH, "pooled_projection_dim": WIDTH, "axes_dims_rope": (4, 6, 6),
}  # fmt: skip


def flux(cls=FluxPipeline, guidance: bool = True, text: int = WIDTH, pooled: int = WIDTH, **changes):
    sizes = {"guidance_embeds": guidance, "joint_attention_dim": text, "pooled_projection_dim": pooled}
    return cls(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=guidance, **SHIFTED),
        vae=parts.kl16(), text_encoder=parts.clip_text(width=pooled), tokenizer=parts.clip_tokenizer(),
        text_encoder_2=parts.t5(width=text), tokenizer_2=parts.t5_tokenizer(),
        transformer=FluxTransformer2DModel(**{**FLUX, **sizes, **changes}).eval(),
    )  # fmt: skip


def flux_dev():
    """Its text has the published widths: Redux leaves it out, and then upstream takes zeros of these."""
    return flux(text=4096, pooled=768)


def flux_schnell():
    return flux(guidance=False)


def flux_fill():
    return flux(FluxFillPipeline, in_channels=384, out_channels=64)


def flux_kontext():
    return flux(FluxKontextPipeline)


def flux_controlnet():
    return FluxControlNetModel(**{**FLUX, "num_layers": 1, "num_single_layers": 1, "guidance_embeds": True,
           "joint_attention_dim": 4096, "pooled_projection_dim": 768}).eval()


def flux_redux():
    return FluxPriorReduxPipeline(
        image_encoder=parts.siglip(), feature_extractor=parts.siglip_images(),
        image_embedder=ReduxImageEncoder(redux_dim=16, txt_in_features=4096).eval(),
    )  # fmt: skip


def _qwen_parts() -> dict:
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, shift_terminal=0.02, time_shift_type="exponential",
            base_shift=0.5, max_shift=0.9, base_image_seq_len=256, max_image_seq_len=8192,
        ),
        "vae": AutoencoderKLQwenImage(
            base_dim=6, z_dim=16, dim_mult=[1, 2, 2, 2], num_res_blocks=1, temperal_downsample=[False, True, True]
        ).eval(),
        "text_encoder": parts.qwen25vl(), "tokenizer": parts.chat_tokenizer(),
        "transformer": QwenImageTransformer2DModel(
            num_layers=3, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=WIDTH, axes_dims_rope=(4, 6, 6)
        ).eval(),
    }  # fmt: skip


def qwen():
    return QwenImagePipeline(**_qwen_parts())


def sana():
    return SanaPipeline(
        tokenizer=parts.tokenizer(300, before="<bos>"), text_encoder=parts.gemma2(),
        vae=AutoencoderDC(
            latent_channels=4, attention_head_dim=4, encoder_block_types=("ResBlock", "EfficientViTBlock"),
            decoder_block_types=("ResBlock", "EfficientViTBlock"), encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8), encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1),
            encoder_qkv_multiscales=((), (5,)), decoder_qkv_multiscales=((), (5,)), scaling_factor=0.41407,
            downsample_block_type="Conv", upsample_block_type="interpolate",
        ).eval(),
        transformer=SanaTransformer2DModel(
            in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=8, num_layers=3,
            num_cross_attention_heads=4, cross_attention_head_dim=8, cross_attention_dim=32, caption_channels=WIDTH,
            sample_size=32,
        ).eval(),
        scheduler=DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    )  # fmt: skip


def _pixart(cls, **changes):
    return cls(
        tokenizer=parts.t5_tokenizer(), text_encoder=parts.t5(), vae=parts.kl(scaling_factor=0.13025),
        transformer=PixArtTransformer2DModel(
            num_attention_heads=4, attention_head_dim=12, num_layers=3, cross_attention_dim=48, caption_channels=WIDTH,
            norm_num_groups=1, **changes,
        ).eval(),
        scheduler=DPMSolverMultistepScheduler(),
    )  # fmt: skip


def pixart_alpha():
    return _pixart(PixArtAlphaPipeline, sample_size=128)


def pixart_sigma():
    return _pixart(PixArtSigmaPipeline, sample_size=128, use_additional_conditions=False)


def lumina2():
    return Lumina2Pipeline(
        transformer=Lumina2Transformer2DModel(
            sample_size=8, in_channels=16, hidden_size=32, num_layers=3, num_refiner_layers=1, num_attention_heads=2,
            num_kv_heads=1, multiple_of=16, axes_dim_rope=(4, 6, 6), axes_lens=(300, 64, 64), cap_feat_dim=WIDTH,
        ).eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0), vae=parts.kl16(), text_encoder=parts.gemma2(),
        tokenizer=parts.tokenizer(256, before="<bos>"),
    )  # fmt: skip


def auraflow():
    return AuraFlowPipeline(
        tokenizer=parts.tokenizer(256, before="<bos>", after="</s>"), text_encoder=parts.umt5(),
        vae=parts.kl(scaling_factor=0.13025),
        transformer=AuraFlowTransformer2DModel(
            sample_size=8, num_mmdit_layers=1, num_single_dit_layers=2, attention_head_dim=8, num_attention_heads=4,
            joint_attention_dim=WIDTH, caption_projection_dim=32, pos_embed_max_size=64,
        ).eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
    )  # fmt: skip


def z_image():
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), vae=parts.kl16(), text_encoder=parts.qwen3(),
        tokenizer=parts.chat_tokenizer(),
        transformer=ZImageTransformer2DModel(
            dim=32, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=WIDTH, axes_dims=[4, 6, 6],
            axes_lens=[1024, 64, 64],
        ).eval(),
    )  # fmt: skip


def cogview4():
    return CogView4Pipeline(
        tokenizer=parts.tokenizer(1024, before="[gMASK]"), text_encoder=parts.glm(), vae=parts.kl16(),
        transformer=CogView4Transformer2DModel(
            num_layers=3, attention_head_dim=8, num_attention_heads=4, text_embed_dim=WIDTH, time_embed_dim=8,
            condition_dim=4, pos_embed_max_size=32, sample_size=16, rope_axes_dim=(16, 16),
        ).eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(
            base_shift=0.25, max_shift=0.75, base_image_seq_len=256, use_dynamic_shifting=True, time_shift_type="linear"
        ),
    )  # fmt: skip


def kandinsky22_prior():
    prior = PriorTransformer(num_attention_heads=2, attention_head_dim=8, num_layers=2, embedding_dim=WIDTH).eval()
    prior.clip_std.data.fill_(0.5)
    return KandinskyV22PriorPipeline(
        prior=prior,
        image_encoder=parts.clip_vision(projected=True), text_encoder=parts.clip_text(projected=True),
        tokenizer=parts.clip_tokenizer(), image_processor=parts.clip_images(),
        scheduler=UnCLIPScheduler(
            variance_type="fixed_small_log", prediction_type="sample", num_train_timesteps=1000, clip_sample=True,
            clip_sample_range=5.0,
        ),
    )  # fmt: skip


def kandinsky22():
    return KandinskyV22Pipeline(
        unet=UNet2DConditionModel(
            in_channels=4, out_channels=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=2,
            down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
            up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
            mid_block_type="UNetMidBlock2DSimpleCrossAttn", addition_embed_type="image", encoder_hid_dim=WIDTH,
            encoder_hid_dim_type="image_proj", cross_attention_dim=WIDTH, attention_head_dim=4,
            resnet_time_scale_shift="scale_shift",
        ).eval(),
        scheduler=DDPMScheduler(beta_start=0.00085, beta_end=0.012, variance_type="learned_range", clip_sample=False),
        movq=VQModel(
            block_out_channels=(32, 32, 32, 32), down_block_types=("DownEncoderBlock2D",) * 3 + ("AttnDownEncoderBlock2D",),
            up_block_types=("AttnUpDecoderBlock2D",) + ("UpDecoderBlock2D",) * 3, latent_channels=4, norm_num_groups=4,
            num_vq_embeddings=32, norm_type="spatial", vq_embed_dim=4,
        ).eval(),
    )  # fmt: skip
