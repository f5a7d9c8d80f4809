"""Trace diagnostics: lists what stops a model's components from being traced, before any weight is loaded.

Every call of one small run is traced twice, with truth values of tensors assumed false and then true; obstacles are recorded and passed
(`obstacles.assuming`). Components are traced as upstream wrote them, or with their plans, as in a run.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from diffusers.tpu.bridge import line_of
from diffusers.tpu.chips.sharding import ModelPlan
from diffusers.tpu.compile.call import Call
from diffusers.tpu.compile.programs import Program
from diffusers.tpu.pipelines.plans import model_plan
from diffusers.tpu.planner.building import build, configuration_of
from diffusers.tpu.planner.recording import RecordingRunner, record

from .obstacles import Obstacle, assuming


LONGEST = 500  # characters of why a trace stopped
SMALL = {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 2}


@dataclass
class Traced:
    """One component's calls: the methods that were traced, their obstacles in order, and why traces ended early."""

    component: str
    kind: str
    entries: list[str] = field(default_factory=list)
    obstacles: list[Obstacle] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)


def list_obstacles(
    model,
    dtype: torch.dtype | None = None,
    arguments: dict | None = None,
    planned: bool = False,
    only: list[str] | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> list[Traced]:
    """Returns a model's components in the order of their first calls.

    Args:
        model: a directory, a model in the hub's cache, a published one, or a pipeline that is not on the TPU path.
        dtype: of a model that is not a pipeline.
        arguments: of the call; they replace those of its card and of `SMALL`. Names that the pipeline does not take are left out.
        planned: trace as in a run, with the processors and methods of our plans.
        only: names of components to list; the others are traced as in a run.

    Raises:
        ValueError: an unknown model, components that it does not have, or arguments that its pipeline refuses.
    """
    pipe, arguments = model, {**SMALL, **(arguments or {})}
    if isinstance(model, str):
        configuration = configuration_of(model)
        on_progress(f"building {model} without weights")
        pipe, arguments = build(configuration, dtype), {**configuration.call, **arguments}
    unknown = set(only or ()) - pipe.components.keys()
    if unknown:
        raise ValueError(
            f"expected components of {type(pipe).__name__} ({', '.join(pipe.components)}), got {', '.join(sorted(unknown))}"
        )
    takes = inspect.signature(type(pipe).__call__).parameters
    arguments = {name: value for name, value in arguments.items() if name in takes}
    found: dict[str, Traced] = {}
    with contextlib.suppress(_Stopped):
        record(pipe, arguments, on_progress, functools.partial(_TracingRunner, found, planned, only))
    return [*found.values()]


class _Stopped(Exception):
    """A component could not be traced, so that the pipeline's next calls are unknown."""


class _TracingRunner(RecordingRunner):
    """Traces every call with both assumed truth values and records the obstacles in `found`."""

    def __init__(self, found: dict[str, Traced], planned: bool, only, component: str, module, plan, recording):
        listed = only is None or component in only
        if listed and not planned and model_plan(type(module)) is not None:
            plan = ModelPlan(entries=plan.entries)
        super().__init__(component, module, plan, recording)
        self.found = found if listed else {}

    def trace(self, call: Call, branches: int = 1) -> Program:
        into = self.found.setdefault(self.component, Traced(self.component, type(self.module).__name__))
        into.entries += [call.entry] * (call.entry not in into.entries)
        programs = [self._assuming(answer, call, into) for answer in (False, True)]
        program = programs[0] or programs[1]
        if program is None:
            raise _Stopped
        return program

    def _assuming(self, answer: bool, call: Call, into: Traced) -> Program | None:
        with assuming(answer) as obstacles:
            try:
                return super().trace(call)
            except Exception as error:  # of any kind: upstream's code goes on with what it was told
                where = f"{call.entry}, truth values assumed {answer}: {type(error).__name__} in {line_of(error)}"
                into.stopped.append(" ".join(f"{where}: {error}".split())[:LONGEST])
                return None
            finally:
                into.obstacles += [one for one in obstacles.found if one not in into.obstacles]
