"""A tiny PixArt-Sigma: the smallest pipeline with text encoder, transformer and VAE, for tests of what surrounds models."""

import torch
from transformers import T5Config, T5EncoderModel

from diffusers import AutoencoderKL, DDIMScheduler, PixArtSigmaPipeline, PixArtTransformer2DModel
from tiny import t5_tokenizer


def pixart(seed: int = 0) -> PixArtSigmaPipeline:
    torch.manual_seed(seed)
    return PixArtSigmaPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=T5EncoderModel(
            T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
        ).eval(),
        vae=AutoencoderKL(
            block_out_channels=(8,),
            down_block_types=("DownEncoderBlock2D",),
            up_block_types=("UpDecoderBlock2D",),
            latent_channels=4,
            norm_num_groups=2,
            layers_per_block=1,
            sample_size=16,
        ).eval(),
        transformer=PixArtTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            out_channels=8,
            num_layers=2,
            cross_attention_dim=16,
            caption_channels=16,
            sample_size=8,
            norm_num_groups=2,
            num_embeds_ada_norm=1000,
            use_additional_conditions=False,
        ).eval(),
        scheduler=DDIMScheduler(),
    )


def call(pipe: PixArtSigmaPipeline, **changes) -> torch.Tensor:
    """Two steps with guidance; latents unless told otherwise."""
    given = {
        "prompt": "a red circle",
        "negative_prompt": "",
        "num_inference_steps": 2,
        "height": 16,
        "width": 16,
        "max_sequence_length": 8,
        "output_type": "latent",
        "use_resolution_binning": False,
        "clean_caption": False,
        "generator": torch.Generator().manual_seed(11),
    }
    return pipe(**{**given, **changes}).images
