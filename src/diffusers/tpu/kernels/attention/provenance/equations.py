"""What the equations of a jaxpr make of what is known of their operands: (equation, operands, type of the output) -> value."""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .parts import INDEX_LIMIT, Choice, Index, Part, Stripe, Value, as_choice, as_part, counts, kept, same


NUMPY = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "abs": np.abs,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "select_n": lambda which, *cases: cases[int(which)],
    "convert_element_type": lambda x: x,
}
NOT = (np.bool_(False), np.bool_(True))


def elementwise(eqn, values: list[Value], aval) -> Value:
    """One of `NUMPY`: a Choice where it is one, else a part along all axes that any operand varies along."""
    values = [_spread(v, len(aval.shape)) for v in values]
    choices = [as_choice(v) for v in values]
    if None not in choices:
        choice = _of_choices(eqn, choices, aval)
        if choice is not None:
            return choice
    parts = [as_part(v) for v in values]
    index, stripe = _indices(eqn.primitive.name, parts, aval.dtype)
    return _applied(eqn, parts, aval, frozenset().union(*(p.varies for p in parts)), index, stripe)


def _spread(value: Value, rank: int) -> Value:
    """A scalar beside arrays, with axes of length one."""
    ones = (1,) * rank
    return (
        value
        if len(value.shape) == rank
        else _each(value, ones, lambda p: p.moved(ones, {}, lambda x: x.reshape(ones)))
    )


def _each(value: Value, shape: tuple[int, ...], rule: Callable[[Part], Part]) -> Value:
    """What moves elements moves them in every part of a Choice."""
    if isinstance(value, Choice):
        return Choice(shape, tuple(rule(p) for p in value.parts), value.on, value.off)
    return rule(value)


def _applied(eqn, parts: list[Part], aval, varies: frozenset[int], index=None, stripe=None) -> Part:
    """The equation on its small operands, brought to full length along `varies`."""

    def make():
        operands = [jnp.broadcast_to(p.make(), kept(p.shape, varies)) for p in parts]
        return eqn.primitive.bind(*operands, **eqn.params)

    return Part(aval.shape, aval.dtype, frozenset(a for a in varies if aval.shape[a] > 1), make, index, stripe)


def _of_choices(eqn, choices: list[Choice], aval) -> Choice | None:
    """A Choice, if the result is one number wherever not each operand is at a certain one of its two."""
    free = [n for n, c in enumerate(choices) if c.parts]
    if len(free) > 3:
        return None
    results = {}
    for states in itertools.product((True, False), repeat=len(free)):
        at = dict(zip(free, states))
        results[states] = _computed(
            eqn, [c.on if at.get(n, True) else c.off for n, c in enumerate(choices)], aval.dtype
        )
    if any(result is None for result in results.values()):
        return None
    for states, on in results.items():
        off, *others = [r for s, r in results.items() if s != states] or [on]
        if not all(same(r, off) for r in others):
            continue
        if same(on, off):
            return Choice(aval.shape, (), on, on)
        parts = []
        for n, state in zip(free, states):
            parts += choices[n].parts if state else [Choice(choices[n].shape, choices[n].parts, *NOT).part()]
        whole = {a: a for a in range(len(aval.shape))}
        return Choice(aval.shape, tuple(p.moved(aval.shape, whole, lambda x: x) for p in parts), on, off)
    return None


def _computed(eqn, numbers: list[np.generic], dtype) -> np.generic | None:
    """The equation on numbers, or None where numpy may not give what XLA does."""
    if np.issubdtype(dtype, np.integer):
        low, high = np.iinfo(dtype).min, min(np.iinfo(dtype).max, INDEX_LIMIT)
        if not all(low <= float(x) <= high for x in numbers):
            return None
    with np.errstate(all="ignore"):
        return np.asarray(NUMPY[eqn.primitive.name](*numbers)).astype(dtype)[()]


def _indices(name: str, parts: list[Part], dtype) -> tuple[Index | None, Stripe | None]:
    """What it makes of indices: another sum of them, or where two of them compare, a stripe."""
    if any(p.index is None for p in parts):
        return None, None
    first, last = parts[0].index, parts[-1].index
    if name == "convert_element_type":
        return first if counts(dtype) else None, None
    if name in ("add", "sub") and counts(dtype):
        return first.plus(last, 1 if name == "add" else -1), None
    if name == "mul" and counts(dtype):
        number, index = (first, last) if not first.factors else (last, first)
        return (None if number.factors else Index().plus(index, number.start)), None
    difference = first.plus(last, -1) if name in ("lt", "le", "gt", "ge", "eq") else None
    if difference is None or sorted(f for _, f in difference.factors) != [-1, 1]:
        return None, None
    (behind, _), (ahead, _) = sorted(difference.factors, key=lambda factor: factor[1])
    low, high = {"ge": 0, "gt": 1, "eq": 0}.get(name), {"le": 0, "lt": -1, "eq": 0}.get(name)
    low, high = (None if x is None else x - difference.start for x in (low, high))
    return None, Stripe(behind, ahead, low, high)


