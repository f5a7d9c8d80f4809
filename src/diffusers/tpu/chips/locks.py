"""The lock that threads of one process share, as they share models, schedulers, chips and what a trace patches.

A trace puts tracers in the place of a module's weights, and wrappers in that of its methods, processors and cached functions; upstream's
pipelines read weights and methods directly, between calls of models too. So a thread holds the lock through a whole call of a
pipeline, or of a model by itself. It releases it where it waits and has changed nothing that is shared: while a program is compiled,
while chips compute what it asks for, in the user's callbacks. Who holds the lock launches programs, so all chips get them in one order:
two programs with collectives, launched in different orders on two chips, would wait for each other for good.
"""

import collections
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator


class _Held(threading.local):
    """Of this thread: how often it has entered the lock, and how many of its callers keep others out."""

    depth = 0
    pins = 0


class Exclusive:
    """A reentrant lock that a thread can release as a whole, however often it has entered it."""

    def __init__(self):
        self._lock, self._held = threading.RLock(), _Held()
        self._later: collections.deque[Callable[[], None]] = collections.deque()

    def __enter__(self):
        self._lock.acquire()
        self._held.depth += 1

    def __exit__(self, *exc):
        while self._later and self._held.depth == 1:
            self._later.popleft()()
        self._held.depth -= 1
        self._lock.release()

    @contextlib.contextmanager
    def pinned(self) -> Iterator[None]:
        """Held, and not released by what runs inside: what is shared is changed for a while."""
        with self:
            self._held.pins += 1
            try:
                yield
            finally:
                self._held.pins -= 1

    @contextlib.contextmanager
    def released(self, pins: int = 0) -> Iterator[bool]:
        """Other threads may run inside; whether that is so. `pins`: how many callers that pin it know of this."""
        depth = self._held.depth if self._held.pins <= pins else 0
        for _ in range(depth):
            self.__exit__()
        try:
            yield depth > 0
        finally:
            for _ in range(depth):
                self.__enter__()

    def soon(self, function: Callable[[], None]):
        """Call it under the lock: now if nothing is in the way, else when its holder leaves. A finalizer must not wait for a lock."""
        if self._held.pins or not self._lock.acquire(blocking=False):
            self._later.append(function)
            return
        self._lock.release()
        with self:
            function()


exclusive = Exclusive()


def held(function: Callable) -> Callable:
    """A function that holds the lock while it runs."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        with exclusive:
            return function(*args, **kwargs)

    return run
