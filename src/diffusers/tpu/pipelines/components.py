"""The models of an installed pipeline and their runners: attached, shared with other pipelines, released.

Pipelines that share a model share its runner, and so its configuration. When no installed pipeline has a model any more, its
weights on the chips are freed; its programs are kept.
"""

import contextlib
import threading
import weakref
from dataclasses import dataclass, field, replace

import torch
from jax.sharding import Mesh

from ..chips.locks import exclusive
from ..common.config import TPUConfig
from ..compile.host import HostModel
from ..compile.module import CompiledModule
from ..weights.hbm import HbmManager
from . import attach


@dataclass(eq=False)
class Installation:
    """The state of one installed pipeline."""

    config: TPUConfig  # resolved
    original: type
    mesh: Mesh
    glue: str
    hbm_manager: HbmManager  # one for all pipelines on these chips
    held: dict[str, CompiledModule | HostModel] = field(default_factory=dict)  # the runner of each model, by name
    former: weakref.WeakSet = field(default_factory=weakref.WeakSet)  # of models that the pipeline no longer has
    leaving: weakref.finalize | None = None  # called when the pipeline is deleted
    depth: int = 0
    not_finite: list[str] = field(default_factory=list)  # components whose pictures of the last call were not finite
    lock: threading.RLock = field(default_factory=threading.RLock)  # one call at a time

    @contextlib.contextmanager
    def one_at_a_time(self):
        """A context for one call of the pipeline; calls of other threads wait for it to end."""
        if not self.lock.acquire(blocking=False):
            with exclusive.released():
                self.lock.acquire()
        try:
            with exclusive:
                yield
        finally:
            self.lock.release()

    def look(self):
        """Search all models for weights that were written to unknown to torch's version counter."""
        for runner in self.runners.values():
            runner.look()

    @property
    def runners(self) -> dict[str, CompiledModule]:
        """Runners of the models that are not kept on the host."""
        return {name: runner for name, runner in self.held.items() if isinstance(runner, CompiledModule)}


def installation(pipe) -> Installation | None:
    """The installation of this instance, or None."""
    return vars(pipe).get("_tpu")


def modules_of(pipe) -> dict[str, torch.nn.Module]:
    return {name: module for name, module in pipe.components.items() if isinstance(module, torch.nn.Module)}


def taken_over(pipe, modules: dict) -> TPUConfig | None:
    """The configuration of models that are attached already: another pipeline's, else one given for a model; else None."""
    shared = {name: attach.runs(m) for name, m in modules.items() if attach.owners(m, but=pipe)}
    asked = [runner for runner in map(attach.runs, modules.values()) if runner is not None and runner.ownership.asked]
    config = next((runner.config for runner in (*shared.values(), *asked)), None)
    on_host = tuple(name for name, runner in shared.items() if isinstance(runner, HostModel))
    return config and replace(config, host=on_host)


def check(pipe, modules: dict, config: TPUConfig):
    """Raises ValueError where `host` names no component, or a model is shared with a pipeline of another configuration."""
    if unknown := [name for name in config.host if name not in pipe.components]:
        raise ValueError(f"expected TPUConfig.host of components among {[*modules]}, got {unknown}")
    for name, module in modules.items():
        others, runner = attach.owners(module, but=pipe), attach.runs(module)
        differing = attach.differences(config, runner.config) if others else ""
        if others and isinstance(runner, HostModel) != (name in config.host):
            differing = ", ".join(filter(None, [differing, "host" if name in config.host else "the chips"]))
        if differing:
            other = type(others[0]).__name__
            raise ValueError(
                f"expected pipelines that share models to have one TPUConfig, got for {name}, from another pipeline on"
                f" {dict(runner.mesh.shape)}, {differing} (this {type(pipe).__name__} for that {other}). Install this one"
                " without a configuration, and it takes over that one's; or give both the same; or uninstall that one."
            )


def attach_all(pipe, state: Installation, modules: dict | None = None):
    """Attach every model that the pipeline has now, and release those that it no longer has.

    Raises ValueError, before any model is attached, where one belongs to a pipeline with another configuration.
    """
    if modules is None:
        modules = modules_of(pipe)
        check(pipe, modules, state.config)
    for name in state.held.keys() - modules.keys():
        release(pipe, state, name)
    for name, module in modules.items():
        on_host, runner = name in state.config.host, attach.runs(module)
        fits = isinstance(runner, HostModel if on_host else CompiledModule) and runner.mesh == state.mesh
        if not fits or attach.differences(runner.config, state.config):
            attach.detach(module)
            runner = attach.attach(module, attach.of_model(state.config), state.mesh, state.hbm_manager, on_host)
        if state.held.get(name, runner) is not runner:
            release(pipe, state, name)
        state.held[name] = runner
        runner.ownership.pipelines.add(pipe)
    order = (getattr(pipe, "model_cpu_offload_seq", None) or "").split("->")
    by_use = sorted(state.runners.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order))
    state.hbm_manager.use(state, by_use, str(pipe.config.get("_name_or_path") or "MODEL"))


def release(pipe, state: Installation, name: str):
    """Release a model that the pipeline no longer has: its weights on the chips are freed, unless it has other owners."""
    runner = state.held.pop(name)
    if runner in state.held.values():  # the pipeline still has it under another name
        return
    state.former.add(runner)
    runner.ownership.pipelines.discard(pipe)
    _leave_if_free(runner)


def deleted(state: Installation):
    """The pipeline was deleted: free the weights of its models that have no other owner."""
    exclusive.soon(lambda: [_leave_if_free(runner) for runner in state.held.values()])


def _leave_if_free(runner: CompiledModule | HostModel):
    if not [*runner.ownership.pipelines] and not runner.ownership.alone:  # `len` counts one that is being deleted
        attach.leave_chips(runner)


def replaced(pipe, name: str, value):
    """An attribute of the pipeline has changed: release the model that it held now, not at the next call."""
    state = installation(pipe)
    if state is not None and (runner := state.held.get(name)) is not None and attach.runs(value) is not runner:
        with exclusive:
            release(pipe, state, name)
