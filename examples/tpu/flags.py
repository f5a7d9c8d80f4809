"""Shared by the example scripts that keep the flags of earlier TPU scripts: flags, their checks, and the timing of steps and runs."""

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import diffusers.tpu
from diffusers.tpu.apps.cli.generate import where
from diffusers.tpu.apps.cli.profile import traced, write_programs
from diffusers.tpu.apps.cli.session import pipeline_class
from diffusers.tpu.apps.cli.timing import wait
from diffusers.tpu.chips.devices import Target, find_target, jax_devices
from diffusers.tpu.chips.mesh import plan_degrees
from diffusers.tpu.common.config import TPUConfig, read_environment
from diffusers.tpu.common.files import whole_files
from diffusers.tpu.pipelines.attach import runs
from diffusers.tpu.pipelines.stepping import observed
from diffusers.utils import export_to_video


# Defaults of a group of flags, used where at least one flag of the group is given.
BLOCKS = {"bqsize": 3328, "bkvsize": 2816, "bkvcomputesize": 256}
LAYOUT = {"use_dp": True, "use_fsdp": True, "sp_num": 1}
FIRST_PROFILED, PROFILED_STEPS = 1, 3  # the first step compiles


def truth(word: str) -> bool:
    """True or False of a command line. Raises ArgumentTypeError for anything else."""
    if word.lower() not in ("true", "false", "1", "0", "yes", "no"):
        raise argparse.ArgumentTypeError(f"expected True or False, got {word!r}")
    return word.lower() in ("true", "1", "yes")


def add(parser: argparse.ArgumentParser):
    """Adds the flags of chips and attention, which `config_of` reads, and `--profile`."""
    flag = {"type": truth, "nargs": "?", "const": True, "metavar": "BOOL"}
    add = parser.add_argument
    add("--use_custom_attention", default=True, **flag, help="this library's kernel; False: JAX's splash attention")
    for name in BLOCKS:
        add(f"--{name}", type=int, help="of the kernel's blocks (default: tuned for the chip; beside another: theirs)")
    add("--use_k_smooth", default=True, **flag, help="keys around their mean, where that lets the kernel go faster")
    add("--use_dp", **flag, help="the two guidance branches side by side")
    add("--sp_num", type=int, help="chips around which keys travel, in place of trading heads")
    add("--use_fsdp", **flag, help="tokens over chips, weights gathered; False: features over chips")
    add("--profile", metavar="DIR", help=f"write a JAX profiler trace of {PROFILED_STEPS} steps after the first")


def config_of(args: argparse.Namespace, chips: int, branches: int | None = None) -> TPUConfig:
    """Returns the flags' mesh and attention settings.

    Args:
        chips: number of chips.
        branches: guidance branches in a model's batch; None for a pipeline, whose plan has their number.

    Raises:
        ValueError: flags that contradict each other, or degrees that do not divide the number of chips.
    """
    mesh, ring = None if branches is None else plan_degrees(chips, None, branches), None
    given = {name: value for name in LAYOUT if (value := getattr(args, name)) is not None}
    if given:
        mesh, ring = _layout(chips, **{**LAYOUT, **given})
    sizes = {name: size for name in BLOCKS if (size := getattr(args, name)) is not None}
    return TPUConfig(
        mesh=mesh,
        attention="auto" if args.use_custom_attention else "splash",
        attention_blocks=tuple({**BLOCKS, **sizes}.values()) if sizes else None,
        attention_smoothing=args.use_k_smooth,
        attention_ring=ring,
    )


