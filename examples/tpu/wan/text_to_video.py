"""Wan 2.1 text-to-video: a video from a prompt."""

import argparse

import torch

from diffusers import WanPipeline
from diffusers.utils import export_to_video


parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Wan-AI/Wan2.1-T2V-1.3B-Diffusers")
parser.add_argument("--prompt", default="A cat walks on the grass, realistic")
parser.add_argument("--negative-prompt", default="")
parser.add_argument("--height", type=int, default=480)
parser.add_argument("--width", type=int, default=832)
parser.add_argument("--num-frames", type=int, default=81)
parser.add_argument("--num-inference-steps", type=int, default=50)
parser.add_argument("--guidance-scale", type=float, default=5.0)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--dtype", default="bfloat16")
parser.add_argument("--device", default="cuda")
parser.add_argument("--output", default="output.mp4")
args = parser.parse_args()

pipe = WanPipeline.from_pretrained(args.model, torch_dtype=getattr(torch, args.dtype))
pipe.to(args.device)

output = pipe(
    prompt=args.prompt,
    negative_prompt=args.negative_prompt,
    height=args.height,
    width=args.width,
    num_frames=args.num_frames,
    num_inference_steps=args.num_inference_steps,
    guidance_scale=args.guidance_scale,
    generator=torch.Generator("cpu").manual_seed(args.seed),
).frames[0]
export_to_video(output, args.output, fps=16)
