"""A dict that evicts what was least recently used: for what grows with each new size or state that a process meets. And its keys."""

import math


class Key(tuple):
    """A tuple whose hash is computed once: a call's is asked for in some ten dicts."""

    def __hash__(self):
        if (known := vars(self).get("hash")) is None:
            known = self.hash = super().__hash__()
        return known


class LRUCache(dict):
    """At most `most` entries, and `most_bytes` of `bytes_of(value)` in all; what was last set stays, however large.

    Setting, `[]`, `get` and `setdefault` count as use; iteration is in the order of use. Not for threads without a lock.
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
        """Evict what is too much; after a value has grown, too."""
        most_bytes = math.inf if self.most_bytes is None else self.most_bytes
        while len(self) > 1 and (len(self) > self.most or sum(map(self.bytes_of, self.values())) > most_bytes):
            del self[next(iter(self))]
            self.evicted += 1
            self.on_evict()
