"""What the pipelines need beside their annotations: changes to components, settings, and arguments of a call.

Recipes whose pattern matches a pipeline's whole name apply one after another. Of a component: a dictionary is changes to
what its annotation makes, a class makes it of that class, a function makes it, None leaves it out.
"""

import re
from dataclasses import dataclass, field

import torch
from components import bert_tokenizer, ldm_bert, noise_image, noise_video, of, qwen_vl_processor, t5_gemma, vocoder
from shrinking import WIDTH, tiny

import diffusers
import tiny as parts


@dataclass(frozen=True)
class Recipe:
    """`parts`: of components and settings; `call`: of arguments, a function of (seed, height, width) makes one; None leaves it out."""

    pattern: str
    parts: dict = field(default_factory=dict)
    call: dict = field(default_factory=dict)


def recipe(pattern: str, call: dict | None = None, **components) -> Recipe:
    return Recipe(pattern, components, call or {})


def make(name: str, **changes):
    """A function that makes a tiny model of upstream's class of this name."""
    return lambda: tiny(of(name), **changes)


def embeds(*shape: int):
    """What an encoder or another pipeline would have made."""
    return lambda seed, *_: torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def nothing(*_):
    """An argument that is given, and None."""


def scaled(numerator: int, denominator: int = 1):
    return lambda _, height, __: height * numerator // denominator


