"""Compiles a run's executables in advance, on any machine: for a slice elsewhere, or for this machine's simulated chips.

`recording` runs upstream's pipeline on models without weights to record its calls. Each call is traced and compiled as in a run,
and stored under the key that the run will look up (`executables`).
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from ..chips.figures import find_topology
from ..chips.mesh import make_mesh
from ..common.config import TPUConfig
from ..compile.module import CompiledModule
from ..compile.programs import Program
from ..pipelines.attach import degrees_of, of_model, target_devices
from ..pipelines.plans import pipeline_plan
from . import SIMULATED
from .aot import BadRequest, Compiler, out_of_memory_told, run_in_child
from .recording import RecordedCall
from .worker import recording_of


TIME_LIMIT = 3600.0


def make(request: dict, folder: Path, on_progress: Callable[[str], None] = lambda text: None) -> dict:
    """Calls `make_here` in a child process whose disk cache is `folder`; returns its result. Raises as `aot.run_in_child`."""
    how = {"seconds": TIME_LIMIT, "schedules": False, "on_progress": on_progress}
    settings = {"DIFFUSERS_TPU": "cpu", "DIFFUSERS_TPU_CACHE": str(folder)}
    return run_in_child(f"{__name__}:make_here", request, environment=settings, **how)


def make_here(request: dict, progress: Callable) -> dict:
    """Stores one run's executables. Returns `programs` of `_make`, all their `bytes`, `weights` of each model in bytes, `mesh`, and
    `left`: why others are not stored.

    Args:
        request: as `planner.request_of` makes it; `topology` may be "simulated".

    Raises BadRequest for a request that cannot be compiled.
    """
    topology = request["topology"]
    devices = target_devices() if topology == SIMULATED else Compiler(find_topology(topology)).devices
    recording = recording_of(request, progress)
    plan, wanted = pipeline_plan(type(recording.pipe)), tuple(request["mesh"]) if request["mesh"] else None
    try:
        config = TPUConfig(**request["config"])
        degrees = degrees_of(recording.modules, devices, config, wanted, plan.branches(recording.pipe))
    except ValueError as error:
        raise BadRequest(str(error)) from error
    config = dataclasses.replace(config, mesh=degrees, regroup=config.regroup and not wanted)
    programs, left, weights = [], [], {}
    resident = (plan.glue if config.glue == "auto" else config.glue) == "resident"
    for name, runner, calls in recording.runners(make_mesh(devices, degrees), of_model(config)):
        weights[name] = sum(weight.nbytes for weight in runner.module.parameters())
        for recorded in calls:
            made = _make(recorded, runner, resident, progress)
            (left if isinstance(made, str) else programs).append(made)
    size = sum(program["bytes"] for program in programs)
    return {"programs": programs, "left": left, "mesh": list(degrees), "bytes": size, "weights": weights}


def _make(recorded: RecordedCall, runner: CompiledModule, resident: bool, progress: Callable) -> dict | str:
    """One program, compiled unless it is stored already: name, file, seconds, bytes. A text instead says why it is not stored."""
    call, name, executables = recorded.call, f"{recorded.component}.{recorded.call.entry}", runner.executables
    branches = recorded.together(runner, resident)
    runner.current()
    if (key := executables.key(call, branches, ())) is None:
        return f"{name}: {executables.reason or 'its call has no words'}"
    path, seconds = executables.cache.folder / key.name, 0.0
    if not (was_there := isinstance(executables.cache.find(key.name, key.parts), Program)):
        progress(f"compiling {name}")
        start = time.perf_counter()
        program = runner.trace(call, branches)
        runner.keep_guards(program, call)
        path = executables.cache.folder / program.key.name
        was_there = isinstance(executables.cache.find(path.name, program.key.parts), Program)  # now with guards
    if not was_there:
        with out_of_memory_told():
            program.compile()
        executables.keep_program(program, ahead=True)
        if not path.exists():
            return f"{name}: {path.parent} cannot be written to, or what it gives cannot be pickled"
        seconds = time.perf_counter() - start
    return {
        "name": name,
        "branches": branches,
        "file": path.name,
        "shapes": [[*shape] for shape, _ in call.shapes],
        "seconds": seconds,
        "bytes": path.stat().st_size,
        "was_there": was_there,
    }
