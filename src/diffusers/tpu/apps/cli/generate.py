"""`diffusers-tpu generate`: runs a pipeline once, writes its pictures and prints its times; for `--stage` see `staged`."""

import contextlib
import time

import torch
from rich.console import Console

from .... import tpu
from ....utils import load_image
from ...chips import hosts
from ...common.errors import NotFinite
from ..generation import media
from . import arguments, output, session
from .timing import Stopwatch, wait


def run(options, rest: list[str]) -> int:
    start = time.perf_counter()
    target, first, mesh, cls, call = session.begin(options, rest)
    seed = session.seed_of(options.seed)
    extra = call_extras(cls, options, seed)
    arguments.require(cls, [*call, *extra])
    steps = _profiled_steps(options, cls, call, target)
    path = output.output_path(options.output, call.get("prompt"))
    pipe = session.load(options, target, mesh)
    stopwatch = Stopwatch(pipe, start)
    with contextlib.ExitStack() as stack:
        if options.debug_nans:
            from ...compile import nans

            stack.enter_context(nans.debugging())
        if steps is not None:
            from .profile import traced

            stack.enter_context(traced(pipe, options.profile, steps))
        with stopwatch.running():
            result = pipe(**{**call, **extra, **stopwatch.callback})
            wait([*vars(result).values()])
    if not first:
        return 0
    made = media.pictures(result)
    check_finite(pipe, target)
    files = media.write(made, path, options.fps)
    tell(stopwatch, f"{where(pipe, target)}; seed {seed}", files)
    return 0


def _profiled_steps(options, cls: type, call: dict, target) -> range | None:
    """The steps of `--profile`, None without it. Raises ValueError for it or `--debug-nans` without the TPU path."""
    if options.debug_nans and target is None:
        raise ValueError(
            "expected no --debug-nans without the TPU path; diffusers-tpu compare looks at upstream's modules"
        )
    if options.profile is None:
        return None
    if target is None:
        raise ValueError("expected no --profile without the TPU path")
    from . import profile

    asked = arguments.parameters_of(cls).get("num_inference_steps")
    count = call.get("num_inference_steps", asked and asked.default)
    return profile.steps_of(options.profile_steps or profile.STEPS, count if isinstance(count, int) else None)


def check_finite(pipe, target):
    """Raises NotFinite if the last call's pictures have NaN or an infinity."""
    if target is None:
        return
    from ...pipelines.pipeline import installation

    if found := installation(pipe).not_finite:
        raise NotFinite(
            f"expected pictures of finite values, got NaN or an infinity from {', '.join(found)}: nothing is written. Ask for"
            " the first submodule that gives one with --debug-nans; float16 overflows where --dtype bfloat16 does not."
        )


def tell(stopwatch: Stopwatch, ran: str, files: list):
    """Print the times of a run, where it ran and what it wrote."""
    rows = ((part, f"{seconds:.3f}") if part else None for part, seconds in stopwatch.rows())
    Console().print(output.table(("part", "seconds"), rows, title="times"))
    output.say(ran)
    output.say("wrote " + ", ".join(map(str, files)))


def call_extras(cls: type, options, seed: int) -> dict:
    """Arguments that the command makes itself: the generator, the image, and pictures as the output type."""
    takes = arguments.parameters_of(cls)
    extra = {}
    if "generator" in takes:
        extra["generator"] = torch.Generator().manual_seed(seed)
    elif options.seed is not None:
        raise ValueError(arguments.unknown(cls, "seed"))
    if "output_type" in takes:
        extra["output_type"] = "pil"
    if options.image is not None:
        try:
            extra["image"] = load_image(options.image)
        except media.NO_PICTURE as error:
            raise ValueError(f"expected --image to be a picture, got {options.image!r}: {error}") from error
    return extra


def where(pipe, target) -> str:
    """One line about the mesh and chips on which the pipeline ran."""
    if target is None:
        return f"plain diffusers on {'cuda' if torch.cuda.is_available() else 'the CPU'}"
    mesh = ", ".join(f"{axis} {degree}" for axis, degree in tpu.report(pipe)["mesh"].items())
    chips = f"{target.simulated} chips simulated on the CPU: these are not TPU times" if target.simulated else target
    processes = hosts.process_count()
    return f"mesh {mesh}; {f'{processes} processes, each ' if processes > 1 else ''}{chips}"
