"""CogVideoX's transformer by itself, timed, with the flags of the earlier TPU script of that name. See README.md, beside it.

Inputs are random, of the sizes that text-to-video has: noise [B, F, C, H, W] and 226 tokens of prompt. A run is one call, from inputs
on the host to its answer there.
"""

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

import diffusers.tpu
from diffusers import CogVideoXPipeline, CogVideoXTransformer3DModel
from diffusers.tpu.apps.cli.generate import where


sys.path.append(str(Path(__file__).resolve().parents[1]))

import flags  # noqa: E402


MODELS = {"480p": "THUDM/CogVideoX-5b", "720p": "THUDM/CogVideoX1.5-5B"}
SIZES = {"480p": (480, 720), "720p": (768, 1360)}
SPATIAL, TEMPORAL = 8, 4  # pixels and frames of one latent
FIRST_TIMESTEP = 999


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--frames", type=int, default=81)
    add("--resolution", choices=tuple(SIZES), default="720p", help="480p: 480 x 720; 720p: 768 x 1360")
    add("--num_runs", type=int, default=3, help="after one that compiles")
    models = ", ".join(f"{size} {name}" for size, name in MODELS.items())
    add("--model_path", help=f"a directory or hub id with a folder transformer (default: {models})")
    add("--enable_cfg", action="store_true", help="both guidance branches, a batch of two")
    add("--seed", type=int, default=42)
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    flags.add(parser)
    return parser


def make_inputs(transformer, frames: int, resolution: str, batch: int, seed: int, dtype: torch.dtype) -> dict:
    """Arguments of the transformer's forward at its first step."""
    config, (height, width) = transformer.config, SIZES[resolution]
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(batch, *shape, generator=generator).to(dtype)

    together = (
        config.patch_size_t or 1
    )  # frames of latents in one token: as the pipeline does, filled up to whole ones
    latent_frames = -(-((frames - 1) // TEMPORAL + 1) // together) * together
    latents = noise(latent_frames, config.in_channels, height // SPATIAL, width // SPATIAL)
    inputs = {
        "hidden_states": latents,
        "encoder_hidden_states": noise(config.max_text_seq_length, config.text_embed_dim),
        "timestep": torch.full((batch,), FIRST_TIMESTEP),
    }
    if config.use_rotary_positional_embeddings:
        pipe = SimpleNamespace(transformer=transformer, vae_scale_factor_spatial=SPATIAL)
        tables = CogVideoXPipeline._prepare_rotary_positional_embeddings
        inputs["image_rotary_emb"] = tables(pipe, height, width, latent_frames, torch.device("cpu"))
    return inputs


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
    transformer = CogVideoXTransformer3DModel.from_pretrained(
        args.model_path or MODELS[args.resolution], subfolder="transformer", dtype=dtype
    )
    diffusers.tpu.install(transformer, config)
    print(f"{where(transformer, target)}; attention {config.attention}")
    inputs = make_inputs(transformer, args.frames, args.resolution, 2 if args.enable_cfg else 1, args.seed, dtype)
    batch, frames, _, height, width = inputs["hidden_states"].shape
    patch = transformer.config.patch_size**2 * (transformer.config.patch_size_t or 1)
    text = transformer.config.max_text_seq_length
    print(
        f"{args.resolution}, {args.frames} frames, batch {batch}: {frames * height * width // patch:,} tokens and"
        f" {text:,} of text"
    )
    flags.time_runs(lambda: run(transformer, inputs), args.num_runs, args.profile, transformer=transformer)


if __name__ == "__main__":
    main()
