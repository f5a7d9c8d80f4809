"""Finds in a function's jaxpr whether it computes each token of a sequence by itself, and the token axis of its results."""

import functools
import itertools
import operator

from jax.extend.core import Jaxpr, Literal


ELEMENTWISE = frozenset(
    "add add_any sub mul div rem max min pow integer_pow square neg sign abs exp exp2 log log1p expm1 tanh logistic erf sin cos sqrt rsqrt"
    " floor ceil round is_finite select_n clamp convert_element_type reduce_precision and or not xor eq ne lt le gt ge copy".split()
)
REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or".split())
CALLS = frozenset("jit pjit closed_call core_call custom_jvp_call custom_vjp_call".split())


class ReadsOthers(Exception):
    """An equation reads several tokens for one token of its result, or may do so."""


def axes_of_tokens(jaxpr: Jaxpr, axes: list[int | None]) -> list[int | None]:
    """The token axis of each result, where `axes` has those of the arguments; None: an array without tokens.

    Raises ReadsOthers where a token of a result may depend on other tokens.
    """
    where, repeated = dict(zip(jaxpr.invars, axes)), {}
    for eqn in jaxpr.eqns:
        found = [None if isinstance(atom, Literal) else where.get(atom) for atom in eqn.invars]
        if {*found} != {None}:
            results = _of_equation(eqn, found, repeated)
            if None in results:
                raise ReadsOthers
            where |= dict(zip(eqn.outvars, results))
        elif eqn.primitive.name == "broadcast_in_dim":
            (out,), dims, shape = eqn.outvars, eqn.params["broadcast_dimensions"], eqn.invars[0].aval.shape
            repeated[out] = {n for n in range(out.aval.ndim) if n not in dims or shape[dims.index(n)] == 1}
    return [None if isinstance(atom, Literal) else where.get(atom) for atom in jaxpr.outvars]


def _of_equation(eqn, found: list[int | None], repeated: dict) -> list[int | None]:
    """The token axis of each result of an equation; None where a token may depend on others. `found`: the operands' axes, at least
    one not None. `repeated`: axes along which an array without tokens repeats one value."""
    name, params, out = eqn.primitive.name, eqn.params, eqn.outvars[0].aval
    if name in CALLS:
        inner = params.get("jaxpr", params.get("call_jaxpr"))
        return axes_of_tokens(getattr(inner, "jaxpr", inner), found)
    axis, x = next((at, atom.aval) for at, atom in zip(found, eqn.invars) if at is not None)

    def alike(atom, at) -> bool:
        return at == axis or (at is None and not isinstance(atom, Literal) and axis in repeated.get(atom, ()))

    def of_all(atom) -> bool:
        return atom.aval.ndim == 0 or atom.aval.shape[axis] == 1

    operands = [*zip(eqn.invars, found)]
    if name in ELEMENTWISE:
        return [axis if all(alike(*one) or (one[1] is None and of_all(one[0])) for one in operands) else None]
    if name == "concatenate":
        return [axis if all(alike(*one) for one in operands) and params["dimension"] != axis else None]
    if name == "stack":
        return [axis + (params["axis"] <= axis) if all(alike(*one) for one in operands) else None]
    if name == "broadcast_in_dim":
        to = params["broadcast_dimensions"][axis]
        return [to if out.shape[to] == x.shape[axis] else None]
    if name == "reshape":
        wanted = functools.reduce(operator.mul, x.shape[:axis], 1), x.shape[axis]
        places = zip(itertools.accumulate(out.shape, operator.mul, initial=1), out.shape)
        return [next((n for n, place in enumerate(places) if place == wanted), None)]
    if name == "transpose":
        return [params["permutation"].index(axis)]
    if name == "squeeze":
        return [axis - sum(n < axis for n in params["dimensions"])]
    if name == "slice":
        return [axis if out.shape[axis] == x.shape[axis] else None]
    if name == "split":
        return [axis if params["axis"] != axis else None] * len(eqn.outvars)
    if name in REDUCTIONS:
        return [None if axis in params["axes"] else axis - sum(n < axis for n in params["axes"])]
    if name == "dot_general" and found[1] is None:
        (contracted, _), (batch, _) = params["dimension_numbers"]
        free = [n for n in range(x.ndim) if n not in contracted and n not in batch]
        return [len(batch) + free.index(axis) if axis in free else None]
    return [None]
