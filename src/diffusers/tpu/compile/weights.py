"""Weights from host tensors to sharded arrays: each chip gets only its part (`transfer`), a tensor at a time, blocks as they come.

What the user changes on the host is placed again before the next call: a tensor that was replaced, written to, or given other
data. Writes through `.data` leave no trace in torch; `sampled_changes` finds them by a few values of each tensor.
"""

import functools
import itertools
import math
import operator
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...utils import logging
from ..bridge import numpy_dtype
from ..chips.sharding import Coverage, ModelPlan, Packed, computed, plan_weights, unwrapped
from ..common import notices
from ..idioms.refusing import refuse_weights
from ..weights.checkpoint import FileTensor, is_ordinary, missing_message, on_chips, settled
from ..weights.transfer import PlacementRequest, Transfer
from .state.adapters import Adapters
from .tracing.scan import Group, find_groups


# Of the bar: bytes; nothing of what takes less than two seconds, and nothing in a log.
BAR = {"unit": "B", "unit_scale": True, "unit_divisor": 1024, "delay": 2.0, "disable": None}
_placements = itertools.count()
SAMPLED = 64  # values of a tensor that are looked at for writes that torch does not count


@dataclass(eq=False)
class PlacedWeights:
    """A module's weights on the mesh. The module keeps its host tensors; what changes there is placed again.

    Attributes:
        planned_for: whether equal blocks are stacked, submodules whose weights are left out, and what each chip has whole.
        arrays: key -> array; a group's weights under `label.name`, stacked. Empty while they are not on the chips.
        sources: key -> the module's tensor names that make it up; None: zeros, for the term of an adapter that a block lacks.
        specs: key -> spec of the array while its block computes, the stacked axis left out.
        avals: key -> shape, dtype and sharding of the array as it is stored.
        watched: tensors that were given, those of them that are placed, and `quick_versions` of these, then.
        placement: changes, to a number of this process's own, when something is placed.
        terms: keys that are of adapters.
        packed: key -> the order in which an axis of it is stored, where that is not the tensor's.
        held: what training keeps on the chips beside them, and weights that it changed there (`chip_arrays.ChipArray`).
    """

    module: torch.nn.Module
    mesh: Mesh
    groups: list[Group]
    sources: dict[str, list[str | None]]
    specs: dict
    avals: dict[str, jax.ShapeDtypeStruct]
    coverage: Coverage
    planned_for: tuple[bool, tuple[str, ...], frozenset[str]]
    arrays: dict[str, jax.Array] = field(default_factory=dict)
    versions: dict[str, tuple] = field(default_factory=dict)
    samples: dict[str, torch.Tensor] = field(default_factory=dict)
    watched: tuple[dict, dict, tuple] | None = None
    placement: int = -1
    terms: set[str] = field(default_factory=set)
    packed: dict[str, Packed] = field(default_factory=dict)
    held: weakref.WeakSet = field(default_factory=weakref.WeakSet)

    def unchanged(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Whether the weights are on the chips as these tensors are now."""
        known = self.watched
        return known is not None and tensors is known[0] and quick_versions(known[1]) == known[2]

    def refresh(self, tensors: dict[str, torch.Tensor], place: bool = True) -> bool:
        """Whether names, shapes or dtypes of the module's tensors are no longer those planned for.

        Places what is new or was changed there since, if they are; `place=False` only tells.
        """
        if self.unchanged(tensors):
            return False
        stale, given = {}, tensors
        tensors = {name: t for name, t in given.items() if not _is_within(name, self.planned_for[1])}
        with torch._C.DisableTorchFunction():  # no detour for tensors of a file, nor by the glue around the call
            for key, names in self._named():
                if any(name not in tensors for name in names):
                    return True
                if self.versions.get(key) != (version := _version(tensors, names)):
                    if place and any(on_chips(tensors[name]) for name in names):
                        settled([tensors[name] for name in names])
                        version = _version(tensors, names)
                    stale[key] = names, version
                    if any(not self._fits(key, tensors[name]) for name in names):
                        return True
        if sum(len(names) for _, names in self._named()) != len(tensors):
            return True
        if not place:
            return False
        if stale:
            self._place(stale, tensors)
        self.watched = given, tensors, quick_versions(tensors)
        return False

    def reuse(self, former: "PlacedWeights"):
        """What is there already of weights that are planned as they were: of a module whose adapters are others, say."""
        tensors = named_tensors(self.module)
        with torch._C.DisableTorchFunction():
            for key, names in self._named():
                known = former.avals.get(key) == self.avals[key] and all(name in tensors for name in names)
                known = known and [n is None for n in former.sources[key]] == [n is None for n in self.sources[key]]
                if known and key in former.versions:  # what was written to is placed at the next look
                    self.arrays[key], self.versions[key] = former.arrays[key], former.versions[key]
                    before = (name for name in former.sources[key] if name is not None)
                    self.samples.update((name, former.samples[old]) for name, old in zip(names, before))
                    for held in [held for held in former.held if held.key == key]:
                        former.held.remove(held)
                        held.placed = self
                        self.held.add(held)
        if self.arrays:
            self.placement = former.placement
        former.drop()

    def sampled_changes(self):
        """Places at the next call what was written to through `.data` since, as far as a sample of its values shows."""
        tensors = self.watched[1] if self.watched is not None else named_tensors(self.module)
        for key, names in self._named():
            there = key in self.versions and all(name in tensors for name in names)
            if there and not all(_same_bits(self.samples[n], _sample(tensors[n])) for n in names):
                del self.versions[key]
                self.watched = None

    def one_by_one(self) -> tuple[dict[str, jax.Array], dict]:
        """Array and spec of every tensor by its name, those of stacks taken out."""
        arrays, specs = {}, {}
        for key, names in self.sources.items():
            for n, name in enumerate(names):
                if name is not None:
                    array = self.arrays[key][n] if self.is_stacked(key) else self.arrays[key]
                    array = self.packed[key].apart(array, self.packed[key].axis) if key in self.packed else array
                    arrays[name] = array[tuple(map(slice, self.watched[1][name].shape))]
                    specs[name] = self.specs[key]
        return arrays, specs

    def in_order(self, key: str, array: jax.Array) -> jax.Array:
        """An array that is stored as ours under this key, its axes as its tensors have them."""
        packed = self.packed.get(key)
        return array if packed is None else packed.apart(array, packed.axis + self.is_stacked(key))

    def is_stacked(self, key: str) -> bool:
        """Whether the array is of several blocks' tensors."""
        return len(self.sources[key]) > 1

    def beside(self) -> list:
        """What is held that is not the weights' own arrays."""
        return [held for held in self.held if held.array is not self.arrays.get(held.key)]

    def changed(self, key: str, tensors: dict[str, torch.Tensor]):
        """The array under this key was changed on the chips, and these tensors, of all names, stand for it or have its values."""
        names = self.sources[key]
        self.versions[key], self.placement = _version(tensors, names), next(_placements)
        self.samples.update((name, _sample(tensors[name])) for name in names)

    def copied(self, key: str, number: int, tensor: torch.Tensor):
        """A tensor that stood for its part of the array has the values now: they need not be placed again."""
        ((now,), name) = _version({"": tensor}, [""]), self.sources[key][number]
        there = self.versions.get(key)
        if there is not None and there[number][0] == now[0]:
            self.versions[key] = (*there[:number], now, *there[number + 1 :])
            self.samples[name] = _sample(tensor)

    def _named(self) -> Iterator[tuple[str, list[str]]]:
        """The sources that are tensors."""
        return ((key, [name for name in names if name is not None]) for key, names in self.sources.items())

    @functools.cached_property
    def settled(self) -> frozenset[str]:
        """Keys of arrays that are stored as they are computed with."""
        specs = {
            key: NamedSharding(self.mesh, PartitionSpec(*[None] * self.is_stacked(key), *spec))
            for key, spec in self.specs.items()
        }
        return frozenset(key for key, a in self.avals.items() if a.sharding.is_equivalent_to(specs[key], a.ndim))

    def drop(self):
        """Leave the chips; the host tensors stay, with what they stood for there."""
        for held in [*self.held]:
            held.leave()
        self.arrays.clear()
        self.versions.clear()
        self.watched = None

    def _fits(self, key: str, tensor: torch.Tensor) -> bool:
        """Of a stack's terms of adapters a lower rank fits too."""
        aval, shape = self.avals[key], tuple(tensor.shape)
        stacked = self.is_stacked(key)
        planned = aval.shape[1:] if stacked else aval.shape
        lower = stacked and key in self.terms and len(shape) == len(planned) and all(map(operator.le, shape, planned))
        return is_ordinary(tensor) and (shape == planned or lower) and numpy_dtype(tensor.dtype) == aval.dtype

    def _place(self, stale: dict[str, tuple[list[str], tuple]], tensors: dict[str, torch.Tensor]):
        """What has changed goes to the chips: key -> names of its tensors, their version."""

        def request(key: str) -> PlacementRequest:
            self.arrays.pop(key, None)  # first: the old and the new need not both have room
            given = [tensors.get(name) for name in self.sources[key]]
            return PlacementRequest(key, self.avals[key], given, self.is_stacked(key), self.packed.get(key))

        nbytes = sum(self.avals[key].size * self.avals[key].dtype.itemsize for key in stale)
        bar = logging.tqdm(total=nbytes, desc=f"Placing {type(self.module).__name__}", **BAR)
        with Transfer() as transfer, bar:
            for key, array in transfer.arrays(map(request, stale)):
                names, version = stale[key]
                self.arrays[key], self.versions[key] = array, version
                self.samples.update((name, _sample(tensors[name])) for name in names)
                self.placement = next(_placements)
                bar.update(array.nbytes)


def plan_placement(module: torch.nn.Module, plan: ModelPlan, mesh: Mesh, planned_for: tuple) -> PlacedWeights:
    """Where every weight of the module will lie; nothing is moved yet. `planned_for`: of `PlacedWeights`.

    Raises ValueError for weights that the checkpoint had no values of, NotImplementedError for quantized ones.
    """
    (scan, without, whole), adapters, model = planned_for, Adapters(module), type(module).__name__
    tensors = {name: t for name, t in named_tensors(module).items() if not _is_within(name, without)}
    if missing := sorted(name for name, t in tensors.items() if t.is_meta):
        raise ValueError(missing_message(model, missing))
    if quantized := [name for name, t in tensors.items() if not is_ordinary(t)]:
        refuse_weights(model, quantized[0], tensors[quantized[0]])
    # A product within float16's rounding is three of bfloat16: of the exact one 2.1e-4 is left to it, one pass is 2.4e-3 off.
    half = sum(t.nbytes for t in tensors.values() if t.dtype == torch.float16)
    if half > sum(t.nbytes for t in tensors.values()) / 2:
        notices.warn_once(
            "float16",
            f"{model} has float16 weights, which a TPU has no products for: they take three times as long as bfloat16's, and"
            " attention has no kernel. Load models with torch_dtype=torch.bfloat16",
        )
    groups = find_groups(module) if scan and not without else []
    sources = {key: names for group in groups for key, names in group.sources(module, adapters).items()}
    taken = {name for names in sources.values() for name in names}
    seen = ((key, name) for key, name in adapters.tensors(module).items() if name in tensors)
    sources.update({key: [name] for key, name in seen if name not in taken})
    shapes = {}
    for key, names in sources.items():
        some = [tensors[name] for name in names if name is not None]
        largest = tuple(map(max, zip(*(t.shape for t in some))))
        shapes[key] = largest, len(names) * math.prod(largest) * some[0].itemsize
    rules = () if without else plan.rules
    stored, coverage = plan_weights(shapes, rules, mesh, whole)
    specs, avals = {key: computed(key, spec, rules) for key, spec in stored.items()}, {}
    for key, names in sources.items():
        stack, spec = ((len(names),), PartitionSpec(None, *stored[key])) if len(names) > 1 else ((), stored[key])
        dtype = numpy_dtype(next(tensors[name].dtype for name in names if name is not None))
        avals[key] = jax.ShapeDtypeStruct((*stack, *shapes[key][0]), dtype, sharding=NamedSharding(mesh, spec))
    terms = {key for key, names in sources.items() if any(map(adapters.in_a_term, filter(None, names)))}
    packed, tp = {}, mesh.shape["tp"]
    for key, (name, *_) in sources.items() if max(tp, mesh.shape["sp"]) > 1 and not without else ():
        found = name and plan.packed.get(unwrapped(name))
        if found and not any(size % tp for size in found.sizes):
            packed[key] = replace(found, tp=tp)
    return PlacedWeights(
        module, mesh, groups, sources, specs, avals, coverage, planned_for, terms=terms, packed=packed
    )


def stack_numbers(numbers: dict[str, float], groups: list[Group]) -> dict[str, np.ndarray]:
    """LoRA scales by `LAYER/PLACE`; those of a group's blocks stacked, under keys that start with its label."""
    left, values = dict(numbers), {}
    for group in groups:
        blocks = [f"{group.path}.{index}." for index in range(group.start, group.stop)]
        of_blocks = [{key.removeprefix(b): left.pop(key) for key in [*left] if key.startswith(b)} for b in blocks]
        for name in dict.fromkeys(itertools.chain.from_iterable(of_blocks)):
            values[f"{group.label}.{name}"] = [scales.get(name, 0.0) for scales in of_blocks]
    return {key: np.asarray(value, np.float32) for key, value in (values | left).items()}


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name; tied ones once."""
    return dict((*module.named_parameters(), *module.named_buffers()))


def quick_versions(tensors: dict[str, torch.Tensor]) -> tuple:
    """Changes when one of them is written to or given other data; without a line of Python for each, as every call compares it."""
    held = tensors.values()
    with torch._C.DisableTorchFunction():
        of_files = [(type(t), t.source) for t in held if type(t) is FileTensor]
        return [*map(operator.attrgetter("_version"), held)], [*map(torch.Tensor.data_ptr, held)], of_files


def _sample(tensor: torch.Tensor) -> torch.Tensor | None:
    """A few values of a host tensor, spread over it, of its own memory; None of a file's, which nothing can have written to."""
    if type(tensor) is FileTensor and tensor.source.values is not None:
        return None
    with torch.utils._mode_utils.no_dispatch(), torch._C.DisableTorchFunction(), torch.no_grad():
        flat = tensor.detach().reshape(-1)
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        return flat[:: max(1, -(-flat.numel() // SAMPLED))].clone()


def _same_bits(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return True  # its version tells whether it was read into memory since
    with torch.utils._mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
        return one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _is_within(name: str, submodules: tuple[str, ...]) -> bool:
    """Whether a tensor of this name is of one of the submodules."""
    return any(name.startswith(f"{submodule}.") for submodule in submodules)


def _version(tensors: dict, names: list[str]) -> tuple:
    """Changes when a tensor is replaced, written to, or given other data (as `module.to(dtype)` does)."""
    held = (tensors[name] for name in names)
    with torch._C.DisableTorchFunction():
        return tuple((id(t), t._version, t.dtype, t.data_ptr(), vars(t).get("source")) for t in held)
