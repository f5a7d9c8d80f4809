"""Models that are moved by name: `.to("cuda")`, `.cuda()`, `.cpu()`, `device_map="cuda"` and `.device` of models by themselves.

diffusers' and transformers' models all end in `torch.nn.Module`'s methods, so these are the seam while the path is in use:
`switch_on` replaces them (and transformers' `from_pretrained`, whose `device_map` is read before anything is moved, and
`device` of the models' base classes); where no TPU is, nothing is replaced. What they mean:

| | a model by itself | a component of an installed pipeline |
|---|---|---|
| an accelerator's name | on the path, weights on the chips as far as there is room | weights on the chips |
| "cpu" | off the path, upstream's again | its weights leave the chips until it is called |
| a dtype | its weights are converted, as upstream does it | the same |

While a pipeline works, upstream's own moves between its devices mean nothing. Other modules stay on the host.

`model.device` has two readers. A script asks where it put the model (`if model.device.type == "cuda"`), and makes its tensors
there, which are the host's for any accelerator's name. Code of the libraries, of a pipeline's call and of a model's methods
compares it with its tensors' devices and needs where the parameters are. So the answer depends on who asks.
"""

import functools
import importlib.abc
import importlib.util
import sys
import types

import torch

from ..chips.devices import is_active
from ..config import ACCELERATORS, names_accelerator


TRANSFORMERS, DIFFUSERS = "transformers.modeling_utils", f"{__package__.split('.')[0]}.models.modeling_utils"
ASKED = torch.device("cuda", 0)  # what torch says of a tensor that was moved by `.to("cuda")`
LIBRARIES = ("accelerate", "diffusers", "peft", "torch", "torchax", "transformers")
_replaced: list[tuple[type, str, object]] = []


def switch_on():
    """Let moves by name reach the TPU path, for the rest of the process or until `switch_off`. Imports nothing large."""
    if _replaced:
        return
    _replace(torch.nn.Module, "to", _to)
    _replace(torch.nn.Module, "cuda", _cuda)
    _replace(torch.nn.Module, "cpu", _cpu)
    for once_imported in _once_imported:
        if once_imported.name in sys.modules:
            once_imported.then(sys.modules[once_imported.name])
        else:
            sys.meta_path.insert(0, once_imported)


def switch_off():
    """torch's and transformers' own methods again."""
    for once_imported in _once_imported:
        if once_imported in sys.meta_path:
            sys.meta_path.remove(once_imported)
    while _replaced:
        owner, name, original = _replaced.pop()
        setattr(owner, name, original)


