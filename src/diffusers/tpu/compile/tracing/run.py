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
from .scan import Group


@dataclass(eq=False)
class Run:
    """Blocks `start` to `stop` of a group, their common arguments, and which outputs feed which arguments.

    Attributes:
        arrays: values of the first block's tensors when it was called: upstream's code may write to them afterwards.
        traced: the first block's trace.
        make_output: makes a block's return value of its outputs.
        outputs: the last block's; `passed` are weak references to those of the blocks before it.
        feeds: number of a tensor among a block's arguments -> the output that it is in the next block; of a single block none.
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
    feeds: dict[int, int] = field(default_factory=dict)
    own: dict[int, list] = field(default_factory=dict)
    autocast: torch.dtype | None = field(default_factory=autocast.dtype_now)

    @property
    def stop(self) -> int:
        return self.start + len(self.passed) + 1

    def extend(self, feeds: dict[int, int], own: dict[int, jax.Array], outputs: list[Deferred]):
        """One block more, that is given these tensors of its own and gives these outputs."""
        for slot in {*own, *self.own}:
            earlier = self.own.setdefault(slot, [self.arrays[slot]] * (self.stop - self.start))
            earlier.append(own.get(slot, self.arrays[slot]))
        self.feeds = feeds
        self.passed.append([weakref.ref(output) for output in self.outputs])
        self.outputs = outputs

    @functools.cached_property
    def text(self) -> tuple[str, list]:
        return text_of(self.traced)

    def names(self, model: torch.nn.Module) -> dict[int, str]:
        """Output -> the name of the argument that it is in the next block; "" where the block's forward names none."""
        slots = itertools.count()
        numbered = [next(slots) if isinstance(leaf, Tensor) else None for leaf in self.leaves]
        args, kwargs = tree_unflatten(numbered, self.spec)
        parameters = [*inspect.signature(type(self.group.block(model, self.start)).forward).parameters][1:]
        given = (*zip(parameters, args), *kwargs.items())
        name_of = {slot: name for name, value in given for slot in tree_leaves(value)}
        return {number: name_of.get(slot, "") for slot, number in self.feeds.items()}

    def still_held(self) -> list[tuple[int, int, Deferred]]:
        """(block of the run, number, output) of those passed on that someone else holds too."""
        found = ((k, n, ref()) for k, refs in enumerate(self.passed) for n, ref in enumerate(refs))
        return [(k, n, output) for k, n, output in found if output is not None]

    def continued_by(self, leaves: list, spec) -> tuple[dict[int, int], dict[int, jax.Array]] | None:
        """`feeds`, and tensors that are not the first block's by their number, if a call with these leaves goes on with this run, else
        None."""
        if spec != self.spec:
            return None
        number = {id(output): n for n, output in enumerate(self.outputs)}
        values, feeds, started, own = enumerate(self.arrays), {}, {}, {}
        for leaf, first in zip(leaves, self.leaves):
            slot, value = next(values) if isinstance(first, Tensor) else (None, None)
            if id(leaf) in number:
                if value is None or (first.shape, first.dtype) != (leaf.shape, leaf.dtype):
                    return None
                if started.setdefault(number[id(leaf)], value) is not value:
                    return None  # two arguments that were two values are one from here on
                feeds[slot] = number[id(leaf)]
            elif value is None and leaf is not first and (isinstance(leaf, torch.Tensor) or leaf != first):
                return None
            elif value is not None:
                if not _stands_for(leaf, value):
                    return None
                if leaf.jax() is not value:  # another tensor, or written to since
                    own[slot] = leaf.jax()
        return (feeds, own) if feeds and self.feeds in ({}, feeds) else None

    def unchanged(self, outputs: list[Deferred]) -> list[jax.Array]:
        """In the place of outputs of blocks that do not run: what they were given, zeros where nothing was."""
        given = {number: self.arrays[slot] for slot, number in self.feeds.items()}
        found = [given.get(n) if n < len(self.outputs) else None for n in range(len(outputs))]
        return [jnp.zeros(o._aval.shape, o._aval.dtype) if x is None else x for o, x in zip(outputs, found)]


def _stands_for(leaf, value: jax.Array) -> bool:
    """Whether a block may be given this leaf in the place of the first block's array: the same, or a floating tensor of its shape. By
    whole numbers and truths blocks decide."""
    if not isinstance(leaf, Tensor) or (isinstance(leaf, Deferred) and leaf.waits):
        return False
    array = leaf.jax()
    alike = (array.shape, array.dtype) == (value.shape, value.dtype) and jnp.issubdtype(array.dtype, jnp.floating)
    return array is value or alike


def text_of(traced: jax.extend.core.ClosedJaxpr) -> tuple[str, list]:
    """Equal for two traces of the same operations on the same values; addresses of functions that JAX made on the way left out."""
    arrays = [x if isinstance(x, jax.core.Tracer) else np.asarray(x) for x in traced.consts]
    constants = [id(x) if isinstance(x, jax.core.Tracer) else (x.shape, x.dtype.str, x.tobytes()) for x in arrays]
    return re.sub(r" at 0x[0-9a-f]+", "", str(traced.jaxpr)), constants