KL16 = {"latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False, "shift_factor": 0.1159}
XL = {
    "addition_embed_type": "text_time", "addition_time_embed_dim": 8, "transformer_layers_per_block": (1, 2),
    "projection_class_embeddings_input_dim": 80, "use_linear_projection": True, "cross_attention_dim": 64,
    "attention_head_dim": (2, 4), "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
}  # fmt: skip
UNET_XL = {**XL, "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}
FLOW_UNIPC = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
SEES_IMAGES = {"in_channels": 36, "image_dim": 16, "added_kv_proj_dim": 48}
SPATIAL = {"norm_type": "spatial", "block_out_channels": (32, 32, 32, 32), "norm_num_groups": 4}
AUDIO_VAE = {
    "in_channels": 1, "out_channels": 1, "block_out_channels": (8, 8, 8), "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
}  # fmt: skip
KANDINSKY = {
    "in_channels": 4, "out_channels": 8, "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
    "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"), "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
    "encoder_hid_dim": WIDTH, "attention_head_dim": 4, "resnet_time_scale_shift": "scale_shift",
}  # fmt: skip
CASCADE = {"clip_image_in_channels": WIDTH, "clip_text_in_channels": WIDTH}
IMAGE_EMBEDS = {"image_embeds": embeds(1, WIDTH), "negative_image_embeds": embeds(1, WIDTH)}
PIXELS = {"height": scaled(1, 4), "width": scaled(1, 4)}


def prior():
    made = tiny(of("PriorTransformer"))
    made.clip_std.data.fill_(0.5)
    return made


RECIPES = [
    # Checkers of pictures are left out, but for one; of the other kind a stand-in lets everything pass
    recipe(".*", safety_checker=None, requires_safety_checker=False),
    recipe("Cosmos.*", safety_checker={}),
    # Widths of latents and of text
    recipe(
        "Flux(?!2).*|Chroma.*|Bria|OvisImage|LongCatImage.*|StableDiffusion3.*|CogView[34].*|Lumina2|ZImage.*|HiDreamImage|VisualCloze.*",
        vae=KL16,
    ),
    recipe("StableDiffusion3.*", text_encoder_3={"d_model": 2 * WIDTH}),
    recipe("StableDiffusionXL.*|AnimateDiffSDXL|TextToVideoZeroSDXL|Kolors.*", unet=UNET_XL, controlnet=XL),
    recipe("StableDiffusionXL.*InstructPix2Pix|StableDiffusionInstructPix2Pix", unet={"in_channels": 8}),
    recipe("Kolors.*", unet={"cross_attention_dim": WIDTH}),
    recipe("StableDiffusion", safety_checker=parts.safety_checker, requires_safety_checker=True),
    recipe("StableDiffusionXLAdapter", adapter={"adapter_type": "full_adapter_xl", "downscale_factor": 16}),
    recipe("StableDiffusionXLControlNetUnion.*", {"control_mode": [0], "control_image": lambda *size: [noise_image(*size)]}),
    recipe("StableDiffusionDepth2Img", unet={"in_channels": 5}),
    recipe("StableDiffusionUpscale", unet={"in_channels": 7, "num_class_embeds": 1000}),
    recipe("StableDiffusionGLIGEN.*", {"gligen_phrases": ["a cat"], "gligen_boxes": [[0.1, 0.2, 0.5, 0.6]]}, unet={"attention_type": "gated"}),
    recipe("StableDiffusionAttendAndExcite", {"token_indices": [2]}),
    recipe("StableDiffusionModelEditing", scheduler=diffusers.DDIMScheduler),
    recipe("StableDiffusionParadigms", scheduler=diffusers.DDIMParallelScheduler),
    recipe("CycleDiffusion", {"source_prompt": "a blue square"}),
    recipe("TextToVideoZero.*", {"t0": 0, "t1": 1, "video_length": 2}),
    recipe("StableVideoDiffusion", image_encoder={"size": 224}),
    recipe("I2VGenXL", {"clip_skip": nothing}),
    recipe("PIA", motion_adapter={"conv_in_channels": 9}),
    recipe("PaintByExample", {"example_image": noise_image}, unet={"in_channels": 9}),
    recipe("LatentConsistency.*", unet={"time_cond_proj_dim": 16}),
    recipe("LDM", unet={"in_channels": 4, "out_channels": 4}),
    recipe("LDMSuperResolution", unet={"in_channels": 6}, vqvae={"latent_channels": 3, "vq_embed_dim": 3}),
    recipe("LDMTextToImage", vqvae=make("AutoencoderKL"), bert=ldm_bert, tokenizer=bert_tokenizer, unet=make("UNet2DConditionModel")),
    recipe("DanceDiffusion", {"audio_length_in_s": 0.02}, scheduler=diffusers.IPNDMScheduler),
    recipe("DiT", {"class_labels": [1]}),
    recipe("HiDreamImage", tokenizer_4=parts.tokens),
    recipe("CycleDiffusion", scheduler={"set_alpha_to_one": False, "steps_offset": 1, "clip_sample": False}),
    recipe(
        "ShapE.*",
        {"frame_size": 8, "height": None, "width": None},
        prior={
            "num_embeddings": 16, "embedding_dim": 16, "embedding_proj_dim": WIDTH, "time_embed_dim": 64, "additional_embeddings": 0,
            "num_attention_heads": 2, "attention_head_dim": 8, "encoder_hid_proj_type": None, "added_emb_type": None, "clip_embed_dim": 2 * 16,
        },
    ),
    recipe("ShapEImg2Img", prior={"embedding_proj_dim": 16, "embedding_proj_norm_type": "layer", "num_embeddings": 16}),
    recipe("StableCascade(Prior|Combined)", prior=CASCADE, prior_prior=CASCADE),
    recipe("StableCascadeCombined", {"prior_num_inference_steps": 2, "height": scaled(2), "width": scaled(2)}),
    recipe(
        "StableCascade(Decoder|Combined)",
        decoder={"in_channels": 4, "out_channels": 4, "patch_size": 2, "effnet_in_channels": 16, "clip_image_in_channels": None},
    ),
    recipe("StableCascadeDecoder", {"image_embeddings": embeds(1, 16, 3, 3)}),
    recipe("StableAudio3(AudioToAudio|Inpaint)", {"audio": embeds(1, 2, 2048)}),
    recipe("StableAudio3.*", {"audio_end_in_s": 0.5}),
    recipe(
        "UnCLIP.*",
        decoder={
            **{name: value for name, value in KANDINSKY.items() if name != "encoder_hid_dim"}, "class_embed_type": "identity",
        },
        super_res_first={"in_channels": 6}, super_res_last={"in_channels": 6},
    ),
    recipe("PNDM", {"num_inference_steps": 8}),
    recipe("Amused.*", scheduler=lambda: diffusers.AmusedScheduler(mask_token_id=32), vqvae={"vq_embed_dim": None, "latent_channels": WIDTH, "lookup_from_codebook": True}),
    recipe("UnCLIP", prior=prior),
    recipe(
        "MarigoldDepth", unet={"in_channels": 8}, prediction_type="depth", default_denoising_steps=2, default_processing_resolution=64
    ),
    recipe(
        "MarigoldNormals", unet={"in_channels": 8}, prediction_type="normals", default_denoising_steps=2,
        default_processing_resolution=64,
    ),
    recipe(
        "MarigoldIntrinsics", unet={"in_channels": 12, "out_channels": 8}, prediction_type="intrinsics", default_denoising_steps=2,
        default_processing_resolution=64, target_properties=lambda: {"target_names": ["albedo", "roughness"]},
    ),
    # Kandinsky
    recipe("Kandinsky(V22)?(Prior.*|.*Combined)", prior=prior, prior_prior=prior),
    recipe("Kandinsky(?![356]).*", movq=SPATIAL, unet=KANDINSKY),
    recipe("Kandinsky3.*", movq=SPATIAL),
    recipe("KandinskyV22.*", unet={"addition_embed_type": "image", "encoder_hid_dim_type": "image_proj"}),
    recipe("KandinskyV22Inpaint.*|KandinskyInpaint.*", unet={"in_channels": 9}),
    recipe("KandinskyV22Controlnet.*", {"hint": embeds(1, 3, 64, 64)}, unet={"addition_embed_type": "image_hint", "in_channels": 8}),
    recipe("Kandinsky(Img2Img|Inpaint)?(Combined)?", unet={"addition_embed_type": "text_image", "encoder_hid_dim_type": "text_image_proj"}),
    recipe("Kandinsky(V22)?(Img2Img|Inpaint|Controlnet|ControlnetImg2Img)?", IMAGE_EMBEDS),
    recipe("Kandinsky.*Combined", {"prior_num_inference_steps": 2}),
    recipe("Kandinsky5I2I", transformer={"visual_cond": True}),
    recipe("Kandinsky5I2V", transformer={"visual_cond": True}),
    # DeepFloyd
    recipe("IF.*", PIXELS, unet={"in_channels": 3, "out_channels": 6, "sample_size": 16}, scheduler={"variance_type": "learned_range"}),
    recipe("IF.*SuperResolution", {"original_image": noise_image}, unet={"in_channels": 6, "class_embed_type": "timestep"}),
    # Image transformers
    recipe("FluxControl(Img2Img|Inpaint)?", transformer={"in_channels": 128, "out_channels": 64}),
    recipe("FluxFill", transformer={"in_channels": 384, "out_channels": 64}),
    recipe("FluxKontext.*", {"max_area": scaled(64), "_auto_resize": False}),
    recipe("Flux2Klein.*", {"text_encoder_out_layers": (1, 2, 3)}),
    recipe("Flux2", {"text_encoder_out_layers": (0, 1, 2)}, tokenizer=parts.chat_tokenizer),
    recipe("CogView4Control", transformer={"in_channels": 32}),
    recipe("PixArtSigma.*", transformer={"use_additional_conditions": False}),
    recipe("Sana(Sprint.*)", transformer={"guidance_embeds": True}, scheduler=lambda: diffusers.SCMScheduler(prediction_type="trigflow")),
    recipe("SanaSprintImg2Img", {"num_inference_steps": 2}),
    recipe("HiDreamImage", {"max_sequence_length": 64}),
    recipe("HunyuanDiT.*", text_encoder_2={}, tokenizer_2={}),
    recipe("HunyuanImageRefiner", transformer={"in_channels": 16, "out_channels": 8, "patch_size": (1, 1, 1), "rope_axes_dim": (4, 6, 6)}),
    recipe("Krea2", text_encoder_select_layers=(0, 1), tokenizer=parts.chat_tokenizer),
    recipe("ZImage.*", text_encoder=parts.qwen3, tokenizer=parts.chat_tokenizer),
    recipe("PRXPixel", text_encoder=lambda: t5_gemma().encoder),
    recipe("(QwenImageEdit|LongCatImageEdit).*", processor=qwen_vl_processor, text_processor=qwen_vl_processor),
    recipe("QwenImageControlNetInpaint", controlnet={"extra_condition_channels": 4}),
    recipe("StableDiffusion3ControlNetInpainting", controlnet={"extra_conditioning_channels": 1}),
    recipe("BriaFibo(Edit)?", vae=parts.wan_vae_22, transformer={"in_channels": 48}),
    recipe("PRX", vae=KL16),
    recipe("NucleusMoEImage", text_encoder={"num_hidden_layers": 8}),
    recipe("BriaFibo(Edit)?", text_encoder={"vocab_size": 128256}),
    recipe("HunyuanDiTControlNet", transformer={"num_layers": 4}),
    recipe("StableDiffusionLatentUpscale", unet={"in_channels": 8, "time_cond_proj_dim": 128 + WIDTH}),
    recipe("StableDiffusionGLIGENTextImage", unet={"attention_type": "gated-text-image"}),
    recipe("WuerstchenCombined", {"height": scaled(2), "width": scaled(2)}),
    recipe("WuerstchenDecoder", {"image_embeddings": embeds(1, 16, 3, 3)}),
    recipe("ZImageControlNetInpaint", controlnet={"control_in_dim": 33, "add_control_noise_refiner": "control_noise_refiner"}),
    recipe(
        "VisualCloze.*",
        {"task_prompt": "a", "content_prompt": "b", "upsampling_height": scaled(1), "upsampling_width": scaled(1),
         "image": lambda *size: [[noise_image(*size), noise_image(*size)], [noise_image(*size), None]]},
        transformer={"in_channels": 384, "out_channels": 64}, resolution=64,
    ),
    # Video
    recipe("Wan(?!Animate).*", scheduler=lambda: diffusers.UniPCMultistepScheduler(**FLOW_UNIPC)),
    recipe("Wan|WanVACE|LucyEdit", transformer={}),
    recipe("LucyEdit", transformer={"in_channels": 32}),
    recipe("(Wan|SkyReelsV2)ImageToVideo|ChronoEdit", transformer=SEES_IMAGES, image_encoder={}, image_processor={}),
    recipe(
        "WanAnimate", {"pose_video": noise_video, "face_video": lambda seed, *_: noise_video(seed, 16, 16), "segment_frame_length": 9,
                       "prev_segment_conditioning_frames": 1, "num_frames": None},
        transformer={"in_channels": 36},
    ),
    recipe("SkyReelsV2DiffusionForcingVideoToVideo", {"overlap_history": 5, "base_num_frames": 9, "num_frames": 13}),
    recipe("CogVideoX(ImageToVideo|FunControl)", transformer={"in_channels": 8}),
    recipe("HunyuanSkyreelsImageToVideo", transformer={"in_channels": 8}),
    recipe("HunyuanVideoImageToVideo", transformer={"image_condition_type": "token_replace"}),
    recipe("SanaVideo|SanaImageToVideo", vae=make("AutoencoderKLWan")),
    recipe("CosmosTextToWorld", transformer={"in_channels": 4, "out_channels": 4}),
    recipe("CosmosVideoToWorld", {"image": None}, transformer={"in_channels": 5, "out_channels": 4}),
    recipe("Cosmos2VideoToWorld", {"video": None}, transformer={"in_channels": 17}),
    recipe("Cosmos2(?!_).*", {"output_type": "latent"}),
    recipe("LTX2ImageToVideo", {"crf": 0}),
    recipe("Cosmos2_5.*", tokenizer=parts.chat_tokenizer, transformer={"in_channels": 17}),
    recipe("AnyFlowFAR|Helios.*", {"image": None, "video": None}),
    recipe("MotifVideo.*", guider=diffusers.ClassifierFreeGuidance),
    recipe(
        "LTX2.*",
        {"max_sequence_length": 64, "spatio_temporal_guidance_blocks": [0], "output_type": "np", "sigmas": None},
    ),
    recipe(
        "LTXI2VLongMultiPrompt",
        {"decode_horizontal_tiles": 1, "decode_vertical_tiles": 1, "decode_overlap": 1, "cond_image": noise_image, "temporal_tile_size": 16,
         "temporal_overlap": 8},
    ),
    recipe("Cosmos3Omni", {"image": None, "video": None}, text_tokenizer=parts.chat_tokenizer),
    # Audio
    recipe(
        "AudioLDM|MusicLDM", {"audio_length_in_s": 0.016}, vae=AUDIO_VAE, vocoder=vocoder,
        unet={"class_embed_type": "simple_projection", "projection_class_embeddings_input_dim": WIDTH, "class_embeddings_concat": True,
              "cross_attention_dim": (8, 16)},
        feature_extractor=None,
    ),
    recipe("StableAudio", {"audio_end_in_s": 0.5}, vae={"sampling_rate": 2048}),
    recipe("LongCatAudioDiT", {"audio_duration_s": 0.5}),
]  # fmt: skip


def recipes_of(name: str) -> tuple[dict, dict]:
    """Of a pipeline's name: components and settings, arguments of a call."""
    components, call = {}, {}
    for one in RECIPES:
        if re.fullmatch(one.pattern, name.removesuffix("Pipeline")):
            for key, value in one.parts.items():
                both = isinstance(value, dict) and isinstance(components.get(key), dict)
                components[key] = {**components[key], **value} if both else value
            call.update(one.call)
    return components, call