def _layout(chips: int, use_dp: bool, use_fsdp: bool, sp_num: int) -> tuple[tuple[int, int, int], int | None]:
    """Returns the degrees (dp, sp, tp), and the number of chips in the key ring."""
    dp = 2 if use_dp else 1
    rest, odd = divmod(chips, dp)
    if odd or sp_num < 1 or rest % sp_num:
        raise ValueError(
            f"expected --use_dp and --sp_num that divide the {chips} chips, got {dp} x {sp_num}; --use_dp False leaves all"
            " chips to each branch"
        )
    if use_fsdp:
        return (dp, rest, 1), sp_num if sp_num > 1 else None
    return (dp, sp_num, rest // sp_num), None


def checked(
    parser: argparse.ArgumentParser, args: argparse.Namespace, steps: int | None = None, branches: int | None = None
) -> tuple[TPUConfig, Target]:
    """Returns the configuration of the flags and the target. Prints which flags have no effect on simulated chips.

    Ends the process with status 2 for flags that `config_of` refuses, for `--profile` where `steps` is 1, and without a TPU.
    """
    target = target_of(parser)
    if args.profile and steps is not None and steps <= FIRST_PROFILED:
        parser.error(
            f"expected --num_inference_steps of more than {FIRST_PROFILED} with --profile: the first one compiles"
        )
    try:
        config = config_of(args, len(jax_devices(target)), branches)
    except ValueError as error:
        parser.error(str(error))
    if target.simulated and config.attention == "auto" and config.attention_blocks:
        print("simulated chips compute attention by its reference: --bqsize and the others take effect on a TPU")
    return config, target


def target_of(parser: argparse.ArgumentParser) -> Target:
    """Returns the chips to run on; ends the process with status 2 without a TPU."""
    target = find_target(read_environment())
    if target is None:
        parser.error("expected a TPU, found none; DIFFUSERS_TPU=cpu runs the same on simulated chips, slowly")
    return target


def checked_class(parser: argparse.ArgumentParser, model: str, expected: type | tuple[type, ...], words: str) -> type:
    """Returns the pipeline that the model's `model_index.json` names.

    Ends the process with status 2 where that is no `expected` one, described by `words` in the message.
    """
    try:
        found = pipeline_class(model)
    except ValueError as error:
        parser.error(str(error))
    if not issubclass(found, expected):
        parser.error(f"expected --model_id of {words}, got a {found.__name__}")
    return found


def at_least_one(parser: argparse.ArgumentParser, args: argparse.Namespace, *names: str):
    """Ends the process with status 2 where one of these flags is less than 1."""
    for name in names:
        if getattr(args, name) < 1:
            parser.error(f"expected --{name} of 1 or more, got {getattr(args, name)}")


def add_video(
    parser: argparse.ArgumentParser, steps: int, fps: int, seed: int = 0, output: str = "--output", file="output.mp4"
):
    """Adds the flags that all scripts that make a video have, those of `add` among them.

    Args:
        steps, fps, seed, file: defaults.
        output: the name of the flag for the file.
    """
    add_argument = parser.add_argument
    add_argument("--negative_prompt", default="")
    add_argument("--num_inference_steps", type=int, default=steps)
    add_argument("--fps", type=int, default=fps)
    add_argument("--seed", type=int, default=seed)
    add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add_argument("--num_iterations", type=int, default=2, help="runs of the same call, the first of which compiles")
    add_argument(output, default=file, dest="output", help="the video of the last run")
    add(parser)


def checked_video(
    parser: argparse.ArgumentParser, args: argparse.Namespace, output: str = "--output"
) -> tuple[TPUConfig, Target]:
    """Returns what `checked` does, after checking the flags of `add_video`, height and width too."""
    found = checked(parser, args, args.num_inference_steps)
    at_least_one(parser, args, "num_iterations")
    path = Path(args.output)
    if path.suffix != ".mp4" or not path.absolute().parent.is_dir():
        parser.error(f"expected {output} of an mp4 in a folder that is there, got {args.output}")
    if (args.height is None) != (args.width is None):
        parser.error("expected --height and --width together, or neither for the model's own size, got one")
    return found


def make_video(pipe, call: dict, args: argparse.Namespace):
    """Runs the same call `args.num_iterations` times, prints the seconds of each, and writes the video of the last.

    Args:
        call: arguments of the pipeline's call, but for its generator.
        args: flags of `add_video`; `profile`: a folder for a trace of steps of the last call, or None; `output`: the mp4 file,
            written as a whole or not at all.
    """
    profiled = range(FIRST_PROFILED, min(FIRST_PROFILED + PROFILED_STEPS, args.num_inference_steps))
    for number in range(1, args.num_iterations + 1):
        tracing = args.profile and number == args.num_iterations
        start = time.perf_counter()
        with (
            step_seconds(pipe) as steps,
            traced(pipe, args.profile, profiled) if tracing else contextlib.nullcontext(),
        ):
            frames = pipe(**call, generator=torch.Generator().manual_seed(args.seed)).frames[0]
        seconds = time.perf_counter() - start
        step = statistics.median(steps[1:] or steps)
        rest = f", {seconds - len(steps) * step:.2f} s outside of steps" if number > 1 else " with compilation"
        print(f"run {number}: {seconds:.2f} s{rest}, {step:.3f} s a step after the first")
    os.environ.setdefault("IMAGEIO_FFMPEG_NO_PREVENT_SIGINT", "1")  # else imageio forks, which JAX warns of
    with whole_files([Path(args.output)]) as (draft,):
        export_to_video(frames, str(draft), fps=args.fps)
    print(f"wrote {args.output}")
    if args.profile:
        print(f"traced steps {profiled.start + 1} to {profiled.stop} into {args.profile}")


@contextlib.contextmanager
def step_seconds(pipe) -> Iterator[list[float]]:
    """Seconds of each step of the calls inside the context.

    A step ends when the device has finished what `scheduler.step` returns, as some pipelines take no callback.
    """
    seconds, since = [], time.perf_counter()

    def ended(result):
        nonlocal since
        wait(result)
        seconds.append(time.perf_counter() - since)
        since = time.perf_counter()

    with observed(pipe.scheduler, ended):
        yield seconds


def add_transformer(parser: argparse.ArgumentParser, frames: int, sizes: dict[str, tuple[int, int]], model: str):
    """Adds the flags of a script that times a transformer by itself.

    Args:
        frames: of the video, by default.
        sizes: height and width of each resolution.
        model: the default of `--model_path`, in words.
    """
    add_argument = parser.add_argument
    resolutions = "; ".join(f"{name}: {height} x {width}" for name, (height, width) in sizes.items())
    add_argument("--frames", type=int, default=frames)
    add_argument("--resolution", choices=tuple(sizes), default="720p", help=resolutions)
    add_argument("--num_runs", type=int, default=3, help="after one that compiles")
    add_argument("--model_path", help=f"a directory or hub id with a folder transformer (default: {model})")
    add_argument("--enable_cfg", action="store_true", help="both guidance branches, a batch of two")
    add_argument("--seed", type=int, default=42)
    add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add(parser)


def load_transformer(parser: argparse.ArgumentParser, args: argparse.Namespace, cls: type, model: str):
    """Returns the transformer of `--model_path`, or of `model`, on the chips; ends the process with status 2 for bad flags."""
    config, target = checked(parser, args, branches=2 if args.enable_cfg else 1)
    at_least_one(parser, args, "frames", "num_runs")
    dtype = getattr(torch, args.dtype)
    transformer = cls.from_pretrained(args.model_path or model, subfolder="transformer", dtype=dtype)
    diffusers.tpu.install(transformer, config)
    print(f"{where(transformer, target)}; attention {config.attention}")
    return transformer


@torch.no_grad()
def run_transformer(transformer, inputs: dict) -> torch.Tensor:
    """Returns the transformer's output on the host."""
    return transformer(**inputs, return_dict=False)[0]


def time_runs(run: Callable[[], object], count: int, profile: str | None = None, **models) -> object:
    """Returns the result of the last run. Prints the seconds of the first, which compiles, and of `count` more.

    Args:
        run: returns when its result is on the host.
        profile: the folder for a trace of the `count` runs, for `diffusers-tpu profile`; None for no trace.
        models: by name, the models whose programs are written beside the trace.
    """
    import jax

    def timed() -> tuple[object, float]:
        start = time.perf_counter()
        return run(), time.perf_counter() - start

    result, seconds = timed()
    print(f"first run, with compilation and the weights' way to the chips: {seconds:.2f} s")
    times = []
    with jax.profiler.trace(profile) if profile else contextlib.nullcontext():
        for _ in range(count):
            result, seconds = timed()
            times.append(1e3 * seconds)
    if profile and (runners := {name: runner for name, model in models.items() if (runner := runs(model))}):
        write_programs(runners, profile, count)
    print(
        f"{count} runs: mean {statistics.mean(times):.1f} ms, least {min(times):.1f}, most {max(times):.1f}"
        + (f"; traced into {profile}" if profile else "")
    )
    return result
