"""A module's Python state as a key: equal keys, equal traces. One walk over everything that a trace may read.

The walk starts at the attributes, hooks and classes of the module and its submodules. Objects are read whole. Code of installed
libraries (`trust`) is taken as it is; of functions and methods of the user's that a forward may reach the names are followed (`code`).
What the walk reads and can change is watched (`watch`). What it cannot read or watch is named in `State.unread`: no program can
stand for the module that has it. The same key in words that mean the same in every process is `store.describing`'s.
"""

import builtins
import enum
import functools
import hashlib
import io
import itertools
import logging
import operator
import os
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

import numpy as np
import torch

from ..adapters import BOOKKEEPING, SIZES, Adapters
from ..checkpoint import FileTensor
from . import watch
from .code import DYNAMIC, IMPURE_BUILTINS, impure, names_of
from .instances import IMMUTABLE, IRRELEVANT, is_asked_by_name, slots_of
from .libraries import Libraries, class_version, put_into
from .trust import is_library, is_library_module
from .watch import Watch, alike, all_alike, content, dicts_differ


HOOKS = ("_forward_hooks", "_forward_pre_hooks")
HOOK_REGISTRY = "_diffusers_hook"
TENSORS = ("_parameters", "_buffers")
DICTS = (*HOOKS, "_modules", *TENSORS)
# torch's own, of which a forward reads none but `training`; hooks and children are read where they belong.
_TORCHS = frozenset(vars(torch.nn.Module())) - {"training"}
# What loaders note on a model: of adapters, what a forward reads of them is in the layers; of a checkpoint, how to save it again.
# No forward of upstream's names one of them (`tests/tpu/test_key.py` looks).
OF_LOADERS = frozenset(
    "peft_config _hf_peft_config_loaded _prepare_lora_hotswap_kwargs lora_scale _safe_fusing _weight_conversions"
    " _use_kernels".split()
)
LARGEST = 16 << 20  # bytes of an array that is a constant of a program, and looked at before each call
MOST_OBJECTS = 200_000
_PLAIN = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout, enum.Enum)
_NUMBERS = (bool, int, float, complex, str, bytes)
METHODS = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)
_FUNCTIONS = (*METHODS, types.MethodType, functools.partial)
_MAKING = frozenset(
    "__new__ __init__ __init_subclass__ __del__ __repr__ __str__ __getstate__ __setstate__ __reduce__ __reduce_ex__"
    " __deepcopy__ __copy__ __sizeof__ __dir__ __class_getitem__ __set_name__ __post_init__".split()
)

_OF_NEW = frozenset({"__new__", "__init__", "__post_init__"})


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
    _quick: "_Quick | None" = None

    def same(self) -> bool:
        """Whether nothing was changed since."""
        if self._quick is None:
            self._quick = _Quick(self)
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


