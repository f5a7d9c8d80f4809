"""HunyuanVideo-1.5, text- and image-to-video, with the flags of the earlier TPU script. What each became: SCRIPTS.md, one folder up."""

import argparse
import sys
from pathlib import Path

import torch

import diffusers.tpu
from diffusers import HunyuanVideo15ImageToVideoPipeline, HunyuanVideo15Pipeline
from diffusers.tpu.apps.cli.arguments import parameters_of
from diffusers.tpu.apps.cli.generate import where
from diffusers.utils import load_image


sys.path.append(str(Path(__file__).resolve().parents[1]))

import flags  # noqa: E402


MODEL = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_"
OUTPUT = "--output_path"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--model_id", help=f"default: {MODEL}t2v, with --image {MODEL}i2v")
    add("--prompt", default='A shop window at night, above it "OPEN" in neon letters.')
    image = "the first frame, a file or an address: image-to-video, the video as large as the model makes it"
    add("--image", help=image)
    add("--num_frames", type=int, default=61)
    add("--guidance_scale", type=float, help="of the model's guider, up to 1 for none (default: as the model says)")
    add("--height", type=int, help="with --width (default: as the model says)")
    add("--width", type=int, help="with --height (default: as the model says)")
    add("--disable_vae_tiling", action="store_true", help="the VAE decodes the map as a whole, split over the chips")
    flags.add_video(parser, steps=30, fps=24, seed=42, output=OUTPUT, file="output_flax.mp4")
    return parser


def pipeline_of(parser: argparse.ArgumentParser, args: argparse.Namespace, model: str) -> type:
    """Returns the pipeline that the model's `model_index.json` names; ends the process with status 2 for flags that do not fit it."""
    if args.image is not None and args.height is not None:
        parser.error("expected no --height and --width with --image, got them: the size follows the picture's")
    classes = HunyuanVideo15Pipeline, HunyuanVideo15ImageToVideoPipeline
    cls = flags.checked_class(parser, model, classes, "HunyuanVideo-1.5")
    takes_image = "image" in parameters_of(cls)
    if takes_image != (args.image is not None):
        expected, got = ("--image", "none") if takes_image else ("no --image", "one")
        parser.error(f"expected {expected} for {model}, a {cls.__name__}, got {got}")
    return cls


def main():
    parser = make_parser()
    args = parser.parse_args()
    config, target = flags.checked_video(parser, args, OUTPUT)
    model = args.model_id or MODEL + ("t2v" if args.image is None else "i2v")
    cls = pipeline_of(parser, args, model)

    pipe = cls.from_pretrained(model, dtype=getattr(torch, args.dtype))
    if not args.disable_vae_tiling:
        pipe.vae.enable_tiling()
    if args.guidance_scale is not None:
        pipe.guider = pipe.guider.new(guidance_scale=args.guidance_scale, enabled=args.guidance_scale > 1)
    diffusers.tpu.install(pipe, config).to("tpu")
    print(f"{where(pipe, target)}; attention {config.attention}")

    call = {name: getattr(args, name) for name in ("prompt", "negative_prompt", "num_frames", "num_inference_steps")}
    call |= {"image": load_image(args.image)} if args.image else {"height": args.height, "width": args.width}
    flags.make_video(pipe, call, args)


if __name__ == "__main__":
    main()
