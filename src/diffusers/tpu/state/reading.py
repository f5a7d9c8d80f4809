"""A module's Python state as a key: equal keys, equal traces."""

import argparse
import dis
import enum
import functools
import itertools
import operator
import sys
import types
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
import torch

from ..adapters import BOOKKEEPING, SIZES, Adapters
from .containers import content, copy_of, differ, put_back


HOOKS = ("_forward_hooks", "_forward_pre_hooks")
HOOK_REGISTRY = "_diffusers_hook"
TENSORS = ("_parameters", "_buffers")
# torch's own, of which a forward reads none but `training`; hooks and children are read where they belong.
_TORCHS = frozenset(vars(torch.nn.Module())) - {"training"}
# A block's own number says where it stands, not what it computes; accelerate's hook says where inputs go.
_NOT_READ = frozenset(
    {"layer_idx", "layer_index", "block_idx", "block_index", "_hf_hook", "__getstate__", "__deepcopy__"}
)
# What loaders note on a model: of adapters, what a forward reads of them is in the layers; of a checkpoint, how to save it again.
_OF_LOADERS = frozenset(
    "peft_config _hf_peft_config_loaded _prepare_lora_hotswap_kwargs lora_scale _safe_fusing _weight_conversions"
    " _use_kernels".split()
)
_PLAIN = (bool, int, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, torch.layout, enum.Enum)
_LIBRARIES = frozenset({"torch", "jax", "jaxlib", "torchax", "numpy", "accelerate", "PIL", "tokenizers", "tqdm"})
_READ_OF_PYTHON = (types.SimpleNamespace, argparse.Namespace)
_UPSTREAM = frozenset({"diffusers", "transformers", "peft"})


@dataclass(frozen=True, eq=False)
class Held:
    """An object that only itself is equal to; `version` where it counts its changes."""

    thing: object
    version: int = 0

    def __eq__(self, other):
        return isinstance(other, Held) and self.thing is other.thing and self.version == other.version

    def __hash__(self):
        return hash((id(self.thing), self.version))


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
        containers, copies: everything that was read and can change in place, and what it held.
        owners: of each container the module or class whose attributes it holds; None: it belongs to a hook, a processor or
            another object of its own, or is held by one of a module's attributes.
        foreign: of each container, whether such an object owns it.
        names: of each container the attribute that holds it, or the module whose attributes it holds.
        of_tensors: dicts of parameters and buffers, and what they held; `views` of their values, and what those `held`.
            Compared by identity alone: tensors are large.
        constants: tensors that are plain attributes, and their versions.
        beside: what classes hold and what methods of the user's name: no part of the key, but a trace may change it.
    """

    module: torch.nn.Module
    key: Hashable = None
    adapters: Adapters | None = None
    numbers: dict[Number, float] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    containers: list = field(default_factory=list)
    copies: list = field(default_factory=list)
    owners: list = field(default_factory=list)
    foreign: list[bool] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    of_tensors: list[tuple[dict, dict]] = field(default_factory=list)
    views: list = field(default_factory=list)
    held: list = field(default_factory=list)
    constants: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    beside: "State | None" = None

    def same(self) -> bool:
        """Whether nothing was changed since."""
        now = self._tensors_now()
        if len(now) != len(self.held) or not all(map(operator.is_, now, self.held)):
            return False
        if differ(self.containers, self.copies):
            return False
        return all(tensor._version == version for tensor, version in self.constants)

    def _tensors_now(self) -> list:
        return [*itertools.chain.from_iterable(self.views)]

    def changed(self) -> list[int]:
        """Positions of containers that no longer hold what they held."""
        pairs = enumerate(zip(self.containers, self.copies))
        return [n for n, (now, before) in pairs if differ(now, before)]

    def left(self) -> dict[str, object]:
        """What the modules' attributes hold that they did not, by name: `blocks.0.before`."""
        found = {}
        for n in self.changed():
            name, now, before = self.names[n], self.containers[n], self.copies[n]
            if not isinstance(self.owners[n], torch.nn.Module):
                found[name] = now
                continue
            for key, value in now.items():
                if key not in before or before[key] is not value:
                    found[f"{name}.{key}".lstrip(".")] = value
        return found

    def restore(self):
        """Every container holds again what it held."""
        for n in self.changed():
            owner = self.owners[n]
            put_back(self.containers[n], self.copies[n], owner if isinstance(owner, type) else None)
        for tensors, before in self.of_tensors:
            put_back(tensors, before)


