"""Reading an array back through the trace that is being made: JAX's tracers know the equations they came from."""

from collections.abc import Callable

import jax
from jax.extend.core import Literal
from jax.interpreters.partial_eval import DynamicJaxprTracer

from .equations import RULES
from .parts import Value, as_choice, constant, leaf


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
        known = x.get_const()
        if known is not None:  # a number, an array, or a value of the trace around this one
            return self.tracer(known) if isinstance(known, jax.core.Tracer) else constant(known, x.dtype)
        if id(x) not in self.values:
            self.values[id(x)] = self._computed(x)
        return self.values[id(x)]

    def _computed(self, x: DynamicJaxprTracer) -> Value:
        if x.parent is None:  # an argument
            return leaf(x)
        try:
            return self.equation(x.parent, x.parent.outvars.index(x.val), self.tracer)
        except _Unknown:
            return leaf(x)

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
            if name in RULES:
                return RULES[name](eqn, [operand(x) for x in eqn.invars], aval)
        finally:
            self.depth -= 1
        raise _Unknown

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
