"""The lock that guards what the threads of a process share: models, schedulers, chips and what a trace patches.

A thread holds it for a whole call of a pipeline, or of a single model, as traces replace weights and methods of modules that others
read. It is released where the thread waits and has changed nothing shared: compilation, results, the user's callbacks. Only the
holder launches programs: two with collectives, launched in different orders on two chips, would deadlock.
"""

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator


class _Held(threading.local):
    depth = 0  # how often this thread has entered the lock
    pins = 0  # how many of its callers prevent a release


class Exclusive(contextlib.ContextDecorator):
    """A reentrant lock that a thread can release completely, however often it has entered it; also a decorator."""

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
        """Holds the lock and prevents its release inside, because shared state is changed for a while."""
        with self:
            self._held.pins += 1
            try:
                yield
            finally:
                self._held.pins -= 1

    @contextlib.contextmanager
    def released(self, pins: int = 0) -> Iterator[bool]:
        """Releases the lock inside, unless more than `pins` callers have pinned it; yields whether it is released."""
        depth = self._held.depth if self._held.pins <= pins else 0
        for _ in range(depth):
            self.__exit__()
        try:
            yield depth > 0
        finally:
            for _ in range(depth):
                self.__enter__()

    def soon(self, function: Callable[[], None]):
        """Calls `function` under the lock: now if possible, else when the holder leaves. For finalizers, which must not wait."""
        if self._held.pins or not self._lock.acquire(blocking=False):
            self._later.append(function)
            return
        self._lock.release()
        with self:
            function()


exclusive = Exclusive()
