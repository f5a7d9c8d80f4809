"""`generate --profile`: writes a trace of some denoising steps, with the texts of the programs that ran.

`diffusers-tpu profile`: prints their seconds by module and by operation, compared with a plan's.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console

from ...common import notices
from ...common.files import write_whole
from ...compile.module import CompiledModule
from ...pipelines.pipeline import installation
from ...pipelines.stepping import observed
from ...planner.profile import PROGRAMS, beside, measured
from .errors import refusing
from .output import cell, say, table, write_json
from .timing import wait


SHOWN = 20
STEPS = "2:4"  # step 0 compiles; step 1 may compile programs that only it needs


def run(options, rest: list[str]) -> int:
    with refusing(ValueError, OSError):
        found = measured(Path(options.folder))
        if options.plan:
            found = beside(found, _plan(options.plan))
    write_json(options.json, found)
    if options.json == "-":
        return 0
    seconds = ("measured", "planned", "ratio", "mfu") if options.plan else ("measured",)
    for kind, names in (("modules", ("component", "module")), ("operations", ("operation", "limit"))):
        longest = sorted(found[kind], key=lambda row: -(row["measured"] or 0.0))[:SHOWN]
        columns = (*names, *(name for name in seconds if name in longest[0]))
        rows = ([cell(row.get(name)) for name in columns] for row in longest)
        Console().print(table(columns, rows, len(columns), title=f"{kind}, seconds a step"))
    said = f"{found['seconds_per_step']:.4g} s a step of a chip; {found['steps']} steps, {found['chips']} chips: {found['device']}"
    if options.plan:
        said += f"; planned {found['planned_seconds_per_step']:.4g} s, measured is {found['ratio']:.3g} of that; MFU {found['mfu']:.1%}"
    say(said)
    return 0


def _plan(path: str) -> dict:
    found = json.loads(Path(path).read_text())
    found = found[0] if isinstance(found, list) and len(found) == 1 else found
    if not isinstance(found, dict) or not {"parts", "steps", "seconds_per_step"} <= found.keys():
        raise ValueError(f"expected --plan of one plan, of diffusers-tpu plan --json FILE for one slice, got {path}")
    return found


def steps_of(text: str, count: int | None) -> range:
    """`--profile-steps`: "2:4" means steps 2 and 3, counted from 0. `count`: how many there are, if known. Raises ValueError."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    steps = range(int(match[1]), int(match[2])) if match else range(0)
    if not steps:
        raise ValueError(f"expected --profile-steps FIRST:END counted from 0, such as {STEPS}, got {text!r}")
    if count is not None and steps.stop > count:
        raise ValueError(
            f"expected --profile-steps within the {count} steps of --num-inference-steps, got {text}: ask for more steps, or others"
        )
    return steps


@contextlib.contextmanager
def traced(pipe, folder: str, steps: range) -> Iterator[None]:
    """Traces these steps of the pipeline's scheduler into a folder.

    A step ends when the device has finished what `scheduler.step` returns. Python calls are not traced, as that would cost more
    than the calls themselves.
    """
    if (scheduler := getattr(pipe, "scheduler", None)) is None:
        raise ValueError(f"expected --profile with a pipeline that has a scheduler, got {type(pipe).__name__}")
    done = 0
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 2
    with contextlib.ExitStack() as trace:

        def begin():
            if done == steps.start:
                trace.enter_context(jax.profiler.trace(folder, profiler_options=options))

        def ended(answer):
            nonlocal done
            done += 1
            if done in (steps.start, steps.stop):
                wait(answer)
            if done == steps.stop:
                trace.close()
            begin()

        with observed(scheduler, ended):
            begin()
            yield
    if done > steps.start:
        write_programs(installation(pipe).runners, folder, min(done, steps.stop) - steps.start)


def write_programs(runners: Mapping[str, CompiledModule], folder: str, steps: int):
    """Writes `PROGRAMS` for a trace of `steps` steps: device, mesh, and the text of each program. Warns of models without texts."""
    programs, without, mesh = [], set(), next(iter(runners.values())).mesh
    for name, runner in runners.items():
        for path, one in runner.nested():
            found = [(p.entry, compiled) for p in one.programs.values() for compiled in p.executables.values()]
            for entry, compiled in found:
                component, text = f"{name}.{path}".rstrip("."), None
                with contextlib.suppress(RuntimeError, NotImplementedError):  # the runtime keeps no text
                    text = compiled.as_text()
                if text:
                    programs.append({"component": component, "entry": entry, "text": text})
                else:
                    without.add(component)
    if without:
        notices.warn(
            f"{', '.join(sorted(without))}: the runtime has no text of a program, its seconds count between models"
        )
    facts = {"steps": steps, "device": mesh.devices.flat[0].device_kind, "mesh": dict(mesh.shape)}
    write_whole(Path(folder) / PROGRAMS, json.dumps({**facts, "programs": programs}))
