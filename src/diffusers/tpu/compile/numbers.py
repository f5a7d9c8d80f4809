"""A trace as a program whose numbers are arguments: one executable for all traces that differ only in numbers.

Schedulers and optimizers compute the numbers of each step on the host; torch's own lines then multiply arrays by them.
"""

import functools
import weakref
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal


# Weak: an entry lives as long as a step uses it.
jitted_by_text: "weakref.WeakValueDictionary[str, Callable]" = weakref.WeakValueDictionary()


class Lifted:
    """A trace as a function of its numbers, in their order in the trace, and of arrays. Where the trace reads an entry of a host
    table, the entry's index is a number too.

    Attributes:
        numbers: those of this trace.
    """

    __name__ = "step"

    def __init__(self, closed: ClosedJaxpr):
        self.jaxpr, self.numbers = closed.jaxpr, [np.asarray(x) for x in closed.consts]
        for eqn in self.jaxpr.eqns:
            if _takes_entries(eqn):
                self.numbers.append(np.asarray(eqn.params["start_indices"], np.int32))
            self.numbers += [np.asarray(x.val, x.aval.dtype) for x in eqn.invars if _is_number(x)]

    @functools.cached_property
    def text(self) -> str:
        arrays = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in self.jaxpr.invars]
        return str(jax.make_jaxpr(self)(self.numbers, arrays))

    def jitted(self) -> Callable:
        """The jitted function of (numbers, arrays)."""
        return jitted_by_text.setdefault(self.text, jax.jit(self))

    def __call__(self, numbers: list[jax.Array], arrays: list[jax.Array], more: list[jax.Array] = []) -> tuple:
        """`more`: the last of the arrays, as an argument of their own for `donate_argnums`."""
        numbers = iter(numbers)
        known = {var: next(numbers) for var in self.jaxpr.constvars}
        known.update(zip(self.jaxpr.invars, [*arrays, *more]))

        def value(x):
            return next(numbers) if _is_number(x) else x.val if isinstance(x, Literal) else known[x]

        for eqn in self.jaxpr.eqns:
            if _takes_entries(eqn):
                start, sizes = next(numbers), eqn.outvars[0].aval.shape
                made = lax.dynamic_slice(value(eqn.invars[0]), [start[n] for n in range(len(sizes))], sizes)
            else:
                made = eqn.primitive.bind(*map(value, eqn.invars), **eqn.primitive.get_bind_params(eqn.params))
            known.update(zip(eqn.outvars, made if eqn.primitive.multiple_results else [made]))
        return tuple(x.val if isinstance(x, Literal) else known[x] for x in self.jaxpr.outvars)


def _is_number(x) -> bool:
    return isinstance(x, Literal) and not x.aval.shape and x.aval.dtype != jnp.bool_


def _takes_entries(eqn) -> bool:
    """Whether the equation reads entries of a table: it slices an array with one axis."""
    return eqn.primitive.name == "slice" and eqn.params["strides"] is None and len(eqn.invars[0].aval.shape) == 1
