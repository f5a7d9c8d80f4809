"""Models that are moved by name: `.to("cuda")`, `.cuda()`, `.cpu()`, `device_map="cuda"` and `.device` of models by themselves.

| | a model by itself | a component of an installed pipeline |
|---|---|---|
| an accelerator's name | on the path, weights on the chips as far as there is room | weights on the chips |
| "cpu" | off the path, upstream's again | its weights on the chips are freed until its next call |
| a dtype | its weights are converted, as upstream does it | the same |

`model.device` depends on the caller. A script gets the device that it moved the model to; tensors that it makes there are host
tensors. Libraries, and code in a pipeline's call or a model's methods, get the device of the parameters.
"""

import functools
import sys
import types

import torch

from ..chips.devices import is_active
from ..common import notices
from ..common.config import ACCELERATORS, names_accelerator
from ..idioms.replacing import Replacements


ROOT = __package__.split(".")[0]
TRANSFORMERS, DIFFUSERS = "transformers.modeling_utils", f"{ROOT}.models.modeling_utils"
PROCESSES = f"{ROOT}.models._modeling_parallel"
MODULAR, MANAGER = (f"{ROOT}.modular_pipelines.{name}" for name in ("modular_pipeline", "components_manager"))
LIBRARIES = ("accelerate", "diffusers", "peft", "torch", "torchax", "transformers")


def replace(replacements: Replacements):
    """Replace the methods that move models by name. Imports nothing large."""
    for name, call in (("to", _to), ("cuda", _cuda), ("cpu", _cpu)):
        replacements.wrap(torch.nn.Module, name, call)

    def of_transformers(module: types.ModuleType):
        replacements.wrap(module.PreTrainedModel, "from_pretrained", _from_pretrained)
        of_device(next(cls for cls in module.PreTrainedModel.__mro__ if "device" in vars(cls)))

    def of_device(cls: type):
        original = vars(cls)["device"]
        replacements.put(cls, "device", property(functools.partial(_device, original), doc=original.__doc__))

    replacements.when_imported(TRANSFORMERS, of_transformers)

    def of_diffusers(module: types.ModuleType):
        replacements.wrap(module.ModelMixin, "from_pretrained", _from_pretrained)
        replacements.wrap(module.ModelMixin, "enable_parallelism", _parallel)
        of_device(module.ModelMixin)

    def of_processes(module: types.ModuleType):
        replacements.wrap(module.ContextParallelConfig, "__post_init__", _parallel_over)

    def of_modular(module: types.ModuleType):
        replacements.wrap(module.ModularPipeline, "__init__", _built)
        replacements.wrap(module.ModularPipeline, "to", _pipeline_to)

    def of_manager(module: types.ModuleType):
        replacements.wrap(module.ComponentsManager, "enable_auto_cpu_offload", _managed)

    of_names = (DIFFUSERS, of_diffusers), (PROCESSES, of_processes), (MODULAR, of_modular), (MANAGER, of_manager)
    for name, then in of_names:
        replacements.when_imported(name, then)


def _to(original, self, *args, **kwargs):
    device = kwargs.get("device", args[0] if args else None)
    if device is None or isinstance(device, (torch.dtype, torch.Tensor)) or not is_active():
        return original(self, *args, **kwargs)
    others = dict(kwargs)
    named, *rest = [others.pop("device"), *args] if "device" in others else args

    def convert(to_device=None):
        if to_device is not None or rest or others:
            original(self, to_device, *rest, **others)

    return _moved(self, convert, named)


def _cuda(original, self, device=None):
    return _moved(self, lambda: None, "cuda") if is_active() else original(self, device)


def _cpu(original, self):
    return _moved(self, lambda to_device: original(self), "cpu") if is_active() else original(self)


def _device(original: property, self) -> torch.device:
    attach, frame = sys.modules.get(f"{__package__}.attach"), sys._getframe(1)
    if frame.f_code.co_name == "device":  # a pipeline's property, which reads its models'
        frame = frame.f_back
    asked_by = frame.f_globals.get("__name__", "").partition(".")[0]
    if attach is None or not attach.is_on_chips(self) or asked_by in LIBRARIES:
        return original.fget(self)
    from .. import bridge
    from . import glue

    return original.fget(self) if glue.in_a_call() or bridge.environment().active else glue.ASKED


def _built(init, self, *args, **kwargs):
    """Install a modular pipeline when it is constructed, as others when they are loaded."""
    init(self, *args, **kwargs)
    if is_active():
        from . import pipeline

        pipeline.install(self)


