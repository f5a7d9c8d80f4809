"""Whether a call of a module does what the call before it did, although that one left something in the module's attributes.

Two calls are traced as one function, with nothing restored between them. The second result may depend on the weights and its own
inputs. If it depends on the first call's inputs, or a number or a list's length changes again, state is kept from call to call. If
it is only computed in another way, the first call may be the special one: it runs eagerly, once.
"""

from collections import Counter
from collections.abc import Iterator

import jax
import numpy as np
import torch
from jax._src.core import jaxprs_in_params  # which JAX has no public name for
from jax.extend.core import Literal
from jax.interpreters.partial_eval import dce_jaxpr
from torch.utils._pytree import tree_leaves

from ...bridge import Tensor, as_numpy
from ..state import Trace, read, undone
from .function import PureFunction


_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def depends_on_previous_call(function: PureFunction, avals: tuple, effects: Trace):
    """Find what later calls would see of the traced one: names and containers, into `effects`. `avals`: of `TraceResult`."""
    left = []

    def calls(weights, first, second, numbers):
        state, answers = read(function.module), []
        with undone(state):
            for inputs in (first, second):
                answers.append(function(weights, inputs, numbers)[0])
                left.append({name: tree_leaves(value) for name, value in state.left().items()})
        return answers

    weights, inputs, numbers = avals
    try:
        traced, shapes = jax.make_jaxpr(calls, return_shape=True)(weights, inputs, inputs, numbers)
    except Exception:
        if not left:
            raise
        effects.names = sorted(left[0])  # the second call fails where the first did not
    else:
        given, first = len(jax.tree.leaves(weights)), len(jax.tree.leaves(shapes[0]))
        sees = _sees(traced, first, slice(given, given + len(inputs)))
        one, two = left
        changed = [n for n in sorted({*one, *two}) if not _alike(one.get(n, ()), two.get(n, ()))]
        effects.certain = bool(changed) or sees is True
        if changed or sees is not False:
            effects.names = changed or sorted(one)
    if effects.names:
        effects.persistent += effects.temporary


def _sees(traced, first: int, inputs: slice) -> bool | None:
    """Whether the second result depends on the first call's inputs; None: it does not, but is computed otherwise than the first.

    `first`: how many of the outputs are the first result.
    """
    jaxpr, count = traced.jaxpr, len(traced.jaxpr.outvars)
    one, _ = dce_jaxpr(jaxpr, [n < first for n in range(count)])
    two, used = dce_jaxpr(jaxpr, [n >= first for n in range(count)])
    if any(used[inputs]):
        return True
    # What a block has left comes from a trace inside this one: here it is a constant without a value.
    within = {id(var) for var, x in zip(jaxpr.constvars, traced.consts) if isinstance(x, jax.core.Tracer)}
    read = {id(var) for eqn in two.eqns for var in eqn.invars} | {*map(id, two.outvars)}
    return None if within & read or Counter(_operations(one)) != Counter(_operations(two)) else False


def _operations(jaxpr) -> Iterator[tuple]:
    """Names of all operations, nested ones too, each with the numbers among its operands."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name, *(str(x) for x in eqn.invars if isinstance(x, Literal))
        for program in jaxprs_in_params(eqn.params):
            yield from _operations(program)


def _alike(one: list, two: list) -> bool:
    """Whether two calls left the same things, as far as Python can compare them."""
    return len(one) == len(two) and all(map(_same, one, two))


def _same(one, two) -> bool:
    if isinstance(one, _PLAIN) or isinstance(two, _PLAIN):
        return type(one) is type(two) and one == two
    on_chips = isinstance(one, Tensor)
    if on_chips != isinstance(two, Tensor):
        return False
    if on_chips or not (isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor)):
        return True
    return np.array_equal(as_numpy(one), as_numpy(two))
