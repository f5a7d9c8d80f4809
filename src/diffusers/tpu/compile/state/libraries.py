"""Classes and modules of libraries as a forward finds them: in which of the states that they have been seen in, and what is not theirs.

Whoever replaces a function of upstream's (`diffusers.models.embeddings.get_timestep_embedding = mine`), or of torch's
(`torch.nn.functional.gelu = mine`), replaces it in a module that is watched here.
"""

import functools
import operator
import sys
import types
import weakref
from collections import deque
from collections.abc import Hashable, Iterator

from .trust import is_library
from .watch import dicts_differ


READ = ("diffusers.models.", "diffusers.hooks.", "transformers.models.", "transformers.modeling_", "peft.tuners.")
ALSO = ("torch.nn.functional", "transformers.activations", "transformers.masking_utils")
MOST_SEEN = 64  # states of a class or a module that are known again


class _Seen:
    """The states that something has been in, numbered."""

    def __init__(self):
        self.states: deque[tuple[int, dict]] = deque(maxlen=MOST_SEEN)
        self.count = 0

    def number(self, now: dict) -> int:
        for number, before in self.states:
            if not dicts_differ(now, before):
                return number
        self.states.append((self.count, dict(now)))
        self.count += 1
        return self.count - 1


_classes: "weakref.WeakKeyDictionary[type, _Seen]" = weakref.WeakKeyDictionary()
_modules: dict[str, _Seen] = {}


def class_version(cls: type) -> int:
    """Which of the states that this class's attributes were seen in this is."""
    return _classes.setdefault(cls, _Seen()).number(vars(cls))


def foreign(x) -> bool:
    """Whether something callable is not of a library."""
    x = x.fget if isinstance(x, property) else getattr(x, "__func__", x)
    if isinstance(x, (types.FunctionType, type)):
        return not is_library(x)
    if isinstance(x, functools.partial):
        return foreign(x.func)
    return not is_library(type(x)) and callable(x)


@functools.lru_cache(maxsize=16384)
def put_into(cls: type, version: int) -> tuple[str, ...]:
    """Names of a library's class that need reading: what is not the library's, and what can change in place."""
    return tuple(
        name
        for name, x in vars(cls).items()
        if (isinstance(x, (dict, list, set)) and name[:2] != "__") or (not isinstance(x, type) and foreign(x))
    )


class Libraries:
    """Functions and classes that stand in the modules of upstream's that code of these modules may run.

    Attributes:
        key: which of the states that each was seen in it is in now.
    """

    def __init__(self, names: set[str]):
        self.modules = _reached(frozenset(name for name in names if name.startswith(READ)))
        self.names = [_callables(module) for module in self.modules]
        self.getters = [operator.itemgetter(*some) for some in self.names]
        self.namespaces = [*map(vars, self.modules)]
        self.held = self._values()
        self.key = tuple(map(self._version, self.modules, self.names, self.held))

    @staticmethod
    def _version(module: types.ModuleType, names: tuple, held: tuple) -> Hashable:
        return Module(module.__name__), _modules.setdefault(module.__name__, _Seen()).number(dict(zip(names, held)))

    def _values(self) -> list[tuple]:
        return [*map(operator.call, self.getters, self.namespaces)]

    def same(self) -> bool:
        try:
            now = self._values()
        except KeyError:
            return False
        return all(all(map(operator.is_, one, other)) for one, other in zip(now, self.held))

    def put_into(self) -> Iterator[types.FunctionType]:
        """What is not the library's."""
        for held in self.held:
            yield from filter(_foreign_function, held)


class Module(str):
    """The name of a module. What stands in it is in words elsewhere (`store.describing.sources_in_words`)."""


def _foreign_function(x) -> bool:
    return isinstance(x, types.FunctionType) and not is_library(x)


@functools.lru_cache(maxsize=256)
def _reached(names: frozenset[str]) -> tuple[types.ModuleType, ...]:
    """The modules of these names, and those whose functions and classes stand in them, and so on."""
    seen, steps = {}, [*sorted(names), *ALSO]
    while steps:
        name = steps.pop()
        module = sys.modules.get(name)
        if name in seen or type(module) is not types.ModuleType:
            continue
        seen[name] = module
        made = {getattr(x, "__module__", None) for x in vars(module).values() if callable(x)}
        steps += sorted(name for name in made if isinstance(name, str) and name.startswith(READ))
    return tuple(seen.values())


def _callables(module: types.ModuleType) -> tuple[str, ...]:
    found = [name for name, x in vars(module).items() if callable(x) and name[:2] != "__"]
    return tuple(found) if len(found) > 1 else ("__name__", "__name__")
