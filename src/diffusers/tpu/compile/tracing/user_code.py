"""What of a module is the script's own: hooks and forwards that look inside, and code beside its libraries'.

A plan's processors and methods give parts of a module other inputs than upstream's do: two streams apart where upstream concatenates
them, a norm with the rotation after it in one pass. A hook on a part would see those, or nothing. And what a script's code computes of
a part of a map is not known. So such a module runs as upstream wrote it.
"""

import functools
import types

import torch

from ....hooks.layerwise_casting import LayerwiseCastingHook
from ..state import is_entry
from ..state.libraries import is_library
from ..state.state import HOOKS


def is_watched_inside(module: torch.nn.Module, apart: tuple = ()) -> bool:
    """Whether a part of the module has a hook, or a forward, of the user's. `apart`: hooks of a cache that programs stand for.

    Upstream's layerwise casting looks at weights alone.
    """
    return any(_is_watched(part, apart) for part in module.modules() if part is not module)


def _is_watched(part: torch.nn.Module, apart: tuple) -> bool:
    own = vars(part)
    if own["_forward_hooks"] or own["_forward_pre_hooks"]:
        return True
    if hooks := [*getattr(own.get("_diffusers_hook"), "hooks", {}).values()]:
        return not all(isinstance(hook, LayerwiseCastingHook) or any(hook is one for one in apart) for hook in hooks)
    forward = own.get("forward")
    return not (forward is None or is_entry(forward) or getattr(forward, "__func__", None) is type(part).forward)


def scripted(module: torch.nn.Module) -> str | None:
    """The first part that runs code of the script's, in words; None: none does.

    What the script put on the module itself runs around its parts, not in them: of it only the class counts.
    """
    for cls in {type(m): None for m in module.modules()}:
        if _has_own_code(cls):
            return f"{cls.__name__} has code of the script's"
    for name, m in module.named_modules():
        hooks = (hook for kind in HOOKS for hook in vars(m)[kind].values())
        others = (value for value in vars(m).values() if not isinstance(value, (type, torch.nn.Module)))
        if name and any(map(_is_own, (*hooks, *others))):
            return f"{name} has a hook, a method or a processor of the script's"
    return None


def _is_own(x) -> bool:
    if isinstance(x, types.MethodType):
        return _is_own(x.__func__) or _is_own(x.__self__)
    if isinstance(x, functools.partial):
        return any(map(_is_own, (x.func, *x.args, *x.keywords.values())))
    return not is_library(x) if isinstance(x, types.FunctionType) else _has_own_code(type(x))


def _has_own_code(cls: type) -> bool:
    """Whether the class or a method that it has now is the script's."""
    functions = (f for base in cls.__mro__ for f in vars(base).values() if isinstance(f, types.FunctionType))
    return not all(map(is_library, (*cls.__mro__, *functions)))
