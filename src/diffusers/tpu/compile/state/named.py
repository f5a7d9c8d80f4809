"""What the walk reads because code of the user's asks for it by name: read behind all else, for as long as more names turn up.

Each function gives the keys of what of `x` is asked for and not yet in `done`. `reader` is `values.Reader`.
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


def once(reader, x, done: set) -> Iterator[Hashable]:
    """All of a value."""
    if not done:
        done.add(True)
        yield reader.value(x, True)


def by_name(reader, x, done: set) -> Iterator[Hashable]:
    """Of an object the attributes that code of the user's names; all, once it names a method."""
    held, at = getattr(x, "__dict__", {}), reader.at
    if None in done:
        return
    if any(callable(getattr(type(x), name, None)) for name in reader.names - held.keys() if name[:2] != "__"):
        done.add(None)
        yield reader.type(type(x)), reader.attributes_of(x, True)
    else:
        yield from _names(reader, held, reader.names & held.keys(), done, at)


def of_namespace(reader, module: types.ModuleType, done: set) -> Iterator[Hashable]:
    """Of a module of the user's what is named, of a library's what of that is a plain value."""
    held, at = vars(module), reader.at
    names = (reader.names & held.keys()) - done
    if is_library_module(module.__name__):
        names = {name for name in names if isinstance(held[name], (bool, int, float, str))}
    elif not done.issuperset(DYNAMIC & reader.names):
        done |= DYNAMIC & reader.names  # by names that are computed: any
        names = {name for name in held if name[:2] != "__"}
    yield from _names(reader, held, names, done, at)


def of_class(reader, cls: type, done: set) -> Iterator[Hashable]:
    """Of a class of the user's what it holds beside methods, and methods that code of the user's names, or Python calls."""
    for name, x in [*vars(cls).items()]:
        of_python = name[:2] == "__"
        reachable = name in reader.names or (cls in reader.made and name in OF_NEW)
        reachable = reachable or (of_python and name not in MAKING and isinstance(x, types.FunctionType))
        if name not in done and (reachable if isinstance(x, METHODS) else not of_python):
            done.add(name)
            reader.at = f"{cls.__qualname__}.{name}"
            of_a_module = isinstance(x, functools._lru_cache_wrapper) and issubclass(cls, torch.nn.Module)
            yield cls.__qualname__, name, reader.cached(x, True) if of_a_module else reader.value(x, True)


def _names(reader, held: dict, names: set[str], done: set, at: str) -> Iterator[Hashable]:
    names = tuple(sorted(names - done))
    done.update(names)
    if names:
        reader.watch(held, watch.of_names(names))
    for name in names:
        reader.at = f"{at}.{name}"
        yield name, reader.value(held[name], True)
