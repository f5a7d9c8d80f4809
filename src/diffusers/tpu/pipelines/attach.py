"""One model on the TPU path: attaching and detaching, its owners, and what its copies and pickles contain.

Its methods take host and device tensors. They return device tensors inside of the environment, else host tensors. To the script
that moved it there `model.device` is "cuda" (`moving`). A deep copy is on the path like the original; a pickle is upstream's model.
"""

import copy
import functools
import weakref
from dataclasses import dataclass, field, replace

import jax
import torch
from jax.sharding import Mesh

from ..bridge import ExecutionDevice
from ..chips.devices import find_target, jax_devices, keep_compiled_programs, why_off
from ..chips.locks import exclusive
from ..chips.mesh import make_mesh, plan_degrees, slices_of
from ..common.config import TPUConfig, read_environment
from ..compile.explain import lines_of, rungs
from ..compile.host import HostModel
from ..compile.module import CompiledModule
from ..compile.state import is_entry
from ..idioms.processes import refuse_several
from ..weights.hbm import HbmManager, hbm_manager_of, room_on, tensor_degree
from .plans import module_plan


@dataclass(eq=False)
class Ownership:
    """The owners of an attached model."""

    pipelines: weakref.WeakSet = field(default_factory=weakref.WeakSet)  # installed ones that have it
    alone: bool = False  # it was moved or installed by itself, and stays on the chips when no pipeline has it
    asked: bool = False  # a configuration was given for it by itself
    on_host: bool = False  # the script moved it to the host; its pipelines keep it


def target_devices() -> tuple:
    """JAX's devices of this process's target. Raises RuntimeError where the TPU path is off."""
    environment = read_environment()
    if (target := find_target(environment)) is None:
        raise RuntimeError(
            f"expected a TPU, found none ({why_off(environment)}); set DIFFUSERS_TPU=cpu to run the TPU path on simulated chips"
        )
    refuse_several()
    keep_compiled_programs(environment.cache_dir)
    return jax_devices(target)


def degrees_of(
    modules: dict[str, torch.nn.Module], devices: tuple, config: TPUConfig, wanted: tuple | None, branches: int = 1
) -> tuple[int, int, int]:
    """(dp, sp, tp) for these models on these devices: `wanted`, or by guidance branches and free HBM. Raises as `plan_degrees`."""
    models = {name: (module, module_plan(module)) for name, module in modules.items()}
    tp = 1 if wanted else tensor_degree(models, len(devices), room_on(devices[0], config)[1])
    return plan_degrees(len(devices), wanted, branches, slices_of(devices), tp)


def resolved(
    config: TPUConfig | None, devices: tuple, modules: dict[str, torch.nn.Module], branches: int = 1
) -> TPUConfig:
    """The configuration (None: defaults) with its mesh degrees resolved: its own, the environment's, or chosen for these models.

    Raises ValueError for degrees that these devices do not have, and for a ring that does not divide `sp`.
    """
    config = config or TPUConfig()
    wanted = config.mesh or read_environment().mesh
    degrees = degrees_of(modules, devices, config, wanted, branches)
    if config.attention_ring and degrees[1] % config.attention_ring:
        raise ValueError(f"expected TPUConfig.attention_ring to divide sp {degrees[1]}, got {config.attention_ring}")
    return replace(config, mesh=degrees, regroup=config.regroup and not wanted)


@functools.cache
def of_model(config: TPUConfig) -> TPUConfig:
    """The part of a pipeline's configuration that concerns each of its models: without `glue` and `host`."""
    return replace(config, glue="auto", host=())


def differences(ours: TPUConfig, theirs: TPUConfig) -> str:
    """ "attention='splash' for attention='auto'" of the settings that models cannot share; empty where they can."""
    ours, theirs = vars(of_model(ours)), vars(of_model(theirs))
    return ", ".join(f"{k}={x!r} for {k}={theirs[k]!r}" for k, x in ours.items() if x != theirs[k])


# Attached and detached


def runs(module) -> CompiledModule | HostModel | None:
    """The runner of this model; None where it is not attached."""
    attributes = getattr(module, "__dict__", {})
    return attributes.get("_tpu_runner") or attributes.get("_tpu_host")


def owners(module, but=None) -> list:
    """The installed pipelines that have this model, except `but`."""
    owned = getattr(runs(module), "ownership", None)
    return [] if owned is None else [pipe for pipe in owned.pipelines if pipe is not but]


@exclusive
def attach(
    module, config: TPUConfig, mesh: Mesh, hbm_manager: HbmManager, on_host=False
) -> CompiledModule | HostModel:
    """Replace the module's methods by those of a new runner, which is returned. `config`: `of_model` of a resolved one."""
    plan = module_plan(module)
    given = (module, plan.entries, mesh) if on_host else (module, plan, mesh, config, hbm_manager)
    runner = (HostModel if on_host else CompiledModule)(*given)
    runner.config, runner.ownership = config, Ownership()
    runner.attach()
    module.__getstate__ = functools.partial(_upstream_state, module)
    module.__deepcopy__ = functools.partial(_copied, module)
    return runner


@exclusive
def detach(module):
    """Restore upstream's methods and free the arrays on the chips."""
    if (runner := runs(module)) is not None:
        runner.detach()
        for name in _COPYING:
            vars(module).pop(name, None)


def is_on_chips(module) -> bool:
    """Whether the script has put this model on the TPU, itself or with a pipeline."""
    runner = runs(module)
    return isinstance(runner, CompiledModule) and not runner.ownership.on_host


