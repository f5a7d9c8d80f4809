"""Descriptions of arrays that are not computed, and a rule per primitive: the description of its result from its operands'."""

import functools
import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


INDEX_LIMIT = 1 << 29  # integers below it, and sums of two, are exact in int32
ELEMENTWISE = {  # on numpy scalars
    **{name: getattr(operator, name) for name in "add sub mul neg abs eq ne lt le gt ge xor".split()},
    **{"and": operator.and_, "or": operator.or_, "not": operator.invert, "max": np.maximum, "min": np.minimum},
    "select_n": lambda which, *cases: cases[int(which)],
    "convert_element_type": lambda x: x,
}
NOT = (np.bool_(False), np.bool_(True))


@dataclass(frozen=True)
class Index:
    """The integers start + sum of factor * index along axis; `factors` are (axis, factor), sorted."""

    factors: tuple[tuple[int, int], ...] = ()
    start: int = 0

    def plus(self, other: "Index", times: int) -> "Index | None":
        """self + times * other, or None where int32 might overflow."""
        sums = dict(self.factors)
        for axis, factor in other.factors:
            sums[axis] = sums.get(axis, 0) + times * factor
        factors, start = tuple(sorted((a, f) for a, f in sums.items() if f)), self.start + times * other.start
        exact = abs(start) < INDEX_LIMIT and sum(abs(f) for _, f in factors) <= 2
        return Index(factors, start) if exact else None


@dataclass(frozen=True)
class Stripe:
    """True where low <= index along `ahead` - index along `behind` <= high; None is open."""

    behind: int
    ahead: int
    low: int | None
    high: int | None


@dataclass(frozen=True, eq=False)
class Part:
    """An array that is the same along every axis not in `varies`; `make()` computes it with length one along those.

    `index`, `stripe`: its values, if of that form. `factors`: float parts that vary along different axes, whose product it is.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    varies: frozenset[int]
    make: Callable[[], jax.Array]
    index: Index | None = None
    stripe: Stripe | None = None
    factors: tuple["Part", "Part"] | None = None

    def __post_init__(self):
        object.__setattr__(self, "make", functools.cache(self.make))

    def moved(self, shape, to: dict[int, int], relay: Callable, varies: frozenset[int] | None = None) -> "Part":
        """The part with axes moved as `to` maps old to new; where a length changes, `index` and `stripe` are lost.

        `relay`: computes the new small array from the old one. `varies`: of the new part, if `to` does not determine it.
        """
        varies = frozenset(to[a] for a in self.varies) if varies is None else varies
        to = {old: new for old, new in to.items() if self.shape[old] == shape[new]}
        index, stripe = self.index, self.stripe
        if index is not None:
            known = all(a in to for a, _ in index.factors)
            index = Index(tuple(sorted((to[a], f) for a, f in index.factors)), index.start) if known else None
        if stripe is not None:
            known = stripe.behind in to and stripe.ahead in to
            stripe = replace(stripe, behind=to[stripe.behind], ahead=to[stripe.ahead]) if known else None
        return Part(tuple(shape), self.dtype, varies, lambda: relay(self.make()), index, stripe)


@dataclass(frozen=True, eq=False)
class Choice:
    """where(all(parts), on, off); without parts, the number `on`."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    on: np.generic
    off: np.generic

    def part(self) -> Part:
        """The same array as one Part."""
        ones = (1,) * len(self.shape)
        if not self.parts:
            index = Index((), int(self.on)) if counts(self.on.dtype) and abs(int(self.on)) < INDEX_LIMIT else None
            return Part(self.shape, self.on.dtype, frozenset(), lambda: jnp.full(ones, self.on), index)
        if self.on.dtype == np.bool_ and self.on and not self.off and len(self.parts) == 1:
            return self.parts[0]

        def make():
            return jnp.where(functools.reduce(jnp.logical_and, [p.make() for p in self.parts]), self.on, self.off)

        return Part(self.shape, self.on.dtype, frozenset().union(*(p.varies for p in self.parts)), make)

    def where(self, number: np.generic) -> Part:
        """A bool Part: True where the array is this number, `on` or `off`."""
        return Choice(self.shape, self.parts, *(np.bool_(same(x, number)) for x in (self.on, self.off))).part()


