"""Branches on small inputs: where upstream's code reads the value of a traced tensor, it is computed outside of the trace.

A trace holds the equations that made each array. Followed back to small inputs of the call (masks, lengths; no weights) they form
a `Guard`. It is evaluated on the host for each call, and its value is a part of the cache key.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.interpreters.partial_eval import DynamicJaxprTracer

from ..kernels.settings import bound
from .lines import Line, asking_line


MOST_ENTRIES = 1 << 14  # of a guard's input and of its value: masks and lengths, no latents
MOST_EQUATIONS = 1 << 10
LAYOUT = ("sharding_constraint", "copy")  # primitives that leave values unchanged


class _Unknown(Exception):
    """The value depends on more than small inputs, or takes too many equations."""


@dataclass(frozen=True)
class Guard:
    """A value that upstream's code branches on, as a function of some of a call's tensors."""

    inputs: tuple[int, ...]  # indices of those tensors
    key: tuple = field(repr=False)  # equal for equal functions of the same inputs
    line: Line = field(compare=False)  # of the code that reads the value
    compute: Callable = field(compare=False, repr=False)

    def value(self, values: Callable[[int], np.ndarray]) -> np.ndarray:
        """The guard's value in a call whose input n is `values(n)`; computed on the host if JAX has a CPU backend."""
        try:
            host = jax.local_devices(backend="cpu")[0]
        except RuntimeError:  # JAX_PLATFORMS leaves it out
            host = None
        with jax.ensure_compile_time_eval(), jax.default_device(host):
            (answer,) = self.compute(*map(values, self.inputs))
        return np.asarray(answer)


@dataclass
class Decisions:
    """The guards of one trace. `made`: each guard and its value, in the order in which they were first evaluated."""

    values: Callable[[int], np.ndarray] | None  # of an input by its index, in the traced call; None: not available
    inputs: list  # the traced arrays of the call's tensors
    made: dict[Guard, np.ndarray] = field(default_factory=dict)

    def decide(self, array: jax.Array) -> np.ndarray | None:
        """The array's values in this call and in all that share its program; None where no guard can compute them."""
        discrete = array.dtype == jnp.bool_ or jnp.issubdtype(array.dtype, jnp.integer)
        if self.values is None or not discrete or array.size > MOST_ENTRIES:
            return None
        try:
            guard = _guard(array, {id(x): n for n, x in enumerate(self.inputs)})
        except _Unknown:
            return None
        if guard not in self.made:
            self.made[guard] = guard.value(self.values)
        return self.made[guard]


_open: contextvars.ContextVar[Decisions | None] = contextvars.ContextVar("diffusers_tpu_decisions", default=None)


def deciding(decisions: Decisions) -> contextlib.AbstractContextManager:
    """A context in which guards compute the values that a trace of these inputs reads, where they can."""
    return bound(_open, decisions)


def decided(array: jax.Array) -> np.ndarray | None:
    """The values of a traced array by a guard; None for other arrays, outside of `deciding`, or where no guard can compute them."""
    decisions = _open.get()
    return None if decisions is None or not isinstance(array, jax.core.Tracer) else decisions.decide(array)


def _guard(array: jax.Array, inputs: dict[int, int]) -> Guard:
    """The guard that computes the array from these inputs (id of an array -> its index). Raises _Unknown where there is none."""
    used, equations = {}, {}
    steps = [(array, False)]
    while steps:  # depth first: an equation follows those of its operands
        x, done = steps.pop()
        x = _constant_or_itself(x)
        if not isinstance(x, jax.core.Tracer) or id(x) in used:
            continue
        if id(x) in inputs:
            if x.size > MOST_ENTRIES:
                raise _Unknown
            used[id(x)] = x
            continue
        eqn = getattr(x, "parent", None)
        if eqn is None or len(equations) == MOST_EQUATIONS:
            raise _Unknown
        if done:
            equations[id(eqn)] = eqn
        elif id(eqn) not in equations:
            steps += [(x, True), *((operand, False) for operand in eqn.in_tracers)]
    used = dict(sorted(used.items(), key=lambda item: inputs[item[0]]))
    compute = functools.partial(_evaluated, array, equations.values(), tuple(used))
    graph = jax.make_jaxpr(compute)(*used.values())
    constants = tuple((x.shape, str(x.dtype), np.asarray(x).tobytes()) for x in graph.consts)
    numbers, key = tuple(inputs[x] for x in used), (str(graph.jaxpr), constants)
    return Guard(numbers, key, asking_line(), jax.jit(jax.extend.core.jaxpr_as_fun(graph)))


def _evaluated(array: jax.Array, equations, used: tuple[int, ...], *values):
    """The array, computed by these equations; `values`: those of the arrays with the ids `used`."""
    made = dict(zip(used, values))

    def read(x):
        x = _constant_or_itself(x)
        if not isinstance(x, jax.core.Tracer):
            return np.asarray(x)
        return made[id(x)] if id(x) in made else made[x.val]

    for eqn in equations:
        operands = [read(x) for x in eqn.in_tracers]
        if eqn.primitive.name not in LAYOUT:
            operands = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
        many = eqn.primitive.multiple_results or eqn.primitive.name in LAYOUT
        made.update(zip(eqn.outvars, operands if many else [operands]))
    return read(array)


def _constant_or_itself(x):
    """The constant behind a tracer (a number, an array, or a value of the enclosing trace); without one, the tracer itself."""
    while isinstance(x, DynamicJaxprTracer):
        known = x.val.val if isinstance(x.val, Literal) else x.get_const()
        if known is None:
            return x
        x = known
    return x
