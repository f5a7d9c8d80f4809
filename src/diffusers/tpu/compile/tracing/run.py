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
    """Blocks `start` to `stop` of a group, their common arguments, and which outputs feed which arguments.

    Attributes:
        arrays: values of the first block's tensors when it was called: upstream's code may write to them afterwards.
        traced: the first block's trace.
        make_output: builds a block's return value from its outputs.
        outputs: the last block's; `passed` are weak references to those of the blocks before it.
        feeds: number of a tensor among a block's arguments -> its place in what the block before gives; empty for a single block.
        between: operations on the last block's outputs. repeated: those on the first block's, if they feed the next block.
        given: for each block but the first, the tensors given to the operations before it. operations: all that may be in use.
        own: number of a tensor among a block's arguments -> its values in each block, where they differ.
        autocast: the dtype that products are cast to where the blocks were called.
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
        """Set the last block's outputs, of these shapes; `compute` sets their values."""
        self.between = Between(compute, more=self.stop < self.group.stop)
        self.outputs = [self.between.deferred(aval, Place("output", n)) for n, aval in enumerate(avals)]

    def extend(self, feeds: dict[int, Place], own: dict[int, jax.Array]):
        """Add a block, which is given these tensors of its own."""
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
        """Output -> the name of the next block's argument that is made from it; "" where the block's forward names none."""
        slots = itertools.count()
        numbered = [next(slots) if isinstance(leaf, Tensor) else None for leaf in self.leaves]
        args, kwargs = tree_unflatten(numbered, self.spec)
        parameters = [*inspect.signature(type(self.group.block(model, self.start)).forward).parameters][1:]
        given = (*zip(parameters, args), *kwargs.items())
        name_of = {slot: name for name, value in given for slot in tree_leaves(value)}
        return {n: name_of.get(slot, "") for slot, place in self.feeds.items() for n in self.sources(place)}

    def sources(self, place: Place) -> set[int]:
        """The outputs that an argument fed from this place is made from."""
        return {place.number} if self.repeated is None else self.repeated.sources(place)

    def alike(self, slot: int) -> int | None:
        """The output that an argument is made from and that has its shape; None: there is none."""
        shapes = {n: self.outputs[n].shape for n in self.sources(self.feeds[slot])}
        return next((n for n, shape in shapes.items() if shape == self.arrays[slot].shape), None)

    def beside(self) -> list[jax.Array]:
        """[L, ...] of each tensor given to the operations between blocks. What is made behind the last block is not used."""
        return [jnp.stack([*arrays, arrays[-1]]) for arrays in zip(*self.given)]

    def still_held(self) -> list[tuple[int, int, Deferred]]:
        """(block of the run, number, output) of the earlier blocks' outputs that are still referenced."""
        found = ((k, n, ref()) for k, refs in enumerate(self.passed) for n, ref in enumerate(refs))
        return [(k, n, output) for k, n, output in found if output is not None]

    def continued_by(self, leaves: list, spec) -> tuple[dict[int, Place], dict[int, jax.Array]] | None:
        """If a call with these leaves continues this run: `feeds`, and its tensors that are not the first block's, by number. Else
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
                    return None  # two arguments that had different values have one from here on
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
        """What replaces the outputs of blocks that do not run: the blocks' inputs, zeros where there are none."""
        given = {place.number: self.arrays[slot] for slot, place in self.feeds.items() if place.kind == "output"}
        found = [given.get(n) if n < len(self.outputs) else None for n in range(len(outputs))]
        return [jnp.zeros(o._aval.shape, o._aval.dtype) if x is None else x for o, x in zip(outputs, found)]


def _stands_for(array: jax.Array, value: jax.Array) -> bool:
    """Whether a block may get this array in place of the first block's: the same, or one of floats of its shape. Blocks may branch
    on integers and booleans."""
    alike = (array.shape, array.dtype) == (value.shape, value.dtype) and jnp.issubdtype(array.dtype, jnp.floating)
    return array is value or alike


def text_of(traced: jax.extend.core.ClosedJaxpr) -> tuple[str, list]:
    """Text and constants, equal for two traces of the same operations on the same values; addresses of JAX's functions left out."""
    arrays = [x if isinstance(x, jax.core.Tracer) else np.asarray(x) for x in traced.consts]
    constants = [id(x) if isinstance(x, jax.core.Tracer) else (x.shape, x.dtype.str, x.tobytes()) for x in arrays]
    return re.sub(r" at 0x[0-9a-f]+", "", str(traced.jaxpr)), constants
