"""What a trace does to a module's Python state is undone whole; what would have lasted is told."""

import contextlib
import functools
import pickle
import random
import sys
import types
from collections.abc import Callable, Iterator
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
        names: of attributes by which a call after it does not do what it does.
        certain: whether that is so of every later call, not of the first one alone.
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

    A forward's scratch (a VAE's feature cache, hooks that transformers installs once) is of no consequence where the next
    forward makes it again: `tracing.depends_on_previous_call` says whether it does. What objects beside the modules keep is, and a number of a
    module's that was counted on.
    """
    trace, before = Trace(), [*_draws(state)]
    try:
        yield trace
    finally:
        for one in state.changed():
            lasts = one.foreign or isinstance(one.owner, type) or one.rewritten()
            (trace.persistent if lasts else trace.temporary).append(one.thing)
        state.restore()
        for (now, _), (was, put_back) in zip(_draws(state), before):
            if pickle.dumps(now) != pickle.dumps(was):
                put_back(was)
                trace.draws += 1


def _draws(state: State) -> Iterator[tuple[object, Callable]]:
    """Of each random generator of Python's and numpy's: where it is, and what puts it there."""
    yield random.getstate(), random.setstate
    yield np.random.get_state(), np.random.set_state
    for x in state.generators:
        if isinstance(x, random.Random):
            yield x.getstate(), x.setstate
        elif isinstance(x, np.random.RandomState):
            yield x.get_state(), x.set_state
        else:
            yield x.bit_generator.state, functools.partial(setattr, x.bit_generator, "state")


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
