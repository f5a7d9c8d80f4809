"""Weights from host tensors to sharded arrays: each chip gets only its part (`transfer`), one array at a time, in chunks.

What the user changes on the host is placed again before the next call: a tensor that was replaced, written to, or given other data.
Torch does not record writes through `.data`; `sampled_changes` finds them by comparing a few values of each tensor.
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
from ..bridge import as_numpy, numpy_dtype
from ..chips.sharding import Coverage, ModelPlan, Packed, computed, plan_weights, unwrapped
from ..common import notices
from ..idioms.refusing import refuse_weights
from ..weights.checkpoint import FileTensor, is_ordinary, missing_message, on_chips, settled
from ..weights.transfer import PlacementRequest, Transfer
from .state.adapters import Adapters, named_tensors
from .tracing.scan import Group, find_groups


# Of the progress bar: in bytes, shown only after two seconds, and not in a log.
BAR = {"unit": "B", "unit_scale": True, "unit_divisor": 1024, "delay": 2.0, "disable": None}
_placements = itertools.count()
SAMPLED = 64  # values of a tensor that are compared to find writes that torch does not record


@dataclass(eq=False)
class PlacedWeights:
    """A module's weights on the mesh. The module keeps its host tensors; what changes there is placed again.

    Attributes:
        planned_for: whether equal blocks are stacked, submodules whose weights are left out, and kinds stored whole on each chip.
        arrays: key -> array; a group's weights under `label.name`, stacked. Empty while the weights are not on the chips.
        sources: key -> names of the module's tensors in it; None: zeros, where a block lacks the term of an adapter.
        specs: key -> spec of the array while its block computes, without the stacked axis.
        avals: key -> shape, dtype and sharding of the array as it is stored.
        watched: the tensors at the last placement, those of them that are placed, and the `quick_versions` of these.
        placement: a number that is new in this process whenever something is placed.
        terms: keys of adapters' terms.
        packed: key -> the order in which an axis of it is stored, where that is not the tensor's.
        held: what training keeps on the chips: arrays beside the weights, and weights that it changed (`chip_arrays.ChipArray`).
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
    samples: dict[str, bytes | None] = field(default_factory=dict)
    watched: tuple[dict, dict, tuple] | None = None
    placement: int = -1
    terms: set[str] = field(default_factory=set)
    packed: dict[str, Packed] = field(default_factory=dict)
    held: weakref.WeakSet = field(default_factory=weakref.WeakSet)

    def unchanged(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Whether the weights on the chips have these tensors' present values."""
        known = self.watched
        return known is not None and tensors is known[0] and quick_versions(known[1]) == known[2]

    def refresh(self, tensors: dict[str, torch.Tensor], place: bool = True) -> bool:
        """Whether names, shapes or dtypes of the module's tensors differ from those planned for.

        If they do not, what is new or has changed is placed; `place=False` places nothing.
        """
        if self.unchanged(tensors):
            return False
        stale, given = {}, tensors
        tensors = _outside(self.planned_for[1], given)
        with torch._C.DisableTorchFunction():  # no dispatch to `FileTensor` or to the environment
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
        """Reuse the former plan's arrays that are planned alike here (only adapters changed, say), and free the rest."""
        tensors = named_tensors(self.module)
        with torch._C.DisableTorchFunction():
            for key, names in self._named():
                known = former.avals.get(key) == self.avals[key] and all(name in tensors for name in names)
                known = known and [n is None for n in former.sources[key]] == [n is None for n in self.sources[key]]
                if known and key in former.versions:  # tensors written to since are placed by the next `refresh`
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
        """Have tensors placed at the next call that were written to through `.data`, as far as a sample of their values shows."""
        tensors = self.watched[1] if self.watched is not None else named_tensors(self.module)
        for key, names in self._named():
            there = key in self.versions and all(name in tensors for name in names)
            if there and any(_overwritten(self.samples[n], _sample(tensors[n])) for n in names):
                del self.versions[key]
                self.watched = None

    def one_by_one(self) -> tuple[dict[str, jax.Array], dict]:
        """Array and spec of every tensor by its name; stacks are split."""
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
        """An array that is stored like the one under this key, with its axes ordered as in the tensors."""
        packed = self.packed.get(key)
        return array if packed is None else packed.apart(array, packed.axis + self.is_stacked(key))

    def is_stacked(self, key: str) -> bool:
        """Whether the array under this key is a stack of several blocks' tensors."""
        return len(self.sources[key]) > 1

    def beside(self) -> list:
        """What training holds apart from the weights' own arrays."""
        return [held for held in self.held if held.array is not self.arrays.get(held.key)]

    def changed(self, key: str, tensors: dict[str, torch.Tensor]):
        """Record that the array under this key was changed on the chips; these tensors represent it or have its values."""
        names = self.sources[key]
        self.versions[key], self.placement = _version(tensors, names), next(_placements)
        self.samples.update((name, _sample(tensors[name])) for name in names)

    def copied(self, key: str, number: int, tensor: torch.Tensor):
        """Record that a tensor which represented its part of the array has the values now: they need not be placed again."""
        ((now,), name) = _version({"": tensor}, [""]), self.sources[key][number]
        there = self.versions.get(key)
        if there is not None and there[number][0] == now[0]:
            self.versions[key] = (*there[:number], now, *there[number + 1 :])
            self.samples[name] = _sample(tensor)

    def _named(self) -> Iterator[tuple[str, list[str]]]:
        """Keys with the names of their tensors, without those that a block lacks."""
        return ((key, [name for name in names if name is not None]) for key, names in self.sources.items())

    @functools.cached_property
    def settled(self) -> frozenset[str]:
        """Keys of arrays that are stored with the sharding that they are computed with."""
        specs = {
            key: NamedSharding(self.mesh, PartitionSpec(*[None] * self.is_stacked(key), *spec))
            for key, spec in self.specs.items()
        }
        return frozenset(key for key, a in self.avals.items() if a.sharding.is_equivalent_to(specs[key], a.ndim))

    def drop(self):
        """Free the arrays. Tensors that represent values on the chips get these first."""
        for held in [*self.held]:
            held.leave()
        self.arrays.clear()
        self.versions.clear()
        self.watched = None

    def _fits(self, key: str, tensor: torch.Tensor) -> bool:
        """Whether the tensor is as planned; in a stack of adapters' terms a lower rank fits too."""
        aval, shape = self.avals[key], tuple(tensor.shape)
        stacked = self.is_stacked(key)
        planned = aval.shape[1:] if stacked else aval.shape
        lower = stacked and key in self.terms and len(shape) == len(planned) and all(map(operator.le, shape, planned))
        return is_ordinary(tensor) and (shape == planned or lower) and numpy_dtype(tensor.dtype) == aval.dtype

    def _place(self, stale: dict[str, tuple[list[str], tuple]], tensors: dict[str, torch.Tensor]):
        """Place what has changed. `stale`: key -> names of its tensors, and their version."""

        def request(key: str) -> PlacementRequest:
            self.arrays.pop(key, None)  # first, so that the old and the new need not fit together
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
    """Plan where every weight of the module will lie; nothing is moved yet. `planned_for`: as in `PlacedWeights`.

    Raises ValueError for weights without values in the checkpoint, NotImplementedError for quantized ones.
    """
    (scan, without, whole), adapters, model = planned_for, Adapters(module), type(module).__name__
    tensors = _outside(without, named_tensors(module))
    if missing := sorted(name for name, t in tensors.items() if t.is_meta):
        raise ValueError(missing_message(model, missing))
    if quantized := [name for name, t in tensors.items() if not is_ordinary(t)]:
        refuse_weights(model, quantized[0], tensors[quantized[0]])
    # A product as exact as float16 takes three of bfloat16, whose error is 2.1e-4; that of one alone is 2.4e-3.
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
    """Scales by name as in `State.numbers`; those of a group's blocks stacked, under keys that start with its label."""
    left, values = dict(numbers), {}
    for group in groups:
        blocks = [f"{group.path}.{index}." for index in range(group.start, group.stop)]
        of_blocks = [{key.removeprefix(b): left.pop(key) for key in [*left] if key.startswith(b)} for b in blocks]
        for name in dict.fromkeys(itertools.chain.from_iterable(of_blocks)):
            values[f"{group.label}.{name}"] = [scales.get(name, 0.0) for scales in of_blocks]
    return {key: np.asarray(value, np.float32) for key, value in (values | left).items()}


def quick_versions(tensors: dict[str, torch.Tensor]) -> tuple:
    """A value that changes when a tensor is written to or given other data. Every call compares it: no Python code per tensor."""
    held = tensors.values()
    with torch._C.DisableTorchFunction():
        of_files = [(type(t), t.source) for t in held if type(t) is FileTensor]
        return [*map(operator.attrgetter("_version"), held)], [*map(torch.Tensor.data_ptr, held)], of_files


def _sample(tensor: torch.Tensor) -> bytes | None:
    """A few values spread over a host tensor's memory; None for one that is still in a file, which nothing can have written to."""
    if type(tensor) is FileTensor and tensor.source.values is not None:
        return None
    with torch.utils._mode_utils.no_dispatch(), torch._C.DisableTorchFunction(), torch.no_grad():
        flat = tensor.detach().reshape(-1)
        return as_numpy(flat[:: max(1, -(-flat.numel() // SAMPLED))]).tobytes()


def _overwritten(before: bytes | None, now: bytes | None) -> bool:
    return None not in (before, now) and before != now  # None: its version changes when it is read into memory


def _outside(submodules: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of the tensors, by name, that are in none of the submodules."""
    prefixes = tuple(f"{submodule}." for submodule in submodules)
    return {name: t for name, t in tensors.items() if not name.startswith(prefixes)}


def _version(tensors: dict, names: list[str]) -> tuple:
    """Changes when a tensor is replaced, written to, or given other data (as `module.to(dtype)` does)."""
    held = (tensors[name] for name in names)
    with torch._C.DisableTorchFunction():
        return tuple((id(t), t._version, t.dtype, t.data_ptr(), vars(t).get("source")) for t in held)
