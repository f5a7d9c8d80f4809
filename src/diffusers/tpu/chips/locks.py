"""The lock that threads of one process share, as they share models, schedulers, chips and what a trace patches.

A thread holds it through a whole call of a pipeline, or of a model by itself, as traces replace weights and methods of modules that
others read. It releases it where it waits and has changed nothing that is shared: compilation, results, the user's callbacks. Who
holds it launches programs: two with collectives, launched in different orders on two chips, would wait for each other for good.
"""

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator


class _Held(threading.local):
    depth = 0  # how often this thread has entered the lock
    pins = 0  # how many of its callers keep others out


class Exclusive(contextlib.ContextDecorator):
    """A reentrant lock that a thread can release as a whole, however often it has entered it. As a decorator: a function holds it."""

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
