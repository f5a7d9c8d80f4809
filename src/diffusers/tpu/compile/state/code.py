"""Code of the user's: which names a function reads, from its bytecode, and the part of the walk that follows them.

A text constant counts as the name of an attribute (`getattr(settings, "strength")`).
"""

import builtins
import dis
import functools
import inspect
import json
import os
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from . import watch
from .libraries import is_library, is_library_module
from .state import Held


GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
# Functions whose answer depends on more than their arguments, and `print`, which a program would do once: a module and its names;
# all of a module without names.
IMPURE = {name: frozenset(x) for name, x in json.loads(Path(__file__).with_name("impure.json").read_text()).items()}
IMPURE_BUILTINS = IMPURE.pop("<built in>")
DYNAMIC = frozenset({"getattr", "vars", "__dict__", "hasattr", "__getattribute__"})
METHODS = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)
MAKING = frozenset(
    "__new__ __init__ __init_subclass__ __del__ __repr__ __str__ __getstate__ __setstate__ __reduce__ __reduce_ex__"
    " __deepcopy__ __copy__ __sizeof__ __dir__ __class_getitem__ __set_name__ __post_init__".split()
)
OF_NEW = frozenset({"__new__", "__init__", "__post_init__"})
_cached: "weakref.WeakKeyDictionary[Callable, Hashable]" = weakref.WeakKeyDictionary()  # and what each read at first


class Names(NamedTuple):
    """What a code names: globals of its module or of Python, attributes and methods of objects and modules, modules imported in it."""

    globals: frozenset[str]
    attributes: frozenset[str]
    modules: frozenset[str]


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> Names:
    """Of a code, and of all that is defined inside of it."""
    constants = [*_constants(code.co_consts)]
    names, attributes, modules = set(), {x for x in constants if isinstance(x, str) and x.isidentifier()}, set()
    for step in dis.get_instructions(code):
        if step.opname in GLOBALS:
            names.add(step.argval)
        elif step.opname == "IMPORT_NAME":
            modules.add(step.argval)
        elif "ATTR" in step.opname or "METHOD" in step.opname or step.opname == "IMPORT_FROM":
            attributes.add(step.argval)
    inner = (names_of(x) for x in constants if isinstance(x, types.CodeType))
    return Names(*(frozenset().union(*parts) for parts in zip((names, attributes, modules), *inner)))


def _constants(constants) -> Iterator:
    for constant in constants:
        if isinstance(constant, (tuple, frozenset)):
            yield from _constants(constant)
        else:
            yield constant


@functools.lru_cache(maxsize=1024)
def reads_its_first(code: types.CodeType) -> bool:
    """Whether a method's code does anything with its object."""
    names = [step.argval for step in dis.get_instructions(code) if "FAST" in step.opname]
    return any(code.co_varnames[0] in (name if isinstance(name, tuple) else (name,)) for name in names)


def impure(module: str, names: frozenset[str]) -> str | None:
    """What of a library's module a code with these names may call that answers differently each time."""
    if not (some := IMPURE.get(module)):
        return None if some is None else module
    found = sorted(names & some)
    return f"{module}.{found[0]}" if found else None


