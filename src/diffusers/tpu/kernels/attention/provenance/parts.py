"""What may be known of an array without computing it: `Part` and `Choice`, and of a part `Index` and `Stripe`."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


INDEX_LIMIT = 1 << 29  # integers below it, and sums of two, are exact in int32


@dataclass(frozen=True)
class Index:
    """The integers start + sum of factor * index along axis; `factors` are (axis, factor), sorted."""

    factors: tuple[tuple[int, int], ...] = ()
    start: int = 0

    def plus(self, other: "Index", times: int) -> "Index | None":
        """self + times * other, or None where int32 might not hold it."""
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
    """An array that is the same along every axis not in `varies`.

    `make()` computes it with length one along those. `index` and `stripe` say its values where they are that.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    varies: frozenset[int]
    make: Callable[[], jax.Array]
    index: Index | None = None
    stripe: Stripe | None = None

    def __post_init__(self):
        object.__setattr__(self, "make", functools.cache(self.make))

    def moved(self, shape, to: dict[int, int], relay: Callable, varies: frozenset[int] | None = None) -> "Part":
        """The part with its axes elsewhere.

        Args:
            to: old axis -> new axis. Where the length changes, what `index` and `stripe` say is lost.
            relay: makes the new small array of the old one.
            varies: of the new part; what `to` makes of the old one's if None.
        """
        if varies is None:
            varies = frozenset(to[a] for a in self.varies)
        index, stripe = self.index, self.stripe
        to = {old: new for old, new in to.items() if self.shape[old] == shape[new]}
        if index is not None:
            known = all(a in to for a, _ in index.factors)
            index = Index(tuple(sorted((to[a], f) for a, f in index.factors)), index.start) if known else None
        if stripe is not None:
            known = stripe.behind in to and stripe.ahead in to
            stripe = Stripe(to[stripe.behind], to[stripe.ahead], stripe.low, stripe.high) if known else None
        return Part(tuple(shape), self.dtype, varies, lambda: relay(self.make()), index, stripe)


@dataclass(frozen=True, eq=False)
class Choice:
    """where(all(parts), on, off); a number if it has no parts."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    on: np.generic
    off: np.generic

    def part(self) -> Part:
        """The same as one part."""
        if not self.parts:
            index = Index((), int(self.on)) if counts(self.on.dtype) and abs(int(self.on)) < INDEX_LIMIT else None
            return Part(
                self.shape, self.on.dtype, frozenset(), lambda: jnp.full((1,) * len(self.shape), self.on), index
            )
        if self.on.dtype == np.bool_ and self.on and not self.off and len(self.parts) == 1:
            return self.parts[0]

        def make():
            return jnp.where(functools.reduce(jnp.logical_and, [p.make() for p in self.parts]), self.on, self.off)

        return Part(self.shape, self.on.dtype, frozenset().union(*(p.varies for p in self.parts)), make)

    def where(self, number: np.generic) -> Part:
        """Where it is this number, `on` or `off`."""
        return Choice(self.shape, self.parts, *(np.bool_(same(x, number)) for x in (self.on, self.off))).part()


Value = Part | Choice


def leaf(array: jax.Array) -> Part:
    """An array of which only the shape is known."""
    varies = frozenset(a for a, n in enumerate(array.shape) if n > 1)
    return Part(array.shape, array.dtype, varies, lambda: array)


def constant(value, dtype) -> Value:
    """A number, or an array whose values nobody looks at."""
    if np.ndim(value):
        return leaf(jnp.asarray(value))
    number = np.asarray(value, dtype)[()]
    return Choice((), (), number, number)


def as_part(value: Value) -> Part:
    return value.part() if isinstance(value, Choice) else value


def as_choice(value: Value) -> Choice | None:
    """A Choice, or a bool part as one."""
    if isinstance(value, Part) and value.dtype == np.bool_:
        return Choice(value.shape, (value,), np.bool_(True), np.bool_(False))
    return value if isinstance(value, Choice) else None


def counts(dtype) -> bool:
    """Whether indices are exact in it."""
    return np.issubdtype(dtype, np.signedinteger) and np.dtype(dtype).itemsize >= 4


def same(a: np.generic, b: np.generic) -> bool:
    """Equal, or both NaN."""
    return bool(a == b or (a != a and b != b))


def kept(shape: tuple[int, ...], varies) -> tuple[int, ...]:
    """The shape of a part's small array."""
    return tuple(n if axis in varies else 1 for axis, n in enumerate(shape))
