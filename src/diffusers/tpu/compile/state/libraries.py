"""Libraries: Python's own, packages in its folders, and this package. All other code is the user's.

What the user's code reads is followed name by name. Classes and modules of libraries are compared as a whole with the states they
have had before: replacing `torch.nn.functional.gelu`, or a function of upstream's, gives such a module a new state.
"""

import functools
import importlib.util
import itertools
import operator
import os
import sys
import sysconfig
import types
import weakref
from collections.abc import Iterator
from pathlib import Path

from .watch import class_attributes, dicts_differ


# These are libraries also where a development checkout is installed.
KNOWN = ("torch", "transformers", "peft", "accelerate", "torchax", "jax", "numpy", "huggingface_hub", "safetensors")
# Modules whose functions and classes a trace may run: those with such names that it reaches, and those of ALSO.
READ = ("diffusers.models.", "diffusers.hooks.", "transformers.models.", "transformers.modeling_", "peft.tuners.")
ALSO = ("torch.nn.functional", "transformers.activations", "transformers.masking_utils")
CONSTANTS = (bool, int, float, str, tuple, list, dict)
_seen: "weakref.WeakKeyDictionary[type | types.ModuleType, weakref.WeakSet[Seen]]" = weakref.WeakKeyDictionary()


class Seen(dict):
    """What a class or a module held, compared by identity. Only keys keep it alive, as a method may hold the model."""

    __eq__, __hash__ = object.__eq__, object.__hash__

    @functools.cached_property
    def put_into(self) -> tuple[str, ...]:
        """Names in a library's class that need reading: values that are not the library's, and those that can change in place."""
        changing = {name for name, x in self.items() if isinstance(x, (dict, list, set)) and name[:2] != "__"}
        return tuple(name for name, x in self.items() if name in changing or (not isinstance(x, type) and foreign(x)))


@functools.cache
def _folders() -> tuple[str, ...]:
    paths = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {*map(str, Path(__file__).resolve().parents[4:5])}
    for name in KNOWN:
        spec = importlib.util.find_spec(name)
        paths |= {*(spec.submodule_search_locations or ())} if spec else set()
    paths |= {path for path in sys.path if path.rstrip(os.sep).endswith(("site-packages", "dist-packages"))}
    return tuple(os.path.realpath(path) + os.sep for path in paths if path)


@functools.lru_cache(maxsize=65536)
def is_library_file(path: str) -> bool:
    if path.startswith("<frozen"):
        return True
    return not path.startswith("<") and os.path.realpath(path).startswith(_folders())


@functools.lru_cache(maxsize=65536)
def is_library_module(name: str) -> bool:
    """Whether the module of this name is a library's; without a file, whether it is a part of Python."""
    if name == "__main__":
        return False
    module, top = sys.modules.get(name), name.partition(".")[0]
    if not isinstance(module, types.ModuleType):
        return top in sys.stdlib_module_names
    files = [module.__file__] if getattr(module, "__file__", None) else [*getattr(module, "__path__", ())]
    if not files:
        return top in sys.stdlib_module_names or top == "torch" or name in sys.builtin_module_names
    return all(map(is_library_file, map(str, files)))


def is_library(x: types.FunctionType | type) -> bool:
    """Whether a function or class is a library's. A wrapper by the user is the user's, and so is a library's of the user's function,
    as `torch.no_grad()` makes."""
    if isinstance(x, type):
        return is_library_module(x.__module__)
    return all(map(has_library_code, layers_of(x)))


def layers_of(function) -> Iterator[types.FunctionType]:
    """A function, and those that it wraps (`functools.wraps`), from the outside in."""
    while isinstance(function := getattr(function, "__func__", function), types.FunctionType):
        yield function
        function = vars(function).get("__wrapped__")


def has_library_code(function: types.FunctionType) -> bool:
    """Whether a function's own code is a library's, whatever it wraps."""
    file = function.__code__.co_filename
    if file.startswith("<") and not file.startswith("<frozen"):  # made at run time, such as dataclasses' methods
        return is_library_module(function.__globals__.get("__name__") or "__main__")
    return is_library_file(file)


def _version(thing: type | types.ModuleType, now: dict) -> Seen:
    """Which of the states that `thing` has had this is; versions of two things are never the same."""
    states = _seen.setdefault(thing, weakref.WeakSet())
    for before in states:
        if not dicts_differ(now, before):
            return before
    states.add(found := Seen(now))
    return found


def class_version(cls: type) -> Seen:
    """Which of the states that this class's attributes have had is the present one."""
    return _version(cls, class_attributes(cls))


def foreign(x) -> bool:
    """Whether something callable is not a library's."""
    x = x.fget if isinstance(x, property) else getattr(x, "__func__", x)
    if isinstance(x, (types.FunctionType, type)):
        return not is_library(x)
    return foreign(x.func) if isinstance(x, functools.partial) else not is_library(type(x)) and callable(x)


def is_read(x) -> bool:
    """Whether a value of a module is a function, a class or a constant."""
    return callable(x) or isinstance(x, CONSTANTS)


class Libraries:
    """Functions, classes and constants in upstream's modules that code of these modules may run or read. `key`: the version of each
    of the modules."""

    def __init__(self, names: set[str]):
        self.modules = _reached(frozenset(name for name in names if name.startswith(READ)))
        self.namespaces = [*map(vars, self.modules)]
        self.names = [[n for n, x in held.items() if is_read(x) and n[:2] != "__"] for held in self.namespaces]
        self.getters = [operator.itemgetter("__name__", "__name__", *some) for some in self.names]
        self.held = self._values()
        found = zip(self.modules, self.names, self.held)
        self.key = tuple((Module(m.__name__), _version(m, dict(zip(some, held[2:])))) for m, some, held in found)

    def _values(self) -> list[tuple]:
        return [*map(operator.call, self.getters, self.namespaces)]

    def same(self) -> bool:
        try:
            now = self._values()
        except KeyError:
            return False
        return all(map(operator.is_, itertools.chain.from_iterable(now), itertools.chain.from_iterable(self.held)))

    def put_into(self) -> Iterator[types.FunctionType]:
        """Functions in these modules that are not a library's."""
        return (x for held in self.held for x in held if isinstance(x, types.FunctionType) and not is_library(x))


class Module(str):
    """The name of a module. Its content is put into words elsewhere (`store.sources.library_words`)."""


@functools.lru_cache(maxsize=256)
def _reached(names: frozenset[str]) -> tuple[types.ModuleType, ...]:
    """The modules of these names, those whose functions and classes are in them, and so on."""
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
