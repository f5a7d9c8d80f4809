"""LoRA layers as programs see them: the base layer, and a term for each active adapter, numbered by its place.

    W x + b + sum_i scale_i B_i A_i x

A layer without active adapters is its base layer. Blocks with one trace need not have the same adapters: where a block lacks a
term, its A and B are zeros there, and zeros fill up a lower rank. The sum is the same to the last bit. Layers are peft's.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence

import torch


# Attributes of a layer and its terms that are no part of a key: the terms' names say which there are, their shapes how large.
BOOKKEEPING = frozenset({"_active_adapter", "_disable_adapters", "merged_adapters", "r", "lora_alpha", "_caches"})
SIZES = frozenset({"in_features", "out_features", "in_channels", "out_channels"})
_BASE = "base_layer"


def is_tuner(module: torch.nn.Module) -> bool:
    """Whether this is a layer that peft has put around another."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and isinstance(module, tuners.BaseTunerLayer)


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name; tied ones once."""
    return dict((*module.named_parameters(), *module.named_buffers()))


class Adapters:
    """The adapters that forwards of a module add. `layers`: their names by path of the LoRA layer. `order`: their names by place;
    by default in the order in which the layers add them."""

    def __init__(self, module: torch.nn.Module, order: Sequence[str] | None = None):
        found = ((path, _terms(m)) for path, m in module.named_modules() if is_tuner(m))
        self.layers = {path: terms for path, terms in found if terms is not None}
        added = (name for terms in self.layers.values() for name in terms)
        self.order = [*dict.fromkeys(added)] if order is None else order

    def seen(self, name: str) -> str | None:
        """What programs call this module or tensor; None: nothing. A base layer has its LoRA layer's name, an adapter its place."""
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
        """As `seen`, for the model without its adapters: None for a LoRA layer itself and its terms."""
        path, part, _ = self._split(name)
        return self.seen(name) if path is None or part == _BASE else None

    def in_a_term(self, name: str) -> bool:
        path, part, _ = self._split(name)
        return path is not None and part not in ("", _BASE)

    def _split(self, name: str) -> tuple[str | None, str, str]:
        """The path of the outermost LoRA layer in this name, the part of that layer, and the rest of the name."""
        parts = name.split(".") if self.layers else ()
        for n in range(1, len(parts) + 1):
            path = ".".join(parts[:n])
            if path in self.layers:
                return path, "".join(parts[n : n + 1]), ".".join(parts[n + 1 :])
        return None, "", name

    def tensors(self, module: torch.nn.Module) -> dict[str, str]:
        """Names in programs -> names in the module, of the parameters and buffers that a forward reads."""
        return {seen: name for name in named_tensors(module) if (seen := self.seen(name)) is not None}

    def children(self, path: str, module: torch.nn.Module) -> Iterator[tuple[str, type]]:
        """(name, class) of a module's children, as programs see them."""
        for name, child in module._modules.items():
            whole = f"{path}.{name}".lstrip(".")
            if self.layers.get(whole) == ():
                yield name, type(child.get_base_layer())
            elif (seen := self.seen(whole)) is not None:
                yield seen.rpartition(".")[2], type(child)

    def by_place(self, path: str, layer: torch.nn.Module, value):
        """An attribute of a layer as programs see it: a dict by adapters keeps those that the layer adds, by their place."""
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
    """The argument whose `scale` multiplies the scales of LoRA layers while upstream's method runs; None: it has none."""
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
    """Path of a LoRA layer -> number of a block whose layer has all terms of that path, for paths where some block lacks terms.

    None if one trace cannot represent all of these blocks: no block has all terms of a layer, zeros would change the sum (DoRA
    divides by norms), or dtypes differ.
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
    """Whether the layer lacks terms that `full` adds."""
    return not is_tuner(layer) or _terms(layer) != _terms(full)


def _may_take(layer: torch.nn.Module, full: torch.nn.Module) -> bool:
    """Whether `full`, with zeros for the terms and ranks that the layer lacks, computes what the layer computes."""
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
