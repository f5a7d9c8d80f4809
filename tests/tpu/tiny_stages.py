"""Tiny pipelines of every kind that runs in stages, with the arguments of a small call of each."""

import PIL.Image
import torch

import tiny
import tiny_wan
from diffusers import (
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
    WanVACEPipeline,
    WanVACETransformer3DModel,
    WanVideoToVideoPipeline,
)


TRANSFORMER = {**tiny_wan.TRANSFORMER, "num_layers": 2}
CALL = {
    "prompt": "a red circle moving left",
    "height": 32,
    "width": 48,
    "num_frames": 5,
    "num_inference_steps": 3,
    "guidance_scale": 4.0,
    "max_sequence_length": 24,
}


def picture(seed: int, size=(48, 32), mode: str = "RGB") -> PIL.Image.Image:
    noise = torch.randint(256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return PIL.Image.fromarray(noise.numpy()).convert(mode)


def _transformer(**changes) -> WanTransformer3DModel:
    return WanTransformer3DModel(**{**TRANSFORMER, **changes}).eval()


def _parts(seed: int) -> dict:
    """Tokenizer, text encoder, VAE and scheduler, whose weights hang on `seed`."""
    pipe = tiny.wan(seed, layers=1)
    parts = {name: getattr(pipe, name) for name in ("tokenizer", "text_encoder", "scheduler")}
    return {**parts, "vae": tiny_wan.vae()}


def _clip() -> dict:
    return {"image_encoder": tiny_wan.image_encoder(), "image_processor": tiny_wan.image_processor()}


def text_to_video():
    """2.1: one transformer."""
    return WanPipeline(**_parts(0), transformer=_transformer()), {**CALL, "negative_prompt": "a circle"}


def two_experts():
    """2.2 A14B: two transformers, each with its guidance; two prompts at once, two videos of each."""
    pipe = WanPipeline(
        **_parts(1), transformer=_transformer(), transformer_2=_transformer(num_layers=1), boundary_ratio=0.9
    )
    return pipe, {
        **CALL,
        "prompt": ["a red circle", "moving left"],
        "guidance_scale_2": 2.5,
        "num_videos_per_prompt": 2,
    }


def image_to_video():
    """2.1: the transformer reads CLIP's tokens beside the encoded first frame."""
    pipe = WanImageToVideoPipeline(
        **_parts(2), **_clip(), transformer=_transformer(in_channels=36, image_dim=16, added_kv_proj_dim=48)
    )
    return pipe, {
        **CALL,
        "image": picture(1),
        "max_sequence_length": 512,
    }  # upstream takes what precedes 512 for CLIP's


def image_to_video_two_experts():
    """2.2 A14B: no CLIP; a first and a last frame."""
    pipe = WanImageToVideoPipeline(
        **_parts(3),
        transformer=_transformer(in_channels=36),
        transformer_2=_transformer(in_channels=36),
        boundary_ratio=0.8,
    )
    return pipe, {**CALL, "image": picture(2), "last_image": picture(3), "guidance_scale_2": 3.0}


def first_frame_kept():
    """2.2 TI2V-5B: the encoded first frame in place, a timestep for each token."""
    pipe = WanImageToVideoPipeline(**_parts(4), transformer=_transformer(), expand_timesteps=True)
    return pipe, {**CALL, "image": picture(4)}


def video_to_video():
    pipe = WanVideoToVideoPipeline(**_parts(5), transformer=_transformer())
    call = {**CALL, "video": [picture(n) for n in range(5)], "strength": 0.7}
    del call["num_frames"]
    return pipe, call


def vace():
    """A video, its mask and one picture to follow."""
    transformer = WanVACETransformer3DModel(**TRANSFORMER, vace_layers=[0, 1], vace_in_channels=96).eval()
    pipe = WanVACEPipeline(**_parts(6), transformer=transformer)
    video = [picture(n) for n in range(5)]
    masks = [picture(n, mode="L") for n in range(5)]
    return pipe, {**CALL, "video": video, "mask": masks, "reference_images": [picture(9)]}


def hunyuan_text_to_video():
    """HunyuanVideo-1.5: two text encoders, a call of `encode_prompt` for each prompt; a word in quotes is ByT5's."""
    call = {name: CALL[name] for name in ("height", "width", "num_frames", "num_inference_steps")}
    return tiny.hunyuan15(7), {**call, "prompt": 'a red circle with "left" on it', "negative_prompt": "a circle"}


def hunyuan_image_to_video():
    """HunyuanVideo-1.5: SigLIP's tokens beside the encoded first frame, whose size the video has."""
    call = {name: CALL[name] for name in ("prompt", "num_frames", "num_inference_steps")}
    return tiny.hunyuan15_i2v(8), {**call, "image": picture(5), "num_videos_per_prompt": 1}


BUILDERS = {
    f.__name__: f
    for f in (
        text_to_video,
        two_experts,
        image_to_video,
        image_to_video_two_experts,
        first_frame_kept,
        video_to_video,
        vace,
        hunyuan_text_to_video,
        hunyuan_image_to_video,
    )
}
