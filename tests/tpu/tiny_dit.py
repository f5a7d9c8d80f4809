"""Tiny random image pipelines with a transformer: components and settings as the published repositories have them."""

import tiny_parts as parts
from diffusers import (
    AuraFlowPipeline,
    AuraFlowTransformer2DModel,
    AutoencoderDC,
    AutoencoderKLQwenImage,
    CogView4Pipeline,
    CogView4Transformer2DModel,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxControlNetModel,
    FluxFillPipeline,
    FluxKontextPipeline,
    FluxPipeline,
    FluxPriorReduxPipeline,
    FluxTransformer2DModel,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
    PixArtAlphaPipeline,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
    SD3ControlNetModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from diffusers.pipelines.flux.modeling_flux import ReduxImageEncoder


WIDTH = parts.WIDTH
SHIFTED = {"base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256, "max_image_seq_len": 4096}


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
    return FluxControlNetModel(
        **{
            **FLUX,
            "num_layers": 1,
            "num_single_layers": 1,
            "guidance_embeds": True,
            "joint_attention_dim": 4096,
            "pooled_projection_dim": 768,
        }
    ).eval()


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
