"""What a trace does to a module's Python state is undone whole; what would have lasted is told."""

import contextlib
import functools
import pickle
import random
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from .state import State


@dataclass
class Trace:
    """What a trace did to the state.

    Attributes:
        persistent: containers that it changed so that the next call would see it: counters, what hooks and processors keep.
        temporary: the other containers that it changed, attributes of modules and what these hold: the next call may not look.
        names: of attributes by which the next call does not do what it does. `certain`: no later call does.
        draws: how many times it drew random numbers.
    """

    persistent: list = field(default_factory=list)
    temporary: list = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    certain: bool = False
    draws: int = 0


@contextlib.contextmanager
def undone(state: State):
    """Around a trace: what it wrote into attributes, dicts and hooks is put back. Gives a `Trace`, filled at the end.

    What objects beside the modules keep persists, and a number of a module's that was counted on. Of the rest, a VAE's feature cache
    say, `tracing.depends_on_previous_call` finds whether the next call reads it.
    """
    generators = [random.getstate.__self__, np.random.get_state.__self__, *state.generators]
    trace, before = Trace(), [(x, x.__getstate__()) for x in generators]
    try:
        yield trace
    finally:
        for one in state.changed():
            lasts = one.foreign or isinstance(one.owner, type) or one.rewritten()
            (trace.persistent if lasts else trace.temporary).append(one.thing)
        state.restore()
        for generator, was in before:
            if pickle.dumps(generator.__getstate__()) != pickle.dumps(was):
                generator.__setstate__(was)
                trace.draws += 1


@contextlib.contextmanager
def without_caches(module: torch.nn.Module):
    """Functions that upstream caches compute: `functools.lru_cache` on a class or a module would keep tracers."""
    owners = {
        base for m in module.modules() for base in type(m).__mro__ if base.__module__ not in ("builtins", "torch")
    }
    owners |= {value for name, value in sys.modules.items() if name.startswith("diffusers.models.")}
    owners |= {sys.modules[o.__module__] for o in owners if isinstance(o, type) and o.__module__ in sys.modules}
    replaced = []
    try:
        for owner in owners:
            for name, value in list(vars(owner).items()):
                plain = _uncached(value)
                if plain is not None:
                    replaced.append((owner, name, value))
                    setattr(owner, name, plain)
        yield
    finally:
        for owner, name, value in replaced:
            setattr(owner, name, value)


def _uncached(value) -> Callable | None:
    """The function behind a cache, also where a wrapper chooses between both; None for anything else."""
    if isinstance(value, functools._lru_cache_wrapper):
        return value.__wrapped__
    if isinstance(value, types.FunctionType) and hasattr(value, "__wrapped__"):
        for cell in value.__closure__ or ():
            if isinstance(cell.cell_contents, functools._lru_cache_wrapper):
                return cell.cell_contents.__wrapped__
    return None
