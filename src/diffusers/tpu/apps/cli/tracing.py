"""`generate --profile`: a trace of some denoising steps, and beside it the texts of the programs that ran."""

import contextlib
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path

from ...files import whole_files
from ...planner.profile import PROGRAMS
from ..stages.running import in_place_of
from .errors import BadInput
from .timing import wait


STEPS = "2:4"  # the first compiles, the second may compile what only it meets


def steps_of(text: str, count: int | None) -> range:
    """`--profile-steps`, "2:4" for steps 2 and 3 counted from 0. `count`: how many there are, where that is known. Raises BadInput."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    steps = range(int(match[1]), int(match[2])) if match else range(0)
    if not steps:
        raise BadInput(f"expected --profile-steps FIRST:END counted from 0, such as {STEPS}, got {text!r}")
    if count is not None and steps.stop > count:
        raise BadInput(
            f"expected --profile-steps within the {count} steps of --num-inference-steps, got {text}: ask for more steps, or others"
        )
    return steps


@contextlib.contextmanager
def traced(pipe, folder: str, steps: range) -> Iterator[None]:
    """Traces these steps of the pipeline's scheduler into a folder.

    A step ends when the device has finished what `scheduler.step` answers. Python's own calls are not traced: they would cost more
    than what they call.
    """
    scheduler = getattr(pipe, "scheduler", None)
    if scheduler is None:
        raise BadInput(f"expected --profile with a pipeline that has a scheduler, got {type(pipe).__name__}")
    step, done = scheduler.step, 0
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 2
    with contextlib.ExitStack() as trace:

        def begin():
            if done == steps.start:
                trace.enter_context(jax.profiler.trace(folder, profiler_options=options))

        @functools.wraps(step)
        def timed(*args, **kwargs):
            nonlocal done
            answer = step(*args, **kwargs)
            done += 1
            if done in (steps.start, steps.stop):
                wait(answer)
            if done == steps.stop:
                trace.close()
            begin()
            return answer

        with in_place_of(scheduler, "step", timed):
            begin()
            yield
    if done > steps.start:
        _write_programs(pipe, Path(folder) / PROGRAMS, min(done, steps.stop) - steps.start)


def _write_programs(pipe, file: Path, steps: int):
    from ...pipelines.pipeline import installation

    state = installation(pipe)
    programs = [
        {"component": f"{name}.{path}".rstrip("."), "entry": program.entry, "text": program.compiled.as_text()}
        for name, runner in state.runners.items()
        for path, one in runner.with_parts()
        for program in one.programs.values()
    ]
    device, mesh = state.mesh.devices.flat[0].device_kind, dict(state.mesh.shape)
    with whole_files([file]) as (draft,):
        draft.write_text(json.dumps({"steps": steps, "device": device, "mesh": mesh, "programs": programs}))
