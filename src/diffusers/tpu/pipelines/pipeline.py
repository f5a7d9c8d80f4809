"""Installs and uninstalls the TPU path on one pipeline instance.

An installed pipeline is an instance of a subclass of its own class, of the same name. Upstream's `__call__` runs as written: on
device tensors with glue "resident" (the loop on the device), on host tensors with glue "host". `TPUConfig.glue` or the pipeline's
plan chooses. A deep copy is installed like the original. A pickle is of upstream's class.
"""

import contextlib
import copy
import dataclasses
import functools
import inspect
import weakref

import torch

from ...schedulers.scheduling_utils import SchedulerMixin
from .. import bridge
from ..chips import hosts
from ..chips.devices import is_active
from ..chips.locks import exclusive
from ..chips.mesh import make_mesh
from ..common import notices
from ..common.config import ACCELERATORS, TPUConfig, names_accelerator
from ..compile import nans
from ..compile.explain import lines_of, rungs
from ..compile.module import one_call
from ..weights.hbm import hbm_manager_of
from . import attach, glue
from .components import Installation, attach_all, check, deleted, installation, modules_of, replaced, taken_over
from .plans import pipeline_plan
from .stepping import as_programs, under_its_name


@exclusive
def install(pipe, config: TPUConfig | None = None):
    """Run the models of this pipeline instance through JAX; returns the same instance. Without `config`, a pipeline that shares
    models with an installed one uses that one's configuration.

    Raises RuntimeError as `attach.target_devices`, ValueError for a mesh that does not fit, or models of a pipeline with another
    configuration.
    """
    state = installation(pipe)
    if state is not None and config is None:
        return pipe
    devices = attach.target_devices()
    original = type(pipe) if state is None else state.original
    plan, modules = pipeline_plan(original), modules_of(pipe)
    shared = taken_over(pipe, modules) if config is None else None
    config = shared or attach.resolved(config, devices, modules, plan.branches(pipe))
    if plan.host:
        config = dataclasses.replace(config, host=tuple(dict.fromkeys((*config.host, *plan.host))))
        whose = f"the {' and '.join(plan.host)} of {original.__name__}"
        notices.warn_once(f"{whose} stays on the host: upstream's loop asks for gradients through it")
    return _installed(pipe, config, devices)


def _installed(pipe, config: TPUConfig, devices: tuple):
    """The pipeline with exactly this resolved configuration, in which `regroup` says whether its mesh was chosen for it."""
    state, modules = installation(pipe), modules_of(pipe)
    if state is not None and config == state.config:
        return pipe
    check(pipe, modules, config)
    if state is not None:
        uninstall(pipe)
    original = type(pipe)
    mesh = make_mesh(devices, config.mesh)
    glue = pipeline_plan(original).glue if config.glue == "auto" else config.glue
    state = Installation(config, original, mesh, glue, hbm_manager_of(mesh, config))
    attach_all(pipe, state, modules)
    object.__setattr__(pipe, "_tpu", state)
    pipe.__class__ = tpu_class(original)
    state.leaving = weakref.finalize(pipe, deleted, state)
    state.leaving.atexit = False
    return pipe


@exclusive
def uninstall(pipe):
    """Undo `install`: upstream's class and methods, no arrays left on the device; returns the same instance."""
    if (state := installation(pipe)) is None:
        return pipe
    state.leaving.detach()
    for runner in (*state.held.values(), *state.former):
        if attach.runs(runner.module) is runner:  # another pipeline that shares it may have uninstalled it
            attach.detach(runner.module)
    state.hbm_manager.orders.pop(state, None)
    del pipe.__dict__["_tpu"]
    pipe.__class__ = state.original
    return pipe


