"""`generate --profile`: a trace of some denoising steps, and beside it the texts of the programs that ran."""

import contextlib
import functools
import json
import re
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


class StepTrace:
    """While it is entered, these steps of the pipeline's scheduler are traced into a folder.

    A step ends when the device has finished what `scheduler.step` answers. Python's own calls are not traced: they would cost more
    than what they call.
    """

    def __init__(self, pipe, folder: str, steps: range):
        self.pipe, self.folder, self.steps = pipe, Path(folder), steps
        self.done, self.traced = 0, 0
        self._open = contextlib.ExitStack()

    def __enter__(self) -> "StepTrace":
        scheduler = getattr(self.pipe, "scheduler", None)
        if scheduler is None:
            raise BadInput(f"expected --profile with a pipeline that has a scheduler, got {type(self.pipe).__name__}")
        self._step = scheduler.step
        timed = functools.wraps(self._step)(functools.partial(self._one))
        self._open.enter_context(in_place_of(scheduler, "step", timed))
        self._trace = self._open.enter_context(contextlib.ExitStack())
        self._begin()
        return self

    def __exit__(self, *error):
        self._open.close()
        if not any(error) and self.traced:
            self._write_programs()

    def _one(self, *args, **kwargs):
        answer = self._step(*args, **kwargs)
        self.done += 1
        if self.done in (self.steps.start, self.steps.stop):
            wait(answer)
        if self.done > self.steps.start:
            self.traced = min(self.done, self.steps.stop) - self.steps.start
        if self.done == self.steps.stop:
            self._trace.close()
        self._begin()
        return answer

    def _begin(self):
        if self.done != self.steps.start:
            return
        import jax

        options = jax.profiler.ProfileOptions()
        options.python_tracer_level, options.host_tracer_level = 0, 2
        self._trace.enter_context(jax.profiler.trace(str(self.folder), profiler_options=options))

    def _write_programs(self):
        from ...pipelines.pipeline import installation

        state = installation(self.pipe)
        programs = [
            {"component": f"{name}.{path}".rstrip("."), "entry": program.entry, "text": program.compiled.as_text()}
            for name, runner in state.runners.items()
            for path, one in runner.with_parts()
            for program in one.programs.values()
        ]
        device = state.mesh.devices.flat[0]
        facts = {
            "steps": self.traced,
            "device": device.device_kind,
            "mesh": dict(state.mesh.shape),
            "programs": programs,
        }
        with whole_files([self.folder / PROGRAMS]) as (draft,):
            draft.write_text(json.dumps(facts))
