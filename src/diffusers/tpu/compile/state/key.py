"""A module's Python state as a key: equal keys mean equal traces. One walk over everything that a trace may read.

The walk starts at the attributes, hooks and classes of the module and its submodules; `values.Reader` continues it. `store.keys`
has the same key in words that mean the same in every process.
"""

import operator
import sys
import types
from collections.abc import Hashable, Iterator

import torch

from . import watch
from .adapters import BOOKKEEPING, SIZES, Adapters, named_tensors
from .libraries import Libraries, is_library
from .state import HOOK_REGISTRY, HOOKS, OF_ALL, TENSORS, TORCHS, Quick, State
from .values import PLAIN, Reader, is_ours
from .watch import Watch, alike


# What loaders store on a model. What a forward reads of adapters is in the layers; the rest says how to save the checkpoint.
# No forward of upstream's names one of them (`tests/tpu/test_key.py` checks).
OF_LOADERS = frozenset(
    "peft_config _hf_peft_config_loaded _prepare_lora_hotswap_kwargs lora_scale _safe_fusing _weight_conversions"
    " _use_kernels".split()
)


def read(module: torch.nn.Module, apart: tuple = ()) -> State:
    """The state of a module and all that it holds, except for what is in the objects `apart`."""
    state = State(module)
    reader = _Modules(module, state, apart=apart)
    tree = reader.tree()
    state.libraries = Libraries({cls.__module__ for cls in reader.types})
    for function in state.libraries.put_into():
        reader.later(reader.once, function)
    state.key = tree, reader.rest(), state.libraries.key
    seen = {*reader.adapters.tensors(module).values()}
    state.tensors = {name: tensor for name, tensor in named_tensors(module).items() if name in seen}
    state.quick = Quick(state)  # now, so that changes before the first call are seen
    return state


def signature(block: torch.nn.Module, adapters: Adapters, apart: tuple = ()) -> Hashable:
    """What must agree between two blocks, beside weights and numbers, for one trace to represent both.

    `adapters`: the model's. `apart`: objects that need not agree.
    """
    reader = _Modules(block, State(block), of_a_block=True, adapters=Adapters(block, adapters.order), apart=apart)
    return reader.tree(), reader.rest()


def of_object(x) -> Hashable:
    """The key of an object among a call's arguments, read anew in each call. Raises Unread."""
    state = State(torch.nn.Module())
    reader = Reader(state, {})
    key = reader.value(x, True), reader.rest()
    if state.unread:
        name, why = next(iter(state.unread.items()))
        raise Unread(f"{type(x).__name__}{name}: {why}")
    return key


class Unread(Exception):
    """Something has no key; the message says what, and why."""


def process_key() -> Hashable:
    """What a trace reads of the process: the active attention backend and torch's default dtype."""
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    backend = dispatch and dispatch._AttentionBackendRegistry._active_backend
    return backend, torch.get_default_dtype()


