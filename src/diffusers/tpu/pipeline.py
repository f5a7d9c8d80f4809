"""Install and uninstall the TPU path on one pipeline instance: the one place that knows every other room.

An installed pipeline is an instance of a subclass of its own class, of the same name, whose `to`, `__call__` and device
properties are ours; its models' methods are runners. Upstream's `__call__` runs as written: on device tensors where the
pipeline has a plan ("resident" glue), on host tensors otherwise ("host" glue).
"""

import contextlib
import functools
import importlib
import inspect
from dataclasses import dataclass, field

import torch
from jax.sharding import Mesh
from torch.utils._pytree import tree_map_only

from ..models.modeling_utils import ModelMixin
from ..utils import logging
from . import bridge, is_active
from .config import ACCELERATORS, TPUConfig, read_environment
from .devices import find_target, jax_devices, keep_compiled_programs
from .host import HostModel
from .idioms import said
from .mesh import make_mesh, plan_degrees
from .residency import Residency
from .runner import Runner
from .sharding import ModelPlan


logger = logging.get_logger(__name__)

# Where the plan of an upstream class is: a module whose PLAN says what is special about it on the TPU.
PLANS = {
    "WanTransformer3DModel": "..models.transformers.transformer_wan_flax",
    "HunyuanVideo15Transformer3DModel": "..models.transformers.transformer_hunyuan_video15_flax",
    "AutoencoderKLWan": "..models.autoencoders.autoencoder_kl_wan_flax",
    "WanVACETransformer3DModel": "..models.transformers.transformer_wan_vace_flax",
    "WanAnimateTransformer3DModel": "..models.transformers.transformer_wan_animate_flax",
    "WanPipeline": "..pipelines.wan.pipeline_wan_flax",
    "WanImageToVideoPipeline": "..pipelines.wan.pipeline_wan_i2v_flax",
    "WanVideoToVideoPipeline": "..pipelines.wan.pipeline_wan_video2video_flax",
    "WanVACEPipeline": "..pipelines.wan.pipeline_wan_vace_flax",
    "WanAnimatePipeline": "..pipelines.wan.pipeline_wan_animate_flax",
}
FLAX = {  # upstream class: where its form in plain JAX is, under the name with Flax before it
    "AutoencoderKLWan": "..models.autoencoders.autoencoder_kl_wan_nnx_flax",
}
VAE_ENTRIES = ("encode", "decode")


@dataclass(frozen=True)
class PipelinePlan:
    """What is special about one pipeline class on the TPU.

    Args:
        glue: "resident" if upstream's loop is known to run on device tensors.
        guided_by_pairs: the denoiser is called once per guidance branch, so that dp 2 is of use.
    """

    glue: str = "host"
    guided_by_pairs: bool = False


@dataclass
class Installation:
    """What `install` made of one pipeline.

    Attributes:
        runners, on_host: of each model, by what runs it.
        replaced: of models that the pipeline no longer has.
        residency: whose weights are on the chips; one for all pipelines that share models.
    """

    config: TPUConfig
    plan: PipelinePlan
    original: type
    mesh: Mesh
    glue: str
    residency: Residency
    runners: dict[str, Runner] = field(default_factory=dict)
    on_host: dict[str, HostModel] = field(default_factory=dict)
    replaced: list[Runner | HostModel] = field(default_factory=list)
    depth: int = 0


def plan_of(cls: type, default):
    """The plan of the first class in cls's bases that has one, else `default`."""
    for base in cls.__mro__:
        if base.__name__ in PLANS and base.__module__.startswith("diffusers."):
            return importlib.import_module(PLANS[base.__name__], __package__).PLAN
    return default


def flax_class(name: str) -> type:
    """The form in plain JAX of upstream's class of this name. Raises ValueError where there is none."""
    if name not in FLAX:
        raise ValueError(f"expected a class that has a form in plain JAX ({', '.join(FLAX)}), got {name}")
    return getattr(importlib.import_module(FLAX[name], __package__), f"Flax{name}")


