"""Arrays that training keeps on the chips (gradients, optimizer states, updated weights), and the host tensors that represent them.

A weight is represented by a `FileTensor`, which reads the array as it would read a file; the others are `OnChips`. Code that asks
for values, torch's own included, gets an ordinary host tensor.
"""

import weakref
from dataclasses import dataclass, field

import jax
import torch
from torch.utils._pytree import tree_map_only

from ..bridge import from_numpy, numpy_dtype
from ..weights.checkpoint import FileTensor, is_about_values, settled
from ..weights.transfer import PlacementRequest, Transfer
from .weights import PlacedWeights


@dataclass(eq=False)
class ChipArray:
    """An array on the chips that belongs to the weights under one key and is laid out as they are, stacked if they are.

    Attributes:
        placed: the weights; it is told when values leave the chips.
        array: None once it has left the chips.
        parts: the parts that tensors represent.
    """

    placed: PlacedWeights
    key: str
    array: jax.Array | None
    parts: "weakref.WeakSet[Part]" = field(default_factory=weakref.WeakSet)
    _host: torch.Tensor | None = None

    def __post_init__(self):
        self.placed.held.add(self)

    def part(self, number: int, shape: torch.Size, dtype: torch.dtype) -> "Part":
        self.parts.add(part := Part(self, number, shape, dtype))
        return part

    def become(self, array: jax.Array):
        """Replace the array; tensors that represent the old one represent this one."""
        self.array, self._host = array, None

    def read(self, number: int) -> torch.Tensor:
        """The values of the tensor with this number, on the host."""
        if self._host is None:
            self._host = from_numpy(self.placed.in_order(self.key, self.array))
        return self._host[number] if self.placed.is_stacked(self.key) else self._host

    def leave(self):
        """Copy the values to the host for each part that is still in use, and free the array."""
        for part in [*self.parts]:
            part.values = part[...]
        self.array = self._host = None

    @property
    def tensors(self) -> int:
        """How many tensors the array is made of."""
        return len(self.placed.sources[self.key])

    @property
    def bytes_per_chip(self) -> int:
        return 0 if self.array is None else self.array.addressable_shards[0].data.nbytes


@dataclass(eq=False)
class Part:
    """One tensor's part of a `ChipArray`. `values`: on the host, once it has left the chips."""

    held: ChipArray
    number: int
    shape: torch.Size
    dtype: torch.dtype
    values: torch.Tensor | None = None

    def __getitem__(self, index) -> torch.Tensor:
        """A host copy of the part's values at this index."""
        with torch.utils._mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
            whole = self.held.read(self.number) if self.values is None else self.values
            return whole[tuple(map(slice, self.shape))][index].to(self.dtype, copy=True)

    def settled(self, tensor: torch.Tensor):
        """Record that a weight which represented this part has its values on the host now; the chips hold the same."""
        if self.values is None:
            self.held.placed.copied(self.held.key, self.number, tensor)


@dataclass(eq=False)
class Number:
    """A scalar that a program returns, with its dtype in torch."""

    array: jax.Array
    dtype: torch.dtype
    shape: torch.Size = torch.Size()

    def __getitem__(self, index) -> torch.Tensor:
        return from_numpy(self.array)[index].to(self.dtype)


class OnChips(torch.Tensor):
    """A host tensor that represents a part on the chips; it becomes an ordinary host tensor when values are needed."""

    part: Part | Number | None
    _host: torch.Tensor | None

    def __new__(cls, part: Part | Number):
        with torch._C.DisableTorchFunctionSubclass():
            return torch.Tensor._make_wrapper_subclass(cls, part.shape, dtype=part.dtype, device="cpu")

    def __init__(self, part: Part | Number):
        self.hold(part)

    def hold(self, part: Part | Number) -> "OnChips":
        """Represent this part from now on."""
        self.part, self._host = part, None
        return self

    def host(self) -> torch.Tensor:
        if self._host is None:
            self._host, self.part = self.part[...], None
        return self._host

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_about_values(func):
            settled(args, kwargs)
            return _on_hosts(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _on_hosts(func, args, kwargs or {})


def _on_hosts(func, args: tuple, kwargs: dict):
    """Call torch's function on the host tensors behind these. A tensor that it wrote to and returns is returned as itself."""
    owners: dict[int, OnChips] = {}

    def host(t: OnChips) -> torch.Tensor:
        owners[id(t.host())] = t
        return t.host()

    result = func(*tree_map_only(OnChips, host, args), **tree_map_only(OnChips, host, kwargs))
    return tree_map_only(torch.Tensor, lambda t: owners.get(id(t), t), result)


def part_of(t) -> Part | None:
    """The part on the chips that a tensor represents; None: its values are on the host."""
    part = t.part if type(t) is OnChips else t.source.values if type(t) is FileTensor else None
    return part if isinstance(part, Part) and part.values is None else None


def together(tensors: list[torch.Tensor]) -> ChipArray | None:
    """The array whose parts these tensors represent, all of them and in order; else None."""
    found = complete(tensors)
    return next(iter(found)) if [*found.values()] == [[*range(len(tensors))]] else None


def complete(tensors: list[torch.Tensor | None]) -> dict[ChipArray, list[int]]:
    """The arrays whose tensors are all among these -> the positions of these tensors here, in the array's order."""
    found: dict[ChipArray, dict[int, int]] = {}
    for n, part in enumerate(map(part_of, tensors)):
        if part is not None:
            found.setdefault(part.held, {})[part.number] = n
    return {held: [at[n] for n in sorted(at)] for held, at in found.items() if len(at) == held.tensors}


def brought(tensors: list[torch.Tensor], like: ChipArray) -> ChipArray:
    """These tensors as an array on the chips, laid out like `like`; there is one for each of its weights, of the same shape."""
    if (found := together(tensors)) is not None:
        return found
    placed, key = like.placed, like.key
    aval = jax.ShapeDtypeStruct(like.array.shape, numpy_dtype(tensors[0].dtype), sharding=like.array.sharding)
    on_host = [t.host() if type(t) is OnChips else t for t in tensors]
    request = PlacementRequest(key, aval, on_host, placed.is_stacked(key), placed.packed.get(key))
    with Transfer() as transfer:
        ((_, array),) = transfer.arrays([request])
    return ChipArray(placed, key, array)


def stand(held: ChipArray, tensors: list[torch.Tensor | None], dtype: torch.dtype) -> list[OnChips]:
    """Tensors that represent all parts of `held`; those given that are `OnChips` are reused."""
    shape = torch.Size(held.array.shape[held.placed.is_stacked(held.key) :])
    parts = [held.part(n, shape, dtype) for n in range(len(tensors))]
    return [t.hold(part) if type(t) is OnChips else OnChips(part) for t, part in zip(tensors, parts)]
