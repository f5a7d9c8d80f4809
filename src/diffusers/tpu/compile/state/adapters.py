"""LoRA layers as programs see them: the base layer, and a term for each adapter that is active, by its place among them.

    W x + b + sum_i scale_i B_i A_i x

A layer that adds nothing is its base layer. Blocks that one trace stands for need not have the same adapters: where one of them lacks a
term, its A and B are zeros there, and zeros fill up a lower rank; the sum is the same to the last bit. Layers are peft's.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence

import torch


# Of a layer and of what its terms are made of: which term there is says the program's name for it, how large it is its shape.
BOOKKEEPING = frozenset({"_active_adapter", "_disable_adapters", "merged_adapters", "r", "lora_alpha", "_caches"})
SIZES = frozenset({"in_features", "out_features", "in_channels", "out_channels"})
_BASE = "base_layer"


def is_tuner(module: torch.nn.Module) -> bool:
    """Whether peft has put this layer around another."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and isinstance(module, tuners.BaseTunerLayer)


class Adapters:
    """The adapters that forwards of a module add: `layers`, by path of the LoRA layer; `order`, their names by place: without one, in the
    order in which the layers add them."""

    def __init__(self, module: torch.nn.Module, order: Sequence[str] | None = None):
        found = ((path, _terms(m)) for path, m in module.named_modules() if is_tuner(m))
        self.layers = {path: terms for path, terms in found if terms is not None}
        added = (name for terms in self.layers.values() for name in terms)
        self.order = [*dict.fromkeys(added)] if order is None else order

    def seen(self, name: str) -> str | None:
        """What programs call the module or tensor of this name; None: they have none, a layer without terms is its base."""
        path, part, more = self._split(name)
        if path is None:
            return name
        if part == _BASE:
            return _joined(path, more)
        adapter, _, rest = more.partition(".")
        terms = self.layers[path]
        if not terms or (adapter and adapter not in terms):
            return None
        return _joined(path, part, str(self.order.index(adapter)) if adapter else "", rest)

    def bare(self, name: str) -> str | None:
        """As `seen`, of the model without its adapters: None for a LoRA layer itself and its terms."""
        path, part, _ = self._split(name)
        return self.seen(name) if path is None or part == _BASE else None

    def in_a_term(self, name: str) -> bool:
        path, part, _ = self._split(name)
        return path is not None and part not in ("", _BASE)

    def _split(self, name: str) -> tuple[str | None, str, str]:
        """The outermost LoRA layer that has this name, what in there is called so, and the rest of the name."""
        parts = name.split(".") if self.layers else ()
        for n in range(1, len(parts) + 1):
            path = ".".join(parts[:n])
            if path in self.layers:
                return path, "".join(parts[n : n + 1]), ".".join(parts[n + 1 :])
        return None, "", name

    def tensors(self, module: torch.nn.Module) -> dict[str, str]:
        """Programs' names of the module's parameters and buffers that a forward reads, to the module's."""
        names = (name for name, _ in (*module.named_parameters(), *module.named_buffers()))
        return {seen: name for name in names if (seen := self.seen(name)) is not None}

    def children(self, path: str, module: torch.nn.Module) -> Iterator[tuple[str, type]]:
        """(name, class) of what is directly in a module, as programs see it."""
        for name, child in module._modules.items():
            whole = f"{path}.{name}".lstrip(".")
            if self.layers.get(whole) == ():
                yield name, type(child.get_base_layer())
            elif (seen := self.seen(whole)) is not None:
                yield seen.rpartition(".")[2], type(child)

    def by_place(self, path: str, layer: torch.nn.Module, value):
        """An attribute of a layer as programs see it: of a dict by adapters those that it adds, by their place."""
        if isinstance(value, dict) and value.keys() <= _available(layer):
            return {self.order.index(name): value[name] for name in self.layers[path] if name in value}
        return value


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