def report(pipe) -> dict:
    """Mesh, glue and, by component, programs (entry, shapes, seconds, calls), bytes per chip and whether they are on the chips."""
    if (state := installation(pipe)) is None:
        raise ValueError("expected a pipeline on the TPU path, got one without: diffusers.tpu.install(pipe) first")
    return {
        "mesh": dict(state.mesh.shape),
        "glue": state.glue,
        "components": {name: attach.component_report(runner) for name, runner in state.runners.items()},
        "on_host": [name for name in state.held if name not in state.runners],
    }


def explain(pipe) -> str:
    """In which mode every module of every component runs, and why, in lines of text."""
    report(pipe)  # or raises
    return "\n".join(
        line for name, runner in installation(pipe).held.items() for line in lines_of(name, rungs(runner))
    )


# What an installed pipeline does differently


class TPUPipelineMixin:
    """Mixed in before the upstream class; never instantiated alone."""

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        for name in ("__call__", "encode_prompt"):
            if hasattr(cls, name):
                setattr(cls, name, entered(vars(cls).get(name) or _inherited(cls, name)))

    def to(self, *args, **kwargs):
        """As upstream's: an accelerator's name means the TPU, "cpu" leaves the TPU path, a dtype converts the weights."""
        given = (*args, kwargs.get("device"), kwargs.get("dtype"))
        dtype = next((x for x in given if isinstance(x, torch.dtype)), None)
        device = next((x for x in given if x is not None and not isinstance(x, torch.dtype)), None)
        on_tpu = names_accelerator(device)
        if installation(self) is None:
            if not on_tpu and device is not None:
                return super().to(*args, **kwargs)
            if on_tpu:
                install(self)
        if dtype is not None:
            super().to(dtype, **{name: x for name, x in kwargs.items() if name not in ("device", "dtype")})
        if str(device).partition(":")[0] == "cpu":
            notices.warn_once(
                "to_cpu",
                "a pipeline left the TPU path for the CPU, as .to('cpu') says; .to('cuda') or .to('tpu') brings it back",
            )
            return uninstall(self)
        if device is not None and not on_tpu:
            raise ValueError(f"expected a device among {(*ACCELERATORS, 'cpu')} on the TPU path, got {str(device)!r}")
        if on_tpu:
            with exclusive:
                state = installation(self)
                attach_all(self, state)
                for runner in state.held.values():
                    runner.ownership.on_host = False
                state.hbm_manager.check_all(state)  # before anything is moved
                state.hbm_manager.place(state.hbm_manager.orders[state].values())
        return self

    @property
    def _execution_device(self) -> torch.device:
        """In a call, the device of upstream's tensors; to a script, the accelerator."""
        if installation(self) is None:
            return super()._execution_device
        return (
            bridge.DEVICE if bridge.environment().active else torch.device("cpu") if glue.in_a_call() else glue.ASKED
        )

    @property
    def device(self) -> torch.device:
        """As `_execution_device`: a pipeline is where its call runs."""
        return super().device if installation(self) is None else self._execution_device

    def enable_model_cpu_offload(self, *args, **kwargs):
        """Not needed: weights are sharded over all chips; models that do not fit are kept on the host until they are called."""
        if installation(self) is None:
            return super().enable_model_cpu_offload(*args, **kwargs)
        notices.warn_once("enable_model_cpu_offload")

    def enable_sequential_cpu_offload(self, *args, **kwargs):
        """Not needed, as `enable_model_cpu_offload`."""
        if installation(self) is None:
            return super().enable_sequential_cpu_offload(*args, **kwargs)
        notices.warn_once("enable_sequential_cpu_offload")

    def __setattr__(self, name: str, value):
        super().__setattr__(name, value)
        replaced(self, name, value)

    def __delattr__(self, name: str):
        super().__delattr__(name)
        replaced(self, name, None)

    def __deepcopy__(self, memo: dict):
        """A copy with models of its own, installed if this pipeline is."""
        state = installation(self)
        new = object.__new__(type(self) if state is None else state.original)
        memo[id(self)] = new
        vars(new).update(copy.deepcopy(_upstream_state(self), memo))
        return new if state is None else _installed(new, state.config, attach.target_devices())

    def __reduce_ex__(self, protocol):
        state = installation(self)
        return object.__new__, (type(self) if state is None else state.original,), _upstream_state(self)


