"""The result of one walk: a key, and all that was read and can change, compared before each call and restored after a trace."""

import contextlib
import functools
import itertools
import operator
import pickle
import random
import sys
import types
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from .libraries import Libraries
from .watch import CLASS, DICT, SEQUENCE, Watch, all_alike


HOOKS = ("_forward_hooks", "_forward_pre_hooks")
OF_ALL = tuple(name for name in vars(torch.nn.modules.module) if name.endswith(HOOKS))  # torch's, for all modules
HOOK_REGISTRY = "_diffusers_hook"
TENSORS = ("_parameters", "_buffers")
DICTS = (*HOOKS, "_modules", *TENSORS)
# torch's own attributes. Of these a forward reads only `training`; hooks and children are read elsewhere.
TORCHS = frozenset(vars(torch.nn.Module())) - {"training"}
_END = object()  # ends the values that are compared, so that those of different lengths differ


@dataclass(frozen=True, eq=False)
class Held:
    """An object that is equal only to itself."""

    thing: object

    def __eq__(self, other):
        return isinstance(other, Held) and self.thing is other.thing

    def __hash__(self):
        return hash(id(self.thing))


@dataclass(eq=False)
class State:
    """Everything in Python that a trace of one module reads, as it was when it was read.

    Attributes:
        key: equal for equal states; without `numbers`: scales of adapters by `LAYER/PLACE` (path of the LoRA layer, adapter's
            place), of IP-Adapters by `PROCESSOR/scale` or, in a list, `PROCESSOR/scale/NUMBER`.
        tensors: parameters and buffers that a forward reads, by name, tied ones once. `of_tensors`: the modules' dicts of them.
        modules: dicts of the submodules' attributes; those without an owner are hooks and children. `watches`: the rest.
        generators: random generators of Python and numpy that were met; if a trace draws from one, it makes no program.
        unread: name -> why the value there cannot be part of a key.
    """

    module: torch.nn.Module
    key: Hashable = None
    numbers: dict[str, float] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    modules: list[Watch] = field(default_factory=list)
    watches: list[Watch] = field(default_factory=list)
    of_tensors: list[Watch] = field(default_factory=list)
    generators: list = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)
    libraries: Libraries | None = None
    quick: "Quick | None" = None

    def same(self) -> bool:
        """Whether nothing has changed since it was read."""
        return self.quick.same() and self.libraries.same()

    def changed(self) -> list[Watch]:
        return [one for one in (*self.modules, *self.watches) if one.changed()]

    def holds(self) -> set[int]:
        """Ids of all that is watched."""
        return {id(one.thing) for one in (*self.modules, *self.watches)}

    def left(self) -> dict[str, object]:
        """What has changed, by name, with its present value: attributes of modules (`blocks.0.before`), other containers whole."""
        found = {}
        for one in self.changed():
            if not isinstance(one.owner, torch.nn.Module):
                found[one.name] = one.now
                continue
            for key, value in one.now.items():
                if key not in one.before or one.before[key] is not value:
                    found[f"{one.name}.{key}".lstrip(".")] = value
        return found

    def restore(self):
        """Restore what everything held."""
        for one in (*self.changed(), *self.of_tensors):
            one.restore()


