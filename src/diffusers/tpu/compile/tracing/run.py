"""One run of equal blocks, each called on the outputs of the one before, while their model is traced."""

import functools
import inspect
import itertools
import re
import weakref
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_unflatten

from ...bridge import Deferred, Tensor, autocast
from .between import Between, Place, waits
from .scan import Group


@dataclass(eq=False)
class Run:
    """Blocks `start` to `stop` of a group, their common arguments, and what of their outputs feeds which arguments.

    Attributes:
        arrays: values of the first block's tensors when it was called: upstream's code may write to them afterwards.
        traced: the first block's trace.
        make_output: makes a block's return value of its outputs.
        outputs: the last block's; `passed` are weak references to those of the blocks before it.
        feeds: number of a tensor among a block's arguments -> where it is among what the block before gives; of a single block none.
        between: what is made of the last block's outputs. repeated: of the first block's, if the next is fed by that.
        given: of each block but the first, the tensors beside the outputs before it. operations: all that may be held.
        own: number of a tensor among a block's arguments -> its values in each block, where they differ.
        autocast: what products are cast to, where the blocks were called.
    """

    group: Group
    start: int
    leaves: list
    arrays: list
    spec: object
    traced: jax.extend.core.ClosedJaxpr | None = None
    make_output: functools.partial | None = None
    outputs: list[Deferred] = field(default_factory=list)
    passed: list[list[weakref.ref]] = field(default_factory=list)
    feeds: dict[int, Place] = field(default_factory=dict)
    between: Between | None = None
    repeated: Between | None = None
    given: list[list[jax.Array]] = field(default_factory=list)
    operations: list[weakref.ref] = field(default_factory=list)
    own: dict[int, list] = field(default_factory=dict)
    autocast: torch.dtype | None = field(default_factory=autocast.dtype_now)

    @property
    def stop(self) -> int:
        return self.start + len(self.passed) + 1

    def begin(self, avals: list, compute):
        """The last block gives outputs of these shapes; `compute` gives them their values."""
        self.between = Between(compute, more=self.stop < self.group.stop)
        self.outputs = [self.between.deferred(aval, Place("output", n)) for n, aval in enumerate(avals)]

    def extend(self, feeds: dict[int, Place], own: dict[int, jax.Array]):
        """One block more, that is given these tensors of its own."""
        for slot in {*own, *self.own}:
            earlier = self.own.setdefault(slot, [self.arrays[slot]] * (self.stop - self.start))
            earlier.append(own.get(slot, self.arrays[slot]))
        if self.repeated is None and any(place.kind == "made" for place in feeds.values()):
            self.repeated = self.between
        self.between.more = False
        self.given.append(self.between.given)
        self.operations += self.between.operations
        self.feeds = feeds
        self.passed.append([weakref.ref(output) for output in self.outputs])
        self.begin([output._aval for output in self.outputs], self.between.compute)

    @functools.cached_property
    def text(self) -> tuple[str, list]:
        return text_of(self.traced)

    def names(self, model: torch.nn.Module) -> dict[int, str]:
        """Output -> the name of the argument of the next block that is made of it; "" where the block's forward names none."""
        slots = itertools.count()
        numbered = [next(slots) if isinstance(leaf, Tensor) else None for leaf in self.leaves]
        args, kwargs = tree_unflatten(numbered, self.spec)
        parameters = [*inspect.signature(type(self.group.block(model, self.start)).forward).parameters][1:]
        given = (*zip(parameters, args), *kwargs.items())
        name_of = {slot: name for name, value in given for slot in tree_leaves(value)}
        return {n: name_of.get(slot, "") for slot, place in self.feeds.items() for n in self.sources(place)}

    def sources(self, place: Place) -> set[int]:
        """The outputs of which what feeds an argument is made."""
        return {place.number} if self.repeated is None else self.repeated.sources(place)

    def alike(self, slot: int) -> int | None:
        """The output of which an argument is made that has its shape, or None."""
        shapes = {n: self.outputs[n].shape for n in self.sources(self.feeds[slot])}
        return next((n for n, shape in shapes.items() if shape == self.arrays[slot].shape), None)

    def beside(self) -> list[jax.Array]:
        """[L, ...] of each tensor beside the outputs of which arguments are made; what is made behind the last block is not used."""
        return [jnp.stack([*arrays, arrays[-1]]) for arrays in zip(*self.given)]

    def still_held(self) -> list[tuple[int, int, Deferred]]:
        """(block of the run, number, output) of those passed on that someone else holds too."""
        found = ((k, n, ref()) for k, refs in enumerate(self.passed) for n, ref in enumerate(refs))
        return [(k, n, output) for k, n, output in found if output is not None]

    def continued_by(self, leaves: list, spec) -> tuple[dict[int, Place], dict[int, jax.Array]] | None:
        """`feeds`, and tensors that are not the first block's by their number, if a call with these leaves goes on with this run, else
        None."""
        if spec != self.spec:
            return None
        values, feeds, started, own = enumerate(self.arrays), {}, {}, {}
        for leaf, first in zip(leaves, self.leaves):
            slot, value = next(values) if isinstance(first, Tensor) else (None, None)
            if (place := self.between.place(leaf)) is not None:
                if value is None or (first.shape, first.dtype) != (leaf.shape, leaf.dtype):
                    return None
                if started.setdefault(place, value) is not value:
                    return None  # two arguments that were two values are one from here on
                feeds[slot] = place
            elif value is None and leaf is not first and (isinstance(leaf, torch.Tensor) or leaf != first):
                return None
            elif value is not None:
                if not isinstance(leaf, Tensor) or waits(leaf) or not _stands_for(leaf.jax(), value):
                    return None
                if leaf.jax() is not value:  # another tensor, or written to since
                    own[slot] = leaf.jax()
        again = not self.repeated or self.between.repeats(self.repeated, _stands_for)
        return (feeds, own) if feeds and self.feeds in ({}, feeds) and again else None

    def unchanged(self, outputs: list[Deferred]) -> list[jax.Array]:
        """In the place of outputs of blocks that do not run: what they were given, zeros where nothing was."""
        given = {place.number: self.arrays[slot] for slot, place in self.feeds.items() if place.kind == "output"}
        found = [given.get(n) if n < len(self.outputs) else None for n in range(len(outputs))]
        return [jnp.zeros(o._aval.shape, o._aval.dtype) if x is None else x for o, x in zip(outputs, found)]


def _stands_for(array: jax.Array, value: jax.Array) -> bool:
    """Whether a block may be given this array in the place of the first block's: the same, or a floating one of its shape. By whole
    numbers and truths blocks decide."""
    alike = (array.shape, array.dtype) == (value.shape, value.dtype) and jnp.issubdtype(array.dtype, jnp.floating)
    return array is value or alike


def text_of(traced: jax.extend.core.ClosedJaxpr) -> tuple[str, list]:
    """Equal for two traces of the same operations on the same values; addresses of functions that JAX made on the way left out."""
    arrays = [x if isinstance(x, jax.core.Tracer) else np.asarray(x) for x in traced.consts]
    constants = [id(x) if isinstance(x, jax.core.Tracer) else (x.shape, x.dtype.str, x.tobytes()) for x in arrays]
    return re.sub(r" at 0x[0-9a-f]+", "", str(traced.jaxpr)), constants
