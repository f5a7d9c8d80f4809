"""Code of the user's script in a module: hooks and forwards that look inside, and code that is not a library's.

A plan's processors and methods give parts of a module other inputs than upstream does: two streams where upstream concatenates
them, a norm and the rotation after it in one pass. A hook on a part would see those inputs, or none. What a script's code computes
from a part of a map is unknown. So such a module runs as upstream wrote it.
"""

import functools
import sys
import types

import torch

from ....hooks.layerwise_casting import LayerwiseCastingHook
from ...chips.sharding import ModelPlan
from ..state import is_entry
from ..state.libraries import is_library
from ..state.values import is_ours


def replaced_parts(module: torch.nn.Module, plan: ModelPlan, apart: tuple = ()) -> list[tuple]:
    """What the plan's processors and methods replace: (part of the module, class of its processor, its methods), all or none.

    None where the script has rewritten one of their classes, and of a plan that is `together` also where it has a processor or a hook of
    its own inside. Linear layers may be of any class. `apart` as `is_watched_inside`.
    """
    found, others = [], False
    for m in module.modules():
        kind, methods = type(getattr(m, "processor", None)), [k for k in plan.methods if k[0] is type(m)]
        others = others or (hasattr(m, "processor") and kind not in plan.processors)
        if kind in plan.processors or methods:
            found.append((m, kind, methods))
    parts = [part for m, *_ in found for part in (m, *m.children()) if not isinstance(part, torch.nn.Linear)]
    if not plan.by_width and any(map(rewritten, {*map(type, parts), *(kind for _, kind, _ in found)})):
        return []
    return [] if plan.together and (others or is_watched_inside(module, apart)) else found


def is_watched_inside(module: torch.nn.Module, apart: tuple = ()) -> bool:
    """Whether a part of the module has a hook or a forward of the user's. `apart`: hooks of a step cache that is compiled.

    Upstream's layerwise casting reads weights alone, so it does not count.
    """
    return any(_is_watched(part, apart) for part in module.modules() if part is not module)


def _is_watched(part: torch.nn.Module, apart: tuple) -> bool:
    own = vars(part)
    if hooks_of(part) or hooks_of(torch.nn.modules.module):
        return True
    if hooks := [*getattr(own.get("_diffusers_hook"), "hooks", {}).values()]:
        return not all(isinstance(hook, LayerwiseCastingHook) or any(hook is one for one in apart) for hook in hooks)
    forward = own.get("forward")
    return not (forward is None or is_entry(forward) or getattr(forward, "__func__", None) is type(part).forward)


def hooks_of(owner, way: str = "forward") -> list:
    """Hooks of a module, or torch's of all modules (`torch.nn.modules.module`), forward or backward; without ours."""
    found = (x for name, x in vars(owner).items() if way in name and name.endswith("hooks") and isinstance(x, dict))
    return [f for some in found for f in some.values() if not is_ours(f)]


def scripted(module: torch.nn.Module) -> str | None:
    """Which part first runs code of the script's, in words; None: none does.

    What the script put on the module itself runs around its parts, not in them: of the module only the class counts.
    """
    for cls in {type(m): None for m in module.modules()}:
        if has_own_code(cls):
            return f"{cls.__name__} has code of the script's"
    for name, m in module.named_modules():
        others = (value for value in vars(m).values() if not isinstance(value, (type, torch.nn.Module)))
        if name and any(map(is_own, (*hooks_of(m), *hooks_of(torch.nn.modules.module), *others))):
            return f"{name} has a hook, a method or a processor of the script's"
    return None


def rewritten(cls: type) -> bool:
    """Whether the script has put code into this class of a library, or a function into its module or `torch.nn.functional`."""
    held = (*vars(sys.modules[cls.__module__]).values(), *vars(torch.nn.functional).values())
    return is_library(cls) and (
        has_own_code(cls) or any(isinstance(x, types.FunctionType) and not is_library(x) for x in held)
    )


def is_own(x) -> bool:
    if isinstance(x, types.MethodType):
        return is_own(x.__func__) or is_own(x.__self__)
    if isinstance(x, functools.partial):
        return any(map(is_own, (x.func, *x.args, *x.keywords.values())))
    return not is_library(x) if isinstance(x, types.FunctionType) else has_own_code(type(x))


def has_own_code(cls: type) -> bool:
    """Whether the class or one of its present methods is the script's."""
    functions = (f for base in cls.__mro__ for f in vars(base).values() if isinstance(f, types.FunctionType))
    return not all(map(is_library, (*cls.__mro__, *functions)))
