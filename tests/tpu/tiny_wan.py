"""Tiny random pipelines of every kind of Wan, of the real classes, and a small call of each."""

import inspect

import PIL.Image
import torch
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

import tiny
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    WanAnimatePipeline,
    WanAnimateTransformer3DModel,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
    WanVACEPipeline,
    WanVACETransformer3DModel,
    WanVideoToVideoPipeline,
)


TRANSFORMER = {
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 64,
    "num_layers": 3,
    "rope_max_seq_len": 64,
}
IMAGE_WIDTH = 16  # of a token of the image encoder
VAE = {"base_dim": 6, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1, "temperal_downsample": [False, True, True]}
WORDS = "a red circle moving left"


def vae(**changes):
    return AutoencoderKLWan(**{**VAE, "z_dim": 16, **changes}).eval()


def vae_22():
    """As Wan 2.2's TI2V: 48 channels of latents, pixels in patches, twice as coarse."""
    return vae(
        decoder_base_dim=8, z_dim=48, is_residual=True, patch_size=2, in_channels=12, out_channels=12,
        scale_factor_spatial=16, latents_mean=[0.1] * 48, latents_std=[1.5] * 48,
    )  # fmt: skip


def transformer(cls=WanTransformer3DModel, **changes):
    return tiny.with_uneven_norms(cls(**{**TRANSFORMER, **changes}).eval())


def image_encoder():
    config = CLIPVisionConfig(
        hidden_size=IMAGE_WIDTH, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=28,
        patch_size=14,
    )  # fmt: skip
    return CLIPVisionModel(config).eval()


def image_processor():
    return CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})


def _with_image(frames=1):
    """What a transformer takes that sees the first frame beside the latents, and the image encoder's 5 tokens of each."""
    image = {"image_dim": IMAGE_WIDTH, "added_kv_proj_dim": 48}
    return {"in_channels": 36, **image, **({"pos_embed_seq_len": 5 * frames} if frames > 1 else {})}


def t2v(cls=WanPipeline, **components):
    """Wan 2.1, from text; `components` and settings replace or join."""
    takes = inspect.signature(cls.__init__).parameters
    common = {name: part for name, part in tiny.wan().components.items() if name in takes and name not in components}
    return cls(**{**common, **components})


def flow(shift: float = 3.0):
    return FlowMatchEulerDiscreteScheduler(shift=shift)


def i2v(frames: int = 1):
    return t2v(
        WanImageToVideoPipeline, transformer=transformer(**_with_image(frames)), image_encoder=image_encoder(),
        image_processor=image_processor(), scheduler=flow(),
    )  # fmt: skip


def a14b():
    """Two experts; at three steps the first does two."""
    return t2v(transformer_2=transformer(), boundary_ratio=0.9)


def a14b_i2v():
    return t2v(
        WanImageToVideoPipeline, transformer=transformer(in_channels=36), transformer_2=transformer(in_channels=36),
        boundary_ratio=0.9, image_encoder=None, image_processor=None,
    )  # fmt: skip


def ti2v(cls=WanPipeline):
    extra = {"image_encoder": None, "image_processor": None} if cls is WanImageToVideoPipeline else {}
    return t2v(
        cls, vae=vae_22(), transformer=transformer(in_channels=48, out_channels=48), expand_timesteps=True, **extra
    )


def v2v():
    return t2v(WanVideoToVideoPipeline, vae=vae())


def vace(layers=3, vace_layers=(0, 2), **components):
    return t2v(
        WanVACEPipeline, scheduler=flow(), **components,
        transformer=transformer(WanVACETransformer3DModel, num_layers=layers, vace_layers=list(vace_layers)),
    )  # fmt: skip


def animate():
    return t2v(
        WanAnimatePipeline, image_encoder=image_encoder(), image_processor=image_processor(),
        transformer=transformer(
            WanAnimateTransformer3DModel, in_channels=36, latent_channels=16, image_dim=IMAGE_WIDTH, added_kv_proj_dim=48,
            motion_encoder_channel_sizes={"4": 8, "8": 8, "16": 8}, motion_encoder_size=16, motion_style_dim=8,
            motion_dim=4, motion_encoder_dim=16, face_encoder_hidden_dim=16, face_encoder_num_heads=2,
            inject_face_latents_blocks=2, num_layers=4,
        ),
    )  # fmt: skip


def picture(height: int, width: int) -> PIL.Image.Image:
    return PIL.Image.effect_noise((width, height), 60).convert("RGB")


def pictures(count: int, height: int, width: int) -> list:
    return [picture(height, width) for _ in range(count)]


# With an image encoder upstream takes the last 512 tokens for the text's.
TEXT_BESIDE_IMAGE = {"max_sequence_length": 512}


def _masked(frames, height, width):
    masks = [mask.convert("L") for mask in pictures(frames, height, width)]
    return {"video": pictures(frames, height, width), "mask": masks, "reference_images": picture(30, 30)}


def _animated(frames, height, width):
    """Two segments, the second begins with the last frame of the first."""
    videos = {"pose_video": pictures(2 * frames - 1, height, width), "face_video": pictures(2 * frames - 1, 16, 16)}
    segments = {"num_frames": None, "segment_frame_length": frames, "prev_segment_conditioning_frames": 1}
    return {**TEXT_BESIDE_IMAGE, **videos, **segments, "image": picture(height, width)}


# Each kind of Wan: how it is built, and what its call takes beside a prompt, for a video of this size.
KINDS = {
    "t2v": (t2v, lambda *size: {}),
    "a14b": (a14b, lambda *size: {"guidance_scale_2": 2.5}),
    "ti2v": (ti2v, lambda *size: {}),
    "i2v": (i2v, lambda _, *size: {**TEXT_BESIDE_IMAGE, "image": picture(*size)}),
    "flf2v": (
        lambda: i2v(frames=2), lambda _, *size: {**TEXT_BESIDE_IMAGE, "image": picture(*size), "last_image": picture(*size)}
    ),
    "a14b-i2v": (a14b_i2v, lambda _, *size: {"image": picture(*size), "guidance_scale_2": 2.5}),
    "ti2v-i2v": (lambda: ti2v(WanImageToVideoPipeline), lambda _, *size: {"image": picture(*size)}),
    "v2v": (v2v, lambda *size: {"video": pictures(*size), "num_frames": None, "strength": 0.7}),
    "vace": (vace, _masked),
    "animate": (animate, _animated),
}  # fmt: skip


def build(kind: str, seed: int = 0):
    torch.manual_seed(seed)
    pipe = KINDS[kind][0]()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def arguments(kind: str, frames: int = 5, height: int = 32, width: int = 48, **changes) -> dict:
    """Arguments of a small call, without a generator; of a coarser VAE the video is twice as large."""
    if kind.startswith("ti2v"):
        height, width = 2 * height, 2 * width
    given = {
        "prompt": WORDS,
        "num_inference_steps": 3,
        "output_type": "np",
        "height": height,
        "width": width,
        "num_frames": frames,
        "guidance_scale": 4.0,
        "max_sequence_length": 24,
        **KINDS[kind][1](frames, height, width),
        **changes,
    }
    return {name: value for name, value in given.items() if value is not None}


def fresh(seed: int = 11) -> dict:
    return {"generator": torch.Generator().manual_seed(seed)}
