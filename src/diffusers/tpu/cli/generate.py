"""`diffusers-tpu generate`: a pipeline run once, its pictures written, its times printed; for `--stage` see staged."""

import time

import torch
from rich.console import Console
from rich.table import Table

from ... import tpu
from .. import hosts
from ..config import TPUConfig
from . import COMMON_ARGUMENTS, arguments, output, session
from .errors import BadInput, calling
from .timing import Stopwatch, Timing


def run(options, rest: list[str]) -> int:
    """The command; returns its exit status."""
    if options.stage is not None:
        from . import staged

        return staged.run(options, rest)
    if options.input is not None:
        raise BadInput("expected --stage denoise or decode with --input: a whole run starts from its arguments")
    start = time.perf_counter()
    target = session.choose_target(options.device)
    first, mesh = session.is_first(target), session.mesh_of(options.mesh, target)
    cls = session.pipeline_class(options.model)
    given = arguments.given_arguments(options, [name.replace("-", "_") for name in COMMON_ARGUMENTS], rest)
    call = arguments.call_arguments(cls, given)
    seed = session.seed_of(options.seed)
    extra = call_extras(cls, options, seed)
    arguments.require(cls, [*call, *extra])
    path = output.output_path(options.output, call.get("prompt"))
    pipe = placed(session.load(options.model, dtype_of(options)), options, target, mesh)
    load_seconds = time.perf_counter() - start
    stopwatch = Stopwatch(pipe)
    with calling():
        result = stopwatch.call({**call, **extra}, "callback_on_step_end" in arguments.parameters_of(cls))
    if not first:
        return 0
    files = output.write(*output.pictures(result), path, options.fps)
    tell(stopwatch.timing, load_seconds, f"{where(pipe, target)}; seed {seed}", files)
    return 0


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
        from ...utils import load_image

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
    from ..pipeline import installation

    with calling():
        if mesh is not None or options.attention != "auto":
            tpu.install(pipe, TPUConfig(mesh=mesh, attention=options.attention))
        pipe.to("tpu")
    installation(pipe).residency.ready()
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
        chips = f"TPU {target.generation}"
    processes = hosts.process_count()
    return f"mesh {mesh}; {f'{processes} processes, each ' if processes > 1 else ''}{chips}"