class CodeReader:
    """A walk's code. `values.Reader` has the rest: `value`, `type`, `attributes_of`, `watch`, `unread`, `fresh`, `state` and `at`.

    `names` are those that code of the user's asks for, `made` the classes that it may make objects of. `pending` is read behind all else:
    (what reads it, the thing, where it was met, what was read of it).
    """

    def __init__(self):
        self.names: set[str] = {"forward", "__call__"}
        self.made: set[type] = set()
        self.pending: list[tuple[Callable, object, str, set]] = []

    def later(self, how: Callable, x):
        self.pending.append((how, x, self.at, set()))

    def rest(self) -> Hashable:
        """The keys of what code of the user's asks for by name, for as long as it asks for more."""
        found, before = [], None
        while before != (before := (len(self.names), len(self.pending), len(self.met), len(found))):
            for how, x, at, done in [*self.pending]:
                self.at = at
                found += how(x, done)
        return tuple(found)

    def cached(self, x: functools._lru_cache_wrapper, of_a_module: bool = False) -> Hashable:
        """A function that keeps its results. A trace goes past the caches of modules' methods (`tracing.without_caches`), which
        gives what they keep for as long as what the method itself reads stays."""
        inner = x.__wrapped__
        if not isinstance(inner, types.FunctionType) or is_library(inner):
            return Held(x)
        if of_a_module and not reads_its_first(inner.__code__):
            alone = self.fresh()
            key = alone.value(inner, True)
            if not alone.state.unread and _cached.setdefault(x, key) == key:
                return self.value(inner, True)
        return self.unread(f"{inner.__qualname__} keeps its results from call to call (functools.lru_cache)")

    def builtin(self, x: types.BuiltinFunctionType) -> Hashable:
        owner = x.__self__
        called = impure(x.__module__ or "", frozenset({x.__name__}))
        if called is not None or (owner is builtins and x.__name__ in IMPURE_BUILTINS):
            return self.unread(f"it calls {called or x.__name__}")
        if owner is None or isinstance(owner, (types.ModuleType, type)):
            return Held(x)
        return x.__name__, self.value(owner, True)

    def function(self, function: types.FunctionType) -> Hashable:
        """Its code and what it has closed over; of a user's also what it names."""
        if (function.__module__ or "").startswith("diffusers.tpu.") and is_library(function):
            return Held(function)
        library, cells = is_library(function), function.__closure__ or ()
        if library and not cells and not function.__defaults__ and not function.__kwdefaults__:
            return Held(function)
        at, read = self.at, []
        for name, cell in zip(function.__code__.co_freevars, cells):
            self.at = f"{at} ({name} of {function.__qualname__})"
            read.append(self.value(cell, True))
        self.at = at
        if not library:
            read += self.named(function)
            self.watch(function, watch.CODE)
            read.append(self.attributes_of(function, True))
        if function.__defaults__ or function.__kwdefaults__:
            read.append((self.value(function.__defaults__, True), self.value(function.__kwdefaults__, True)))
        return Held(function.__code__), tuple(read)

    def named(self, function: types.FunctionType) -> list[Hashable]:
        """What a function of the user's names: of its module, of others, of Python."""
        names, namespace = names_of(function.__code__), function.__globals__
        self.names |= names.attributes | names.globals
        at, some = self.at, tuple(sorted(names.globals))
        self.at = f"{at} (of {function.__module__})"
        self.watch(namespace, watch.of_names(some))
        read = []
        for name in some:
            self.at = f"{at} ({name} of {function.__module__}, in {function.__qualname__})"
            if name in namespace:
                read.append((name, self.named_value(namespace[name], names.attributes)))
            elif name in IMPURE_BUILTINS:
                self.unread(f"it calls {name}")
        for name in sorted(names.modules):
            self.at = f"{at} (imported in {function.__qualname__})"
            read.append((name, self.imported(name, namespace.get("__package__"), names.attributes)))
        self.at = at
        return read

    def imported(self, name: str, package: str | None, attributes: frozenset[str]) -> Hashable:
        """What is imported inside of a function: a module, or of a package one beside the function's."""
        for whole in (name, f"{package}.{name}".rstrip(".")):
            if whole in sys.modules:
                top = sys.modules.get(whole.partition(".")[0])
                return tuple(self.named_value(x, attributes) for x in (sys.modules[whole], top))
        self.watch(sys.modules, watch.of_names((name,)))
        return self.unread(f"it imports {name}")

    def named_value(self, x, attributes: frozenset[str]) -> Hashable:
        module = x.__name__ if isinstance(x, types.ModuleType) else (x if isinstance(x, type) else type(x)).__module__
        if (called := impure(module, attributes)) is not None:
            self.unread(f"it calls {called}")
        if x is os and attributes & {"environ", "getenv", "environb"}:
            self.later(self.once, os.environ)
        return self.value(x, True)

    # What is asked for by name: what of x is not yet in `done`

    def once(self, x, done: set) -> Iterator[Hashable]:
        """All of a value."""
        if not done:
            done.add(True)
            yield self.value(x, True)

    def flags(self, x, done: set) -> Iterator[Hashable]:
        """Of an object that orders threads the flags that code of the user's asks for."""
        for name in (watch.FLAGS.keys() & self.names) - done:
            if hasattr(x, name):
                done.add(name)
                self.watch(x, watch.FLAGS[name])
                yield name, getattr(x, name)()

    def by_name(self, x, done: set) -> Iterator[Hashable]:
        """Of an object the attributes that the user's code names, itself or by a property; all, once it names a method."""
        held, at = getattr(x, "__dict__", {}), self.at
        if None in done:
            return
        of_class = {name: getattr(type(x), name, None) for name in self.names - held.keys()}
        getters = (inspect.unwrap(one.fget) for one in of_class.values() if isinstance(one, property))
        named = (names_of(f.__code__).attributes for f in getters if isinstance(f, types.FunctionType))
        self.names.update(n for some in named for n in some if not callable(getattr(type(x), n, None)))
        if any(callable(one) for name, one in of_class.items() if name[:2] != "__"):
            done.add(None)
            yield self.type(type(x)), self.attributes_of(x, True)
        else:
            yield from self._names(held, self.names, done, at)

    def of_namespace(self, module: types.ModuleType, done: set) -> Iterator[Hashable]:
        """Of a module of the user's what is named, of a library's what of that is a plain value."""
        held, at = vars(module), self.at
        names = self.names - done
        if is_library_module(module.__name__):
            names = {name for name in names if isinstance(held.get(name), (bool, int, float, str))}
        elif not done.issuperset(DYNAMIC & self.names):
            done |= DYNAMIC & self.names  # by names that are computed: any
            names |= {name for name in held if name[:2] != "__"}
        yield from self._names(held, names, done, at)

    def of_class(self, cls: type, done: set) -> Iterator[Hashable]:
        """Of a class of the user's what it holds beside methods, and methods that code of the user's names, or Python calls."""
        for name, x in [*vars(cls).items()]:
            of_python = name[:2] == "__"
            reachable = name in self.names or (cls in self.made and name in OF_NEW)
            reachable = reachable or (of_python and name not in MAKING and isinstance(x, types.FunctionType))
            if name not in done and (reachable if isinstance(x, METHODS) else not of_python):
                done.add(name)
                self.at = f"{cls.__qualname__}.{name}"
                of_a_module = isinstance(x, functools._lru_cache_wrapper) and issubclass(cls, torch.nn.Module)
                yield cls.__qualname__, name, self.cached(x, True) if of_a_module else self.value(x, True)

    def _names(self, held: dict, names: set[str], done: set, at: str) -> Iterator[Hashable]:
        names = tuple(sorted(names - done))
        done.update(names)
        if names:
            self.watch(held, watch.of_names(names))
        for name in filter(held.__contains__, names):
            self.at = f"{at}.{name}"
            yield name, self.value(held[name], True)
