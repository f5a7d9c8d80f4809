"""Guards: branches of upstream's code on a call's small inputs, evaluated on the host; their values are a part of the cache key.

The first guard is the same for all calls of one kind (key, branches side by side, state). Which one follows depends on the values so
far, so a call evaluates guards until no further one is known for it.
"""

from collections.abc import Callable

import numpy as np

from .. import bridge, notices
from .call import Call, values_of
from .lru import LRUCache


MOST_GUARDS = 8  # of a program, where all have as many


class Guards:
    """The guards of one module. `most`: programs that are kept of it.

    Attributes:
        known: the guard that follows on these values, by kind of call and values.
        alone: kinds of calls that do not run side by side, as each branches for itself.
    """

    def __init__(self, name: str, most: int):
        self.name = name
        self.known: dict[tuple, bridge.Guard] = LRUCache(MOST_GUARDS * most)
        self.alone: dict[tuple, bool] = LRUCache(most)

    def values(self, kind: tuple, call: Call) -> tuple:
        """The values of all guards that are known for this call."""
        values = ()
        while (guard := self.known.get((kind, values))) is not None:
            values += (_hashable(guard.value(lambda number: values_of(call.tensors[number]))),)
        return values

    def learn(self, kind: tuple, decisions: bridge.Decisions, keep: Callable) -> tuple:
        """The values of a trace's guards, which are known from here on. `keep(values, guard)` gets each, with the values before it."""
        values = ()
        for guard, value in decisions.made.items():
            self.know(kind, values, guard)
            keep(values, guard)
            values += (_hashable(value),)
        return values

    def know(self, kind: tuple, values: tuple, guard: bridge.Guard):
        """The guard that follows on these values."""
        if (kind, values) in self.known:
            return
        self.known[kind, values] = guard
        notices.warn_once(
            f"decided {self.name} {guard.line}",
            f"{self.name}.{kind[0][0]} asks for values ({guard.line}): they are decided before each call, from its small"
            " inputs, and each answer has a program of its own",
        )


def _hashable(value: np.ndarray) -> tuple:
    return value.shape, value.dtype.str, value.tobytes()
