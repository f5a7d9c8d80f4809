"""Which model-card scripts are run: of upstream's installed files, video first."""

import torch

from cards import Card, Limits


CALL = '\nimage = pipeline("a photo of an astronaut riding a horse on mars").images[0]\n'
VIDEO_CALL = '\nvideo = pipe("a panda").frames[0]\nexport_to_video(video, "output.mp4", fps=8)\n'
COGVIDEOX_2B = "THUDM/CogVideoX-2b"
WAN_T2V = "Wan-AI/Wan2.1-T2V-14B-Diffusers"
HUNYUAN_T2V = "hunyuanvideo-community/HunyuanVideo-1.5-480p_t2v"
HUNYUAN_720P = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v"


def _wan(name: str) -> Card:
    return Card("pipelines/wan/pipeline_wan.py", renamed={WAN_T2V: name})


def _cogvideox(name: str) -> Card:
    return Card("pipelines/cogvideo/pipeline_cogvideox.py", renamed={COGVIDEOX_2B: name})


def _load_image():
    from diffusers.utils import load_image

    return load_image


CARDS = [
    Card("pipelines/wan/pipeline_wan.py"),
    _wan("Wan-AI/Wan2.1-T2V-1.3B-Diffusers"),
    _wan("Wan-AI/Wan2.2-T2V-A14B-Diffusers"),
    _wan("Wan-AI/Wan2.2-TI2V-5B-Diffusers"),
    Card("pipelines/wan/pipeline_wan_i2v.py"),
    Card("pipelines/wan/pipeline_wan_video2video.py"),
    Card("pipelines/wan/pipeline_wan_vace.py"),
    Card("pipelines/skyreels_v2/pipeline_skyreels_v2.py"),
    Card("pipelines/hunyuan_video/pipeline_hunyuan_video.py"),
    Card("pipelines/hunyuan_video/pipeline_hunyuan_video_framepack.py"),
    Card("pipelines/hunyuan_video1_5/pipeline_hunyuan_video1_5.py"),
    Card("pipelines/hunyuan_video1_5/pipeline_hunyuan_video1_5.py", renamed={HUNYUAN_T2V: HUNYUAN_720P}),
    Card("pipelines/hunyuan_video1_5/pipeline_hunyuan_video1_5_image2video.py", given={"load_image": _load_image()}),
    Card("pipelines/cogvideo/pipeline_cogvideox.py"),
    _cogvideox("THUDM/CogVideoX-5b"),
    _cogvideox("THUDM/CogVideoX1.5-5B"),
    Card("pipelines/cogvideo/pipeline_cogvideox_image2video.py"),
    Card("pipelines/cogvideo/pipeline_cogvideox_video2video.py"),
    Card("pipelines/cogvideo/pipeline_cogvideox_fun_control.py"),
    Card("hooks/pyramid_attention_broadcast.py", after=VIDEO_CALL),
    Card("pipelines/ltx/pipeline_ltx.py"),
    Card("pipelines/ltx/pipeline_ltx_image2video.py"),
    Card("pipelines/ltx/pipeline_ltx_condition.py", limits=Limits(num_frames=161, pixels=64)),
    Card("pipelines/mochi/pipeline_mochi.py"),
    Card("pipelines/kandinsky5/pipeline_kandinsky.py"),
    Card("pipelines/stable_video_diffusion/pipeline_stable_video_diffusion.py", given={"torch": torch}),
    Card("pipelines/animatediff/pipeline_animatediff.py"),
    Card("pipelines/latte/pipeline_latte.py"),
    Card("pipelines/stable_diffusion/pipeline_stable_diffusion.py"),
    Card("pipelines/stable_diffusion/pipeline_stable_diffusion_img2img.py"),
    Card("pipelines/pag/pipeline_pag_sd.py"),
    Card("pipelines/controlnet/pipeline_controlnet.py"),
    Card("pipelines/t2i_adapter/pipeline_stable_diffusion_adapter.py"),
    Card("loaders/textual_inversion.py"),
    Card("pipelines/latent_consistency_models/pipeline_latent_consistency_text2img.py"),
    Card("pipelines/latent_consistency_models/pipeline_latent_consistency_img2img.py"),
    Card("pipelines/stable_diffusion_xl/pipeline_stable_diffusion_xl.py"),
    Card("pipelines/stable_diffusion_xl/pipeline_stable_diffusion_xl_img2img.py"),
    Card("pipelines/stable_diffusion_xl/pipeline_stable_diffusion_xl_inpaint.py"),
    Card("pipelines/stable_diffusion_xl/pipeline_stable_diffusion_xl_instruct_pix2pix.py"),
    Card("pipelines/pag/pipeline_pag_sd_xl.py"),
    Card("pipelines/controlnet/pipeline_controlnet_sd_xl.py"),
    Card("loaders/lora_base.py", 0, after=CALL),
    Card("loaders/lora_base.py", 1, after=CALL),
    Card("loaders/lora_base.py", 2, after=CALL),
    Card("loaders/peft.py", 0, after=CALL),
    Card("pipelines/stable_diffusion_3/pipeline_stable_diffusion_3.py"),
    Card("pipelines/stable_diffusion_3/pipeline_stable_diffusion_3_img2img.py"),
    Card("pipelines/stable_diffusion_3/pipeline_stable_diffusion_3_inpaint.py"),
    Card("pipelines/controlnet_sd3/pipeline_stable_diffusion_3_controlnet.py"),
    Card("pipelines/flux/pipeline_flux.py"),
    Card("pipelines/flux/pipeline_flux_img2img.py"),
    Card("pipelines/flux/pipeline_flux_inpaint.py"),
    Card("pipelines/flux/pipeline_flux_fill.py"),
    Card("pipelines/flux/pipeline_flux_kontext.py"),
    Card("pipelines/flux/pipeline_flux_controlnet.py"),
    Card("pipelines/flux/pipeline_flux_prior_redux.py"),
    Card("hooks/taylorseer_cache.py", after='\nimage = pipe("a cat").images[0]\n'),
    Card("pipelines/qwenimage/pipeline_qwenimage.py"),
    Card("pipelines/qwenimage/pipeline_qwenimage_img2img.py"),
    Card("pipelines/pipeline_utils.py", 1),
    Card("pipelines/sana/pipeline_sana.py"),
    Card("pipelines/pixart_alpha/pipeline_pixart_alpha.py"),
    Card("pipelines/pixart_alpha/pipeline_pixart_sigma.py"),
    Card("pipelines/lumina2/pipeline_lumina2.py"),
    Card("pipelines/aura_flow/pipeline_aura_flow.py"),
    Card("pipelines/z_image/pipeline_z_image.py"),
    Card("pipelines/z_image/pipeline_z_image_img2img.py", limits=Limits(height=96)),
    Card("pipelines/cogview4/pipeline_cogview4.py"),
    Card("hooks/first_block_cache.py"),
    Card("pipelines/kandinsky2_2/pipeline_kandinsky2_2.py"),
]

# In the fast set: a video and a picture, of those that are compiled soonest (Wan's takes 20 s).
FAST = [card for card in CARDS if card.name in ("ltx", "flux")]
