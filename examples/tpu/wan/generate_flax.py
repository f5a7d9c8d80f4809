"""Wan text-to-video with the flags of the earlier TPU scripts, on this library. What each became: README.md, beside it."""

import argparse
import contextlib
import os
import statistics
import time
from pathlib import Path

import torch

import diffusers.tpu
from diffusers.tpu import TPUConfig
from diffusers.tpu.files import whole_files
from diffusers.utils import export_to_video


BLOCKS = ("bqsize", "bkvsize", "bkvcomputesize")
FIRST_PROFILED, PROFILED_STEPS = 1, 3  # the first step compiles and is no step like the others


def truth(word: str) -> bool:
    if word.lower() not in ("true", "false", "1", "0", "yes", "no"):
        raise argparse.ArgumentTypeError(f"expected True or False, got {word!r}")
    return word.lower() in ("true", "1", "yes")


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
    flag = {"type": truth, "nargs": "?", "const": True, "metavar": "BOOL"}
    add("--use_custom_attention", default=True, **flag, help="this library's kernel; False: JAX's splash attention")
    for name in BLOCKS:
        add(f"--{name}", type=int, help="of the kernel's blocks, all three or none (default: tuned for the chip)")
    add("--use_k_smooth", default=True, **flag, help="keys around their mean, where that lets the kernel go faster")
    add("--use_dp", default=True, **flag, help="the two guidance branches side by side")
    add("--sp_num", type=int, default=1, help="chips around which keys travel, in place of trading heads")
    add("--use_fsdp", default=True, **flag, help="tokens over chips, weights gathered; False: features over chips")
    add("--profile", metavar="DIR", help=f"write a JAX profiler trace of {PROFILED_STEPS} steps after the first")
    return parser


def config_of(args, chips: int) -> TPUConfig:
    """What the flags say about mesh and attention. Raises ValueError for flags that contradict each other."""
    dp = 2 if args.use_dp else 1
    rest, odd = divmod(chips, dp)
    if odd or args.sp_num < 1 or rest % args.sp_num:
        raise ValueError(
            f"expected --use_dp and --sp_num that divide the {chips} chips, got {dp} x {args.sp_num}; --use_dp False leaves"
            " all chips to each branch"
        )
    if args.use_fsdp:
        mesh, ring = (dp, rest, 1), args.sp_num if args.sp_num > 1 else None
    else:
        mesh, ring = (dp, args.sp_num, rest // args.sp_num), None
    blocks = tuple(getattr(args, name) for name in BLOCKS)
    given = [f"--{name}" for name, size in zip(BLOCKS, blocks) if size is not None]
    if given and len(given) < len(BLOCKS):
        raise ValueError(
            f"expected all of --{', --'.join(BLOCKS)} or none (tuned for the chip), got {', '.join(given)}"
        )
    return TPUConfig(
        mesh=mesh,
        attention="auto" if args.use_custom_attention else "splash",
        attention_blocks=blocks if given else None,
        attention_smoothing=args.use_k_smooth,
        attention_ring=ring,
    )


class Steps:
    """Called at the end of each step: its seconds, and the trace of some of them. Its latents are on the host: the step is done."""

    def __init__(self, count: int, profile: str | None):
        self.profile, self.last_profiled = profile, min(FIRST_PROFILED + PROFILED_STEPS, count) - 1
        self.seconds, self.since = [], time.perf_counter()
        self.trace = contextlib.ExitStack()

    def __call__(self, pipe, step: int, timestep, tensors: dict) -> dict:
        import jax

        self.seconds.append(time.perf_counter() - self.since)
        if self.profile and step == FIRST_PROFILED - 1:
            self.trace.enter_context(jax.profiler.trace(self.profile))
        if step == self.last_profiled:
            self.trace.close()
        self.since = time.perf_counter()
        return {}


def main():
    parser = make_parser()
    args = parser.parse_args()
    from diffusers.tpu.config import read_environment
    from diffusers.tpu.devices import find_target, jax_devices

    target = find_target(read_environment())
    if target is None:
        parser.error("expected a TPU, found none; DIFFUSERS_TPU=cpu runs the same on simulated chips, slowly")
    if args.profile and args.num_inference_steps <= FIRST_PROFILED:
        parser.error(
            f"expected --num_inference_steps of more than {FIRST_PROFILED} with --profile: the first one compiles"
        )
    output = Path(args.output)
    if output.suffix != ".mp4" or not output.absolute().parent.is_dir():
        parser.error(f"expected --output of an mp4 in a folder that is there, got {args.output}")
    try:
        config = config_of(args, len(jax_devices(target)))
    except ValueError as error:
        parser.error(str(error))
    print(f"mesh dp,sp,tp {','.join(map(str, config.mesh))}; attention {config.attention}")
    if target.simulated and config.attention == "auto" and config.attention_blocks:
        print("simulated chips compute attention by its reference: --bqsize and the others take effect on a TPU")

    from diffusers.pipelines.wan.pipeline_wan_flax import WanPipeline

    pipe = WanPipeline.from_pretrained(args.model_id, dtype=getattr(torch, args.dtype))
    if args.flow_shift is not None:
        pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, flow_shift=args.flow_shift)
    diffusers.tpu.install(pipe, config).to("tpu")

    os.environ.setdefault("IMAGEIO_FFMPEG_NO_PREVENT_SIGINT", "1")  # else imageio forks, which JAX warns of
    start, steps = time.perf_counter(), Steps(args.num_inference_steps, args.profile)
    with steps.trace:
        frames = pipe(
            prompt=args.prompt,
            negative_prompt=args.negative_prompt,
            height=args.height,
            width=args.width,
            num_frames=args.frames,
            num_inference_steps=args.num_inference_steps,
            guidance_scale=args.guidance_scale,
            generator=torch.Generator().manual_seed(args.seed),
            callback_on_step_end=steps,
        ).frames[0]
    seconds = time.perf_counter() - start
    with whole_files([output]) as (draft,):
        export_to_video(frames, str(draft), fps=args.fps)
    later = statistics.median(steps.seconds[1:] or steps.seconds)
    print(f"{seconds:.2f} s with compilation, {later:.3f} s a step after the first; wrote {args.output}")
    if args.profile:
        print(f"traced steps {FIRST_PROFILED + 1} to {steps.last_profiled + 1} into {args.profile}")


if __name__ == "__main__":
    main()