def _pipeline_to(to, self, *args, **kwargs):
    from . import pipeline

    on_tpu = is_active() and names_accelerator(kwargs.get("device", args[0] if args else None))
    return pipeline.install(self).to(*args, **kwargs) if on_tpu else to(self, *args, **kwargs)


def _parallel(enable, self, *args, **kwargs):
    notices.warn_once("parallelism") if is_active() else enable(self, *args, **kwargs)


def _parallel_over(check, self):
    """The check of a configuration for several processes: on the TPU path there is one."""
    if is_active() and {self.ring_degree, self.ulysses_degree} <= {None, 1}:
        self.ring_degree = self.ulysses_degree = 1
        return notices.warn_once("parallelism")
    check(self)


def _managed(enable, manager, device=None, memory_reserve_margin="3GB", offload_strategy=None):
    if not is_active() or not names_accelerator("cuda" if device is None else device):
        return enable(manager, device, memory_reserve_margin, offload_strategy)
    notices.warn_once("ComponentsManager.enable_auto_cpu_offload")
    manager.model_hooks, manager._auto_offload_enabled = [], True
    manager._auto_offload_device, manager._offload_strategy = device, offload_strategy


def _from_pretrained(load, cls, *args, device_map=None, **kwargs):
    asked, on_tpu = resolve_device_map(device_map)
    if is_active() and kwargs.pop("parallel_config", None) is not None:
        notices.warn_once("parallelism")
    given = {} if asked is None else {"device_map": asked}
    loaded = load(cls, *args, **given, **kwargs)  # a model or (model, information)
    if on_tpu:
        from . import attach

        model = loaded[0] if isinstance(loaded, tuple) else loaded
        attach.install(model)  # its first call loads the weights
        model.hf_device_map = {"": 0}  # as upstream's has it, on one GPU
    return loaded


def resolve_device_map(device_map) -> tuple:
    """(the `device_map` for the loader, whether the model is to run on the TPU).

    Raises NotImplementedError for a map by submodule that names an accelerator.
    """
    if device_map is None or not is_active():
        return device_map, False
    names = list(device_map.values()) if isinstance(device_map, dict) else [device_map]
    if all(str(name) == "cpu" for name in names):
        return device_map, False
    if len(names) == 1 and (names_accelerator(names[0]) or names[0] in ("auto", "balanced", "sequential")):
        return None, True
    raise NotImplementedError(
        f"expected device_map None, 'cuda', 'auto' or 'cpu' on the TPU path, got {device_map!r}: a model's weights are"
        " sharded over all chips. Leave it out, or set DIFFUSERS_TPU=off."
    )


def _moved(module: torch.nn.Module, convert, device) -> torch.nn.Module:
    """Move the module to the device and return it. `convert(device=None)` does upstream's part of the move."""
    on_tpu = names_accelerator(device)
    if not on_tpu and f"{__package__}.attach" not in sys.modules:
        convert(device)  # no model can be attached yet
        return module
    from ..compile import tracing
    from . import attach, glue

    if glue.in_a_call() or tracing.tracing():  # upstream's own moves to an accelerator have no effect there
        convert(*(() if on_tpu else (device,)))
        return module
    known = models_in(module)
    if on_tpu:
        convert()
        for model in known:
            attach.move(attach.runs(attach.install(model)), on_host=False)
        library = type(module).__module__.partition(".")[0]
        if not known and library not in ("diffusers", "transformers"):  # parts of a model move with it
            notices.warn_once(
                f"stays {type(module).__qualname__}",
                f"{type(module).__name__} stays on the host: on the TPU path models of diffusers and transformers run on the"
                " TPU, other modules do not",
            )
        return module
    attached = [model for model in known if attach.runs(model) is not None]
    if attached and str(device).partition(":")[0] not in ("cpu", "meta"):
        raise ValueError(f"expected a device among {(*ACCELERATORS, 'cpu')} on the TPU path, got {device!r}")
    for model in attached:
        attach.move(attach.runs(model), on_host=True) if attach.owners(model) else attach.detach(model)
    convert(device)
    return module


def models_in(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The outermost models of diffusers and transformers in this module, or the module itself if it is one."""
    from ...models.modeling_utils import ModelMixin

    transformers = sys.modules.get("transformers.modeling_utils")
    if isinstance(module, (ModelMixin, *([transformers.PreTrainedModel] if transformers else ()))):
        return [module]
    return [model for child in module.children() for model in models_in(child)]