class _Modules(Reader):
    """The walk over a module. `adapters`: of the model that it is part of. `of_a_block`: hooks of the root may differ."""

    def __init__(self, root, state: State, of_a_block: bool = False, adapters: Adapters | None = None, apart=()):
        super().__init__(state, {id(module): name for name, module in root.named_modules()}, apart)
        self.root, self.of_a_block = root, of_a_block
        self.adapters = Adapters(root) if adapters is None else adapters

    def tree(self) -> Hashable:
        read, state = [], self.state
        for kind in OF_ALL:
            self.watch(getattr(torch.nn.modules.module, kind), watch.MAPPING)
        for path, m in self.root.named_modules():
            terms, seen, own = self.adapters.layers.get(path), self.adapters.seen(path), vars(m)
            if terms is None and seen is None:
                continue  # of an inactive adapter
            state.modules.append(Watch(own, *watch.OF_MODULE, m, False, path))
            state.modules += [Watch(own[name], *watch.OF_MODULE, None, False, path) for name in (*HOOKS, "_modules")]
            state.of_tensors += [Watch(own[name], *watch.OF_MODULE) for name in TENSORS]
            attributes = self.module(path, m) if terms is None else self.lora(path, m, terms)
            attributes = sorted(attributes, key=operator.itemgetter(0))
            if seen is not None:
                read.append(self.whole(path, seen, m, attributes))
        return tuple(read)

    def module(self, path: str, module: torch.nn.Module) -> Iterator[tuple[str, Hashable]]:
        is_model = not path and hasattr(type(module), "add_adapter")
        ignored = SIZES if self.adapters.in_a_term(path) else OF_LOADERS if is_model else ()
        if not path and self.of_a_block and own_forward(module) is not None:
            ignored = (*ignored, "forward", HOOK_REGISTRY)
        for name, value in vars(module).items():
            if is_entry(value):
                value = value.tpu_own
            elif name in TORCHS or name in ignored or name.startswith("_tpu_") or is_ours(value):
                continue
            if not _says_nothing(module, name, value):
                self.at = f"{path}.{name}".lstrip(".")
                of_processor = name == "scale" and path.endswith("processor") and is_library(type(module))
                yield name, self.strengths(path, value) if of_processor else self.value(value, False)

    def lora(self, path: str, layer: torch.nn.Module, terms: tuple[str, ...]) -> Iterator[tuple[str, Hashable]]:
        """A LoRA layer's attributes. Of one that adds nothing, only what could change that is watched."""
        for name in ("merged_adapters", "_active_adapter"):
            if isinstance(vars(layer)[name], list):
                self.watch(vars(layer)[name], watch.SEQUENCE, foreign=False)
        for name, value in vars(layer).items():
            self.at = f"{path}.{name}"
            if name == "scaling":
                yield name, self.scales(path, value, terms)
            elif terms and name not in TORCHS and name not in BOOKKEEPING:
                yield name, self.value(self.adapters.by_place(path, layer, value), False)

    def whole(self, path: str, seen: str, module: torch.nn.Module, own: list) -> Hashable:
        self.at, hooks = f"a hook of {path or 'all modules'}", []
        # torch runs hooks of the root outside of the trace: those of all modules are read in their place.
        held, kinds = (vars(module), HOOKS) if path else (vars(torch.nn.modules.module), OF_ALL)
        for kind in kinds:
            ways = [held.get(f"{kind}_{flag}", ()) for flag in ("with_kwargs", "always_called")]
            for number, function in held[kind].items():
                if not is_ours(function):
                    hooks.append((kind, tuple(number in way for way in ways), self.value(function, True)))
        return seen, self.type(type(module)), tuple(own), tuple(hooks), tuple(self.adapters.children(path, module))

    def scales(self, path: str, scaling: dict, terms: tuple[str, ...]) -> Hashable:
        """Places of the adapters that the layer adds; `State.numbers` gets the scales. Tensors (for hot swaps) are watched."""
        self.watch(scaling, watch.DICT, foreign=False)
        of_terms = {self.adapters.order.index(name): scaling[name] for name in terms if name in scaling}
        self.state.numbers.update((f"{path}/{place}", float(scale)) for place, scale in of_terms.items())
        for scale in of_terms.values():
            if isinstance(scale, torch.Tensor):
                self.tensor(scale)
        return tuple(of_terms)

    def strengths(self, path: str, scale) -> Hashable:
        """The key of a processor's scale of its IP-Adapter, or list of them: which are zero. `State.numbers` gets their values."""
        several = isinstance(scale, list)
        if several:
            self.watch(scale, watch.SEQUENCE, foreign=False)
        found = []
        for place, one in enumerate(scale if several else [scale]):
            if type(one) in (int, float):
                self.state.numbers[f"{path}/scale/{place}" if several else f"{path}/scale"] = float(one)
                found.append(one == 0)
            else:
                found.append(self.value(one, False))
        return several, tuple(found)


def _says_nothing(module: torch.nn.Module, name: str, value) -> bool:
    """Whether it is a remnant of removed hooks and caches: an empty registry, or the class's attribute on the instance."""
    if name == HOOK_REGISTRY:
        return not value.hooks
    if isinstance(value, (*PLAIN, float, complex)):
        inherited = getattr(type(module), name, HOOK_REGISTRY)
        return alike(inherited, value)
    own = isinstance(value, types.MethodType) and value.__self__ is module
    return own and value.__func__ is getattr(type(module), name, None)


def own_forward(block: torch.nn.Module):
    """Where upstream's hooks on a block store its own forward, if that is its class's; None: there are none."""
    references = getattr(vars(block).get(HOOK_REGISTRY), "_fn_refs", None)
    own = getattr(references[0].original_forward, "__func__", None) if references else None
    return references[0] if own is type(block).forward else None


def is_entry(value) -> bool:
    """Whether this attribute of a module is a runner's entry: `value.tpu_own` is what it replaced (None: the class's)."""
    return isinstance(value, types.FunctionType) and hasattr(value, "tpu_own")