def read(module: torch.nn.Module, apart: tuple = ()) -> State:
    """The state of a module and all that it holds, but for what is in the objects `apart`."""
    state = State(module)
    reader = _Reader(module, state, apart=apart)
    state.key, state.adapters = reader.tree(), reader.adapters
    seen = {*reader.adapters.tensors(module).values()}
    named = (*module.named_parameters(), *module.named_buffers())
    state.tensors = {name: tensor for name, tensor in named if name in seen}
    state.views = [tensors.values() for tensors, _ in state.of_tensors]
    state.held = state._tensors_now()
    state.beside = _Beside(module, State(module)).of(reader)
    return state


def signature(block: torch.nn.Module, adapters: Adapters, apart: tuple = ()) -> Hashable:
    """What must agree between two blocks, beside weights and numbers, for one trace to stand for both.

    Hooks of the block itself run around its traced forward, as the model calls it: they may differ. `adapters`: the model's.
    `apart`: objects that need not agree.
    """
    return _Reader(
        block, State(block), hooks_of_root=False, adapters=Adapters(block, adapters.order), apart=apart
    ).tree()


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
        hooks_of_root: bool = True,
        adapters: Adapters | None = None,
        apart: tuple = (),
    ):
        self.apart = {*map(id, apart)}
        self.root, self.state, self.hooks_of_root = root, state, hooks_of_root
        self.adapters = Adapters(root) if adapters is None else adapters
        self.paths = {id(module): name for name, module in root.named_modules()}
        self.met: dict[int, int] = {}
        self.at = ""  # of what is read now
        self.types: dict[type, Hashable] = {}

    def note(self, container, owner=None, foreign: bool = False):
        self.state.containers.append(container)
        self.state.copies.append(copy_of(container))
        self.state.owners.append(owner)
        self.state.foreign.append(foreign)
        self.state.names.append(self.at)

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
        self.watch(path, module)
        ignored = SIZES if self.adapters.in_a_term(path) else () if path else _OF_LOADERS
        if not (path or self.hooks_of_root) and own_forward(module) is not None:
            ignored = (*ignored, "forward", HOOK_REGISTRY)
        own = []
        for name, value in vars(module).items():
            if is_entry(value):
                value = value.tpu_entry.own
            elif name in _TORCHS or name in _NOT_READ or name in ignored or name.startswith("_tpu_"):
                continue
            if _says_nothing(module, name, value):
                continue
            self.at = f"{path}.{name}".lstrip(".")
            own.append((name, self.value(value, False)))
        return self.whole(path, seen, module, own)

    def lora(self, path: str, layer: torch.nn.Module) -> Hashable:
        """A LoRA layer's key; None where it adds nothing, but what may change that is watched."""
        self.watch(path, layer)
        for name in ("merged_adapters", "_active_adapter"):
            if isinstance(vars(layer)[name], list):
                self.note(vars(layer)[name])
        own, terms = [], self.adapters.layers[path]
        for name, value in vars(layer).items():
            self.at = f"{path}.{name}"
            if name == "scaling":
                own.append((name, self.scales(path, value, terms)))
            elif terms and name not in _TORCHS and name not in BOOKKEEPING:
                own.append((name, self.value(self.adapters.by_place(path, layer, value), False)))
        return self.whole(path, path, layer, own) if terms else None

    def watch(self, path: str, module: torch.nn.Module):
        """Changes of what the module has directly are seen."""
        attributes, self.at = vars(module), path
        self.note(attributes, module)
        for name in (*HOOKS, "_modules"):
            self.note(attributes[name])
        self.state.of_tensors += [(attributes[name], dict(attributes[name])) for name in TENSORS]

    def whole(self, path: str, seen: str, module: torch.nn.Module, own: list) -> Hashable:
        own.sort(key=lambda item: item[0])
        attributes, with_hooks = vars(module), path or self.hooks_of_root
        hooks = tuple(self.hook(module, k, n, f) for k in HOOKS for n, f in attributes[k].items() if with_hooks)
        children = ((name, cls) for name, cls in self.adapters.children(path, module))
        return seen, self.type(type(module)), tuple(own), hooks, tuple(children)

    def hook(self, module: torch.nn.Module, kind: str, number: int, function) -> Hashable:
        flags = tuple(number in getattr(module, f"{kind}_{flag}", ()) for flag in ("with_kwargs", "always_called"))
        return kind, flags, self.value(function, True)

    def scales(self, path: str, scaling: dict, terms: tuple[str, ...]) -> Hashable:
        """Of the adapters that the layer adds, by their place; a tensor (peft's, for hot swaps) may be written to."""
        self.note(scaling)
        of_terms = {self.adapters.order.index(name): scaling[name] for name in terms if name in scaling}
        self.state.numbers.update((Number(path, place), float(scale)) for place, scale in of_terms.items())
        tensors = [scale for scale in of_terms.values() if isinstance(scale, torch.Tensor)]
        self.state.constants += [(tensor, tensor._version) for tensor in tensors]
        return tuple(of_terms)

    def type(self, cls: type) -> Hashable:
        """A class, and which of the methods and attributes that it has had it has now."""
        if cls not in self.types:
            bases = [base for base in cls.__mro__ if base is not object]
            for base in bases:
                if base not in self.types:
                    self.note(vars(base), base)
            self.types[cls] = tuple((Held(base), class_version(base)) for base in bases)
        return self.types[cls]

    def value(self, x, foreign: bool) -> Hashable:
        """`x` as what it is equal to. `foreign`: it belongs to an object that is no module."""
        if type(x) is float:
            return float, repr(x)
        if isinstance(x, _PLAIN):
            return type(x), x
        if isinstance(x, torch.Tensor):
            self.state.constants.append((x, x._version))
            return Held(x, x._version)
        if isinstance(x, (np.generic, np.ndarray)):
            return type(x), x.dtype.str, x.shape, x.tobytes()
        if isinstance(x, torch.nn.Module):
            return ("module", self.paths[id(x)]) if id(x) in self.paths else Held(x)
        if isinstance(x, types.MethodType):
            return Held(x.__func__), self.value(x.__self__, True)
        if isinstance(x, tuple):
            return type(x), tuple(self.value(item, foreign) for item in x)
        if id(x) in self.apart:
            return type(x)
        if id(x) in self.met:
            return "met", self.met[id(x)]
        self.met[id(x)] = len(self.met)
        return self.collection(x, foreign)

    def collection(self, x, foreign: bool) -> Hashable:
        if isinstance(x, (dict, list, set)):
            self.note(x, foreign=foreign)
        if isinstance(x, dict):
            return type(x), tuple((self.value(k, foreign), self.value(v, foreign)) for k, v in x.items())
        if isinstance(x, list):
            return type(x), tuple(self.value(item, foreign) for item in x)
        if isinstance(x, (set, frozenset)):
            return type(x), frozenset(self.value(item, foreign) for item in x)
        return self.object(x)

    def object(self, x) -> Hashable:
        if isinstance(x, functools.partial):
            return functools.partial, *(self.value(part, True) for part in (x.func, x.args, x.keywords))
        if isinstance(x, types.FunctionType):
            return self.function(x)
        package = type(x).__module__.partition(".")[0]
        opaque = package in _LIBRARIES or (package in sys.stdlib_module_names and not isinstance(x, _READ_OF_PYTHON))
        if opaque or not hasattr(x, "__dict__") or type(x).__module__.startswith("diffusers.tpu"):
            return Held(x)
        self.note(vars(x), foreign=True)
        own = sorted(((name, self.value(v, True)) for name, v in vars(x).items()), key=lambda item: item[0])
        return self.type(type(x)), tuple(own)

    def function(self, function: types.FunctionType) -> Hashable:
        """Its code and what it has closed over; of a user's also what it names of its module and may write into."""
        package, _, room = (function.__module__ or "").partition(".")
        if package in _LIBRARIES or (package, room.partition(".")[0]) == ("diffusers", "tpu"):
            return Held(function)
        read = []
        for cell in function.__closure__ or ():
            self.note(cell, foreign=True)
            read.append(self.value(content(cell), True))
        if package not in _UPSTREAM:
            read += self.globals(function)
        defaults = self.value(function.__defaults__, True), self.value(function.__kwdefaults__, True)
        return Held(function.__code__), tuple(read), defaults

    def globals(self, function: types.FunctionType) -> list[Hashable]:
        names = [name for name in function.__code__.co_names if name in function.__globals__]
        values = {name: function.__globals__[name] for name in names}
        if any(isinstance(value, (bool, int, float)) for value in values.values()):
            self.note(function.__globals__, foreign=True)
        read = (bool, int, float, str, dict, list, set)
        return [self.value(value, True) for value in values.values() if isinstance(value, read)]


