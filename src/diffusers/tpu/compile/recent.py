"""A dict of what was used last: of what grows with each new size or state that a process meets, the least recently used goes."""

from collections.abc import Callable


class Recent(dict):
    """At most `most` entries, and `most_bytes` of `bytes_of(value)` in all; what was last set stays, however large.

    Setting, `[]`, `get` and `setdefault` count as use; the order of iteration is that of use. Not for threads without a lock.
    `then` is called for each entry that goes.

    Attributes:
        evicted: how many went.
    """

    def __init__(
        self,
        most: int,
        most_bytes: float | None = None,
        bytes_of: Callable[[object], int] | None = None,
        then: Callable[[], None] = lambda: None,
    ):
        super().__init__()
        self.most, self.most_bytes, self.bytes_of, self.then = most, most_bytes, bytes_of, then
        self.evicted = 0

    def __getitem__(self, key):
        value = self.pop(key)
        super().__setitem__(key, value)
        return value

    def get(self, key, default=None):
        return self[key] if key in self else default

    def __setitem__(self, key, value):
        self.pop(key, None)
        super().__setitem__(key, value)
        self.fit()

    def setdefault(self, key, default=None):
        if key not in self:
            self[key] = default
        return self[key]

    def fit(self):
        """Evict what is too much; after a value has grown, too."""
        sizes = [] if self.most_bytes is None else [*map(self.bytes_of, self.values())]
        excess = sum(sizes) - (self.most_bytes or 0)
        for number, key in enumerate([*self][:-1]):
            if len(self) <= self.most and (not sizes or excess <= 0):
                break
            excess -= sizes[number] if sizes else 0
            del self[key]
            self.evicted += 1
            self.then()
