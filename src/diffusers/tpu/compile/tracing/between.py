"""What a model's code does with a block's outputs before it calls the next block with them: deferred, and then a part of the scan.

Before a deferred output gets a value, `Environment.dispatch` asks `Between.result`: a function that moves elements or adds them up gives
deferred tensors too. Where the code does the same after each block, the run goes on (`Run.continued_by`).
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ...bridge import Deferred, Tensor, autocast, environment, storage
from .results import PLAIN, flattened, unflattened


# Functions, methods and operators of torch that depend on their arguments alone, and on no weight.
FUNCTIONS = frozenset(
    "add sub mul div neg where cat concat concatenate stack chunk split split_with_sizes unbind narrow select slice view reshape flatten"
    " unflatten transpose permute movedim squeeze unsqueeze expand expand_as to type_as float half bfloat16 size"
    " __getitem__ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __neg__".split()
)


class Place(NamedTuple):
    """Where a tensor is: the block's "output", "made" of these, or "given" beside them; of each kind its number."""

    kind: str
    number: int


@dataclass(eq=False)
class Operation:
    """A function with its flattened arguments. Deferred tensors among them are themselves, others have the values of then."""

    function: Callable
    spec: TreeSpec
    leaves: list
    results: list[weakref.ref] = field(default_factory=list)

    def called(self, leaves: list) -> tuple:
        """The flattened result of these arguments."""
        with autocast.without(), environment():
            args, kwargs = tree_unflatten(leaves, self.spec)
            return flattened(self.function(*args, **kwargs))

    def settle(self):
        """Give those of the results that are held their values."""
        for ref, tensor in zip(self.results, self.called(self.leaves)[0]):
            if (result := ref()) is not None:
                result.become(tensor)


@dataclass(frozen=True)
class Step:
    """An operation with places for tensors. `made`: numbers of its results."""

    function: Callable
    spec: TreeSpec
    leaves: list
    made: range

    @property
    def text(self) -> tuple:
        return self.function, self.spec, [(type(leaf), leaf) for leaf in self.leaves], self.made


class Between:
    """Of one block's outputs. `compute` gives them their values; `more`: whether the next block is still to come.

    Attributes:
        steps: the operations so far.
        given: arrays of tensors that are no block's.
        made: how many tensors the steps make.
        operations: what has results that may be held.
    """

    def __init__(self, compute: Callable[[], None], more: bool):
        self.compute, self.more, self.steps, self.given, self.made = compute, more, [], [], 0
        self.operations: list[weakref.ref[Operation]] = []

    def deferred(self, aval, place: Place, operation: Operation | None = None) -> Deferred:
        return Deferred(jax.ShapeDtypeStruct(aval.shape, aval.dtype), self.compute, (self, place, operation))

    def place(self, leaf) -> Place | None:
        """Where a deferred tensor is; None of what is none, or another block's."""
        between, place, _ = leaf.source if waits(leaf) and leaf.source else (None,) * 3
        return place if between is self else None

    def result(self, function: Callable, args: tuple, kwargs: dict):
        """What the function gives, deferred if it is a tensor; NotImplemented where values are needed."""
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        name = getattr(getattr(function, "overloadpacket", function), "__name__", "")
        known = all(self.place(t) if waits(t) else isinstance(t, Tensor) for t in tensors)
        plain = all(isinstance(leaf, (*PLAIN, slice, type(...))) for leaf in leaves)
        if not (name in FUNCTIONS and known and plain):
            return NotImplemented
        operation, found = Operation(function, spec, [_as_now(leaf) for leaf in leaves]), []

        def trial(arrays):
            copies = [Tensor(array, environment()) for array in arrays]
            given = iter(copies)
            of_copies = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            found[:] = copies, *operation.called(of_copies)
            return [x.jax() for x in found[1]]

        try:
            avals = jax.eval_shape(trial, [t._aval if waits(t) else t.jax() for t in tensors])
        except Exception:  # it is raised again where the function is called on values
            return NotImplemented
        copies, results, *form = found
        same = [next((t for t, copy in zip(tensors, copies) if copy is result), None) for result in results]
        if all(t is not None for t in same):  # a tensor that has this shape, this dtype already; or a size
            return unflattened(*form, same)
        others = {id(copy.jax()) for t, copy in zip(tensors, copies) if not waits(t)}
        shared = any(t is not None or id(storage(result)) in others for t, result in zip(same, results))
        if shared or not self.more:  # a view of a tensor with values
            return NotImplemented
        made = range(self.made, self.made + len(results))
        places = [self._place_or_given(leaf) if isinstance(leaf, Tensor) else leaf for leaf in operation.leaves]
        self.steps.append(Step(function, spec, places, made))
        self.made = made.stop
        results = [self.deferred(aval, Place("made", number), operation) for aval, number in zip(avals, made)]
        operation.results += map(weakref.ref, results)
        self.operations.append(weakref.ref(operation))
        return unflattened(*form, results)

    def _place_or_given(self, t: Tensor) -> Place:
        if (place := self.place(t)) is None:
            place = Place("given", len(self.given))
            self.given.append(t.jax())
        return place

    def repeats(self, other: "Between", stands_for: Callable) -> bool:
        """Whether both do the same, beside tensors that stand for each other."""
        alike = [step.text for step in self.steps] == [step.text for step in other.steps]
        return alike and all(map(stands_for, self.given, other.given))

    def sources(self, place: Place) -> set[int]:
        """The outputs of which this is made."""
        if place.kind != "made":
            return {place.number} if place.kind == "output" else set()
        step = next(step for step in self.steps if place.number in step.made)
        return set().union(*(self.sources(leaf) for leaf in step.leaves if isinstance(leaf, Place)))

    def values(self, outputs: list[jax.Array], given: list[jax.Array]) -> dict[Place, jax.Array]:
        """Of all places, from other outputs and arrays in the places of these."""
        kinds = (("output", outputs), ("given", given))
        found = {Place(kind, n): Tensor(x, environment()) for kind, arrays in kinds for n, x in enumerate(arrays)}
        for step in self.steps:
            operation = Operation(step.function, step.spec, [])
            results, *_ = operation.called([found[x] if isinstance(x, Place) else x for x in step.leaves])
            found |= {Place("made", number): x for number, x in zip(step.made, results)}
        return {place: t.jax() for place, t in found.items()}


def waits(leaf) -> bool:
    """Whether it is a deferred tensor that has no value yet."""
    return isinstance(leaf, Deferred) and leaf.waits


def _as_now(leaf):
    """A tensor that has values, by itself: what is written to it later is not seen."""
    return Tensor(leaf.jax(), environment()) if isinstance(leaf, Tensor) and not waits(leaf) else leaf
