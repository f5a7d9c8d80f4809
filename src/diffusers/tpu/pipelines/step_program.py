"""A traced step as a jitted function whose numbers are arguments: traces that differ in numbers alone share an executable."""

import weakref
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

from ..chips import hosts


def program_of(closed: ClosedJaxpr, arrays: list[jax.Array]) -> Callable:
    """The program of a trace, its numbers bound: one executable for all traces that differ in numbers alone."""
    function = _Function(closed)
    text = str(jax.make_jaxpr(function)(function.numbers, arrays))
    jitted, where = jitted_by_text.get(text), arrays[0].sharding
    if jitted is None:
        jitted = jitted_by_text[text] = jax.jit(function)
    numbers = [hosts.put(x, where) if where.is_fully_replicated else jnp.asarray(x) for x in function.numbers]
    return lambda arrays: jitted(numbers, arrays)


jitted_by_text: "weakref.WeakValueDictionary[str, Callable]" = (
    weakref.WeakValueDictionary()
)  # as long as a step has it


class _Function:
    """A trace as a function of its numbers, and of arrays of the host's, beside what it was a function of: where it takes an entry
    of a table, which one is a number too.

    Attributes:
        numbers: in the order in which they come.
    """

    __name__ = "scheduler_step"

    def __init__(self, closed: ClosedJaxpr):
        self.jaxpr, self.numbers = closed.jaxpr, [np.asarray(x) for x in closed.consts]
        for eqn in self.jaxpr.eqns:
            if _takes_entries(eqn):
                self.numbers.append(np.asarray(eqn.params["start_indices"], np.int32))
            self.numbers += [np.asarray(x.val, x.aval.dtype) for x in eqn.invars if _is_number(x)]

    def __call__(self, numbers: list[jax.Array], arrays: list[jax.Array]) -> list[jax.Array]:
        numbers = iter(numbers)
        known = {var: next(numbers) for var in self.jaxpr.constvars}
        known.update(zip(self.jaxpr.invars, arrays))

        def value(x):
            return next(numbers) if _is_number(x) else x.val if isinstance(x, Literal) else known[x]

        for eqn in self.jaxpr.eqns:
            if _takes_entries(eqn):
                start, sizes = next(numbers), eqn.outvars[0].aval.shape
                made = lax.dynamic_slice(value(eqn.invars[0]), [start[n] for n in range(len(sizes))], sizes)
            else:
                made = eqn.primitive.bind(*map(value, eqn.invars), **eqn.primitive.get_bind_params(eqn.params))
            known.update(zip(eqn.outvars, made if eqn.primitive.multiple_results else [made]))
        return [x.val if isinstance(x, Literal) else known[x] for x in self.jaxpr.outvars]


def _is_number(x) -> bool:
    return isinstance(x, Literal) and not x.aval.shape and x.aval.dtype != jnp.bool_


def _takes_entries(eqn) -> bool:
    """Of a table: a slice of what has one axis."""
    return eqn.primitive.name == "slice" and eqn.params["strides"] is None and len(eqn.invars[0].aval.shape) == 1
