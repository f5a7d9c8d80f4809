"""Upstream's caches that decide by step: what their hooks keep from call to call is arguments and results of programs.

| cache | decided | programs |
|---|---|---|
| `FirstBlockCacheConfig` | on the device, by the first block's residual r: mean of r - r' over that of r' | one for a first call; one with a condition around the scan of the other blocks |
| `MagCacheConfig` | on the host, by known ratios: upstream's own hooks run on one value | one with blocks, one without |
| `PyramidAttentionBroadcastConfig` | on the host, by calls and timestep: upstream's own hooks | one for each set of attentions that run |
| `TaylorSeerCacheConfig` | on the host, by step: upstream's own hooks | one of a first call, of a later one, and of those between |
"""

import torch

from ..scan import find_groups
from .counted import PyramidAttentionBroadcast, TaylorSeer
from .step_cache import Results, Step, StepCache
from .whole import FirstBlockCache, MagCache


KINDS = {cls.HOOKS: cls for cls in (FirstBlockCache, MagCache, PyramidAttentionBroadcast, TaylorSeer)}


def kept_by(model: torch.nn.Module, scan: bool, known: StepCache | None = None) -> StepCache | None:
    """The cache on the model, if its steps can be compiled; None: there is none, or other hooks are beside it.

    `scan`: whether its equal blocks are scanned. `known`: what was found before, returned again if it has the same hooks.
    """
    registries = ((module, vars(module).get("_diffusers_hook")) for module in model.modules())
    hooked = [(module, hook) for module, registry in registries for hook in getattr(registry, "hooks", {}).values()]
    cls = KINDS.get(frozenset(type(hook).__name__ for _, hook in hooked))
    found = cls and cls.found(model, hooked, find_groups(model) if scan else [])
    same = found and known and [*map(id, found.hooks)] == [*map(id, known.hooks)]
    return known if same else found