class _Quick:
    """A look at the modules' own attributes and tensors without a line of Python for each."""

    def __init__(self, state: State):
        pairs = [*zip(state.attributes, state.owners)]
        self.modules = [owner for _, owner in pairs if owner is not None]
        self.own = [held for held, owner in pairs if owner is not None]
        self.getters = [
            operator.itemgetter(*DICTS, *(n for n in held if n == "training" or n not in _TORCHS)) for held in self.own
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


def read(module: torch.nn.Module, apart: tuple = ()) -> State:
    """The state of a module and all that it holds, but for what is in the objects `apart`."""
    state = State(module)
    reader = _Reader(module, state, apart=apart)
    tree = reader.tree()
    state.libraries = Libraries({cls.__module__ for cls in reader.types})
    for function in state.libraries.put_into():
        reader.extra(function)
    state.key, state.adapters = (tree, reader.rest(), state.libraries.key), reader.adapters
    seen = {*reader.adapters.tensors(module).values()}
    named = (*module.named_parameters(), *module.named_buffers())
    state.tensors = {name: tensor for name, tensor in named if name in seen}
    return state


def signature(block: torch.nn.Module, adapters: Adapters, apart: tuple = ()) -> Hashable:
    """What must agree between two blocks, beside weights and numbers, for one trace to stand for both.

    `adapters`: the model's. `apart`: objects that need not agree.
    """
    reader = _Reader(block, State(block), of_a_block=True, adapters=Adapters(block, adapters.order), apart=apart)
    return reader.tree(), reader.rest()


def of_object(x) -> Hashable:
    """The key of an object that is given to a call, and is looked at anew in each call. Raises Unread."""
    state = State(torch.nn.Module())
    reader = _Reader(state.module, state)
    key = reader.value(x, True), reader.rest()
    if state.unread:
        name, why = next(iter(state.unread.items()))
        raise Unread(f"{type(x).__name__}{name}: {why}")
    return key


class Unread(Exception):
    """There is no key for something: the message says for what, and why."""


def process_key() -> Hashable:
    """What a trace reads of the process."""
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    backend = dispatch and dispatch._AttentionBackendRegistry._active_backend
    return backend, torch.get_default_dtype()


class _Reader:
    """One walk. An object met again is named by when it was met first, so that equal structures have equal keys."""

    def __init__(
        self,
        root: torch.nn.Module,
        state: State,
        of_a_block: bool = False,
        adapters: Adapters | None = None,
        apart: tuple = (),
    ):
        self.apart = {*map(id, apart)}
        self.root, self.state, self.of_a_block = root, state, of_a_block
        self.adapters = Adapters(root) if adapters is None else adapters
        self.paths = {id(module): name for name, module in root.named_modules()}
        self.met: dict[int, int] = {}
        self.kept: list = []  # what was met, so that nothing else gets its id
        self.at = ""  # of what is read now
        self.types: dict[type, Hashable] = {}
        self.names: set[str] = {"forward", "__call__"}  # that code of the user's asks for
        self.bases: set[type] = set()
        self.made: set[type] = set()  # classes that it may make objects of
        self.pending: list = []

    def watch(self, thing, how: tuple[Callable, Callable], owner=None, foreign: bool = True):
        self.state.watches.append(Watch(thing, *how, owner, foreign, self.at))

    def unread(self, why: str) -> Hashable:
        self.state.unread.setdefault(self.at, why)
        return "unread", self.at

    # Modules

    def tree(self) -> Hashable:
        found = ((path, self.adapters.seen(path), module) for path, module in self.root.named_modules())
        read = (
            self.lora(path, m) if path in self.adapters.layers else self.module(path, seen, m)
            for path, seen, m in found
        )
        return tuple(key for key in read if key is not None)

    def module(self, path: str, seen: str | None, module: torch.nn.Module) -> Hashable:
        """A module's key; None of one of an adapter that is not added."""
        if seen is None:
            return None
        self.attributes(path, module)
        ignored = SIZES if self.adapters.in_a_term(path) else () if path else OF_LOADERS
        if not path and self.of_a_block and own_forward(module) is not None:
            ignored = (*ignored, "forward", HOOK_REGISTRY)
        own = []
        for name, value in vars(module).items():
            if is_entry(value):
                value = value.tpu_entry.own
            elif name in _TORCHS or name in ignored or name.startswith("_tpu_") or _is_ours(value):
                continue
            if _says_nothing(module, name, value):
                continue
            self.at = f"{path}.{name}".lstrip(".")
            own.append((name, self.value(value, False)))
        return self.whole(path, seen, module, own)

    def lora(self, path: str, layer: torch.nn.Module) -> Hashable:
        """A LoRA layer's key; None where it adds nothing, but what may change that is watched."""
        self.attributes(path, layer)
        for name in ("merged_adapters", "_active_adapter"):
            if isinstance(vars(layer)[name], list):
                self.watch(vars(layer)[name], watch.of_list(vars(layer)[name]), foreign=False)
        own, terms = [], self.adapters.layers[path]
        for name, value in vars(layer).items():
            self.at = f"{path}.{name}"
            if name == "scaling":
                own.append((name, self.scales(path, value, terms)))
            elif terms and name not in _TORCHS and name not in BOOKKEEPING:
                own.append((name, self.value(self.adapters.by_place(path, layer, value), False)))
        return self.whole(path, path, layer, own) if terms else None

    def attributes(self, path: str, module: torch.nn.Module):
        """Changes of what the module has directly are seen."""
        attributes, state = vars(module), self.state
        for held, owner in ((attributes, module), *((attributes[name], None) for name in (*HOOKS, "_modules"))):
            state.attributes.append(held)
            state.copies.append(dict(held))
            state.owners.append(owner)
            state.paths.append(path)
        state.of_tensors += [(attributes[name], dict(attributes[name])) for name in TENSORS]

    def whole(self, path: str, seen: str, module: torch.nn.Module, own: list) -> Hashable:
        own.sort(key=lambda item: item[0])
        attributes = vars(module)
        # torch runs hooks of the root around what is traced
        self.at = f"a hook of {path}"
        hooks = tuple(self.hook(module, k, n, f) for k in HOOKS for n, f in attributes[k].items() if path)
        children = ((name, cls) for name, cls in self.adapters.children(path, module))
        return seen, self.type(type(module)), tuple(own), hooks, tuple(children)

    def hook(self, module: torch.nn.Module, kind: str, number: int, function) -> Hashable:
        flags = tuple(number in getattr(module, f"{kind}_{flag}", ()) for flag in ("with_kwargs", "always_called"))
        return kind, flags, self.value(function, True)

    def scales(self, path: str, scaling: dict, terms: tuple[str, ...]) -> Hashable:
        """Of the adapters that the layer adds, by their place; a tensor (peft's, for hot swaps) may be written to."""
        self.watch(scaling, watch.of_dict(scaling), foreign=False)
        of_terms = {self.adapters.order.index(name): scaling[name] for name in terms if name in scaling}
        self.state.numbers.update((Number(path, place), float(scale)) for place, scale in of_terms.items())
        for scale in of_terms.values():
            if isinstance(scale, torch.Tensor):
                self.tensor(scale)
        return tuple(of_terms)

    # Values

    def value(self, x, foreign: bool) -> Hashable:
        """`x` as what it is equal to. `foreign`: it belongs to an object that is no module."""
        kind = type(x)
        if kind is float or kind is complex:
            return kind, repr(x)
        if isinstance(x, _PLAIN) and (not isinstance(x, _NUMBERS) or kind in _NUMBERS):
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
        if isinstance(x, (*_FUNCTIONS, types.BuiltinFunctionType, functools._lru_cache_wrapper, types.CellType)):
            return self.callable(x)
        if isinstance(x, types.ModuleType):
            return self.namespace(x)
        return self.object(x, foreign)

    def tensor(self, x: torch.Tensor) -> Hashable:
        """A constant of the program, by its values. An array on the chips never changes: by itself."""
        if hasattr(x, "jax"):
            how = (lambda: (vars(x).get("_array", x), vars(x).get("_value", x))), lambda before: None
            self.watch(x, how)
            return Held(x), tuple(map(Held, how[0]()))
        plain = type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout is torch.strided
        if not plain or x.device.type != "cpu" or x.is_quantized or isinstance(x, FileTensor):
            self.watch(x, ((lambda: (x._version,)), lambda before: None))
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
            array = values.numpy()
        self.watch(x, watch.of_tensor(x, array))
        return "tensor", x.dtype, tuple(x.shape), _digest(array)

    def array(self, x: np.ndarray | np.generic) -> Hashable:
        if isinstance(x, np.generic) or not x.dtype.hasobject:
            if x.nbytes > LARGEST:
                return self.unread(f"an array of {x.nbytes >> 20} MiB: make it a buffer of the module")
            if isinstance(x, np.ndarray):
                self.watch(x, watch.of_array(x))
            return type(x), x.dtype.str, x.shape, _digest(np.asarray(x))
        self.watch(x, ((lambda: [*x.flat]), lambda before: x.flat.__setitem__(slice(None), before)))
        return type(x), x.shape, tuple(self.value(item, True) for item in x.flat)

    def collection(self, x, foreign: bool) -> Hashable:
        kind = type(x)
        if isinstance(x, _NUMBERS):  # of a class of one's own
            base = next(base for base in _NUMBERS if isinstance(x, base))
            return kind, base.__repr__(x), self.attributes_of(x, foreign)
        if isinstance(x, types.MappingProxyType):
            self.watch(x, ((lambda: [*x, *x.values()]), lambda before: None), foreign=foreign)
        elif isinstance(x, (dict, list, set, deque)):
            how = watch.of_dict if isinstance(x, dict) else watch.of_set if isinstance(x, set) else watch.of_list
            self.watch(x, how(x), foreign=foreign)
        if isinstance(x, (dict, types.MappingProxyType)):
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
        self.watch(x, watch.of_object(x, slots))
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
        if isinstance(x, IRRELEVANT) or isinstance(x, logging.Logger) or _is_ours(x):
            return Held(x)
        if isinstance(x, weakref.ReferenceType):
            return "reference", self.value(x(), foreign)
        if isinstance(x, ContextVar):
            self.watch(x, watch.of_variable(x), foreign=False)  # what is set anew in each call is its scratch
            return Held(x), self.value((x.get(None),), True)
        if isinstance(x, os._Environ):
            return self.environment()
        if isinstance(x, (Iterator, AsyncIterator, Awaitable, io.IOBase)):
            return self.unread(f"a {cls.__name__}, which no one can look at without changing it")
        if foreign and is_asked_by_name(cls):
            self.pending.append(_ByName(x, self.at))
            return Held(x)
        if not hasattr(x, "__dict__") and not slots_of(cls):
            if is_library(cls) or cls.__module__ == "builtins":
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
            self.watch(held, watch.of_dict(held))
        return "environment", tuple(sorted(held.items()))

    # Code

    def callable(self, x) -> Hashable:
        if isinstance(x, types.FunctionType):
            return self.function(x)
        if isinstance(x, types.MethodType):
            self.names.add(getattr(x.__func__, "__name__", "__call__"))
            return "method", self.value(x.__func__, True), self.value(x.__self__, True)
        if isinstance(x, functools.partial):
            return functools.partial, *(self.value(part, True) for part in (x.func, x.args, x.keywords))
        if isinstance(x, types.CellType):
            self.watch(x, watch.of_cell(x))
            return self.value(content(x), True)
        if isinstance(x, property):
            return property, *(self.value(part, True) for part in (x.fget, x.fset))
        if isinstance(x, (staticmethod, classmethod)):
            return type(x), self.value(x.__func__, True)
        if isinstance(x, functools.cached_property):
            return type(x), self.value(x.func, True)
        if isinstance(x, functools._lru_cache_wrapper):
            inner = x.__wrapped__
            if isinstance(inner, types.FunctionType) and not is_library(inner):
                return self.unread(f"{inner.__qualname__} keeps its results from call to call (functools.lru_cache)")
            return Held(x)
        return self.builtin(x)

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
            self.watch(function, ((lambda: _called_by(function)), lambda before: None))
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
        self.watch(namespace, watch.of_names(namespace, some))
        read = []
        for name in some:
            self.at = f"{at} ({name} of {function.__module__}, in {function.__qualname__})"
            if name in namespace:
                read.append((name, self.named_value(namespace[name], names.attributes)))
            elif name in IMPURE_BUILTINS:
                self.unread(f"it calls {name}")
        for name in sorted(names.modules):
            module = sys.modules.get(name)
            if module is not None:
                read.append((name, self.named_value(module, names.attributes)))
                top = sys.modules.get(name.partition(".")[0])
                if top is not module:
                    read.append((name, self.named_value(top, names.attributes)))
        self.at = at
        return read

    def named_value(self, x, attributes: frozenset[str]) -> Hashable:
        if isinstance(x, types.ModuleType):
            self.asked_of_library(x, attributes)
        return self.value(x, True)

    def asked_of_library(self, module: types.ModuleType, attributes: frozenset[str]):
        if not is_library_module(module.__name__):
            return
        called = impure(module.__name__, attributes)
        if called is not None:
            self.unread(f"it calls {called}")
        if module is os and attributes & {"environ", "getenv", "environb"}:
            self.environment()
            self.extra(os.environ)

    def namespace(self, module: types.ModuleType) -> Hashable:
        """A module by its name; of what stands in it, what code of the user's asks for."""
        if not is_library_module(module.__name__) or module.__name__.partition(".")[0] in (
            "diffusers",
            "transformers",
        ):
            self.pending.append(_Namespace(module, self.at))
        return "module", module.__name__

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
        self.watch(base, watch.of_class(base), base)
        if not is_library(base):
            of_libraries = [other for other in cls.__mro__ if other is not object and is_library(other)]
            overriding = (n for n in vars(base) if n not in _MAKING and any(n in vars(o) for o in of_libraries))
            self.names.update(overriding)
            self.pending.append(_Methods(base, self.at))
        else:
            for name in put_into(base, class_version(base)):
                self.extra(vars(base)[name])

    # What is asked for by name

    def extra(self, x):
        self.pending.append(_Once(x, self.at))

    def rest(self) -> Hashable:
        """The keys of what code of the user's asks for by name, for as long as it asks for more."""
        found, before = [], None
        while before != (before := (len(self.names), len(self.pending), len(self.met), len(found))):
            for one in [*self.pending]:
                self.at = one.at
                found += one.asked(self)
        return tuple(found)


class _Once:
    """A value that is read behind all others."""

    def __init__(self, thing, at: str):
        self.thing, self.at, self.done = thing, at, False

    def asked(self, reader: _Reader) -> Iterator[Hashable]:
        if not self.done:
            self.done = True
            yield reader.value(self.thing, True)


class _ByName:
    """An object of which attributes are read that code of the user's names; all, once it names a method."""

    def __init__(self, thing, at: str):
        self.thing, self.at, self.done, self.whole = thing, at, set(), False

    def asked(self, reader: _Reader) -> Iterator[Hashable]:
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


class _Namespace:
    """A module: of one of the user's what is named, of a library's what of that is a plain value."""

    def __init__(self, thing: types.ModuleType, at: str):
        self.thing, self.at, self.done = thing, at, set()
        self.library = is_library_module(thing.__name__)

    def asked(self, reader: _Reader) -> Iterator[Hashable]:
        held = vars(self.thing)
        names = (reader.names & held.keys()) - self.done
        if self.library:
            names = {name for name in names if isinstance(held[name], (bool, int, float, str))}
        elif not self.done.issuperset(DYNAMIC & reader.names):
            self.done |= DYNAMIC & reader.names  # by names that are computed: any
            names = {name for name in held if name[:2] != "__"} - self.done
        yield from _names(reader, held, names, self.done, self.at)


class _Methods:
    """A class of the user's: what it holds beside methods, and methods that code of the user's names, or Python calls."""

    def __init__(self, thing: type, at: str):
        self.thing, self.at, self.done = thing, at, set()

    def asked(self, reader: _Reader) -> Iterator[Hashable]:
        for name, x in [*vars(self.thing).items()]:
            of_python = name[:2] == "__"
            reachable = name in reader.names or (
                of_python and name not in _MAKING and isinstance(x, types.FunctionType)
            )
            reachable = reachable or (self.thing in reader.made and name in _OF_NEW)
            read = reachable if isinstance(x, METHODS) else not of_python
            if read and name not in self.done:
                self.done.add(name)
                reader.at = f"{self.thing.__qualname__}.{name}"
                yield self.thing.__qualname__, name, reader.value(x, True)


def _names(reader: _Reader, held: dict, names: set[str], done: set[str], at: str) -> Iterator[Hashable]:
    names = tuple(sorted(names))
    done.update(names)
    if names:
        reader.watch(held, watch.of_names(held, names))
    for name in names:
        reader.at = f"{at}.{name}"
        yield name, reader.value(held[name], True)


def _called_by(function: types.FunctionType) -> tuple:
    return function.__code__, function.__defaults__, function.__kwdefaults__


def _digest(array: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(array).reshape(-1).view(np.uint8), digest_size=16).hexdigest()


def _is_ours(value) -> bool:
    """Whether the package has put it there."""
    value = value.func if isinstance(value, functools.partial) else value
    where = value.__module__ if isinstance(value, types.FunctionType) else type(value).__module__
    return (where or "").startswith("diffusers.tpu.")


def _says_nothing(module: torch.nn.Module, name: str, value) -> bool:
    """What hooks and caches leave behind when they are removed: an empty registry, what the class has on the instance."""
    if name == HOOK_REGISTRY:
        return not value.hooks
    if isinstance(value, (*_PLAIN, float, complex)):
        inherited = getattr(type(module), name, HOOK_REGISTRY)
        return alike(inherited, value)
    own = isinstance(value, types.MethodType) and value.__self__ is module
    return own and value.__func__ is getattr(type(module), name, None)


def own_forward(block: torch.nn.Module):
    """What upstream's hooks on a block hold its own forward by, its class's; None where there are none."""
    references = getattr(vars(block).get(HOOK_REGISTRY), "_fn_refs", None)
    own = getattr(references[0].original_forward, "__func__", None) if references else None
    return references[0] if own is type(block).forward else None


def is_entry(value) -> bool:
    """Whether this attribute of a module is a runner's way in: `value.tpu_entry` is an `Entry`."""
    return isinstance(value, types.FunctionType) and hasattr(value, "tpu_entry")
