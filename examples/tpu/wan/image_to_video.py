"""Wan image-to-video (2.1, or 2.2 with two experts): a video whose first frame is a picture."""

import argparse

import torch

from diffusers import WanImageToVideoPipeline
from diffusers.utils import export_to_video, load_image


parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Wan-AI/Wan2.2-I2V-A14B-Diffusers")
parser.add_argument("--image", required=True, help="a file or an address; scaled to the video's size")
parser.add_argument("--prompt", default="The boat turns around slowly, ripples on the water")
parser.add_argument("--negative-prompt", default="")
parser.add_argument("--height", type=int, default=720)
parser.add_argument("--width", type=int, default=1280)
parser.add_argument("--num-frames", type=int, default=81)
parser.add_argument("--num-inference-steps", type=int, default=40)
parser.add_argument("--guidance-scale", type=float, default=3.5)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--dtype", default="bfloat16")
parser.add_argument("--device", default="cuda")
parser.add_argument("--output", default="output.mp4")
args = parser.parse_args()

pipe = WanImageToVideoPipeline.from_pretrained(args.model, torch_dtype=getattr(torch, args.dtype))
pipe.to(args.device)

output = pipe(
    image=load_image(args.image).resize((args.width, args.height)),
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
