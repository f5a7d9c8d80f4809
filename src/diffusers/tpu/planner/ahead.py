"""A run's executables, made before it, on any machine: for a slice that is elsewhere, or for this machine's simulated chips.

The calls are those that upstream's pipeline makes on models without weights (`recording`); each becomes the program that a run
would trace, and lies in the store under the key that the run will ask for (`executables`).
"""

import time
from collections.abc import Callable
from pathlib import Path

from ..chips.figures import find_topology
from ..chips.mesh import make_mesh, plan_degrees, slices_of
from ..compile.executables import ALONE
from ..compile.module import CompiledModule
from ..config import TPUConfig
from ..pipelines.attach import of_model, target_devices
from ..pipelines.plans import module_plan, pipeline_plan
from . import SIMULATED
from .aot import BadRequest, Compiler, out_of_memory_told, run_in_child
from .recording import RecordedCall
from .worker import recording_of


MAKE = f"{__name__}:make_here"
TIME_LIMIT = 3600.0


def make(request: dict, folder: Path, on_progress: Callable[[str], None] = lambda text: None) -> dict:
    """What `make_here` answers, from a process of its own, whose store is in this folder.

    Raises as `aot.run_in_child`.
    """
    settings = {"DIFFUSERS_TPU": "cpu", "DIFFUSERS_TPU_CACHE": str(folder)}
    return run_in_child(
        MAKE, request, seconds=TIME_LIMIT, schedules=False, on_progress=on_progress, environment=settings
    )


def make_here(request: dict, progress: Callable) -> dict:
    """The executables of one run: `programs`, each a name, seconds and bytes, `bytes` of all; `weights` of each model in bytes; `left`: why others are not kept.

    Args:
        request: as `planner.request_of` makes it; `topology` may be "simulated".

    Raises BadRequest for what cannot be compiled.
    """
    topology = request["topology"]
    devices = target_devices() if topology == SIMULATED else Compiler(find_topology(topology)).devices
    progress(f"building {request['model']} without weights")
    recording = recording_of(request, progress)
    pipe = recording.pipe
    plan = pipeline_plan(type(pipe))
    wanted = tuple(request["mesh"]) if request["mesh"] else None
    try:
        degrees = plan_degrees(len(devices), wanted, plan.in_pairs(pipe), slices_of(devices))
    except ValueError as error:
        raise BadRequest(str(error)) from error
    config = of_model(TPUConfig(**{**request["config"], "mesh": degrees}))
    resident = (
        plan.glue if request["config"].get("glue", "auto") == "auto" else request["config"]["glue"]
    ) == "resident"
    mesh, programs, left = make_mesh(devices, degrees), [], []
    for name, module in pipe.components.items():
        calls = [r for r in recording.calls if r.component == name]
        if not calls:
            continue
        runner = CompiledModule(module, module_plan(module), mesh, config)
        runner.attach()
        try:
            for call in calls:
                _make(call, runner, resident, programs, left, progress)
        finally:
            runner.detach()
    models = {name: m for name, m in pipe.components.items() if any(r.component == name for r in recording.calls)}
    return {
        "programs": programs,
        "left": left,
        "mesh": list(degrees),
        "bytes": sum(program["bytes"] for program in programs),
        "weights": {name: sum(weight.nbytes for weight in model.parameters()) for name, model in models.items()},
    }


def _make(
    recorded: RecordedCall, runner: CompiledModule, resident: bool, programs: list, left: list, progress: Callable
):
    call, name = recorded.call, f"{recorded.component}.{recorded.call.entry}"
    branches = runner.branches.side_by_side(call) if resident and recorded.pairs else 1
    runner.current()
    key = runner.executables.key(call, branches, ())
    if key is None:
        left.append(f"{name}: {runner.executables.reason or 'its call has no words'}")
        return
    cache = runner.executables.cache
    path = cache.folder / key.name
    made = {"name": name, "branches": branches, "file": key.name, "shapes": [[*shape] for shape, _ in call.shapes]}
    if path.exists() and cache.find(key.name, key.parts) not in (None, ALONE):
        programs.append({**made, "seconds": 0.0, "bytes": path.stat().st_size, "was_there": True})
        return
    progress(f"compiling {name}")
    start = time.perf_counter()
    program = runner.trace(call, branches)
    program.key = key
    with out_of_memory_told():
        program.compile()
    runner.executables.keep(program, ahead=True)
    if not path.exists():
        left.append(f"{name}: {path.parent} cannot be written to, or what it gives cannot be pickled")
        return
    seconds = time.perf_counter() - start
    programs.append({**made, "seconds": seconds, "bytes": path.stat().st_size, "was_there": False})