Value = Part | Choice


def leaf(array: jax.Array) -> Part:
    """The Part of an array of which only the shape is known."""
    varies = frozenset(a for a, n in enumerate(array.shape) if n > 1)
    return Part(array.shape, array.dtype, varies, lambda: array)


def constant(value, dtype) -> Value:
    """The description of a constant: a Choice for a number; of an array only the shape is used."""
    if np.ndim(value):
        return leaf(jnp.asarray(value))
    number = np.asarray(value, dtype)[()]
    return Choice((), (), number, number)


def as_part(value: Value) -> Part:
    return value.part() if isinstance(value, Choice) else value


def as_choice(value: Value) -> Choice | None:
    """A Choice, also of a bool Part; else None."""
    if isinstance(value, Part) and value.dtype == np.bool_:
        return Choice(value.shape, (value,), np.bool_(True), np.bool_(False))
    return value if isinstance(value, Choice) else None


def counts(dtype) -> bool:
    """Whether indices are exact in this dtype."""
    return np.issubdtype(dtype, np.signedinteger) and np.dtype(dtype).itemsize >= 4


def same(a: np.generic, b: np.generic) -> bool:
    """Equal, or both NaN."""
    return bool(a == b or (a != a and b != b))


def kept(shape: tuple[int, ...], varies) -> tuple[int, ...]:
    """The shape of a part's small array."""
    return tuple(n if axis in varies else 1 for axis, n in enumerate(shape))


def elementwise(eqn, values: list[Value], aval) -> Value:
    """The rule of `ELEMENTWISE`: a Choice if the result is one, else a Part that varies wherever an operand does."""
    values = [_spread(v, len(aval.shape)) for v in values]
    choices = [as_choice(v) for v in values]
    if None not in choices and (choice := _of_choices(eqn, choices, aval)) is not None:
        return choice
    parts = [as_part(v) for v in values]
    index, stripe = _indices(eqn.primitive.name, parts, aval.dtype)
    result = _applied(eqn, parts, aval, frozenset().union(*(p.varies for p in parts)), index, stripe)
    multiplies = eqn.primitive.name == "mul" and jnp.issubdtype(aval.dtype, jnp.floating)
    if not multiplies or any(p.varies == result.varies for p in parts):
        return result
    whole = {a: a for a in range(len(aval.shape))}
    return replace(result, factors=tuple(p.moved(aval.shape, whole, lambda x: x) for p in parts))


def _spread(value: Value, rank: int) -> Value:
    """A scalar as an array of `rank` axes of length one."""
    ones = (1,) * rank
    if len(value.shape) == rank:
        return value
    return _each(value, ones, lambda p: p.moved(ones, {}, lambda x: x.reshape(ones)))


def _each(value: Value, shape: tuple[int, ...], rule: Callable[[Part], Part]) -> Value:
    """Applies a rule that only moves elements to every part of a Choice, or to a Part."""
    if isinstance(value, Choice):
        return Choice(shape, tuple(rule(p) for p in value.parts), value.on, value.off)
    return rule(value)


def _applied(eqn, parts: list[Part], aval, varies: frozenset[int], index=None, stripe=None) -> Part:
    """The equation on its small operands, which are broadcast along `varies`."""

    def make():
        operands = [jnp.broadcast_to(p.make(), kept(p.shape, varies)) for p in parts]
        return eqn.primitive.bind(*operands, **eqn.params)

    return Part(aval.shape, aval.dtype, frozenset(a for a in varies if aval.shape[a] > 1), make, index, stripe)


