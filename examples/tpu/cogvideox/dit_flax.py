"""CogVideoX's transformer by itself, timed, with the flags of the earlier TPU script of that name.

Inputs are random and have the sizes of text-to-video: noise [B, F, C, H, W] and 226 tokens of prompt. A run is one call, from inputs on
the host to the output on the host. What each flag became: SCRIPTS.md, one folder up.
"""

import argparse
import functools
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from diffusers import CogVideoXPipeline, CogVideoXTransformer3DModel


sys.path.append(str(Path(__file__).resolve().parents[1]))

import flags  # noqa: E402


MODELS = {"480p": "THUDM/CogVideoX-5b", "720p": "THUDM/CogVideoX1.5-5B"}
SIZES = {"480p": (480, 720), "720p": (768, 1360)}
SPATIAL, TEMPORAL = 8, 4  # pixels and frames of one latent
FIRST_TIMESTEP = 999


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    models = ", ".join(f"{size} {name}" for size, name in MODELS.items())
    flags.add_transformer(parser, 81, SIZES, models)
    return parser


def make_inputs(transformer, frames: int, resolution: str, batch: int, seed: int, dtype: torch.dtype) -> dict:
    """Returns the arguments of the transformer's forward at the first step."""
    config, (height, width) = transformer.config, SIZES[resolution]
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(batch, *shape, generator=generator).to(dtype)

    # Frames of latents are padded to a multiple of those in one token, as by the pipeline.
    together = config.patch_size_t or 1
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


def main():
    parser = make_parser()
    args = parser.parse_args()
    transformer = flags.load_transformer(parser, args, CogVideoXTransformer3DModel, MODELS[args.resolution])
    dtype, config = getattr(torch, args.dtype), transformer.config
    inputs = make_inputs(transformer, args.frames, args.resolution, 2 if args.enable_cfg else 1, args.seed, dtype)
    batch, frames, _, height, width = inputs["hidden_states"].shape
    tokens = frames * height * width // (config.patch_size**2 * (config.patch_size_t or 1))
    print(
        f"{args.resolution}, {args.frames} frames, batch {batch}: {tokens:,} tokens and"
        f" {config.max_text_seq_length:,} of text"
    )
    run = functools.partial(flags.run_transformer, transformer, inputs)
    flags.time_runs(run, args.num_runs, args.profile, transformer=transformer)


if __name__ == "__main__":
    main()