def _terms(layer: torch.nn.Module) -> tuple[str, ...] | None:
    """The adapters that the layer's forward adds, in its order; None where it does something else."""
    known = {_BASE, "lora_dropout", *layer.adapter_layer_names}
    if not (type(layer).__module__.startswith("peft.") and layer._modules.keys() <= known):
        return None
    own = layer._parameters or layer._buffers or layer._forward_hooks or layer._forward_pre_hooks
    if own or "forward" in vars(layer) or (layer.merged and layer.disable_adapters):
        return None
    if layer.merged or layer.disable_adapters:
        return ()
    available = _available(layer)
    return tuple(name for name in layer.active_adapters if name in available)


def _available(layer: torch.nn.Module) -> set[str]:
    return {name for part in layer.adapter_layer_names for name in getattr(layer, part)}


def scaled_by(method: Callable) -> str | None:
    """The argument whose `scale` upstream's method multiplies the scales of its LoRA layers by while it runs, if it has one."""
    while method is not None:
        code = getattr(method, "__code__", None)
        if code is not None and method.__globals__["__name__"] == "diffusers.utils.peft_utils":
            return inspect.getclosurevars(method).nonlocals.get("kwargs_name")
        method = getattr(method, "__wrapped__", None)
    return None


def take_scale(kwargs: dict, name: str | None) -> tuple[dict, float]:
    """The arguments without that scale, and the scale."""
    given = kwargs.get(name)
    scale = given.get("scale") if isinstance(given, dict) else None
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        return kwargs, 1.0
    return {**kwargs, name: {k: v for k, v in given.items() if k != "scale"} or None}, scale


def lenders(blocks: Sequence[torch.nn.Module], order: Sequence[str]) -> dict[str, int] | None:
    """Path of a LoRA layer -> number of the block whose layer has all terms that any block's has there, where not all have.

    None where one trace cannot stand for all of these blocks: no block has all terms of a layer, zeros would not leave the sum
    as it is (DoRA divides by norms), or dtypes differ.
    """
    of_blocks, found = [Adapters(block, order).layers for block in blocks], {}
    for path in dict.fromkeys(path for layers in of_blocks for path, terms in layers.items() if terms):
        layers = [block.get_submodule(path) for block in blocks]
        full = max(range(len(blocks)), key=lambda number: len(of_blocks[number].get(path, ())))
        if not all(_may_take(layer, layers[full]) for layer in layers):
            return None
        if any(lacks(layer, layers[full]) for layer in layers):
            found[path] = full
    return found


def lacks(layer: torch.nn.Module, full: torch.nn.Module) -> bool:
    """Whether the layer adds fewer terms."""
    return not is_tuner(layer) or _terms(layer) != _terms(full)


def _may_take(layer: torch.nn.Module, full: torch.nn.Module) -> bool:
    """Whether `full`, with zeros for the terms that the layer lacks and for what it lacks of a rank, does what the layer does."""
    additive = not getattr(full, "lora_variant", True)
    if layer is full:
        return True
    if not is_tuner(layer):
        return additive and type(layer) is type(full.get_base_layer())
    terms = _terms(layer)
    if terms is None or type(layer) is not type(full):
        return False
    own, given = _tensors(layer, terms), _tensors(full, terms)
    if _flags(layer) != _flags(full) or {k: t.dtype for k, t in own.items()} != {k: t.dtype for k, t in given.items()}:
        return not terms and additive
    return additive or (terms == _terms(full) and all(t.shape == given[name].shape for name, t in own.items()))


def _tensors(layer: torch.nn.Module, terms: tuple[str, ...]) -> dict[str, torch.Tensor]:
    return {
        name: t for name, t in layer.named_parameters() if name.split(".")[1] in terms and not name.startswith(_BASE)
    }


def _flags(layer: torch.nn.Module) -> dict:
    plain = (bool, int, float, str)
    return {k: v for k, v in vars(layer).items() if isinstance(v, plain) and k not in BOOKKEEPING}