@exclusive
def move(runner: CompiledModule | HostModel, on_host: bool):
    """Move the model's weights to the chips, if there is room, or free them there until its next call."""
    runner.ownership.on_host = on_host
    if on_host:
        leave_chips(runner)
    elif isinstance(runner, CompiledModule):
        runner.hbm_manager.place([runner])


@exclusive
def leave_chips(runner: CompiledModule | HostModel):
    """Free the model's weights on the chips; its next call loads them again."""
    if isinstance(runner, CompiledModule):
        runner.hbm_manager.leave(runner)


# A model by itself


@exclusive
def install(module: torch.nn.Module, config: TPUConfig | None = None) -> torch.nn.Module:
    """Run this model's methods on the TPU; returns the same model. Raises RuntimeError as `target_devices`; ValueError for a mesh
    that does not fit, `TPUConfig.host`, or settings other than those of an installed pipeline that has the model."""
    devices = target_devices()
    if config is not None and config.host:
        raise ValueError(f"expected TPUConfig.host for a pipeline, got {config.host} for a {type(module).__name__}")
    runner, wanted = runs(module), of_model(resolved(config, devices, {"": module}))
    if runner is not None:
        differing = "" if config is None else differences(wanted, runner.config)
        if not differing:
            runner.ownership.alone = runner.ownership.alone or not owners(module)
            return module
        if owners(module):
            raise ValueError(_belongs(module, "the settings of the pipeline that has it", differing))
        detach(module)
    mesh = make_mesh(devices, wanted.mesh)
    runner = attach(module, wanted, mesh, hbm_manager_of(mesh, wanted))
    runner.ownership.alone, runner.ownership.asked = True, config is not None
    runner.hbm_manager.choose_storage({"": runner}, trained=True)
    return module


@exclusive
def uninstall(module: torch.nn.Module) -> torch.nn.Module:
    """Undo `install`: upstream's methods, weights on the host. Raises ValueError for a model of an installed pipeline."""
    if owners(module):
        raise ValueError(_belongs(module, "a model that no installed pipeline has", "one that is a component of it"))
    detach(module)
    return module


def _belongs(module, expected: str, got: str) -> str:
    names = ", ".join(sorted({type(pipe).__name__ for pipe in owners(module)}))
    return (
        f"expected {expected}, got {got}: this {type(module).__name__} belongs to an installed {names}. Configure that"
        " (diffusers.tpu.install(pipe, config); TPUConfig(host=...) keeps components on the host), or uninstall it first."
    )


def report(module: torch.nn.Module) -> dict:
    """Mesh and programs of a model, weight bytes per chip and whether they are there. Raises ValueError if it is not attached."""
    if (runner := runs(module)) is None:
        raise ValueError(
            f"expected a model on the TPU path, got a {type(module).__name__} without: diffusers.tpu.install(model) first"
        )
    return {"mesh": dict(runner.mesh.shape), "on_host": isinstance(runner, HostModel), **component_report(runner)}


def explain(module: torch.nn.Module) -> str:
    """In which mode every submodule of an attached model runs, and why, in lines of text."""
    return "\n".join(lines_of(type(module).__name__, report(module)["rungs"]))


def component_report(runner: CompiledModule | HostModel) -> dict:
    """Programs (module, entry, shapes, branches, seconds, calls, whether another process has compiled it), compilations, evicted
    programs, traces, why calls run eagerly, why programs are not kept for other processes, every module's mode, bytes per chip
    and whether they are there, and with `TPUConfig.attention_tally` the shares of the softmax modes."""
    if isinstance(runner, HostModel):
        return {"rungs": rungs(runner)}
    facts = "entry", "branches", "compile_seconds", "recalled", "calls"
    programs = [
        {"module": name, "shapes": [list(shape) for shape, _ in program.shapes]}
        | {k: getattr(program, k) for k in facts}
        for name, one in runner.nested()
        for program in one.programs.values()
    ]
    placed = runner._placed
    found = {
        "compilations": runner.compilations,
        "evicted": runner.evicted,
        "traces": sum(one.traces for _, one in runner.nested()),
        "programs": programs,
        "eager": runner.eager,
        "not_kept": runner.executables.reason,
        "rungs": rungs(runner),
        "weights": placed and placed.coverage,
        "on_chips": bool(placed and placed.arrays),
    }
    if runner.tally is not None:
        jax.effects_barrier()  # until all programs that ran have reported to the tally
        found["attention_ways"] = runner.tally.shares()
    return found


# Copies


_COPYING = ("__getstate__", "__deepcopy__")


def _upstream_state(module) -> dict:
    """The module's attributes as in upstream: without those that `attach` added, and with those that it replaced."""
    attributes = {n: x for n, x in vars(module).items() if n not in _COPYING and not n.startswith("_tpu")}
    former = {name: value.tpu_own for name, value in attributes.items() if is_entry(value)}
    if isinstance(hook := attributes.get("_hf_hook"), ExecutionDevice):
        former["_hf_hook"] = hook.former
    return {n: x for n, x in (attributes | former).items() if x is not None or n not in former}


def _copied(module, memo: dict) -> torch.nn.Module:
    """A deep copy with its own weights, which its first call loads to the chips; on the host if the original runs there."""
    runner, new = runs(module), type(module).__new__(type(module))
    memo[id(module)] = new
    new.__setstate__(copy.deepcopy(module.__getstate__(), memo))
    if isinstance(runner, CompiledModule):
        made = attach(new, runner.config, runner.mesh, runner.hbm_manager)
        made.ownership.asked, made.storage = runner.ownership.asked, runner.storage
    return new
