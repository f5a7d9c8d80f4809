"""HunyuanVideo-1.5's transformer by itself, timed, with the flags of the earlier TPU script.

Inputs are random and have the sizes of text-to-video: noise [B, C, F, H, W] with empty conditions, 1000 tokens of prompt, masked glyph
tokens and a zero image. A run is one call, from inputs on the host to the output on the host. What each flag became: SCRIPTS.md, one
folder up.
"""

import argparse
import functools
import sys
from pathlib import Path

import torch

from diffusers import HunyuanVideo15Transformer3DModel


sys.path.append(str(Path(__file__).resolve().parents[1]))

import flags  # noqa: E402


MODEL = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-{}_t2v"
SIZES = {"480p": (480, 848), "720p": (720, 1280)}
SPATIAL, TEMPORAL = 16, 4  # pixels and frames of one latent
TEXT, GLYPHS, IMAGE = 1000, 256, 729  # tokens as the pipeline has them
FIRST_TIMESTEP = 1000.0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    flags.add_transformer(parser, 121, SIZES, MODEL.format("RESOLUTION"))
    return parser


def make_inputs(config, frames: int, resolution: str, batch: int, seed: int, dtype: torch.dtype) -> dict:
    """Returns the arguments of the transformer's forward at the first step; `config` is the transformer's."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(batch, *shape, generator=generator).to(dtype)

    height, width = (side // SPATIAL for side in SIZES[resolution])
    latents = noise(config.out_channels, (frames - 1) // TEMPORAL + 1, height, width)
    conditions = latents.new_zeros(batch, config.in_channels - config.out_channels, *latents.shape[2:])
    return {
        "hidden_states": torch.cat([latents, conditions], dim=1),
        "timestep": latents.new_full((batch,), FIRST_TIMESTEP),
        "encoder_hidden_states": noise(TEXT, config.text_embed_dim),
        "encoder_attention_mask": latents.new_ones(batch, TEXT),
        "encoder_hidden_states_2": latents.new_zeros(batch, GLYPHS, config.text_embed_2_dim),
        "encoder_attention_mask_2": latents.new_zeros(batch, GLYPHS),
        "image_embeds": latents.new_zeros(batch, IMAGE, config.image_embed_dim),
    }


def main():
    parser = make_parser()
    args = parser.parse_args()
    model = MODEL.format(args.resolution)
    transformer = flags.load_transformer(parser, args, HunyuanVideo15Transformer3DModel, model)
    dtype, batch = getattr(torch, args.dtype), 2 if args.enable_cfg else 1
    inputs = make_inputs(transformer.config, args.frames, args.resolution, batch, args.seed, dtype)
    tokens = inputs["hidden_states"][0, 0].numel() // transformer.config.patch_size**2
    print(
        f"{args.resolution}, {args.frames} frames, batch {batch}: {tokens:,} tokens and {TEXT + GLYPHS + IMAGE:,} of text"
    )
    run = functools.partial(flags.run_transformer, transformer, inputs)
    flags.time_runs(run, args.num_runs, args.profile, transformer=transformer)


if __name__ == "__main__":
    main()
