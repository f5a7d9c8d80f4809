"""A dict that evicts the least recently used entry, for what grows with each new size or state. And its keys."""

import math


class Key(tuple):
    """A tuple whose hash is computed once, as a call's is needed in some ten dicts."""

    def __hash__(self):
        if (known := vars(self).get("hash")) is None:
            known = self.hash = super().__hash__()
        return known


class LRUCache(dict):
    """At most `most` entries, and `most_bytes` in all by `bytes_of(value)`; the entry set last stays, however large.

    Setting, `[]`, `get` and `setdefault` count as use; iteration is in the order of use. Not thread-safe without a lock.
    `on_evict()` is called for each evicted entry; `evicted` counts them.
    """

    def __init__(self, most: int, most_bytes: float | None = None, bytes_of=lambda value: 0, on_evict=lambda: None):
        super().__init__()
        self.most, self.most_bytes, self.bytes_of, self.on_evict = most, most_bytes, bytes_of, on_evict
        self.evicted = 0

    def __getitem__(self, key):
        value = self.pop(key)
        super().__setitem__(key, value)
        return value

    def get(self, key, default=None):
        try:
            return self[key]
        except KeyError:
            return default

    def __setitem__(self, key, value):
        self.pop(key, None)
        super().__setitem__(key, value)
        self.fit()

    def setdefault(self, key, default=None):
        if key not in self:
            self[key] = default
        return self[key]

    def fit(self):
        """Evict what exceeds the limits; to be called, too, when a value has grown."""
        most_bytes = math.inf if self.most_bytes is None else self.most_bytes
        while len(self) > 1 and (len(self) > self.most or sum(map(self.bytes_of, self.values())) > most_bytes):
            del self[next(iter(self))]
            self.evicted += 1
            self.on_evict()