def _broadcast(eqn, values: list[Value], aval) -> Value:
    axes = eqn.params["broadcast_dimensions"]
    to = dict(enumerate(axes))

    def rule(part):
        small = kept(aval.shape, {to[a] for a in part.varies})
        return part.moved(aval.shape, to, lambda x: lax.broadcast_in_dim(x, small, axes))

    return _each(values[0], aval.shape, rule)


def _transpose(eqn, values: list[Value], aval) -> Value:
    axes = eqn.params["permutation"]
    to = {old: new for new, old in enumerate(axes)}
    return _each(values[0], aval.shape, lambda p: p.moved(aval.shape, to, lambda x: lax.transpose(x, axes)))


def _tile(eqn, values: list[Value], aval) -> Value:
    def rule(part):
        reps = [r if a in part.varies else 1 for a, r in enumerate(eqn.params["reps"])]
        return part.moved(aval.shape, {a: a for a in range(len(reps))}, lambda x: jnp.tile(x, reps))

    return _each(values[0], aval.shape, rule)


def _slice(eqn, values: list[Value], aval) -> Value:
    starts, limits, strides = (eqn.params[name] for name in ("start_indices", "limit_indices", "strides"))
    taken = [slice(*bounds) for bounds in zip(starts, limits, strides or (1,) * len(starts))]

    def rule(part):
        own = tuple(s if a in part.varies else slice(None) for a, s in enumerate(taken))
        long = frozenset(a for a in part.varies if aval.shape[a] > 1)
        return part.moved(aval.shape, {a: a for a in range(len(own))}, lambda x: x[own], long)

    return _each(values[0], aval.shape, rule)


def _reshape(eqn, values: list[Value], aval) -> Value:
    """Also squeeze. Axes are split and merged in groups; one that nothing varies along gives no varying axes."""

    def rule(part):
        to, varies, full = {}, set(), set()
        for olds, news in _groups(part.shape, aval.shape):
            olds, news = [a for a in olds if part.shape[a] > 1], [a for a in news if aval.shape[a] > 1]
            if len(olds) == len(news) == 1:
                to[olds[0]] = news[0]
            if part.varies.intersection(olds):
                varies.update(news)
                full.update(olds)
        old, new = kept(part.shape, full), kept(aval.shape, varies)
        return part.moved(aval.shape, to, lambda x: jnp.broadcast_to(x, old).reshape(new), frozenset(varies))

    return _each(values[0], aval.shape, rule)


def _groups(old: tuple[int, ...], new: tuple[int, ...]):
    """The least runs of axes, of one shape and of the other, that hold the same elements."""
    i = j = 0
    while i < len(old) or j < len(new):
        olds, news, size_old, size_new = [], [], 1, 1
        while not (olds or news) or size_old != size_new:
            if j == len(new) or (size_old <= size_new and i < len(old)):
                olds.append(i)
                size_old, i = size_old * old[i], i + 1
            else:
                news.append(j)
                size_new, j = size_new * new[j], j + 1
        yield olds, news


def _iota(eqn, values: list[Value], aval) -> Value:
    axis = eqn.params["dimension"]
    varies = frozenset({axis} if aval.shape[axis] > 1 else ())
    index = Index(((axis, 1),)) if counts(aval.dtype) and aval.shape[axis] < INDEX_LIMIT else None
    make = lambda: lax.broadcasted_iota(aval.dtype, kept(aval.shape, varies), axis)  # noqa: E731
    return Part(aval.shape, aval.dtype, varies, make, index)


def _concatenate(eqn, values: list[Value], aval) -> Value:
    return _joined(eqn, values, aval, {eqn.params["dimension"]})


def _pad(eqn, values: list[Value], aval) -> Value:
    return _joined(eqn, values, aval, {a for a, sizes in enumerate(eqn.params["padding_config"]) if any(sizes)})


def _joined(eqn, values: list[Value], aval, along: set[int]) -> Value:
    """Operands that are of two numbers between them give a Choice again: it is one of them where the operands are."""
    choices = [as_choice(v) for v in values]
    numbers = [] if None in choices else [x for c in choices for x in (c.on, c.off)]
    others = [x for x in numbers if not same(x, numbers[0])]
    two = numbers and all(same(x, others[0]) for x in others)
    parts = [c.where(numbers[0]) for c in choices] if two else [as_part(v) for v in values]
    varies = frozenset(along).union(*(p.varies for p in parts))
    if not two:
        return _applied(eqn, parts, aval, varies)
    if not others:
        return Choice(aval.shape, (), numbers[0], numbers[0])
    is_first = _applied(eqn, parts, jax.ShapeDtypeStruct(aval.shape, np.bool_), varies)
    return Choice(aval.shape, (is_first,), numbers[0], others[0])


RULES = {
    **dict.fromkeys(NUMPY, elementwise),
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "tile": _tile,
    "slice": _slice,
    "reshape": _reshape,
    "squeeze": _reshape,
    "iota": _iota,
    "concatenate": _concatenate,
    "pad": _pad,
}
