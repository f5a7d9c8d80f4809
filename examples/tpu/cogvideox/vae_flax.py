"""CogVideoX's VAE by itself, timed: upstream's module on the TPU path, or its form in Flax NNX.

A random video [B, C, F, H, W] is encoded and its latents are decoded; with `--only decode` the latents are random. A run is one call,
from the input on the host to the output on the host. What each flag became: SCRIPTS.md, one folder up.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import diffusers.tpu
from diffusers import AutoencoderKLCogVideoX
from diffusers.tpu.apps.cli.generate import where
from diffusers.tpu.pipelines.plans import flax_class


sys.path.append(str(Path(__file__).resolve().parents[1]))

import flags  # noqa: E402


MODEL = "THUDM/CogVideoX1.5-5B"
SPATIAL, TEMPORAL = 8, 4  # pixels and frames of one latent
CHANNELS_LAST, CHANNELS_FIRST = (0, 2, 3, 4, 1), (0, 4, 1, 2, 3)
ENTRIES = ("encode", "decode")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--model_id", default=MODEL, help="a directory or hub id with a folder vae")
    add("--frames", type=int, default=81)
    add("--height", type=int, default=768)
    add("--width", type=int, default=1360)
    add("--batch", type=int, default=1)
    add("--only", choices=ENTRIES, help="default: both")
    add("--flax", action="store_true", help="the VAE in Flax NNX, without torch; else upstream's module")
    add("--enable_tiling", action="store_true", help="in tiles, blended where they overlap")
    add("--compare", action="store_true", help="how far from upstream's module, on the host in float32")
    add("--num_runs", type=int, default=3, help="after one that compiles")
    add("--seed", type=int, default=42)
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--profile", metavar="DIR", help="write a JAX profiler trace of the runs that count")
    return parser


@torch.no_grad()
def upstreams(vae, entry: str, x: torch.Tensor) -> torch.Tensor:
    """Returns the latents' means, or the video, from upstream's module."""
    return vae.encode(x).latent_dist.mode() if entry == "encode" else vae.decode(x).sample


def in_flax(vae, entry: str, x: torch.Tensor) -> torch.Tensor:
    """Returns the same from the Flax module, whose arrays are channels-last."""
    x = x.permute(CHANNELS_LAST).float().numpy()
    answer = vae.encode(x).mode() if entry == "encode" else vae.decode(x)
    return torch.from_numpy(np.array(answer, np.float32)).permute(CHANNELS_FIRST)


def where_in_flax(vae, target) -> str:
    """Returns one line about the mesh and chips of the Flax module, as `where` does for upstream's."""
    mesh = ", ".join(f"{axis} {degree}" for axis, degree in vae.mesh.shape.items())
    return f"Flax NNX; mesh {mesh}; " + ("simulated chips: these are not TPU times" if target.simulated else "TPU")


def load(args: argparse.Namespace) -> tuple[object, Callable]:
    """Returns the VAE on the chips and the function that calls it, `upstreams` or `in_flax`."""
    if args.flax:
        import jax.numpy as jnp

        cls = flax_class("AutoencoderKLCogVideoX")
        vae, run = cls.from_pretrained(args.model_id, subfolder="vae", dtype=getattr(jnp, args.dtype)), in_flax
    else:
        dtype = getattr(torch, args.dtype)
        vae = AutoencoderKLCogVideoX.from_pretrained(args.model_id, subfolder="vae", dtype=dtype)
        vae, run = diffusers.tpu.install(vae), upstreams
    if args.enable_tiling:
        vae.enable_tiling()
    return vae, run


def first_input(config, args: argparse.Namespace) -> torch.Tensor:
    """Returns a random video in [-1, 1], or random latents with `--only decode`, in the dtype of `args`."""
    generator = torch.Generator().manual_seed(args.seed)
    if args.only == "decode":
        latents = (args.frames - 1) // TEMPORAL + 1, args.height // SPATIAL, args.width // SPATIAL
        x = torch.randn(args.batch, config["latent_channels"], *latents, generator=generator)
    else:
        x = torch.rand(args.batch, 3, args.frames, args.height, args.width, generator=generator) * 2 - 1
    return x.to(getattr(torch, args.dtype))


def compared(answer: torch.Tensor, expected: torch.Tensor) -> str:
    """Returns the mean, largest and relative error in one line."""
    apart = (answer.double() - expected.double()).abs()
    relative = apart.norm() / expected.double().norm()
    return f"mean {apart.mean():.1e}, largest {apart.max():.1e}, relative {relative:.1e}"


def main():
    parser = make_parser()
    args = parser.parse_args()
    target = flags.target_of(parser)
    flags.at_least_one(parser, args, "frames", "batch", "num_runs")
    for name in ("height", "width"):
        if getattr(args, name) % SPATIAL or getattr(args, name) < 1:
            parser.error(f"expected --{name} of a multiple of {SPATIAL}, got {getattr(args, name)}")

    vae, run = load(args)
    print(where_in_flax(vae, target) if args.flax else where(vae, target))
    theirs = None
    if args.compare:
        theirs = AutoencoderKLCogVideoX.from_pretrained(args.model_id, subfolder="vae")
        if args.enable_tiling:
            theirs.enable_tiling()
    x = first_input(vae.config, args)
    for entry in [args.only] if args.only else ENTRIES:
        print(f"{entry} {list(x.shape)}, {args.dtype}")
        profile = args.profile and f"{args.profile}/{entry}"
        answer = flags.time_runs(lambda: run(vae, entry, x), args.num_runs, profile, vae=vae)
        if theirs is not None:
            print(f"from upstream's in float32: {compared(answer, upstreams(theirs, entry, x.float()))}")
        x = answer.to(x.dtype)


if __name__ == "__main__":
    main()
