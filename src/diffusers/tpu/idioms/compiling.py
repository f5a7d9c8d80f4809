"""`torch.compile` of models: JAX compiles them when they are called, so it returns its argument. Of all else it is torch's."""

import functools
import types

import torch

from ..notices import warn_once
from .replacing import Replacements, Stand


_PACKAGES = {"diffusers", "transformers"}


def replace(replacements: Replacements):
    """Put what this file has in torch's place."""
    replacements.put(torch, "compile", Stand(torch.compile, _compiled, "torch", "compile"))
    method = torch.nn.Module.compile
    replacements.put(torch.nn.Module, "compile", functools.wraps(method)(functools.partialmethod(_in_place, method)))


def _compiled(original, model=None, **kwargs):
    if model is None:
        return lambda model: torch.compile(model, **kwargs)
    if not is_ours(model):
        return original(model, **kwargs)
    _say()
    return model


def _in_place(module, original, *args, **kwargs):
    if not is_ours(module):
        return original(module, *args, **kwargs)
    _say()


def _say():
    warn_once(
        "compile",
        "torch.compile: on the TPU path models are compiled by JAX at their first call, and stay as they are",
    )


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
    if isinstance(thing, types.MethodType):
        thing = thing.__self__
    if isinstance(thing, torch.nn.Module):
        return is_ours(thing)
    return _is_of_package(type(thing)) and hasattr(type(thing), "components")


def _seen_by(function: types.FunctionType):
    """The values of what a function names: in its closure, and of its module."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a name that is not bound yet
            pass
    yield from (function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__)


def _is_of_package(cls: type) -> bool:
    return any((base.__module__ or "").split(".")[0] in _PACKAGES for base in cls.__mro__)
