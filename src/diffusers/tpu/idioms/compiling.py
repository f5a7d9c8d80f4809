"""`torch.compile` of models: returns the model, as JAX compiles it at its first call. Anything else goes to torch's own.

torch_xla, where it is installed too (Colab, Kaggle), is disabled: upstream's loops would call `mark_step` in each step. Inference
mode becomes `torch.no_grad`, with equal values. In inference mode tensors have no version counter, by which changed weights are
detected, and torch does not decompose operators, which torchax needs. Autocast on an accelerator becomes CUDA's, which the bridge
reads, and the host's, for a script's tensors outside of models; its float16 becomes bfloat16.
"""

import contextlib
import contextvars
import functools
import os
import types

import torch

from ...utils import import_utils
from ..common.config import names_accelerator
from ..common.notices import warn_once
from .replacing import Replacements, Stand


_PACKAGES = {"diffusers", "transformers"}


def replace(replacements: Replacements):
    replacements.put(torch, "compile", Stand(torch, "compile", _compiled))
    replacements.wrap(torch.nn.Module, "compile", _in_place)
    replacements.wrap(torch.autograd.grad_mode.inference_mode, "__enter__", _entered)
    autocast = torch.amp.autocast_mode.autocast
    for name, call in (("__init__", _made), ("__enter__", _cast_inside), ("__exit__", _cast_outside)):
        replacements.wrap(autocast, name, call)
    if import_utils._torch_xla_available:  # it would open the chips, which only one runtime can use
        replacements.put(import_utils, "_torch_xla_available", False)
        os.environ["USE_TORCH_XLA"] = "0"  # accelerate and transformers read this before they import it
        warn_once(
            "torch_xla",
            "torch_xla: on the TPU path models run through JAX, and torch_xla, which would take the chips, is left out"
            " (USE_TORCH_XLA=0). Import diffusers before accelerate; DIFFUSERS_TPU=off leaves the TPU to torch_xla",
        )


def _compiled(original, model=None, **kwargs):
    if model is None:
        return lambda model: torch.compile(model, **kwargs)
    return model if _is_left_to_jax(model) else original(model, **kwargs)


def _in_place(original, module, *args, **kwargs):
    return None if _is_left_to_jax(module) else original(module, *args, **kwargs)


def _is_left_to_jax(thing) -> bool:
    if found := is_ours(thing):
        sentence = (
            "torch.compile: on the TPU path models are compiled by JAX at their first call, and stay as they are"
        )
        warn_once("compile", sentence)
    return found


def is_ours(thing) -> bool:
    """Whether this is, belongs to or calls a model or pipeline of diffusers or transformers."""
    if isinstance(thing, torch.nn.Module):
        return any(_is_of_package(type(module)) for module in thing.modules())
    if isinstance(thing, functools.partial):
        return is_ours(thing.func)
    if isinstance(thing, types.MethodType):
        mine = getattr(thing.__self__, "__dict__", {}).values()
        return is_ours(thing.__self__) or is_ours(thing.__func__) or any(map(_is_model, mine))
    if isinstance(thing, types.FunctionType):
        return (thing.__module__ or "").split(".")[0] in _PACKAGES or any(map(_is_model, _seen_by(thing)))
    return _is_of_package(type(thing))


def _is_model(thing) -> bool:
    thing = thing.__self__ if isinstance(thing, types.MethodType) else thing
    if isinstance(thing, torch.nn.Module):
        return is_ours(thing)
    return _is_of_package(type(thing)) and hasattr(type(thing), "components")


def _seen_by(function: types.FunctionType):
    """The values of a function's closure, and of the module's globals that it names."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a name that is not bound yet
            yield cell.cell_contents
    yield from (function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__)


def _is_of_package(cls: type) -> bool:
    return any((base.__module__ or "").split(".")[0] in _PACKAGES for base in cls.__mro__)


# Modes


def _entered(enter, mode):
    if not mode.mode:
        return enter(mode)
    mode._inference_mode_context = torch.no_grad()
    mode._inference_mode_context.__enter__()


def _made(init, self, device_type, dtype=None, enabled=True, cache_enabled=None):
    if isinstance(device_type, str) and names_accelerator(device_type):
        device_type = "cuda"
        if enabled and (dtype or torch.get_autocast_dtype(device_type)) == torch.float16:
            warn_once("autocast", "torch.autocast: a TPU has no products of float16; bfloat16 takes its place")
            dtype = torch.bfloat16
    init(self, device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


# The dtype of this thread's autocast on an accelerator, for the bridge: inside of an operator torch reports autocast as off.
casting: contextvars.ContextVar[torch.dtype | None] = contextvars.ContextVar("diffusers_tpu_casting", default=None)


def _companions() -> tuple[str, str]:
    """Devices whose autocast is set as well: that of the script's tensors, and the one that a traced model's tensors report."""
    return "cpu", torch._C._get_privateuse1_backend_name()


def _cast_inside(enter, self):
    if self.device == "cuda":
        others = [(torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in _companions()]
        self._before = casting.get(), others
        casting.set(self.fast_dtype if self._enabled else None)
        for name in _companions():
            torch.set_autocast_enabled(name, self._enabled)
            torch.set_autocast_dtype(name, self.fast_dtype)
    return enter(self)


def _cast_outside(leave, self, *error):
    if before := vars(self).pop("_before", None):
        dtype, others = before
        casting.set(dtype)
        for name, (enabled, dtype) in zip(_companions(), others):
            torch.set_autocast_enabled(name, enabled)
            torch.set_autocast_dtype(name, dtype)
    return leave(self, *error)