class _Beside(_Reader):
    """What a trace of the modules may change and no key is made of, as most of it no forward reads."""

    def of(self, reader: _Reader) -> State:
        """What the classes that `reader` has met hold, and what the methods of the user's among them name."""
        self.met = dict.fromkeys(map(id, reader.state.containers), 0)
        for cls in reader.types:
            package = cls.__module__.partition(".")[0]
            for x in () if package in _LIBRARIES else vars(cls).values():
                if isinstance(x, (dict, list, set)):
                    self.value(x, True)
                elif package not in _UPSTREAM:
                    self.value(getattr(x, "__func__", x), True)
        return self.state

    def object(self, x) -> Hashable:
        """Of upstream's objects, tokenizers say, nothing is read."""
        return Held(x) if type(x).__module__.partition(".")[0] in _UPSTREAM else super().object(x)

    def function(self, function: types.FunctionType) -> Hashable:
        if function.__module__ is None or function.__module__.partition(".")[0] in (*_LIBRARIES, *_UPSTREAM):
            return Held(function)
        return super().function(function)

    def globals(self, function: types.FunctionType) -> list[Hashable]:
        """Of a function that gives names of its module other values all of these too."""
        namespace, code = function.__globals__, function.__code__
        if _writes_globals(code) and id(namespace) not in self.met:
            self.met[id(namespace)] = 0
            self.note(namespace, foreign=True)
        named = (namespace.get(name) for name in code.co_names)
        return [self.value(x, True) for x in named if not isinstance(x, (type, types.ModuleType, np.ndarray))]


@functools.cache
def _writes_globals(code: types.CodeType) -> bool:
    return any(instruction.opname == "STORE_GLOBAL" for instruction in dis.get_instructions(code))


def _says_nothing(module: torch.nn.Module, name: str, value) -> bool:
    """What hooks and caches leave behind when they are removed: an empty registry, what the class has on the instance."""
    if name == HOOK_REGISTRY:
        return not value.hooks
    if isinstance(value, _PLAIN):
        inherited = getattr(type(module), name, HOOK_REGISTRY)
        return type(inherited) is type(value) and inherited == value
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


_classes: dict[type, list[dict]] = {}


def class_version(cls: type) -> int:
    """Which of the states that this class's attributes were seen in this is."""
    seen = _classes.setdefault(cls, [])
    for number, attributes in enumerate(seen):
        if not differ(vars(cls), attributes):
            return number
    seen.append(dict(vars(cls)))
    return len(seen) - 1
