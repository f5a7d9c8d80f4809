"""The user's code: which names a function reads, from its bytecode, and the part of the walk that follows them.

A string constant counts as the name of an attribute (`getattr(settings, "strength")`).
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
from .libraries import has_library_code, is_library, is_library_module
from .state import Held


GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
# Functions whose result depends on more than their arguments, and `print`, which would run in the trace only: module -> names;
# no names: the whole module.
IMPURE = {name: frozenset(x) for name, x in json.loads(Path(__file__).with_name("impure.json").read_text()).items()}
IMPURE_BUILTINS = IMPURE.pop("<built in>")
DYNAMIC = frozenset({"getattr", "vars", "__dict__", "hasattr", "__getattribute__"})
METHODS = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)
MAKING = frozenset(
    "__new__ __init__ __init_subclass__ __del__ __repr__ __str__ __getstate__ __setstate__ __reduce__ __reduce_ex__"
    " __deepcopy__ __copy__ __sizeof__ __dir__ __class_getitem__ __set_name__ __post_init__".split()
)
OF_NEW = frozenset({"__new__", "__init__", "__post_init__"})
_cached: "weakref.WeakKeyDictionary[Callable, Hashable]" = weakref.WeakKeyDictionary()  # what each read at first


class Names(NamedTuple):
    """The names in code: globals of its module or of Python, attributes and methods of objects and modules, modules it imports."""

    globals: frozenset[str]
    attributes: frozenset[str]
    modules: frozenset[str]


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> Names:
    """The names in a code object, and in all that is defined inside it."""
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
    """Whether a method's code uses its object."""
    names = [step.argval for step in dis.get_instructions(code) if "FAST" in step.opname]
    return any(code.co_varnames[0] in (name if isinstance(name, tuple) else (name,)) for name in names)


def impure(module: str, names: frozenset[str]) -> str | None:
    """The function of a library's module that code with these names may call and whose result varies; None: there is none."""
    if not (some := IMPURE.get(module)):
        return None if some is None else module
    found = sorted(names & some)
    return f"{module}.{found[0]}" if found else None


class CodeReader:
    """The part of a walk that reads code. `values.Reader` has the rest: `value`, `type`, `attributes_of`, `watch` and the like.

    `names`: those that the user's code reads. `made`: classes that it may make objects of. `pending`, read last: (how to read it,
    the object, where it was met, what was read of it).
    """

    def __init__(self):
        self.names: set[str] = {"forward", "__call__"}
        self.made: set[type] = set()
        self.pending: list[tuple[Callable, object, str, set]] = []

    def later(self, how: Callable, x):
        self.pending.append((how, x, self.at, set()))

    def rest(self) -> Hashable:
        """The keys of what the user's code reads by name, until it names nothing new."""
        found, before = [], None
        while before != (before := (len(self.names), len(self.pending), len(self.met), len(found))):
            for how, x, at, done in [*self.pending]:
                self.at = at
                found += how(x, done)
        return tuple(found)

    def cached(self, x: functools._lru_cache_wrapper, of_a_module: bool = False) -> Hashable:
        """A function that caches its results. A trace bypasses the caches of modules' methods (`state.without_caches`): the results
        are the same as long as what the method itself reads stays."""
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
        """A function's code and closure; for a user's function also what it names."""
        if (function.__module__ or "").startswith("diffusers.tpu.") and is_library(function):
            return Held(function)
        library, cells = has_library_code(function), function.__closure__ or ()
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
        """What a user's function names: of its module, of others, of Python."""
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
        """What is imported inside a function: a module, or one beside the function in its package."""
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

    # Read by name: the part of x that is not yet in `done`

    def once(self, x, done: set) -> Iterator[Hashable]:
        """All of a value, once."""
        if not done:
            done.add(True)
            yield self.value(x, True)

    def flags(self, x, done: set) -> Iterator[Hashable]:
        """The flags that the user's code names, of an object that synchronizes threads."""
        for name in (watch.FLAGS.keys() & self.names) - done:
            if hasattr(x, name):
                done.add(name)
                self.watch(x, watch.FLAGS[name])
                yield name, getattr(x, name)()

    def by_name(self, x, done: set) -> Iterator[Hashable]:
        """An object's attributes that the user's code names, itself or by a property; all of them once it names a method."""
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
        """What the user's code names in a module; of a library's module only plain values."""
        held, at = vars(module), self.at
        names = self.names - done
        if is_library_module(module.__name__):
            names = {name for name in names if isinstance(held.get(name), (bool, int, float, str))}
        elif not done.issuperset(DYNAMIC & self.names):
            done |= DYNAMIC & self.names  # a computed name may be any
            names |= {name for name in held if name[:2] != "__"}
        yield from self._names(held, names, done, at)

    def of_class(self, cls: type, done: set) -> Iterator[Hashable]:
        """What a user's class holds beside methods, and the methods that the user's code names or Python calls."""
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
