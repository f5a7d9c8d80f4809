"""What example scripts share that take the flags of earlier TPU scripts: chips, attention, a profile, the clock of steps and runs."""

import argparse
import contextlib
import functools
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from diffusers.tpu.apps.cli.profile import traced, write_programs
from diffusers.tpu.apps.cli.session import pipeline_class
from diffusers.tpu.apps.cli.timing import wait
from diffusers.tpu.chips.devices import Target, find_target, jax_devices
from diffusers.tpu.chips.mesh import plan_degrees
from diffusers.tpu.common.config import TPUConfig, read_environment
from diffusers.tpu.common.files import whole_files
from diffusers.tpu.compile.state.watch import replaced
from diffusers.tpu.pipelines.attach import runs
from diffusers.utils import export_to_video


BLOCKS = {"bqsize": 3328, "bkvsize": 2816, "bkvcomputesize": 256}  # what one means that is left out beside others
FIRST_PROFILED, PROFILED_STEPS = 1, 3  # the first step compiles and is no step like the others
LAYOUT = {"use_dp": True, "use_fsdp": True, "sp_num": 1}  # what a flag means that is left out beside others


def truth(word: str) -> bool:
    """True or False of a command line. Raises ArgumentTypeError for anything else."""
    if word.lower() not in ("true", "false", "1", "0", "yes", "no"):
        raise argparse.ArgumentTypeError(f"expected True or False, got {word!r}")
    return word.lower() in ("true", "1", "yes")


def add(parser: argparse.ArgumentParser):
    """The flags that `config_of` and `Steps` read."""
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
    """What the flags say about mesh and attention.

    Args:
        chips: how many there are.
        branches: guidance branches in the batch of a model by itself; None: of a pipeline, which knows.

    Raises:
        ValueError: flags that contradict each other, or a layout that the chips cannot have.
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
    """Degrees dp, sp, tp, and the chips of a ring."""
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
    """What the flags ask for, and what the script runs on; says what they cannot mean here.

    Ends the process with status 2 for flags that `config_of` refuses, a profile of one step of `steps`, and without a TPU.
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
    """What the script runs on; ends the process with status 2 without a TPU."""
    target = find_target(read_environment())
    if target is None:
        parser.error("expected a TPU, found none; DIFFUSERS_TPU=cpu runs the same on simulated chips, slowly")
    return target


def check_class(parser: argparse.ArgumentParser, model: str, expected: type, words: str):
    """Ends the process with status 2 where the model's `model_index.json` names no `expected` pipeline, `words` say which."""
    try:
        found = pipeline_class(model)
    except ValueError as error:
        parser.error(str(error))
    if not issubclass(found, expected):
        parser.error(f"expected --model_id of {words}, got a {found.__name__}")


def at_least_one(parser: argparse.ArgumentParser, args: argparse.Namespace, *names: str):
    """Ends the process with status 2 where one of these counts is less than 1."""
    for name in names:
        if getattr(args, name) < 1:
            parser.error(f"expected --{name} of 1 or more, got {getattr(args, name)}")


def output_file(parser: argparse.ArgumentParser, flag: str, name: str) -> Path:
    """Where a video is to be written; ends the process with status 2 where it cannot be."""
    path = Path(name)
    if path.suffix != ".mp4" or not path.absolute().parent.is_dir():
        parser.error(f"expected {flag} of an mp4 in a folder that is there, got {name}")
    return path


def write_video(frames, path: Path, fps: int):
    """One video, frames as a pipeline gives them, whole or not at all."""
    os.environ.setdefault("IMAGEIO_FFMPEG_NO_PREVENT_SIGINT", "1")  # else imageio forks, which JAX warns of
    with whole_files([path]) as (draft,):
        export_to_video(frames, str(draft), fps=fps)


def time_runs(run: Callable[[], object], count: int, profile: str | None = None, **models) -> object:
    """The answer of the last run. Prints the seconds of the first, which compiles, and of `count` more.

    Args:
        run: returns when its answer is on the host.
        profile: the folder of a trace of the runs that count, for `diffusers-tpu profile`, None for none.
        models: by name, whose programs the trace is of.
    """
    import jax

    def timed() -> tuple[object, float]:
        start = time.perf_counter()
        return run(), time.perf_counter() - start

    answer, seconds = timed()
    print(f"first run, with compilation and the weights' way to the chips: {seconds:.2f} s")
    times = []
    with jax.profiler.trace(profile) if profile else contextlib.nullcontext():
        for _ in range(count):
            answer, seconds = timed()
            times.append(1e3 * seconds)
    if profile and (runners := {name: runner for name, model in models.items() if (runner := runs(model))}):
        write_programs(runners, profile, count)
    print(
        f"{count} runs: mean {statistics.mean(times):.1f} ms, least {min(times):.1f}, most {max(times):.1f}"
        + (f"; traced into {profile}" if profile else "")
    )
    return answer


class Steps:
    """The clock of a pipeline's steps while it is entered, and a trace of some of them.

    A step ends when the device has finished what `scheduler.step` answers: there are pipelines without callbacks.

    Args:
        count: steps of the call.
        profile: the folder of the trace, for `diffusers-tpu profile`, None for none.
    """

    def __init__(self, pipe, count: int, profile: str | None = None):
        self.pipe, self.profile = pipe, profile
        self.last_profiled = min(FIRST_PROFILED + PROFILED_STEPS, count) - 1
        self.seconds: list[float] = []
        self._open = contextlib.ExitStack()

    def __enter__(self) -> "Steps":
        self._step = self.pipe.scheduler.step
        timed = functools.wraps(self._step)(functools.partial(self._timed))  # upstream reads what `step` takes
        self._open.enter_context(replaced([(vars(self.pipe.scheduler), "step", timed)]))
        if self.profile:
            self._open.enter_context(traced(self.pipe, self.profile, range(FIRST_PROFILED, self.last_profiled + 1)))
        self._since = time.perf_counter()
        return self

    def __exit__(self, *error):
        return self._open.__exit__(*error)

    def _timed(self, *args, **kwargs):
        answer = self._step(*args, **kwargs)
        wait(answer)
        self.seconds.append(time.perf_counter() - self._since)
        self._since = time.perf_counter()
        return answer

    @property
    def median(self) -> float:
        """Seconds of a step after the first, which begins with the text and may compile."""
        return statistics.median(self.seconds[1:] or self.seconds)

    @property
    def total(self) -> float:
        """Seconds of all steps, each of the median: the rest of a call is text, VAE and the pipeline's own."""
        return len(self.seconds) * self.median

    def __str__(self) -> str:
        return f"{self.median:.3f} s a step after the first"

    @property
    def traced(self) -> str:
        return f"traced steps {FIRST_PROFILED + 1} to {self.last_profiled + 1} into {self.profile}"


def repeat_call(pipe, call: dict, args: argparse.Namespace) -> tuple[object, Steps]:
    """The frames of the last of `args.num_iterations` calls, alike to the seed, and its clock. Prints the seconds of each.

    `args` names also `num_inference_steps`, `seed`, and `profile`: the folder for a trace of the last call's steps, or None.
    """
    import torch

    for number in range(args.num_iterations):
        last, start = number == args.num_iterations - 1, time.perf_counter()
        with Steps(pipe, args.num_inference_steps, args.profile if last else None) as steps:
            frames = pipe(**call, generator=torch.Generator().manual_seed(args.seed)).frames[0]
        seconds = time.perf_counter() - start
        rest = f", {seconds - steps.total:.2f} s outside of steps" if number else " with compilation"
        print(f"run {number + 1}: {seconds:.2f} s{rest}, {steps}")
    return frames, steps