def install(pipe, config: TPUConfig | None = None):
    """Route the models of this pipeline instance through JAX; returns the same instance.

    Raises:
        RuntimeError: the TPU path is off, or JAX has fewer devices than it needs.
        ValueError: a mesh that does not fit the chips.
    """
    if installation(pipe) is not None:
        if config is None or config == pipe._tpu.config:
            return pipe
        uninstall(pipe)
    environment = read_environment()
    target = find_target(environment)
    if target is None:
        raise RuntimeError(
            "expected a TPU, found none on this host; set DIFFUSERS_TPU=cpu to run the TPU path on simulated chips"
        )
    config = config or TPUConfig(mesh=environment.mesh)
    plan = plan_of(type(pipe), PipelinePlan())
    devices = jax_devices(target)
    keep_compiled_programs(environment.cache_dir)
    degrees = plan_degrees(len(devices), config.mesh or environment.mesh, plan.guided_by_pairs)
    glue = plan.glue if config.glue == "auto" else config.glue
    mesh = make_mesh(devices, degrees)
    residency = Residency(mesh, config, str(pipe.config.get("_name_or_path") or "MODEL"))
    state = Installation(config, plan, type(pipe), mesh, glue, residency)
    _attach_all(pipe, state)
    pipe._tpu = state
    pipe.__class__ = tpu_class(type(pipe))
    return pipe


def uninstall(pipe):
    """Undo `install`: upstream's class and methods, no arrays left on the device; returns the same instance."""
    state = installation(pipe)
    if state is None:
        return pipe
    for runner in (*state.runners.values(), *state.on_host.values(), *state.replaced):
        runner.detach()
    del pipe.__dict__["_tpu"]
    pipe.__class__ = state.original
    return pipe


def installation(pipe) -> Installation | None:
    """The installation of this instance, or None."""
    return vars(pipe).get("_tpu")


def report(pipe) -> dict:
    """Mesh, glue and, by component, programs (entry, shapes, seconds, calls), bytes per chip and whether they are there."""
    state = installation(pipe)
    if state is None:
        raise ValueError("expected a pipeline on the TPU path, got one without: diffusers.tpu.install(pipe) first")
    components = {}
    for name, runner in state.runners.items():
        components[name] = {
            "compilations": runner.compilations,
            "programs": [
                {
                    "entry": program.entry,
                    "shapes": [list(shape) for shape, _ in program.shapes],
                    "branches": program.branches,
                    "compile_seconds": program.compile_seconds,
                    "calls": program.calls,
                }
                for program in runner.programs.values()
            ],
            "weights": runner._placed and runner._placed.coverage,
            "on_chips": bool(runner._placed and runner._placed.arrays),
        }
    return {
        "mesh": dict(state.mesh.shape),
        "glue": state.glue,
        "components": components,
        "on_host": [*state.on_host],
    }


def _attach_all(pipe, state: Installation):
    """A runner for every model of the pipeline that has none; a model shared with another pipeline keeps its own.

    Raises ValueError, before any runner is attached, where a shared model is on another mesh.
    """
    modules = {name: module for name, module in pipe.components.items() if isinstance(module, torch.nn.Module)}
    unknown = [name for name in state.config.host if name not in pipe.components]
    if unknown:
        raise ValueError(f"expected TPUConfig.host of components among {[*modules]}, got {unknown}")
    shared = {name: vars(m)["_tpu_runner"] for name, m in modules.items() if "_tpu_runner" in vars(m)}
    shared_on_host = {name: vars(m)["_tpu_host"] for name, m in modules.items() if "_tpu_host" in vars(m)}
    for name, runner in (shared | shared_on_host).items():
        if runner.mesh != state.mesh or (name in shared_on_host) != (name in state.config.host):
            raise ValueError(
                f"expected {name} on the mesh {dict(state.mesh.shape)} or the host as this TPUConfig says, got it from"
                f" another pipeline on {dict(runner.mesh.shape)}; install both with one TPUConfig"
            )
    state.residency = next((r.residency for r in shared.values() if r.residency is not None), state.residency)
    for name, module in modules.items():
        on_host = name in state.config.host
        known, mine = (shared_on_host, state.on_host) if on_host else (shared, state.runners)
        if name not in known:
            plan = module_plan(module)
            known[name] = (
                HostModel(module, plan.entries, state.mesh)
                if on_host
                else Runner(module, plan, state.mesh, state.config, state.residency)
            )
            known[name].attach()
        if mine.get(name, known[name]) is not known[name]:
            state.replaced.append(mine[name])
        mine[name] = known[name]
    order = (pipe.model_cpu_offload_seq or "").split("->")
    by_use = sorted(state.runners.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order))
    state.residency.use(by_use)


def module_plan(module: torch.nn.Module) -> ModelPlan:
    plan = plan_of(type(module), None)
    if plan is not None:
        return plan
    if not isinstance(module, ModelMixin):
        return ModelPlan(
            decide=_without_cache if "use_cache" in inspect.signature(module.forward).parameters else None
        )
    is_autoencoder = all(hasattr(module, entry) for entry in VAE_ENTRIES)
    return ModelPlan(entries=("forward", *VAE_ENTRIES) if is_autoencoder else ("forward",))


