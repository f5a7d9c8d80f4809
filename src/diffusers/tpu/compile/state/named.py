"""What the walk reads because code of the user's asks for it by name: read behind all else, for as long as more names turn up.

Each class here has `asked(reader)`: the keys of what is asked for and was not read yet. `reader` is `values.Reader`.
"""

import functools
import types
from collections.abc import Hashable, Iterator

import torch

from . import watch
from .code import DYNAMIC
from .trust import is_library_module


METHODS = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)
MAKING = frozenset(
    "__new__ __init__ __init_subclass__ __del__ __repr__ __str__ __getstate__ __setstate__ __reduce__ __reduce_ex__"
    " __deepcopy__ __copy__ __sizeof__ __dir__ __class_getitem__ __set_name__ __post_init__".split()
)

OF_NEW = frozenset({"__new__", "__init__", "__post_init__"})


class Once:
    """A value that is read behind all others."""

    def __init__(self, thing, at: str):
        self.thing, self.at, self.done = thing, at, False

    def asked(self, reader) -> Iterator[Hashable]:
        if not self.done:
            self.done = True
            yield reader.value(self.thing, True)


class ByName:
    """An object of which attributes are read that code of the user's names; all, once it names a method."""

    def __init__(self, thing, at: str):
        self.thing, self.at, self.done, self.whole = thing, at, set(), False

    def asked(self, reader) -> Iterator[Hashable]:
        if self.whole:
            return
        held = getattr(self.thing, "__dict__", {})
        if any(
            callable(getattr(type(self.thing), name, None)) for name in reader.names - held.keys() if name[:2] != "__"
        ):
            self.whole = True
            yield reader.type(type(self.thing)), reader.attributes_of(self.thing, True)
            return
        yield from _names(reader, held, (reader.names & held.keys()) - self.done, self.done, self.at)


class Namespace:
    """A module: of one of the user's what is named, of a library's what of that is a plain value."""

    def __init__(self, thing: types.ModuleType, at: str):
        self.thing, self.at, self.done = thing, at, set()
        self.library = is_library_module(thing.__name__)

    def asked(self, reader) -> Iterator[Hashable]:
        held = vars(self.thing)
        names = (reader.names & held.keys()) - self.done
        if self.library:
            names = {name for name in names if isinstance(held[name], (bool, int, float, str))}
        elif not self.done.issuperset(DYNAMIC & reader.names):
            self.done |= DYNAMIC & reader.names  # by names that are computed: any
            names = {name for name in held if name[:2] != "__"} - self.done
        yield from _names(reader, held, names, self.done, self.at)


class Methods:
    """A class of the user's: what it holds beside methods, and methods that code of the user's names, or Python calls."""

    def __init__(self, thing: type, at: str):
        self.thing, self.at, self.done = thing, at, set()

    def asked(self, reader) -> Iterator[Hashable]:
        for name, x in [*vars(self.thing).items()]:
            of_python = name[:2] == "__"
            reachable = name in reader.names or (
                of_python and name not in MAKING and isinstance(x, types.FunctionType)
            )
            reachable = reachable or (self.thing in reader.made and name in OF_NEW)
            read = reachable if isinstance(x, METHODS) else not of_python
            if read and name not in self.done:
                self.done.add(name)
                reader.at = f"{self.thing.__qualname__}.{name}"
                of_a_module = isinstance(x, functools._lru_cache_wrapper) and issubclass(self.thing, torch.nn.Module)
                yield self.thing.__qualname__, name, reader.cached(x, True) if of_a_module else reader.value(x, True)


def _names(reader, held: dict, names: set[str], done: set[str], at: str) -> Iterator[Hashable]:
    names = tuple(sorted(names))
    done.update(names)
    if names:
        reader.watch(held, watch.of_names(held, names))
    for name in names:
        reader.at = f"{at}.{name}"
        yield name, reader.value(held[name], True)