class Quick:
    """Compares the modules' own attributes and tensors, and what is watched, without Python code for each of them."""

    def __init__(self, state: State):
        kinds = [CLASS[0], DICT[0], SEQUENCE[0]]
        classes, dicts, lists = ([one for one in state.watches if one.read is kind] for kind in kinds)
        self.others = [one for one in state.watches if one.read not in kinds]
        self.many = [*classes, *dicts, *lists]
        self.maps = [*(vars(one.thing) for one in classes), *(one.thing for one in dicts)]
        self.lists = [one.thing for one in lists]
        self.watched = self._watched()
        self.modules = [one.owner for one in state.modules if one.owner is not None]
        self.own = [one.thing for one in state.modules if one.owner is not None]
        self.getters = [operator.itemgetter(*DICTS, *(n for n in held if n not in TORCHS)) for held in self.own]
        others = [one.thing for one in state.modules if one.owner is None]
        self.empty, self.children = [x for x in others if not x], [x for x in others if x]
        self.tensors = [one.thing.values() for one in state.of_tensors]
        self.shape, self.held = self._shape(), [*self._values()]

    def _watched(self) -> tuple[list, list]:
        chain = itertools.chain.from_iterable
        held = chain(self.maps), chain(map(operator.methodcaller("values"), self.maps)), chain(self.lists)
        return [*map(len, (*self.maps, *self.lists))], [*chain(held)]

    def _same_watches(self) -> bool:
        now = self._watched()
        if now[0] != self.watched[0] or not all(map(operator.is_, now[1], self.watched[1])):
            if any(map(Watch.changed, self.many)):
                return False
            self.watched = now  # equal values in new objects, or attributes that Python adds to a class
        return not any(map(Watch.changed, self.others))

    def _shape(self) -> tuple:
        return [*map(len, self.own)], [*map(tuple, self.children)]

    def _values(self) -> Iterator:
        chain = itertools.chain.from_iterable
        own, children = chain(map(operator.call, self.getters, self.own)), chain(map(dict.values, self.children))
        return itertools.chain(map(type, self.modules), own, children, chain(self.tensors), (_END,))

    def same(self) -> bool:
        return self._same_modules() and self._same_watches()

    def _same_modules(self) -> bool:
        try:
            if any(self.empty) or self._shape() != self.shape:
                return False
            if all(map(operator.is_, self._values(), self.held)):
                return True
            now = [*self._values()]
        except KeyError:
            return False
        if not all_alike(now, self.held):
            return False
        self.held = now  # equal values in new objects: a number that was set again
        return True


@dataclass
class Trace:
    """What a trace did to the state.

    Attributes:
        persistent: containers that it changed so that the next call would see it: counters, what hooks and processors keep.
        temporary: other containers that it changed, attributes of modules and what these hold; the next call may not read them.
        names: of attributes that make the next call do something else. `certain`: every later call, too.
        draws: how many times it drew random numbers.
    """

    persistent: list = field(default_factory=list)
    temporary: list = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    certain: bool = False
    draws: int = 0


@contextlib.contextmanager
def undone(state: State):
    """Around a trace: what it wrote to attributes, dicts and hooks is restored. Gives a `Trace`, filled at the end.

    Changes of objects beside the modules persist, as do numbers of a module that have another value, counters say. For other
    changes (a VAE's feature cache) `tracing.depends_on_previous_call` finds whether the next call reads them.
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
    """While this is open, upstream's cached functions compute: `functools.lru_cache` of a class or module would keep tracers."""
    bases = {base for m in module.modules() for base in type(m).__mro__}
    owners = {base for base in bases if base.__module__ not in ("builtins", "torch")}
    owners |= {value for name, value in sys.modules.items() if name.startswith("diffusers.models.")}
    owners |= {sys.modules[o.__module__] for o in owners if isinstance(o, type) and o.__module__ in sys.modules}
    with contextlib.ExitStack() as stack:
        for owner in owners:
            for name, value in list(vars(owner).items()):
                if (plain := _uncached(value)) is not None:
                    stack.callback(setattr, owner, name, value)
                    setattr(owner, name, plain)
        yield


def _uncached(value) -> Callable | None:
    """The function behind a cache, also if a wrapper chooses between both; None for anything else, and for our own caches."""
    if isinstance(value, functools._lru_cache_wrapper):
        return None if value.__module__.startswith("diffusers.tpu.") else value.__wrapped__
    if isinstance(value, types.FunctionType) and hasattr(value, "__wrapped__"):
        for cell in value.__closure__ or ():
            if isinstance(cell.cell_contents, functools._lru_cache_wrapper):
                return cell.cell_contents.__wrapped__
    return None