def _of_choices(eqn, choices: list[Choice], aval) -> Choice | None:
    """A Choice, if one combination of the operands' numbers gives `on` and all other combinations give one number."""
    free = [n for n, c in enumerate(choices) if c.parts]
    if len(free) > 3:
        return None
    results = {}
    for states in itertools.product((True, False), repeat=len(free)):
        at = dict(zip(free, states))
        numbers = [c.on if at.get(n, True) else c.off for n, c in enumerate(choices)]
        results[states] = _computed(eqn, numbers, aval.dtype)
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
    """The equation on numbers, or None where numpy and XLA might differ."""
    if np.issubdtype(dtype, np.integer):
        low, high = np.iinfo(dtype).min, min(np.iinfo(dtype).max, INDEX_LIMIT)
        if not all(low <= float(x) <= high for x in numbers):
            return None
    with np.errstate(all="ignore"):
        return np.asarray(ELEMENTWISE[eqn.primitive.name](*numbers)).astype(dtype)[()]


def _indices(name: str, parts: list[Part], dtype) -> tuple[Index | None, Stripe | None]:
    """(index, stripe) of a primitive on indices: a sum of indices, or the stripe where two indices compare."""
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


def _broadcast(params: dict, part: Part, shape):
    axes = params["broadcast_dimensions"]
    small = kept(shape, {axes[a] for a in part.varies})
    return dict(enumerate(axes)), lambda x: lax.broadcast_in_dim(x, small, axes)


def _transpose(params: dict, part: Part, shape):
    axes = params["permutation"]
    return {old: new for new, old in enumerate(axes)}, lambda x: lax.transpose(x, axes)


def _tile(params: dict, part: Part, shape):
    reps = [r if a in part.varies else 1 for a, r in enumerate(params["reps"])]
    return {a: a for a in range(len(reps))}, lambda x: jnp.tile(x, reps)


def _slice(params: dict, part: Part, shape):
    starts, limits, strides = (params[name] for name in ("start_indices", "limit_indices", "strides"))
    taken = [slice(*bounds) for bounds in zip(starts, limits, strides or (1,) * len(starts))]
    own = tuple(s if a in part.varies else slice(None) for a, s in enumerate(taken))
    return {a: a for a in range(len(own))}, lambda x: x[own], frozenset(a for a in part.varies if shape[a] > 1)


def _reshape(params: dict, part: Part, shape):
    """Also for squeeze. Axes are split and merged in groups; a group along which nothing varies gives no varying axes."""
    to, varies, full = {}, set(), set()
    for olds, news in _groups(part.shape, shape):
        olds, news = [a for a in olds if part.shape[a] > 1], [a for a in news if shape[a] > 1]
        if len(olds) == len(news) == 1:
            to[olds[0]] = news[0]
        if part.varies.intersection(olds):
            varies.update(news)
            full.update(olds)
    old, new = kept(part.shape, full), kept(shape, varies)
    return to, lambda x: jnp.broadcast_to(x, old).reshape(new), frozenset(varies)


def _groups(old: tuple[int, ...], new: tuple[int, ...]):
    """The shortest runs of axes of both shapes that hold equally many elements."""
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


def _joined(eqn, values: list[Value], aval, along: set[int]) -> Value:
    """The rule of concatenate and pad: a Choice if the operands have at most two numbers among them, else a Part."""
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


def _moving(how: Callable) -> Callable:
    """The rule of an equation that moves elements. `how`: (parameters, part, shape) -> arguments of `Part.moved` after shape."""

    def moved(params, part: Part, shape) -> Part:
        factors = part.factors and tuple(moved(params, factor, shape) for factor in part.factors)
        return replace(part.moved(shape, *how(params, part, shape)), factors=factors)

    return lambda eqn, values, aval: _each(values[0], aval.shape, lambda part: moved(eqn.params, part, aval.shape))


RULES = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    "broadcast_in_dim": _moving(_broadcast),
    "transpose": _moving(_transpose),
    "tile": _moving(_tile),
    "slice": _moving(_slice),
    "reshape": _moving(_reshape),
    "squeeze": _moving(_reshape),
    "iota": _iota,
    "concatenate": lambda eqn, *given: _joined(eqn, *given, {eqn.params["dimension"]}),
    "pad": lambda eqn, *given: _joined(eqn, *given, {a for a, n in enumerate(eqn.params["padding_config"]) if any(n)}),
}
