"""Wan text-to-video with the flags of the earlier TPU scripts, on this library. What each became: SCRIPTS.md, one folder up."""

import argparse
import sys
from pathlib import Path

import torch

import diffusers.tpu
from diffusers import WanPipeline as Upstream
from diffusers.tpu.apps.cli.generate import where


sys.path.append(str(Path(__file__).resolve().parents[1]))

import flags  # noqa: E402


PASSED = ("prompt", "negative_prompt", "height", "width", "num_inference_steps", "guidance_scale")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--model_id", default="Wan-AI/Wan2.1-T2V-14B-Diffusers")
    add("--prompt", default="A cat and a dog baking a cake together in a kitchen.")
    add("--width", type=int, default=1280)
    add("--height", type=int, default=720)
    add("--frames", type=int, default=81)
    add("--guidance_scale", type=float, default=5.0)
    add("--flow_shift", type=float, default=5.0, help="of the scheduler: 5 for 720p, 3 for 480p")
    flags.add_video(parser, steps=50, fps=16)
    return parser


def main():
    parser = make_parser()
    args = parser.parse_args()
    config, target = flags.checked_video(parser, args)
    flags.checked_class(parser, args.model_id, Upstream, "Wan, text-to-video")

    from diffusers.pipelines.wan.pipeline_wan_flax import WanPipeline

    pipe = WanPipeline.from_pretrained(args.model_id, dtype=getattr(torch, args.dtype))
    theirs = pipe.scheduler.config.get("flow_shift")
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, flow_shift=args.flow_shift)
    diffusers.tpu.install(pipe, config).to("tpu")
    differs = f"; flow_shift {args.flow_shift:g}, the model's own is {theirs}" if theirs != args.flow_shift else ""
    print(f"{where(pipe, target)}; attention {config.attention}{differs}")

    call = {name: getattr(args, name) for name in PASSED} | {"num_frames": args.frames}
    flags.make_video(pipe, call, args)


if __name__ == "__main__":
    main()
