"""Values, objects and code as keys: the part of the walk that does not depend on models.

Objects are read whole. Code of libraries is a constant; in the user's functions the names are followed (`code`). What is read and
can change is watched (`watch`); what cannot be read or watched is named in `State.unread`.
"""

import array
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import inspect
import io
import logging
import os
import pathlib
import random
import re
import sys
import threading
import types
import typing
import uuid
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator
from contextvars import ContextVar

import numpy as np
import torch

from ...weights.checkpoint import FileTensor
from . import watch
from .code import MAKING, CodeReader
from .libraries import class_version, is_library, is_library_module
from .state import Held, State
from .watch import Watch, content


LARGEST = 16 << 20  # bytes of an array that is a constant of a program and is compared before each call
MOST_OBJECTS, DEEPEST = 200_000, 150  # deeper ones would end in a RecursionError
PLAIN = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout, enum.Enum)
_slots: "weakref.WeakKeyDictionary[type, tuple[str, ...]]" = weakref.WeakKeyDictionary()
_NUMBERS = (bool, int, float, complex, str, bytes)
_PARTS = {
    functools.partial: ("func", "args", "keywords"),
    property: ("fget", "fset"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    functools.cached_property: ("func",),
}

# Immutable: their key is their repr.
IMMUTABLE = (
    range, slice, re.Pattern, pathlib.PurePath, decimal.Decimal, fractions.Fraction, uuid.UUID,
    datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, inspect.Signature, types.GenericAlias,
    types.UnionType, types.EllipsisType, types.NotImplementedType, types.MemberDescriptorType,
    types.GetSetDescriptorType, types.CodeType, typing.TypeVar, np.dtype, torch.finfo, torch.iinfo,
    torch.memory_format,
)  # fmt: skip
# Only their `watch.FLAGS` affect values: they synchronize threads, write logs, remove hooks. Generators are noted when they draw.
IRRELEVANT = (
    type(threading.Lock()), type(threading.RLock()), threading.Thread, threading.Event, threading.Condition,
    threading.Semaphore, logging.Handler, logging.Filter, torch.utils.hooks.RemovableHandle, torch.Generator,
)  # fmt: skip
# Large objects of libraries, of which the user's code reads a few attributes: only these are read, by name. If the code calls a
# method, all are.
ASKED_BY_NAME = (
    "diffusers.pipelines", "diffusers.modular_pipelines", "diffusers.schedulers", "diffusers.image_processor",
    "diffusers.video_processor", "transformers.tokenization", "transformers.processing", "transformers.image_processing",
    "transformers.feature_extraction", "accelerate", "tqdm", "PIL", "tokenizers",
)  # fmt: skip


class Reader(CodeReader):
    """One walk, which fills `state`. An object met again is named by its number in the walk: equal structures have equal keys.

    `paths`: names of the model's modules by their ids; `apart`: objects that are not read.
    """

    def __init__(self, state: State, paths: dict[int, str], apart: tuple = ()):
        super().__init__()
        self.state, self.paths, self.apart = state, paths, {*map(id, apart)}
        self.met: dict[int, int] = {}
        self.kept: list = []  # keeps what was met alive, so that no id is used twice
        self.at, self.depth = "", 0  # name and depth of what is being read
        self.types: dict[type, Hashable] = {}
        self.bases: set[type] = set()

    def watch(self, thing, how: tuple[Callable, Callable], owner=None, foreign: bool = True):
        self.state.watches.append(Watch(thing, *how, owner, foreign, self.at))

    def fresh(self) -> "Reader":
        """Another walk, which has met nothing yet."""
        return Reader(State(self.state.module), {})

    def unread(self, why: str) -> Hashable:
        self.state.unread.setdefault(f"{self.at:.200}", why)
        return "unread", self.at

    def value(self, x, foreign: bool) -> Hashable:
        """The key of `x`. `foreign`: it belongs to an object that is no module."""
        kind = type(x)
        if kind is float or kind is complex:
            return kind, repr(x)
        if isinstance(x, PLAIN) and (not isinstance(x, _NUMBERS) or kind in _NUMBERS):
            return kind, x
        if isinstance(x, torch.nn.Module) and id(x) in self.paths:
            return "module", self.paths[id(x)]
        if kind is not tuple:
            if id(x) in self.apart:
                return kind
            if id(x) in self.met:
                return "met", self.met[id(x)]
            self.met[id(x)] = len(self.met)
            self.kept.append(x)
        if len(self.met) > MOST_OBJECTS or self.depth == DEEPEST:
            return self.unread(f"it holds more than {MOST_OBJECTS} objects, or {DEEPEST} within each other")
        self.depth += 1
        key = self.thing(x, foreign)
        self.depth -= 1
        return key

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
                self.later(self.of_namespace, x)
            return "module", x.__name__
        return self.object(x, foreign)

    def tensor(self, x: torch.Tensor) -> Hashable:
        """A constant of the program, by its values. An array on the chips never changes, so it is compared by identity."""
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
                size = f"{x.nbytes >> 20} MiB"
                return self.unread(f"a tensor of {size} that is no parameter and no buffer: register_buffer it")
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
        if isinstance(x, _NUMBERS):  # of a subclass
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
        """An object's attributes, by name."""
        slots = slots_of(type(x))
        if not slots and not hasattr(x, "__dict__"):
            return ()
        self.watch(x, watch.of_object(slots))
        at, read, found = self.at, [], attributes(x)
        for name in sorted(found, key=str):
            self.at = f"{at}.{name}"
            read.append((name, self.value(found[name], True)))
        self.at = at
        return tuple(read)

    def object(self, x, foreign: bool) -> Hashable:
        """An object of none of Python's or torch's basic types."""
        cls = type(x)
        if isinstance(x, IMMUTABLE):
            return cls, repr(x)
        if isinstance(x, (random.Random, np.random.Generator, np.random.RandomState)):
            self.state.generators.append(getattr(x, "bit_generator", x))
            return Held(x)
        if isinstance(x, IRRELEVANT) or isinstance(x, logging.Logger) or is_ours(x):
            self.later(self.flags, x)
            return Held(x)
        if isinstance(x, weakref.ReferenceType):
            return "reference", self.value(x(), foreign)
        if isinstance(x, ContextVar):
            self.watch(x, watch.VARIABLE, foreign=False)  # each call may set it anew
            return Held(x), self.value((x.get(None),), True)
        if isinstance(x, os._Environ):
            return "environment", self.value(x._data, True)  # all variables: code that reads one may read any
        if isinstance(x, (Iterator, AsyncIterator, Awaitable, io.IOBase)):
            return self.unread(f"a {cls.__name__}, which no one can look at without changing it")
        if foreign and any(base.__module__.startswith(ASKED_BY_NAME) for base in cls.__mro__):
            self.later(self.by_name, x)
            return Held(x)
        if isinstance(x, (bytearray, array.array)):
            self.watch(x, watch.BYTEARRAY if isinstance(x, bytearray) else watch.ARRAY)
            return cls, bytes(x)
        if not hasattr(x, "__dict__") and not slots_of(cls):
            of_python = cls.__module__.partition(".")[0] in sys.stdlib_module_names | {"builtins"}
            if cls is object or callable(x) or (is_library(cls) and not of_python):
                return Held(x)
            return self.unread(f"a {cls.__module__}.{cls.__qualname__}, whose state Python cannot read")
        key = self.type(cls)
        if not foreign and not is_library(cls):  # upstream's code may call any of its methods
            self.names.update(name for base in cls.__mro__ if not is_library(base) for name in vars(base))
        return key, self.attributes_of(x, foreign)

    def type(self, cls: type) -> Hashable:
        """The key of a class: the class and its bases, each with its version."""
        if cls not in self.types:
            self.types[cls] = ()  # in case it refers to itself
            bases = [base for base in cls.__mro__ if base is not object]
            for base in bases:
                self.base(base, cls)
            self.types[cls] = tuple((Held(base), class_version(base)) for base in bases)
        return self.types[cls] or ("class", cls.__qualname__)

    def base(self, base: type, cls: type):
        """Watch a class's own attributes; its methods are read if they are the user's."""
        if base in self.bases:
            return
        self.bases.add(base)
        if not base.__flags__ & (1 << 9):  # not made by a `class` statement: it cannot be changed
            return
        self.watch(base, watch.CLASS, base)
        if not is_library(base):
            of_libraries = [other for other in cls.__mro__ if other is not object and is_library(other)]
            overriding = (n for n in vars(base) if n not in MAKING and any(n in vars(o) for o in of_libraries))
            self.names.update(overriding)
            self.later(self.of_class, base)
        else:
            for name in class_version(base).put_into:
                self.later(self.once, vars(base)[name])


def _digest(array: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(array).reshape(-1).view(np.uint8), digest_size=16).hexdigest()


def is_ours(value) -> bool:
    """Whether this package has put the value there."""
    value = value.func if isinstance(value, functools.partial) else value
    value = value.__func__ if isinstance(value, types.MethodType) else value
    where = value.__module__ if isinstance(value, types.FunctionType) else type(value).__module__
    return (where or "").startswith("diffusers.tpu.")


def slots_of(cls: type) -> tuple[str, ...]:
    """Names of attributes that instances hold in slots. Members of types written in C are not among them."""
    if cls not in _slots:
        held = (item for base in cls.__mro__ for item in vars(base).items())
        found = {name: x for name, x in held if type(x) is types.MemberDescriptorType}
        _slots[cls] = tuple(sorted(name for name, x in found.items() if x.__objclass__.__flags__ & (1 << 9)))
    return _slots[cls]


def attributes(x) -> dict[str, object]:
    """An object's attributes by name, in slots and in its dict."""
    return {n: getattr(x, n) for n in slots_of(type(x)) if hasattr(x, n)} | dict(getattr(x, "__dict__", {}))
