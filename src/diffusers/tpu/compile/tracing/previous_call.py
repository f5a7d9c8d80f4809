"""Whether a call of a module does what the call before it did, although that one left something in the module's attributes.

Two calls are traced as one function, nothing put back between them. The second answer may depend on weights and on its own
inputs. Where it depends on the first call's inputs too, something is kept from call to call. So it is where a tensor that the
first call left is read and the second leaves another (a count), and where a number or the length of a list changes again.
Where the second answer is merely computed in another way, the first call may be the one that is special: it ran once, then.

What is only written is none of it, nor what each call empties, nor a table that the first call makes of no input.
"""

from collections import Counter

import jax
import numpy as np
import torch
from jax.extend.core import Literal
from torch.utils._pytree import tree_leaves

from ...bridge import View
from ...bridge.host_twin import DEVICE_TENSORS
from ...weights.convert import as_numpy
from ..state import Trace, read, undone
from .function import PureFunction


_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def depends_on_previous_call(function: PureFunction, avals: tuple, effects: Trace):
    """What a call after the traced one would see of it, into `effects`: names and containers that last. `avals`: of `TraceResult`."""
    left = []

    def calls(weights, first, second, numbers):
        state, answers, arrays = read(function.module), [], []
        with undone(state):
            for inputs in (first, second):
                answers.append(function(weights, inputs, numbers)[0])
                left.append({name: tree_leaves(value) for name, value in state.left().items()})
                arrays.append({name: [_array(x) for x in leaves if _on_chips(x)] for name, leaves in left[-1].items()})
        return *answers, *arrays

    weights, inputs, numbers = avals
    try:
        traced, shapes = jax.make_jaxpr(calls, return_shape=True)(weights, inputs, inputs, numbers)
    except Exception:
        if not left:
            raise
        effects.names = sorted(left[0])  # what the first call could do the second cannot
    else:
        graph = _Graph(traced, shapes, (weights, inputs))
        effects.names = graph.kept(*left)
        effects.certain = bool(effects.names)
        if not effects.names and graph.differs():
            effects.names = sorted(left[0])
    if effects.names:
        effects.persistent += effects.temporary


def _on_chips(x) -> bool:
    return isinstance(x, DEVICE_TENSORS)


def _array(x: torch.Tensor) -> jax.Array:
    """The array that a tensor's values are of: a view's is its tensor's."""
    return x.source_jax() if isinstance(x, View) else x.jax()


def _alike(one, two) -> bool:
    """Whether two calls have left the same thing, as far as Python can tell."""
    if isinstance(one, _PLAIN) or isinstance(two, _PLAIN):
        return type(one) is type(two) and one == two
    if _on_chips(one) != _on_chips(two):
        return False
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor) and not _on_chips(one):
        return np.array_equal(as_numpy(one), as_numpy(two))
    return True


class _Graph:
    """Both calls' operations.

    Attributes:
        first, second: variables that each answer is computed of.
        left: the arrays that each call left, by attribute.
        inputs: variables of the first call's inputs.
        within: those that a block has left: values of a trace within this one, to which they are constants without values.
    """

    def __init__(self, traced, shapes, arguments):
        self.makers = {id(var): eqn for eqn in traced.jaxpr.eqns for var in eqn.outvars}
        outputs = iter(traced.jaxpr.outvars)
        first, second, *self.left = jax.tree.map(lambda _: next(outputs), shapes)
        weights, inputs = (len(jax.tree.leaves(part)) for part in arguments)
        self.inputs = {id(var) for var in traced.jaxpr.invars[weights : weights + inputs]}
        constants = zip(traced.jaxpr.constvars, traced.consts)
        self.within = {id(var) for var, x in constants if isinstance(x, jax.core.Tracer)}
        self.first, self.second = self._behind(first), self._behind(second)

    def _behind(self, outputs: list) -> set[int]:
        """What these are computed of, with them."""
        found, todo = set(), list(outputs)
        while todo:
            var = todo.pop()
            if not isinstance(var, Literal) and id(var) not in found:
                found.add(id(var))
                todo += self.makers[id(var)].invars if id(var) in self.makers else ()
        return found

    def kept(self, one: dict[str, list], two: dict[str, list]) -> list[str]:
        """Attributes by which the second call sees the first one; `one` and `two` are what each has left in them."""
        found = {name for name in {*one, *two} if self._changes(name, one.get(name, ()), two.get(name, ()))}
        if self.second & self.inputs:
            found |= {name for name, left in self.left[0].items() if any(id(var) in self.second for var in left)}
            found = found or one
        return sorted(found)

    def _changes(self, name: str, one: list, two: list) -> bool:
        if len(one) != len(two) or not all(map(_alike, one, two)):
            return True
        return any(x is not y and id(x) in self.second for x, y in zip(*(left[name] for left in self.left)))

    def differs(self) -> bool:
        """Whether the second answer is computed in another way than the first, or of what no one else may read."""
        return bool(self.second & self.within) or self._operations(self.first) != self._operations(self.second)

    def _operations(self, variables: set[int]) -> Counter:
        eqns = {id(eqn): eqn for var in variables if (eqn := self.makers.get(var)) is not None}
        return Counter(operation for eqn in eqns.values() for operation in _within(eqn))


def _within(eqn):
    """An operation and those inside of it, each with the numbers that it is given."""
    yield eqn.primitive.name, *(str(x) for x in eqn.invars if isinstance(x, Literal))
    for x in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_program):
        for part in getattr(getattr(x, "jaxpr", x), "eqns", ()):
            yield from _within(part)


def _is_program(x) -> bool:
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")
