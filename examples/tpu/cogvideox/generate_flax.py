"""CogVideoX text-to-video with the flags of the earlier TPU scripts, on this library. What each became: SCRIPTS.md, one folder up."""

import argparse
import sys
from pathlib import Path

import torch

import diffusers.tpu
from diffusers import CogVideoXPipeline
from diffusers.tpu.apps.cli.generate import where


sys.path.append(str(Path(__file__).resolve().parents[1]))

import flags  # noqa: E402


MODEL = "THUDM/CogVideoX1.5-5B"
PASSED = ("height", "width", "prompt", "negative_prompt", "num_inference_steps", "guidance_scale", "use_dynamic_cfg")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--model_id", default=MODEL)
    add("--prompt", default="A paper lantern drifts down a river at dusk, fireflies around it.")
    add("--width", type=int, help="with --height (default: as the model says)")
    add("--height", type=int, help="with --width (default: as the model says)")
    add("--frames", type=int, help="default: as the model says")
    add("--guidance_scale", type=float, default=6.0, help="up to 1 for none")
    add("--use_dynamic_cfg", action="store_true", help="guidance that grows from step to step")
    add("--disable_vae_tiling", action="store_true", help="the VAE decodes the map as a whole")
    flags.add_video(parser, steps=50, fps=16)
    return parser


def main():
    parser = make_parser()
    args = parser.parse_args()
    config, target = flags.checked_video(parser, args)
    flags.checked_class(parser, args.model_id, CogVideoXPipeline, "CogVideoX, text-to-video")

    pipe = CogVideoXPipeline.from_pretrained(args.model_id, dtype=getattr(torch, args.dtype))
    if not args.disable_vae_tiling:
        pipe.vae.enable_tiling()
    diffusers.tpu.install(pipe, config).to("tpu")
    print(f"{where(pipe, target)}; attention {config.attention}")

    call = {name: getattr(args, name) for name in PASSED} | {"num_frames": args.frames, "output_type": "np"}
    flags.make_video(pipe, call, args)


if __name__ == "__main__":
    main()
