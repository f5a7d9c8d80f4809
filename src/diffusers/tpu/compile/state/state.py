"""What one walk has found: a key, and everything that it read and that can change, compared before each call, put back after a trace."""

import itertools
import operator
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import torch

from . import watch
from .adapters import Adapters
from .libraries import Libraries
from .watch import Watch, all_alike, dicts_differ


HOOKS = ("_forward_hooks", "_forward_pre_hooks")
HOOK_REGISTRY = "_diffusers_hook"
TENSORS = ("_parameters", "_buffers")
DICTS = (*HOOKS, "_modules", *TENSORS)
# torch's own, of which a forward reads none but `training`; hooks and children are read where they belong.
TORCHS = frozenset(vars(torch.nn.Module())) - {"training"}


@dataclass(frozen=True, eq=False)
class Held:
    """An object that only itself is equal to."""

    thing: object

    def __eq__(self, other):
        return isinstance(other, Held) and self.thing is other.thing

    def __hash__(self):
        return hash(id(self.thing))


@dataclass(frozen=True, order=True)
class Number:
    """A number that travels as an argument: the scale of an adapter, by its place, in the LoRA layer at `path`."""

    path: str
    adapter: int

    def __str__(self):
        return f"{self.path}/{self.adapter}"

    @staticmethod
    def parse(text: str) -> "Number":
        path, adapter = text.split("/")
        return Number(path, int(adapter))

    def holder(self, module: torch.nn.Module) -> dict:
        """The dict that has it, in the module that `path` is relative to."""
        return module.get_submodule(self.path).scaling


@dataclass(frozen=True)
class Entry:
    """What a runner put in a method's place: whose it is, and what stood there on the instance (None: the class's)."""

    runner: object
    own: object


@dataclass
class State:
    """Everything in Python that a trace of one module reads, as it was when this was read.

    Attributes:
        key: equal for equal states; `numbers` are not in it.
        numbers: scales of LoRA layers.
        adapters: which of LoRA layers' a forward adds.
        tensors: parameters and buffers that a forward reads, by name, tied ones once.
        attributes, copies, paths: dicts of the submodules' attributes, hooks and children, what each held, and whose it is. `owners`:
            the module whose attributes the dict holds; None of hooks and children.
        watches: everything else that was read and can change.
        of_tensors: dicts of parameters and buffers, and what they held.
        generators: random generators of Python and numpy that were met: a trace that draws from one is of no use.
        unread: name -> why what stands there can be no part of a key.
    """

    module: torch.nn.Module
    key: Hashable = None
    adapters: Adapters | None = None
    numbers: dict[Number, float] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    attributes: list[dict] = field(default_factory=list)
    copies: list[dict] = field(default_factory=list)
    owners: list = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    watches: list[Watch] = field(default_factory=list)
    of_tensors: list[tuple[dict, dict]] = field(default_factory=list)
    generators: list = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)
    libraries: Libraries | None = None
    _quick: "Quick | None" = None

    def same(self) -> bool:
        """Whether nothing was changed since."""
        if self._quick is None:
            self._quick = Quick(self)
        if not self._quick.same() or any(map(Watch.changed, self.watches)):
            return False
        return self.libraries is None or self.libraries.same()

    def changed(self) -> list["Changed"]:
        """What no longer holds what it held."""
        found = [
            Changed(now, now, before, owner, False, name)
            for now, before, owner, name in zip(self.attributes, self.copies, self.owners, self.paths)
            if dicts_differ(now, before)
        ]
        return found + [
            Changed(w.thing, _as_is(w), _as_was(w), w.owner, w.foreign, w.name) for w in self.watches if w.changed()
        ]

    def holds(self) -> set[int]:
        """Ids of all that is watched."""
        return {*map(id, self.attributes), *(id(w.thing) for w in self.watches)}

    def left(self) -> dict[str, object]:
        """What the modules' attributes hold that they did not, by name: `blocks.0.before`."""
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
        """Everything holds again what it held."""
        for now, before in zip(self.attributes, self.copies):
            if dicts_differ(now, before):
                watch.put_back(now, before)
        for one in self.watches:
            if one.changed():
                one.restore()
        for tensors, before in self.of_tensors:
            watch.put_back(tensors, before)


@dataclass(frozen=True)
class Changed:
    """One thing that no longer holds what it held: the thing, what it holds and what it held, whose it is."""

    thing: object
    now: object
    before: object
    owner: object
    foreign: bool
    name: str


def _as_is(w: Watch):
    return w.thing if isinstance(w.thing, (dict, list, set, deque)) else [*w.read()]


def _as_was(w: Watch):
    """What a container held, as a container of its kind where that is told by what was read."""
    if isinstance(w.thing, dict):
        half = len(w.before) // 2
        return dict(zip(w.before[:half], w.before[half:]))
    return w.before


class Quick:
    """A look at the modules' own attributes and tensors without a line of Python for each."""

    def __init__(self, state: State):
        pairs = [*zip(state.attributes, state.owners)]
        self.modules = [owner for _, owner in pairs if owner is not None]
        self.own = [held for held, owner in pairs if owner is not None]
        self.getters = [
            operator.itemgetter(*DICTS, *(n for n in held if n == "training" or n not in TORCHS)) for held in self.own
        ]
        self.empty = [held for held, owner in pairs if owner is None and not held]
        self.children = [held for held, owner in pairs if owner is None and held]
        self.tensors = [tensors.values() for tensors, _ in state.of_tensors]
        self.sizes, self.keys, self.held = self._sizes(), self._keys(), [*self._values()]

    def _sizes(self) -> list[int]:
        return [*map(len, self.own)]

    def _keys(self) -> list[tuple]:
        return [*map(tuple, self.children)]

    def _values(self) -> Iterator:
        chain = itertools.chain.from_iterable
        own, children = chain(map(operator.call, self.getters, self.own)), chain(map(dict.values, self.children))
        return itertools.chain(map(type, self.modules), own, children, chain(self.tensors), (_END,))

    def same(self) -> bool:
        try:
            if any(self.empty) or self._sizes() != self.sizes or self._keys() != self.keys:
                return False
            if all(map(operator.is_, self._values(), self.held)):
                return True
            now = [*self._values()]
        except KeyError:
            return False
        if not all_alike(now, self.held):
            return False
        self.held = now  # other objects of the same values: a number that was set again
        return True


_END = object()  # where one has more values than the other, it meets something else
