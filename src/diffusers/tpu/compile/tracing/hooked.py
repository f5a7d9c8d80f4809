"""Whether what runs inside of a module is watched: a plan's processors and methods give its parts other inputs than upstream's do.

A plan computes two streams apart where upstream concatenates them, or a norm with the rotation after it in one pass. A hook on a part
would see those, or nothing. So a module whose parts are hooked runs as upstream wrote it.
"""

import torch

from ....hooks.layerwise_casting import LayerwiseCastingHook


def is_watched_inside(module: torch.nn.Module, apart: tuple = ()) -> bool:
    """Whether a part of the module has a hook, or a forward, of the user's. `apart`: hooks of a cache that programs stand for.

    Upstream's layerwise casting looks at weights alone.
    """
    return any(_is_watched(part, apart) for part in module.modules() if part is not module)


def _is_watched(part: torch.nn.Module, apart: tuple) -> bool:
    own = vars(part)
    if own["_forward_hooks"] or own["_forward_pre_hooks"]:
        return True
    hooks = [*getattr(own.get("_diffusers_hook"), "hooks", {}).values()]
    if hooks:
        return not all(isinstance(hook, LayerwiseCastingHook) or any(hook is one for one in apart) for hook in hooks)
    forward = own.get("forward")
    return not (
        forward is None or hasattr(forward, "tpu_entry") or getattr(forward, "__func__", None) is type(part).forward
    )
