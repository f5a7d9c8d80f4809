"""HunyuanVideo-1.5's transformer by itself, timed, with the flags of the earlier TPU script. See README.md, beside it.

Inputs are random, of the sizes that text-to-video has: noise [B, C, F, H, W] beside empty conditions, 1000 tokens of prompt, none
of glyphs or of an image. A run is one call, from inputs on the host to its answer there.
"""

import argparse
import sys
from pathlib import Path

import torch

import diffusers.tpu
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.tpu.apps.cli.generate import where


sys.path.append(str(Path(__file__).resolve().parents[1]))

import flags  # noqa: E402


MODEL = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-{}_t2v"
SIZES = {"480p": (480, 848), "720p": (720, 1280)}
SPATIAL, TEMPORAL = 16, 4  # pixels and frames of one latent
TEXT, GLYPHS, IMAGE = 1000, 256, 729  # tokens as the pipeline has them
FIRST_TIMESTEP = 1000.0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--frames", type=int, default=121)
    add("--resolution", choices=tuple(SIZES), default="720p")
    add("--num_runs", type=int, default=3, help="after one that compiles")
    add(
        "--model_path", help=f"a directory or hub id with a folder transformer (default: {MODEL.format('RESOLUTION')})"
    )
    add("--enable_cfg", action="store_true", help="both guidance branches, a batch of two")
    add("--seed", type=int, default=42)
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    flags.add(parser)
    return parser


def make_inputs(config, frames: int, resolution: str, batch: int, seed: int, dtype: torch.dtype) -> dict:
    """Arguments of the transformer's forward at its first step; `config` is the transformer's."""
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


@torch.no_grad()
def run(transformer, inputs: dict) -> torch.Tensor:
    """The transformer's answer on the host."""
    return transformer(**inputs, return_dict=False)[0]


def main():
    parser = make_parser()
    args = parser.parse_args()
    config, target = flags.checked(parser, args, branches=2 if args.enable_cfg else 1)
    flags.at_least_one(parser, args, "frames", "num_runs")

    dtype = getattr(torch, args.dtype)
    transformer = HunyuanVideo15Transformer3DModel.from_pretrained(
        args.model_path or MODEL.format(args.resolution), subfolder="transformer", dtype=dtype
    )
    diffusers.tpu.install(transformer, config)
    print(f"{where(transformer, target)}; attention {config.attention}")
    batch = 2 if args.enable_cfg else 1
    inputs = make_inputs(transformer.config, args.frames, args.resolution, batch, args.seed, dtype)
    tokens = inputs["hidden_states"][0, 0].numel() // transformer.config.patch_size**2
    print(
        f"{args.resolution}, {args.frames} frames, batch {batch}: {tokens:,} tokens and {TEXT + GLYPHS + IMAGE:,} of text"
    )
    flags.time_runs(lambda: run(transformer, inputs), args.num_runs, args.profile, transformer=transformer)


if __name__ == "__main__":
    main()