def _without_cache(arguments: dict) -> dict:
    """A text encoder reads its prompt once: the key-value cache that a language model would fill is never read."""
    return {} if arguments.get("use_cache") is not None else {"use_cache": False}


class TPUPipelineMixin:
    """What an installed pipeline does differently. Mixed in before the upstream class; never instantiated alone."""

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        for name in ("__call__", "encode_prompt"):
            if hasattr(cls, name):
                setattr(cls, name, entered(getattr(cls, name)))

    def to(self, *args, **kwargs):
        """As upstream's: an accelerator's name means the TPU, "cpu" leaves the TPU path, a dtype converts the weights."""
        device, dtype, rest = _parse_to(args, kwargs)
        if installation(self) is None:
            if device in ACCELERATORS:
                install(self)
            elif device is not None:
                return super().to(*args, **kwargs)
        if dtype is not None:
            super().to(dtype, **rest)
        if device == "cpu":
            said.once("to_cpu", ".to('cpu'): the pipeline leaves the TPU and runs on the host; .to('cuda') comes back")
            return uninstall(self)
        if device is not None and device not in ACCELERATORS:
            raise ValueError(f"expected a device among {(*ACCELERATORS, 'cpu')} on the TPU path, got {device!r}")
        if device is not None:
            self._tpu.residency.place_all()
        return self

    @property
    def _execution_device(self) -> torch.device:
        state = installation(self)
        if state is None:
            return super()._execution_device
        return bridge.DEVICE if state.glue == "resident" else torch.device("cpu")

    @property
    def device(self) -> torch.device:
        return super().device if installation(self) is None else self._execution_device

    def enable_model_cpu_offload(self, *args, **kwargs):
        """Not needed: weights are sharded over all chips; models without room wait on the host."""
        logger.info("enable_model_cpu_offload: on the TPU path models that have no room on the chips wait on the host")

    def enable_sequential_cpu_offload(self, *args, **kwargs):
        """Not needed: weights are sharded over all chips; models without room wait on the host."""
        logger.info(
            "enable_sequential_cpu_offload: on the TPU path models that have no room on the chips wait on the host"
        )


@functools.cache
def tpu_class(cls: type) -> type:
    """`cls` with the mixin in front, under the same name, so that saving and loading see upstream's class."""
    if issubclass(cls, TPUPipelineMixin):
        return cls
    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (TPUPipelineMixin, cls), namespace)


def self_installing(cls: type, module: str) -> type:
    """The class that `module` exports for `cls`: the same name and signature; an instance installs itself if it can."""

    @functools.wraps(cls.__init__)
    def __init__(self, *args, **kwargs):
        cls.__init__(self, *args, **kwargs)
        if is_active():
            install(self)

    namespace = {"__module__": module, "__qualname__": cls.__name__, "__doc__": cls.__doc__, "__init__": __init__}
    return type(cls.__name__, (TPUPipelineMixin, cls), namespace)


def entered(method):
    """A method of a pipeline that handles tensors, run in the environment of a call; its results come to the host."""

    @functools.wraps(method)
    def run(self, *args, **kwargs):
        with _running(self):
            output = method(self, *args, **kwargs)
        return _on_host(self, output)

    return run


@contextlib.contextmanager
def _running(pipe):
    """The environment of a call: new components get runners; device tensors work, on the pipeline's mesh."""
    state = installation(pipe)
    if state is None:
        yield
        return
    _attach_all(pipe, state)
    if state.depth == 0:
        state.residency.check_all()
    if state.glue == "host":
        yield
        return
    env = bridge.environment()
    modes = env if state.depth == 0 else contextlib.nullcontext()
    with env.override_property(mesh=state.mesh), bridge.quiet_integers(), bridge.decomposing(), modes:
        state.depth += 1
        try:
            yield
        finally:
            state.depth -= 1


def _on_host(pipe, output):
    """Device tensors in what leaves the outermost call come to the host: they cannot be used outside of it."""
    state = installation(pipe)
    if state is None or state.glue == "host" or state.depth:
        return output
    return tree_map_only(bridge.DEVICE_TENSORS, lambda t: bridge.from_numpy(t.jax()), output)


def _parse_to(args: tuple, kwargs: dict) -> tuple[str | None, torch.dtype | None, dict]:
    """(device type, dtype, the rest) of `.to`'s arguments, in any of upstream's forms."""
    rest = dict(kwargs)
    device, dtype = rest.pop("device", None), rest.pop("dtype", None)
    for arg in args:
        if isinstance(arg, torch.dtype):
            dtype = arg
        elif arg is not None:
            device = arg
    kind = getattr(device, "type", None) or (str(device).split(":")[0] if device is not None else None)
    return ("cuda" if isinstance(device, int) else kind), dtype, rest