class _OnceImported(importlib.abc.MetaPathFinder):
    """What is replaced of a library's module when someone imports it."""

    def __init__(self, name: str, then):
        self.name, self.then = name, then

    def find_spec(self, name: str, path, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def run(module):
            execute(module)
            self.then(module)

        spec.loader.exec_module = run
        return spec


def _of_transformers(module: types.ModuleType):
    _replace(module.PreTrainedModel, "from_pretrained", _from_pretrained)
    _replace(next(cls for cls in module.PreTrainedModel.__mro__ if "device" in vars(cls)), "device", _device)


def _of_diffusers(module: types.ModuleType):
    _replace(module.ModelMixin, "device", _device)


_once_imported = (_OnceImported(TRANSFORMERS, _of_transformers), _OnceImported(DIFFUSERS, _of_diffusers))


def _replace(owner: type, name: str, make):
    original = vars(owner)[name]
    _replaced.append((owner, name, original))
    setattr(owner, name, make(original))


def _to(original):
    @functools.wraps(original)
    def to(self, *args, **kwargs):
        device = device_of(args, kwargs)
        if device is None or not is_active():
            return original(self, *args, **kwargs)
        others = dict(kwargs)
        named, *rest = [others.pop("device"), *args] if "device" in others else args

        def convert(to_device=None):
            if to_device is not None or rest or others:
                original(self, to_device, *rest, **others)

        return _moved(self, device, convert, named)

    return to


def _cuda(original):
    @functools.wraps(original)
    def cuda(self, device=None):
        return _moved(self, "cuda", lambda: None, device) if is_active() else original(self, device)

    return cuda


def _cpu(original):
    @functools.wraps(original)
    def cpu(self):
        return _moved(self, "cpu", lambda to_device: original(self), "cpu") if is_active() else original(self)

    return cpu


def _device(original: property) -> property:
    @functools.wraps(original.fget)
    def device(self) -> torch.device:
        attach = sys.modules.get(f"{__package__}.attach")
        if attach is not None and attach.is_on_chips(self) and _is_asked_by_a_script(sys._getframe(1)):
            return ASKED
        return original.fget(self)

    return property(device)


def _is_asked_by_a_script(frame: types.FrameType) -> bool:
    """Whether this is the user's code, not a library's; upstream's pipelines pass the question on to their models."""
    if frame.f_code.co_name == "device":
        frame = frame.f_back
    if frame.f_globals.get("__name__", "").partition(".")[0] in LIBRARIES:
        return False
    from .. import bridge
    from . import glue

    return not (glue.in_a_call() or bridge.environment().active)


def _from_pretrained(original):
    load = original.__func__

    @functools.wraps(load)
    def from_pretrained(cls, *args, device_map=None, **kwargs):
        asked, on_tpu = resolve_device_map(device_map)
        given = {} if asked is None else {"device_map": asked}
        model = load(cls, *args, **given, **kwargs)
        return on_model_loaded(model) if on_tpu else model

    return classmethod(from_pretrained)


def resolve_device_map(device_map) -> tuple:
    """(what the loader is to do about a model's `device_map`, is the model for the TPU).

    Raises NotImplementedError for a map by submodule that names an accelerator.
    """
    if device_map is None or not is_active():
        return device_map, False
    names = list(device_map.values()) if isinstance(device_map, dict) else [device_map]
    if all(name == "cpu" or str(name) == "cpu" for name in names):
        return device_map, False
    if len(names) == 1 and (names_accelerator(names[0]) or names[0] in ("auto", "balanced", "sequential")):
        return None, True
    raise NotImplementedError(
        f"expected device_map None, 'cuda', 'auto' or 'cpu' on the TPU path, got {device_map!r}: a model's weights are"
        " sharded over all chips. Leave it out, or set DIFFUSERS_TPU=off."
    )


def on_model_loaded(loaded):
    """What a loader returned, a model or (model, information), the model on the TPU path; its weights go when it is called."""
    from . import attach

    attach.install(loaded[0] if isinstance(loaded, tuple) else loaded)
    return loaded


def device_of(args: tuple, kwargs: dict) -> str | None:
    """The type of the device that these arguments of `.to` name, "cuda" for a number; None where there is none."""
    device = kwargs.get("device", args[0] if args else None)
    if device is None or isinstance(device, (torch.dtype, torch.Tensor)):
        return None
    return "cuda" if names_accelerator(device) else str(device).split(":")[0]


def _moved(module: torch.nn.Module, kind: str, convert, device) -> torch.nn.Module:
    """The module where the script wants it. `convert(device=None)` does upstream's part of the move."""
    on_tpu = kind in ACCELERATORS
    if not on_tpu and f"{__package__}.attach" not in sys.modules:
        convert(device)  # nothing can be on the path yet
        return module
    from ..compile import tracing
    from . import glue

    if glue.in_a_call() or tracing.tracing():
        convert(*(() if on_tpu else (device,)))
        return module
    from . import attach

    known = models_in(module)
    if on_tpu:
        convert()
        for model in known:
            attach.to_chips(attach.runs(attach.install(model)))
        if not known:
            _say_that_it_stays(module)
        return module
    attached = [model for model in known if attach.runs(model) is not None]
    if attached and kind not in ("cpu", "meta"):
        raise ValueError(f"expected a device among {(*ACCELERATORS, 'cpu')} on the TPU path, got {device!r}")
    for model in attached:
        if attach.owners(model):
            attach.to_host(attach.runs(model))
        else:
            attach.detach(model)
    convert(device)
    return module


def models_in(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The models of diffusers and transformers that this module is or is made of, outermost ones."""
    from ...models.modeling_utils import ModelMixin

    transformers = sys.modules.get("transformers.modeling_utils")
    if isinstance(module, (ModelMixin, *([transformers.PreTrainedModel] if transformers else ()))):
        return [module]
    return [model for child in module.children() for model in models_in(child)]


def _say_that_it_stays(module: torch.nn.Module):
    library = type(module).__module__.partition(".")[0]
    if library not in ("diffusers", "transformers"):  # parts of a model move with it
        from .. import notices

        notices.warn_once(
            f"stays {type(module).__qualname__}",
            f"{type(module).__name__} stays on the host: on the TPU path models of diffusers and transformers run on the TPU,"
            " other modules do not",
        )