def _upstream_state(pipe) -> dict:
    return {name: value for name, value in vars(pipe).items() if name != "_tpu"}


@functools.cache
def tpu_class(cls: type) -> type:
    """`cls` with the mixin in front, so that saving and loading see upstream's class."""
    return cls if issubclass(cls, TPUPipelineMixin) else under_its_name(cls, (TPUPipelineMixin, cls))


@functools.cache
def self_installing(cls: type, module: str) -> type:
    """The class that `module` exports for `cls`: the same name and signature; instances install themselves if the path is on."""

    @functools.wraps(cls.__init__)
    def __init__(self, *args, **kwargs):
        cls.__init__(self, *args, **kwargs)
        if is_active():
            install(self)

    return under_its_name(cls, (TPUPipelineMixin, cls), __module__=module, __init__=__init__)


# Calls


def _inherited(cls: type, name: str):
    """A method that looks up the base classes' method at each call, as a script may replace it there."""

    @functools.wraps(getattr(cls, name))
    def run(self, *args, **kwargs):
        return getattr(super(cls, cls), name)(self, *args, **kwargs)

    return run


def entered(method):
    """A pipeline's method, wrapped to run in the environment of a call and to return host tensors."""

    @functools.wraps(method)
    def run(self, *args, **kwargs):
        if (state := installation(self)) is None:
            return method(self, *args, **kwargs)
        with state.one_at_a_time():
            outermost = state.depth == 0
            if outermost and hosts.process_count() > 1:
                _, *given = inspect.signature(method).bind(self, *args, **kwargs).arguments.items()
                hosts.alike(f"{state.original.__name__}.{method.__name__}", dict(given))
            with _running(self, state) as noted:
                there = self._execution_device  # for whatever accelerator the arguments name
                args = [there if isinstance(a, torch.device) and names_accelerator(a) else a for a in args]
                if names_accelerator(kwargs.get("device")):
                    kwargs["device"] = there
                kwargs = glue.with_user_callbacks(kwargs, state.look)
                output = method(self, *args, **kwargs)
            if not outermost:
                return output
            runners = state.runners.items()
            state.not_finite = [name for name, runner in runners if not all(map(bool, noted.get(runner, ())))]
            if state.not_finite:
                notices.warn(
                    f"expected pictures of finite values, got NaN or an infinity from {', '.join(state.not_finite)} of"
                    f" {type(self).__name__}: diffusers-tpu generate --debug-nans names the first submodule that gives one"
                )
            if state.glue == "host":
                return output
            glue.bring_attributes(self, *(part for part in _parts(self) if not isinstance(part, torch.nn.Module)))
            return glue.on_host(output)

    return run


@contextlib.contextmanager
def _running(pipe, state: Installation):
    """A context for a call: attaches new components; resident glue enters the environment on the mesh. Yields what `nans` notes."""
    attach_all(pipe, state)
    env, noted, outermost = bridge.environment(), None, state.depth == 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(glue.inside())
        if outermost:
            state.hbm_manager.check_all(state)
            state.look()
            stack.enter_context(one_call(state.runners.values()))
            noted = stack.enter_context(nans.noting())
        if state.glue == "resident":
            for context in (env.override_property(mesh=state.mesh), bridge.quiet_integers(), bridge.decomposing()):
                stack.enter_context(context)
        if state.glue == "resident" and outermost:
            stack.enter_context(env)
            schedulers = [p for p in _parts(pipe) if isinstance(p, SchedulerMixin) and hasattr(p, "step")]
            stack.enter_context(as_programs(schedulers))
        state.depth += 1
        try:
            yield noted
        finally:
            state.depth -= 1


def _parts(pipe) -> list:
    return [part for part in pipe.components.values() if hasattr(part, "__dict__") and not inspect.isclass(part)]
