"""Tiny random image pipelines with a UNet: components and settings as the published repositories have them."""

import tiny_parts as parts
from diffusers import (
    ControlNetModel,
    DDPMScheduler,
    EulerDiscreteScheduler,
    KandinskyV22Pipeline,
    KandinskyV22PriorPipeline,
    LatentConsistencyModelPipeline,
    LCMScheduler,
    PNDMScheduler,
    PriorTransformer,
    StableDiffusionPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLInstructPix2PixPipeline,
    StableDiffusionXLPipeline,
    T2IAdapter,
    UnCLIPScheduler,
    UNet2DConditionModel,
    VQModel,
)


WIDTH = parts.WIDTH
BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
BLOCKS = {
    "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 2,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
}  # fmt: skip


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


def adapter():
    return T2IAdapter(
        in_channels=3, channels=[8, 16], num_res_blocks=1, downscale_factor=8, adapter_type="full_adapter"
    ).eval()


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
