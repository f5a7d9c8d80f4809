"""HunyuanVideo-1.5, text- and image-to-video, with the flags of the earlier TPU script. What each became: SCRIPTS.md, one folder up."""

import argparse
import sys
from pathlib import Path

import torch

import diffusers.tpu
from diffusers import HunyuanVideo15ImageToVideoPipeline, HunyuanVideo15Pipeline
from diffusers.tpu.apps.cli.arguments import parameters_of
from diffusers.tpu.apps.cli.generate import where
from diffusers.tpu.apps.cli.session import pipeline_class
from diffusers.utils import load_image


sys.path.append(str(Path(__file__).resolve().parents[1]))

import flags  # noqa: E402


MODEL = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--model_id", help=f"default: {MODEL}t2v, with --image {MODEL}i2v")
    add("--prompt", default='A shop window at night, above it "OPEN" in neon letters.')
    add("--negative_prompt", default="")
    add(
        "--image",
        help="the first frame, a file or an address: image-to-video, the video as large as the model makes it",
    )
    add("--num_frames", type=int, default=61)
    add("--num_inference_steps", type=int, default=30)
    add("--guidance_scale", type=float, help="of the model's guider, up to 1 for none (default: as the model says)")
    add("--seed", type=int, default=42)
    add("--height", type=int, help="with --width (default: as the model says)")
    add("--width", type=int, help="with --height (default: as the model says)")
    add("--disable_vae_tiling", action="store_true", help="the VAE decodes the map as a whole, split over the chips")
    add("--num_iterations", type=int, default=2, help="runs of the same call, the first of which compiles")
    add("--output_path", default="output_flax.mp4", help="the video of the last run")
    add("--fps", type=int, default=24)
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    flags.add(parser)
    return parser


def pipeline_of(args: argparse.Namespace) -> type:
    """The pipeline that `model_index.json` names. Raises ValueError for flags that it does not take or that need others."""
    if args.num_iterations < 1:
        raise ValueError(f"expected --num_iterations of 1 or more, got {args.num_iterations}")
    if (args.height is None) != (args.width is None):
        raise ValueError("expected --height and --width together, or neither for the model's own size, got one")
    if args.image is not None and args.height is not None:
        raise ValueError("expected no --height and --width with --image, got them: the size follows the picture's")
    args.model_id = args.model_id or MODEL + ("t2v" if args.image is None else "i2v")
    cls = pipeline_class(args.model_id)
    if not issubclass(cls, (HunyuanVideo15Pipeline, HunyuanVideo15ImageToVideoPipeline)):
        raise ValueError(f"expected --model_id of HunyuanVideo-1.5, got a {cls.__name__}")
    takes_image = "image" in parameters_of(cls)
    if takes_image != (args.image is not None):
        expected, got = ("--image", "none") if takes_image else ("no --image", "one")
        raise ValueError(f"expected {expected} for {args.model_id}, a {cls.__name__}, got {got}")
    return cls


def main():
    parser = make_parser()
    args = parser.parse_args()
    config, target = flags.checked(parser, args, args.num_inference_steps)
    output = flags.output_file(parser, "--output_path", args.output_path)
    try:
        cls = pipeline_of(args)
    except ValueError as error:
        parser.error(str(error))

    pipe = cls.from_pretrained(args.model_id, dtype=getattr(torch, args.dtype))
    if not args.disable_vae_tiling:
        pipe.vae.enable_tiling()
    if args.guidance_scale is not None:
        pipe.guider = pipe.guider.new(guidance_scale=args.guidance_scale, enabled=args.guidance_scale > 1)
    diffusers.tpu.install(pipe, config).to("tpu")
    print(f"{where(pipe, target)}; attention {config.attention}")

    call = {name: getattr(args, name) for name in ("prompt", "negative_prompt", "num_frames", "num_inference_steps")}
    call |= {"image": load_image(args.image)} if args.image else {"height": args.height, "width": args.width}
    frames, steps = flags.repeat_call(pipe, call, args)
    flags.write_video(frames, output, args.fps)
    print(f"wrote {args.output_path}")
    if args.profile:
        print(steps.traced)


if __name__ == "__main__":
    main()
