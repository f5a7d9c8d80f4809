"""How a traced array was computed, so that a mask of tokens x tokens can be recognised as made of small arrays.

JAX's tracers record the equations that made them. `read` follows these back and describes an array as one of two:

- `Part`: constant along every axis that is not in `varies`;
- `Choice`: where(all of some bool parts, on, off), with numbers `on` and `off`. Outer products of masks have this form,
  and keep it under comparisons, masked_fill, where, casts and arithmetic with numbers.

An equation without a rule gives a Part that varies along all its axes: never wrong, only large. Reading computes
nothing; `Part.make` does, from small ancestors. The compiler then drops the large array, as nothing uses it.
"""

import contextlib
from collections.abc import Callable

import jax
from jax.extend.core import Literal
from jax.interpreters.partial_eval import DynamicJaxprTracer

from .rules import RULES, Choice, Part, Value, as_choice, constant, leaf


__all__ = ["Choice", "Part", "read"]

DEPTH = 64  # most equations followed back in a row
SAME = ("copy", "sharding_constraint")  # have the values of their operand
CALLS = {"jit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}


class _Unknown(Exception):
    """An equation without a rule."""


def read(array: jax.Array) -> Value:
    """The description of an array; of a bool array always a Choice."""
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
        """Describes output `number` of an equation; `operand` describes its operands."""
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
        """Describes output `number` of a nested jaxpr."""
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
