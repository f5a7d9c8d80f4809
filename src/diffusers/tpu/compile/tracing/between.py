"""What a model's code does with a block's outputs before it calls the next block with them: deferred, then part of the scan.

Before a deferred output gets a value, `Environment.dispatch` asks `Between.result`: the results of `FUNCTIONS` are deferred too. If
the code does the same after each block, the run continues (`Run.continued_by`).
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
    """Where a tensor comes from: the block's "output", "made" of these, or "given" beside them; and its number among that kind."""

    kind: str
    number: int


@dataclass(eq=False)
class Operation:
    """A function with its flattened arguments. Deferred tensors among them are kept as such, others with the values they had."""

    function: Callable
    spec: TreeSpec
    leaves: list
    results: list[weakref.ref] = field(default_factory=list)

    def called(self, leaves: list) -> tuple:
        """The flattened result for these arguments."""
        with autocast.without(), environment():
            args, kwargs = tree_unflatten(leaves, self.spec)
            return flattened(self.function(*args, **kwargs))

    def settle(self):
        """Set the values of the results that are still referenced."""
        for ref, tensor in zip(self.results, self.called(self.leaves)[0]):
            if (result := ref()) is not None:
                result.become(tensor)


@dataclass(frozen=True)
class Step:
    """An operation with places instead of tensors. `made`: numbers of its results."""

    function: Callable
    spec: TreeSpec
    leaves: list
    made: range

    @property
    def text(self) -> tuple:
        return self.function, self.spec, [(type(leaf), leaf) for leaf in self.leaves], self.made


class Between:
    """The operations on one block's outputs. `compute` sets the outputs' values. `more`: whether a next block may follow.

    Attributes:
        steps: the operations so far.
        given: arrays of tensors that are not computed from the block's outputs.
        made: how many tensors the steps make.
        operations: those whose results may still be referenced.
    """

    def __init__(self, compute: Callable[[], None], more: bool):
        self.compute, self.more, self.steps, self.given, self.made = compute, more, [], [], 0
        self.operations: list[weakref.ref[Operation]] = []

    def deferred(self, aval, place: Place, operation: Operation | None = None) -> Deferred:
        return Deferred(jax.ShapeDtypeStruct(aval.shape, aval.dtype), self.compute, (self, place, operation))

    def place(self, leaf) -> Place | None:
        """The place of a deferred tensor; None: it is not deferred, or it is another block's."""
        between, place, _ = leaf.source if waits(leaf) and leaf.source else (None,) * 3
        return place if between is self else None

    def result(self, function: Callable, args: tuple, kwargs: dict):
        """The function's result, deferred if it is a tensor; NotImplemented if values are needed."""
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
        if all(t is not None for t in same):  # a tensor that has this shape or dtype already; or a size
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
        """Whether both have the same steps, on tensors that may replace each other by `stands_for`."""
        alike = [step.text for step in self.steps] == [step.text for step in other.steps]
        return alike and all(map(stands_for, self.given, other.given))

    def sources(self, place: Place) -> set[int]:
        """The outputs that this place is computed from."""
        if place.kind != "made":
            return {place.number} if place.kind == "output" else set()
        step = next(step for step in self.steps if place.number in step.made)
        return set().union(*(self.sources(leaf) for leaf in step.leaves if isinstance(leaf, Place)))

    def values(self, outputs: list[jax.Array], given: list[jax.Array]) -> dict[Place, jax.Array]:
        """The values of all places, computed from these outputs and given arrays."""
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
    """A tensor that has values as a new tensor, so that later writes to it are not seen; other leaves as they are."""
    return Tensor(leaf.jax(), environment()) if isinstance(leaf, Tensor) and not waits(leaf) else leaf
