"""What of a module is the script's own code, not its libraries': what that computes of a part of a map nobody can say."""

import functools
import types
from collections.abc import Iterator

import torch

from ..state.state import HOOKS
from ..state.trust import is_library


def scripted(module: torch.nn.Module) -> str | None:
    """The first part that runs code of the script's, in words; None: none does.

    What the script put on the module itself runs around its parts, not in them: of it only the class counts.
    """
    for cls in {type(m): None for m in module.modules()}:
        if _has_own_code(cls):
            return f"{cls.__name__} has code of the script's"
    for name, m in module.named_modules():
        if name and any(map(_is_own, _on_the_instance(m))):
            return f"{name} has a hook, a method or a processor of the script's"
    return None


def _on_the_instance(m: torch.nn.Module) -> Iterator[object]:
    for kind in HOOKS:
        yield from vars(m)[kind].values()
    yield from (value for value in vars(m).values() if not isinstance(value, (type, torch.nn.Module)))


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
