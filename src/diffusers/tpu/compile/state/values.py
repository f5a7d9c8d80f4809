"""Values, objects and code as keys: the part of the walk that knows nothing of models.

Objects are read whole. Code of installed libraries (`trust`) is taken as it is; of the user's functions the names are followed (`code`,
`named`). What is read and can change is watched (`watch`); what cannot be read or watched is named in `State.unread`.
"""

import array
import builtins
import enum
import functools
import hashlib
import io
import logging
import os
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator
from contextvars import ContextVar

import numpy as np
import torch

from ...weights.checkpoint import FileTensor
from . import watch
from .code import IMPURE_BUILTINS, impure, names_of, reads_its_first
from .instances import IMMUTABLE, IRRELEVANT, is_asked_by_name, slots_of
from .libraries import class_version, put_into
from .named import MAKING, by_name, of_class, of_namespace, once
from .state import Held, State
from .trust import is_library, is_library_module
from .watch import Watch, content


LARGEST = 16 << 20  # bytes of an array that is a constant of a program, and looked at before each call
MOST_OBJECTS = 200_000
PLAIN = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout, enum.Enum)
_NUMBERS = (bool, int, float, complex, str, bytes)
_PARTS = {
    functools.partial: ("func", "args", "keywords"),
    property: ("fget", "fset"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    functools.cached_property: ("func",),
}


class Reader:
    """One walk. An object met again is named by when it was met first, so that equal structures have equal keys.

    Args:
        state: filled with what is read.
        paths: names of the model's modules by their ids.
        apart: objects that are not read.
    """

    def __init__(self, state: State, paths: dict[int, str], apart: tuple = ()):
        self.state, self.paths, self.apart = state, paths, {*map(id, apart)}
        self.met: dict[int, int] = {}
        self.kept: list = []  # what was met, so that nothing else gets its id
        self.at = ""  # of what is read now
        self.types: dict[type, Hashable] = {}
        self.bases: set[type] = set()
        self.names: set[str] = {"forward", "__call__"}  # that code of the user's asks for
        self.made: set[type] = set()  # classes that it may make objects of
        self.pending: list[tuple] = []  # (what reads it, the thing, where it was met, what was read of it)

    def later(self, how: Callable, x):
        self.pending.append((how, x, self.at, set()))

    def watch(self, thing, how: tuple[Callable, Callable], owner=None, foreign: bool = True):
        self.state.watches.append(Watch(thing, *how, owner, foreign, self.at))

    def unread(self, why: str) -> Hashable:
        self.state.unread.setdefault(self.at, why)
        return "unread", self.at

    # Values

    def value(self, x, foreign: bool) -> Hashable:
        """`x` as what it is equal to. `foreign`: it belongs to an object that is no module."""
        kind = type(x)
        if kind is float or kind is complex:
            return kind, repr(x)
        if isinstance(x, PLAIN) and (not isinstance(x, _NUMBERS) or kind in _NUMBERS):
            return kind, x
        if isinstance(x, torch.nn.Module) and id(x) in self.paths:
            return "module", self.paths[id(x)]
        if kind is tuple:
            return kind, tuple(self.value(item, foreign) for item in x)
        if id(x) in self.apart:
            return kind
        if id(x) in self.met:
            return "met", self.met[id(x)]
        self.met[id(x)] = len(self.met)
        self.kept.append(x)
        if len(self.met) > MOST_OBJECTS:
            return self.unread(f"it holds more than {MOST_OBJECTS} objects")
        return self.thing(x, foreign)

    def thing(self, x, foreign: bool) -> Hashable:
        if isinstance(x, torch.Tensor):
            return self.tensor(x)
        if isinstance(x, (np.ndarray, np.generic)):
            return self.array(x)
        if isinstance(x, (dict, list, set, frozenset, tuple, deque, types.MappingProxyType, *_NUMBERS)):
            return self.collection(x, foreign)
        if isinstance(x, type):
            self.made.add(x)
            return self.type(x)
        if isinstance(x, types.FunctionType):
            return self.function(x)
        if isinstance(x, types.MethodType):
            self.names.add(getattr(x.__func__, "__name__", "__call__"))
            return "method", self.value(x.__func__, True), self.value(x.__self__, True)
        for kind, names in _PARTS.items():
            if isinstance(x, kind):
                return kind, *(self.value(getattr(x, name), True) for name in names)
        if isinstance(x, types.CellType):
            self.watch(x, watch.CELL)
            return self.value(content(x), True)
        if isinstance(x, functools._lru_cache_wrapper):
            return self.cached(x)
        if isinstance(x, types.BuiltinFunctionType):
            return self.builtin(x)
        if isinstance(x, types.ModuleType):
            top = x.__name__.partition(".")[0]
            if top in ("diffusers", "transformers") or not is_library_module(x.__name__):
                self.later(of_namespace, x)
            return "module", x.__name__
        return self.object(x, foreign)

    def tensor(self, x: torch.Tensor) -> Hashable:
        """A constant of the program, by its values. An array on the chips never changes: by itself."""
        if hasattr(x, "jax"):
            self.watch(x, watch.ON_CHIPS)
            return Held(x), tuple(map(Held, watch.ON_CHIPS[0](x)))
        plain = type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout is torch.strided
        if not plain or x.device.type != "cpu" or x.is_quantized or isinstance(x, FileTensor):
            self.watch(x, watch.VERSION)
            return Held(x), x._version
        with torch.utils._mode_utils.no_dispatch(), torch._C.DisableTorchFunction(), torch.no_grad():
            flat = x.detach()
            flat = flat.resolve_conj().resolve_neg() if x.is_complex() else flat
            values = flat.view(torch.int16) if x.dtype == torch.bfloat16 else flat
            values = flat.view(torch.uint8) if "float8" in str(x.dtype) else values
            if x.nbytes > LARGEST:
                return self.unread(
                    f"a tensor of {x.nbytes >> 20} MiB that is no parameter and no buffer: register_buffer it"
                )
            memory = values.numpy()

        def place() -> int:
            with torch._C.DisableTorchFunction():
                return x.data_ptr()

        self.watch(x, watch.of_memory(memory, place))
        return "tensor", x.dtype, tuple(x.shape), _digest(memory)

    def array(self, x: np.ndarray | np.generic) -> Hashable:
        if isinstance(x, np.generic) or not x.dtype.hasobject:
            if x.nbytes > LARGEST:
                return self.unread(f"an array of {x.nbytes >> 20} MiB: make it a buffer of the module")
            if isinstance(x, np.ndarray):
                self.watch(x, watch.of_memory(x, lambda: (x.__array_interface__["data"][0], x.shape, x.dtype.str)))
            return type(x), x.dtype.str, x.shape, _digest(np.asarray(x))
        self.watch(x, watch.OBJECTS)
        return type(x), x.shape, tuple(self.value(item, True) for item in x.flat)

    def collection(self, x, foreign: bool) -> Hashable:
        kind = type(x)
        if isinstance(x, _NUMBERS):  # of a class of one's own
            base = next(base for base in _NUMBERS if isinstance(x, base))
            return kind, base.__repr__(x), self.attributes_of(x, foreign)
        if isinstance(x, (list, set, deque)):
            self.watch(x, watch.SEQUENCE, foreign=foreign)
        if isinstance(x, (dict, types.MappingProxyType)):
            self.watch(x, watch.DICT if isinstance(x, dict) else watch.MAPPING, foreign=foreign)
            items = tuple((self.value(k, foreign), self.value(v, foreign)) for k, v in x.items())
        elif isinstance(x, (set, frozenset)):
            items = frozenset(self.value(item, foreign) for item in x)
        else:
            items = tuple(self.value(item, foreign) for item in x)
        if kind in (dict, list, set, frozenset, tuple, types.MappingProxyType):
            return kind, items
        more = getattr(x, "default_factory", None), getattr(x, "maxlen", None)
        return self.type(kind), items, self.value(more, foreign), self.attributes_of(x, foreign)

    def attributes_of(self, x, foreign: bool) -> Hashable:
        """What an object holds by name."""
        slots = slots_of(type(x))
        if not slots and not hasattr(x, "__dict__"):
            return ()
        self.watch(x, watch.of_object(slots))
        found = {name: getattr(x, name) for name in slots if hasattr(x, name)} | getattr(x, "__dict__", {})
        at, read = self.at, []
        for name in sorted(found, key=str):
            self.at = f"{at}.{name}"
            read.append((name, self.value(found[name], True)))
        self.at = at
        return tuple(read)

    def object(self, x, foreign: bool) -> Hashable:
        """An object of no kind that Python itself or torch has a form for."""
        cls = type(x)
        if isinstance(x, IMMUTABLE):
            return cls, repr(x)
        if isinstance(x, (random.Random, np.random.Generator, np.random.RandomState)):
            self.state.generators.append(x)
            return Held(x)
        if isinstance(x, IRRELEVANT) or isinstance(x, logging.Logger) or is_ours(x):
            return Held(x)
        if isinstance(x, weakref.ReferenceType):
            return "reference", self.value(x(), foreign)
        if isinstance(x, ContextVar):
            self.watch(x, watch.VARIABLE, foreign=False)  # what is set anew in each call is its scratch
            return Held(x), self.value((x.get(None),), True)
        if isinstance(x, os._Environ):
            return self.environment()
        if isinstance(x, (Iterator, AsyncIterator, Awaitable, io.IOBase)):
            return self.unread(f"a {cls.__name__}, which no one can look at without changing it")
        if foreign and is_asked_by_name(cls):
            self.later(by_name, x)
            return Held(x)
        if isinstance(x, (bytearray, array.array)):
            self.watch(x, watch.BYTES)
            return cls, bytes(x)
        if not hasattr(x, "__dict__") and not slots_of(cls):
            of_python = cls.__module__.partition(".")[0] in sys.stdlib_module_names | {"builtins"}
            if cls is object or callable(x) or (is_library(cls) and not of_python):
                return Held(x)
            return self.unread(f"a {cls.__module__}.{cls.__qualname__}, whose state Python cannot read")
        key = self.type(cls)
        if not foreign and not is_library(cls):  # upstream's code calls its methods, whatever they are called
            self.names.update(name for base in cls.__mro__ if not is_library(base) for name in vars(base))
        return key, self.attributes_of(x, foreign)

    def environment(self) -> Hashable:
        """Environment variables, all of them: a code that asks for one may ask for any."""
        held = os.environ._data
        if id(held) not in self.met:
            self.met[id(held)] = len(self.met)
            self.watch(held, watch.DICT)
        return "environment", tuple(sorted(held.items()))

    # Code

    def cached(self, x: functools._lru_cache_wrapper, of_a_module: bool = False) -> Hashable:
        """A function that keeps its results. A trace goes past the caches of modules' methods (`tracing.without_caches`), which
        gives what they keep for as long as what the method itself reads stays."""
        inner = x.__wrapped__
        if not isinstance(inner, types.FunctionType) or is_library(inner):
            return Held(x)
        if of_a_module and not reads_its_first(inner.__code__):
            alone = State(self.state.module)
            key = Reader(alone, {}).value(inner, True)
            if not alone.unread and _cached.setdefault(x, key) == key:
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
            if vars(function):
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
        called = impure(module, attributes)
        if called is not None:
            self.unread(f"it calls {called}")
        if x is os and attributes & {"environ", "getenv", "environb"}:
            self.later(once, os.environ)
        return self.value(x, True)

    # Classes

    def type(self, cls: type) -> Hashable:
        """A class, and which of the methods and attributes that it has had it has now."""
        if cls not in self.types:
            self.types[cls] = ()  # met again in what it holds
            bases = [base for base in cls.__mro__ if base is not object]
            for base in bases:
                self.base(base, cls)
            self.types[cls] = tuple((Held(base), class_version(base)) for base in bases)
        return self.types[cls] or ("class", cls.__qualname__)

    def base(self, base: type, cls: type):
        """What a class itself holds is watched; its methods are read where they are the user's."""
        if base in self.bases:
            return
        self.bases.add(base)
        if not base.__flags__ & (1 << 9):  # not made by a `class` statement: no one can change it
            return
        self.watch(base, watch.CLASS, base)
        if not is_library(base):
            of_libraries = [other for other in cls.__mro__ if other is not object and is_library(other)]
            overriding = (n for n in vars(base) if n not in MAKING and any(n in vars(o) for o in of_libraries))
            self.names.update(overriding)
            self.later(of_class, base)
        else:
            for name in put_into(base, class_version(base)):
                self.later(once, vars(base)[name])

    def rest(self) -> Hashable:
        """The keys of what code of the user's asks for by name, for as long as it asks for more."""
        found, before = [], None
        while before != (before := (len(self.names), len(self.pending), len(self.met), len(found))):
            for how, x, at, done in [*self.pending]:
                self.at = at
                found += how(self, x, done)
        return tuple(found)


_cached: "weakref.WeakKeyDictionary[Callable, Hashable]" = weakref.WeakKeyDictionary()  # and what each read at first


def _digest(array: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(array).reshape(-1).view(np.uint8), digest_size=16).hexdigest()


def is_ours(value) -> bool:
    """Whether the package has put it there."""
    value = value.func if isinstance(value, functools.partial) else value
    where = value.__module__ if isinstance(value, types.FunctionType) else type(value).__module__
    return (where or "").startswith("diffusers.tpu.")
