"""Wan text-to-video with the flags of the earlier TPU scripts, on this library. What each became: README.md, beside it."""

import argparse
import sys
import time
from pathlib import Path

import torch

import diffusers.tpu
from diffusers.tpu.apps.cli.generate import where


sys.path.append(str(Path(__file__).resolve().parents[1]))

import flags  # noqa: E402


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--model_id", default="Wan-AI/Wan2.1-T2V-14B-Diffusers")
    add("--prompt", default="A cat and a dog baking a cake together in a kitchen.")
    add("--negative_prompt", default="")
    add("--num_inference_steps", type=int, default=50)
    add("--width", type=int, default=1280)
    add("--height", type=int, default=720)
    add("--frames", type=int, default=81)
    add("--fps", type=int, default=16)
    add("--guidance_scale", type=float, default=5.0)
    add("--flow_shift", type=float, help="of the scheduler: 5 for 720p, 3 for 480p (default: as the model says)")
    add("--seed", type=int, default=0)
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--output", default="output.mp4")
    flags.add(parser)
    return parser


def main():
    parser = make_parser()
    args = parser.parse_args()
    config, target = flags.checked(parser, args, args.num_inference_steps)
    output = flags.output_file(parser, "--output", args.output)

    from diffusers.pipelines.wan.pipeline_wan_flax import WanPipeline

    pipe = WanPipeline.from_pretrained(args.model_id, dtype=getattr(torch, args.dtype))
    if args.flow_shift is not None:
        pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, flow_shift=args.flow_shift)
    diffusers.tpu.install(pipe, config).to("tpu")
    print(f"{where(pipe, target)}; attention {config.attention}")

    start = time.perf_counter()
    with flags.Steps(pipe, args.num_inference_steps, args.profile) as steps:
        frames = pipe(
            prompt=args.prompt,
            negative_prompt=args.negative_prompt,
            height=args.height,
            width=args.width,
            num_frames=args.frames,
            num_inference_steps=args.num_inference_steps,
            guidance_scale=args.guidance_scale,
            generator=torch.Generator().manual_seed(args.seed),
        ).frames[0]
    seconds = time.perf_counter() - start
    flags.write_video(frames, output, args.fps)
    print(f"{seconds:.2f} s with compilation, {steps}; wrote {args.output}")
    if args.profile:
        print(steps.traced)


if __name__ == "__main__":
    main()
