"""A hub cache of tiny random models under published names, so that scripts' own `from_pretrained` finds them offline.

It is laid out as huggingface_hub keeps what it downloaded (`models--ORG--NAME/{refs,snapshots,blobs}`). What a name stands
for is made when it is first asked for, and once for all names of one kind.
"""

import hashlib
import os
from pathlib import Path

import torch
from huggingface_hub.file_download import repo_folder_name
from peft import LoraConfig, get_peft_model_state_dict

import tiny_dit as images
import tiny_parts as parts
import tiny_unets as unets
import tiny_videos as videos
from conftest import draws_of
from diffusers import DiffusionPipeline, StableDiffusionXLPipeline, WanPipeline


def lora_xl(name: str):
    """A writer of a LoRA of SDXL's UNet in a file of this name."""

    def write(folder: Path):
        unet = unets.unet_xl()
        unet.add_adapter(LoraConfig(r=4, init_lora_weights=False, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
        StableDiffusionXLPipeline.save_lora_weights(folder, get_peft_model_state_dict(unet), weight_name=name)

    return write


def lora_wan(name: str):
    """A writer of a LoRA of Wan's transformer in a file of this name."""

    def write(folder: Path):
        transformer = videos.wan().transformer
        transformer.add_adapter(LoraConfig(r=4, init_lora_weights=False, target_modules=["to_q", "to_v", "net.2"]))
        WanPipeline.save_lora_weights(folder, get_peft_model_state_dict(transformer), weight_name=name)

    return write


def concept(token: str):
    """A writer of a textual inversion: one learned word."""

    def write(folder: Path):
        torch.save({token: 0.1 * torch.randn(parts.WIDTH)}, folder / "learned_embeds.bin")

    return write


few_steps = lora_wan("wan2.1_t2v_14b_lora_rank64_lightx2v_4step.safetensors")
pixel_art, cinematic, cat_toy = (
    lora_xl("pixel-art-xl.safetensors"), lora_xl("pytorch_lora_weights.safetensors"), concept("<cat-toy>"),
)  # fmt: skip
MAKERS = {
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": videos.wan,
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": videos.wan,
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": videos.wan_a14b,
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": videos.wan_ti2v,
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": videos.wan_i2v,
    "Wan-AI/Wan2.1-VACE-1.3B-diffusers": videos.wan_vace,
    "Skywork/SkyReels-V2-T2V-14B-720P-Diffusers": videos.skyreels_v2,
    "hunyuanvideo-community/HunyuanVideo": videos.hunyuan,
    "lllyasviel/FramePackI2V_HY": videos.framepack,
    "lllyasviel/flux_redux_bfl": videos.siglip_parts,
    "hunyuanvideo-community/HunyuanVideo-1.5-480p_t2v": videos.hunyuan15,
    "hunyuanvideo-community/HunyuanVideo-1.5-480p_i2v": videos.hunyuan15_i2v,
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v": videos.hunyuan15,
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_i2v": videos.hunyuan15_i2v,
    "THUDM/CogVideoX-2b": videos.cogvideox_2b,
    "THUDM/CogVideoX-5b": videos.cogvideox_5b,
    "THUDM/CogVideoX1.5-5B": videos.cogvideox_15,
    "THUDM/CogVideoX-5b-I2V": videos.cogvideox_i2v,
    "alibaba-pai/CogVideoX-Fun-V1.1-5b-Pose": videos.cogvideox_control,
    "Lightricks/LTX-Video": videos.ltx,
    "Lightricks/LTX-Video-0.9.5": videos.ltx_095,
    "genmo/mochi-1-preview": videos.mochi,
    "kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers": videos.kandinsky5,
    "stabilityai/stable-video-diffusion-img2vid-xt": videos.svd,
    "guoyww/animatediff-motion-adapter-v1-5-2": videos.motion_adapter,
    "maxin-cn/Latte-1": videos.latte,
    "stable-diffusion-v1-5/stable-diffusion-v1-5": unets.sd,
    "frankjoshua/toonyou_beta6": unets.sd,
    "SG161222/Realistic_Vision_V5.1_noVAE": unets.sd,
    "CompVis/stable-diffusion-v1-4": unets.sd,
    "SimianLuo/LCM_Dreamshaper_v7": unets.lcm,
    "lllyasviel/sd-controlnet-canny": unets.controlnet,
    "TencentARC/t2iadapter_color_sd14v1": unets.adapter,
    "stabilityai/stable-diffusion-xl-base-1.0": unets.sdxl,
    "stabilityai/stable-diffusion-xl-refiner-1.0": unets.sdxl_refiner,
    "diffusers/sdxl-instructpix2pix-768": unets.sdxl_pix2pix,
    "diffusers/controlnet-canny-sdxl-1.0": unets.sdxl_controlnet,
    "madebyollin/sdxl-vae-fp16-fix": parts.kl,
    "lightx2v/Wan2.1-Distill-Loras": few_steps,
    "nerijs/pixel-art-xl": pixel_art,
    "jbilcke-hf/sdxl-cinematic-1": cinematic,
    "sd-concepts-library/cat-toy": cat_toy,
    "stabilityai/stable-diffusion-3-medium-diffusers": images.sd3,
    "InstantX/SD3-Controlnet-Canny": images.sd3_controlnet,
    "black-forest-labs/FLUX.1-dev": images.flux_dev,
    "black-forest-labs/FLUX.1-schnell": images.flux_schnell,
    "black-forest-labs/FLUX.1-Fill-dev": images.flux_fill,
    "black-forest-labs/FLUX.1-Kontext-dev": images.flux_kontext,
    "black-forest-labs/FLUX.1-Redux-dev": images.flux_redux,
    "InstantX/FLUX.1-dev-controlnet-canny": images.flux_controlnet,
    "Qwen/Qwen-Image": images.qwen,
    "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers": images.sana,
    "PixArt-alpha/PixArt-XL-2-1024-MS": images.pixart_alpha,
    "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS": images.pixart_sigma,
    "Alpha-VLLM/Lumina-Image-2.0": images.lumina2,
    "fal/AuraFlow": images.auraflow,
    "Z-a-o/Z-Image-Turbo": images.z_image,
    "THUDM/CogView4-6B": images.cogview4,
    "kandinsky-community/kandinsky-2-2-prior": unets.kandinsky22_prior,
    "kandinsky-community/kandinsky-2-2-decoder": unets.kandinsky22,
}
HALVES = ("stabilityai/stable-diffusion-xl-base-1.0", "stabilityai/stable-video-diffusion-img2vid-xt")


class Hub:
    """The cache in `folder`, of the names that `lay` was called with."""

    def __init__(self, folder: Path):
        self.cache, self.made = folder / "hub", folder / "made"

    def lay(self, repo: str):
        """Put what the repository `repo` stands for into the cache. Raises KeyError for a name that stands for nothing."""
        made = self._make(MAKERS[repo], halves=repo in HALVES)
        home = self.cache / repo_folder_name(repo_id=repo, repo_type="model")
        if home.exists():
            return
        commit = hashlib.sha1(repo.encode()).hexdigest()
        for file in sorted(path for path in made.rglob("*") if path.is_file()):
            blob = home / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
            pointer = home / "snapshots" / commit / file.relative_to(made)
            for path in (blob, pointer):
                path.parent.mkdir(parents=True, exist_ok=True)
            if not blob.exists():
                os.link(file, blob)
            pointer.symlink_to(os.path.relpath(blob, pointer.parent))
        (home / "refs").mkdir()
        (home / "refs" / "main").write_text(commit)

    def _make(self, maker, halves: bool) -> Path:
        """The folder of what `maker` makes: a pipeline, a model, components by name, or files that it writes itself."""
        folder = self.made / f"{maker.__module__}.{maker.__qualname__}-{id(maker)}"
        if folder.exists():
            return folder
        folder.mkdir(parents=True)
        files = maker in (pixel_art, cinematic, cat_toy, few_steps)
        with draws_of(folder.name.rpartition("-")[0]):
            made = maker(*[folder] * files)
        if files:
            return folder
        for name, part in made.items() if isinstance(made, dict) else [(".", made)]:
            part.save_pretrained(folder / name)
        if halves:
            assert isinstance(made, DiffusionPipeline)
            made.to(torch.float16).save_pretrained(folder, variant="fp16")
        return folder
