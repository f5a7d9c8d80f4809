"""How a traced array came to be, as far as it takes to see that a mask of tokens x tokens is made of small arrays.

JAX's tracers know the equations they came from. An array is read back through them, and is one of two:

- `Part`: the same along every axis that is not in `varies`;
- `Choice`: where(all of some bool parts, on, off), `on` and `off` numbers. Outer products of masks are that, and
  still are after comparisons, masked_fill, where, casts and arithmetic with numbers.

An equation not known here gives a Part that varies along all its axes: never wrong, only large. Reading computes
nothing; `Part.make` does, from small ancestors. The compiler drops the large array, which nothing uses then.
"""

import contextlib
from collections.abc import Callable

import jax
from jax.extend.core import Literal
from jax.interpreters.partial_eval import DynamicJaxprTracer

from .rules import RULES, Choice, Part, Value, as_choice, constant, leaf


__all__ = ["Choice", "Part", "read"]

DEPTH = 64  # equations read back in a row
SAME = ("copy", "sharding_constraint")  # their operand, for what is asked here
CALLS = {"jit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}


class _Unknown(Exception):
    """An equation that is not known here."""


def read(array: jax.Array) -> Value:
    """What is known of the array; of a bool array always a Choice."""
    value = _Reader().tracer(array)
    return as_choice(value) or value


class _Reader:
    def __init__(self):
        self.values: dict[int, Value] = {}
        self.depth = 0

    def tracer(self, x) -> Value:
        if not isinstance(x, DynamicJaxprTracer):
            return leaf(x)
        if (known := x.get_const()) is not None:  # a number, an array, or a value of the trace around this one
            return self.tracer(known) if isinstance(known, jax.core.Tracer) else constant(known, x.dtype)
        if id(x) not in self.values:
            self.values[id(x)] = leaf(x)
            if x.parent is not None:  # without an equation it is an argument
                with contextlib.suppress(_Unknown):
                    self.values[id(x)] = self.equation(x.parent, x.parent.outvars.index(x.val), self.tracer)
        return self.values[id(x)]

    def equation(self, eqn, number: int, operand: Callable) -> Value:
        """Output `number` of an equation whose operands `operand` reads."""
        name, aval = eqn.primitive.name, eqn.outvars[number].aval
        if self.depth == DEPTH or 0 in aval.shape:
            raise _Unknown
        self.depth += 1
        try:
            if name in SAME:
                return operand(eqn.invars[number])
            if name in CALLS:
                return self.call(eqn.params[CALLS[name]], number, eqn.invars, operand)
            if name not in RULES:
                raise _Unknown
            return RULES[name](eqn, [operand(x) for x in eqn.invars], aval)
        finally:
            self.depth -= 1

    def call(self, closed, number: int, arguments: list, operand: Callable) -> Value:
        """Output `number` of a nested jaxpr."""
        outside = dict(zip(closed.jaxpr.invars, arguments))
        constants = dict(zip(closed.jaxpr.constvars, closed.consts))
        makers = {var: (eqn, n) for eqn in closed.jaxpr.eqns for n, var in enumerate(eqn.outvars)}
        values = {}

        def inner(atom) -> Value:
            if isinstance(atom, Literal):
                return constant(atom.val, atom.aval.dtype)
            if atom in outside:
                return operand(outside[atom])
            if atom in constants:
                return constant(constants[atom], atom.aval.dtype)
            if atom not in values:
                values[atom] = self.equation(*makers[atom], inner)
            return values[atom]

        return inner(closed.jaxpr.outvars[number])
