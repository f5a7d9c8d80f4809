"""`diffusers-tpu generate`: a pipeline run once, its pictures written, its times printed; for `--stage` see staged."""

import contextlib
import time

import torch
from rich.console import Console
from rich.table import Table

from .... import tpu
from ...chips import hosts
from ...config import TPUConfig
from ...errors import NotFinite
from ..generation import media
from . import arguments, output, session
from .errors import BadInput, calling
from .timing import Stopwatch, Timing


def refuse_flags_of_prompts(options):
    """Raises BadInput for flags that go with a file of prompts."""
    if options.batch != 1 or options.retry or options.ray is not None:
        raise BadInput("expected --prompts FILE with --batch, --retry and --ray")


def run(options, rest: list[str]) -> int:
    """The command; returns its exit status."""
    refuse_flags_of_prompts(options)
    if options.input is not None:
        raise BadInput("expected --stage denoise or decode with --input: a whole run starts from its arguments")
    start = time.perf_counter()
    target = session.choose_target(options.device)
    first, mesh = session.is_first(target), session.mesh_of(options.mesh, target)
    cls = session.pipeline_class(options.model)
    given = arguments.given_arguments(options, rest)
    call = arguments.call_arguments(cls, given)
    seed = session.seed_of(options.seed)
    extra = call_extras(cls, options, seed)
    arguments.require(cls, [*call, *extra])
    steps = _profiled(options, cls, call, target)
    path = output.output_path(options.output, call.get("prompt"))
    pipe = placed(session.load(options.model, dtype_of(options)), options, target, mesh)
    load_seconds = time.perf_counter() - start
    stopwatch = Stopwatch(pipe)
    if options.debug_nans and target is None:
        raise BadInput(
            "expected no --debug-nans without the TPU path; diffusers-tpu compare looks at upstream's modules"
        )
    with calling(), _looking(options.debug_nans), _traced(pipe, options, steps):
        result = stopwatch.call({**call, **extra}, "callback_on_step_end" in arguments.parameters_of(cls))
    if not first:
        return 0
    with calling():
        made = media.pictures(result)
    check_finite(pipe, target)
    files = media.write(*made, path, options.fps)
    tell(stopwatch.timing, load_seconds, f"{where(pipe, target)}; seed {seed}", files)
    return 0


def _profiled(options, cls: type, call: dict, target) -> range | None:
    """The steps of `--profile`, None without. Raises BadInput."""
    if options.profile is None:
        if options.profile_steps is not None:
            raise BadInput("expected --profile DIR with --profile-steps")
        return None
    if target is None:
        raise BadInput("expected no --profile without the TPU path")
    from . import tracing

    asked = arguments.parameters_of(cls).get("num_inference_steps")
    count = call.get("num_inference_steps", asked and asked.default)
    return tracing.steps_of(options.profile_steps or tracing.STEPS, count if isinstance(count, int) else None)


def _traced(pipe, options, steps: range | None):
    if steps is None:
        return contextlib.nullcontext()
    from . import tracing

    return tracing.StepTrace(pipe, options.profile, steps)


def _looking(wanted: bool):
    if not wanted:
        return contextlib.nullcontext()
    from ...compile import nans

    return nans.debugging()


def check_finite(pipe, target):
    """Raises NotFinite for pictures of the last call that are no numbers."""
    if target is None:
        return
    from ...pipelines.pipeline import installation

    if found := installation(pipe).not_finite:
        raise NotFinite(
            f"expected pictures of finite values, got NaN or an infinity from {', '.join(found)}: nothing is written. Ask for"
            " the first submodule that gives one with --debug-nans; float16 overflows where --dtype bfloat16 does not."
        )


def tell(timing: Timing, load_seconds: float, ran: str, files: list):
    """Print the times of a run, where it ran and what it wrote."""
    console = Console()
    console.print(times_table(timing, load_seconds))
    console.print(ran, soft_wrap=True)
    console.print("wrote " + ", ".join(map(str, files)), soft_wrap=True)


def call_extras(cls: type, options, seed: int) -> dict:
    """Arguments that no pipeline takes from a command line as they are: generator, image, pictures as output."""
    takes = arguments.parameters_of(cls)
    extra = {}
    if "generator" in takes:
        extra["generator"] = torch.Generator().manual_seed(seed)
    elif options.seed is not None:
        raise BadInput(arguments.unknown(cls, "seed"))
    if "output_type" in takes:
        extra["output_type"] = "pil"
    if options.image is not None:
        from ....utils import load_image

        try:
            extra["image"] = load_image(options.image)
        except (OSError, ValueError) as error:
            raise BadInput(f"expected --image to be a picture, got {options.image!r}: {error}") from error
    return extra


def dtype_of(options) -> torch.dtype | None:
    """`--dtype`, None where none is given."""
    return options.dtype and getattr(torch, options.dtype)


def placed(pipe, options, target, mesh):
    """The pipeline, its weights where they will be used."""
    if target is None:
        return pipe.to("cuda" if torch.cuda.is_available() else "cpu")
    if not tpu.is_main_process():
        pipe.set_progress_bar_config(disable=True)
    from ...pipelines.pipeline import installation

    with calling():
        if mesh is not None or options.attention != "auto":
            tpu.install(pipe, TPUConfig(mesh=mesh, attention=options.attention))
        pipe.to("tpu")
    installation(pipe).hbm_manager.ready()
    return pipe


def times_table(timing: Timing, load_seconds: float) -> Table:
    """The times of a run as a table."""
    table = Table("part", "seconds", title="times", title_justify="left")
    table.columns[1].justify = "right"
    rows = [("load", load_seconds)]
    rows += [(f"compile {name}", seconds) for name, seconds in timing.compile.items()]
    rows += [(part, seconds) for part, seconds in timing.parts.items() if part != "VAE decode"]
    if timing.steps:
        rows.append(("first step", timing.steps[0]))
        rows.append((f"median of {max(len(timing.steps) - 1, 1)} further steps", timing.median_step))
    rows += [(part, seconds) for part, seconds in timing.parts.items() if part == "VAE decode"]
    for part, seconds in rows:
        table.add_row(part, f"{seconds:.3f}")
    table.add_section()
    table.add_row("total", f"{load_seconds + timing.total:.3f}")
    return table


def where(pipe, target) -> str:
    """In one line what the pipeline ran on."""
    if target is None:
        return f"plain diffusers on {'cuda' if torch.cuda.is_available() else 'the CPU'}"
    mesh = ", ".join(f"{axis} {degree}" for axis, degree in tpu.report(pipe)["mesh"].items())
    if target.simulated:
        chips = f"{target.simulated} chips simulated on the CPU: these are not TPU times"
    else:
        chips = str(target)
    processes = hosts.process_count()
    return f"mesh {mesh}; {f'{processes} processes, each ' if processes > 1 else ''}{chips}"
