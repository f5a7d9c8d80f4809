"""The Python state of one module, read again when it changed, and the keys that are made of it."""

import itertools

import torch

from . import tracing
from .lru import LRUCache
from .state import State, process_key, read
from .weights import PlacedWeights, stack_numbers


class ModuleState:
    """Of one module, `now` as last read; `most` states are remembered.

    Attributes:
        step_cache: the upstream cache on the module whose steps programs stand for; None: there is none, or its hooks run by themselves.
        numbers_are_static: a trace has read the scales of LoRA layers: they are in the key, not arguments.
    """

    def __init__(self, module: torch.nn.Module, most: int):
        self.module = module
        self.now: State | None = None
        self.numbers_are_static = False
        self._cache: tracing.StepCache | None = None
        self._ids, self._next_id = LRUCache(most), itertools.count()
        self._key = (), ()

    def changed(self, scan: bool | None) -> bool:
        """Read the state again if it is not as it was. `scan`: of equal blocks; None: another module's caches count."""
        if self.now is not None and self.now.same():
            return False
        if scan is not None:
            self._cache = tracing.kept_by(self.module, scan, self._cache)
        self.now = read(self.module, () if self.step_cache is None else self.step_cache.apart)
        return True

    @property
    def step_cache(self) -> tracing.StepCache | None:
        return None if self._cache is None or self._cache.left else self._cache

    def leave_step_cache(self):
        """Upstream's hooks themselves go on with the cache; where they do for good they are read as any others."""
        if self.step_cache is not None:
            self._cache.leave()
            self.now = None if self._cache.left else self.now

    def forget(self):
        self.now = None
        if self._cache is not None:
            self._cache.reset()  # what it keeps is on the chips

    @property
    def read(self) -> tuple:
        """What a trace reads of the module's Python."""
        return self.now.key, tuple(self.now.numbers.items()) if self.numbers_are_static else ()

    def key(self, placed: PlacedWeights) -> tuple:
        """The key of a program of now, beside its call's."""
        of = self.now, placed, self.numbers_are_static
        if self._key[0] != of:
            weights = tuple((key, a.shape, a.dtype, a.sharding.spec) for key, a in placed.avals.items())
            key = (*self.read, weights)
            if key not in self._ids:
                self._ids[key] = next(self._next_id)
            self._key = of, self._ids[key]
        return (self._key[1], *process_key())

    def numbers(self, placed: PlacedWeights, scale: float = 1.0) -> dict:
        """Scales of LoRA layers that are arguments of programs, multiplied by `scale`."""
        numbers = {} if self.numbers_are_static else {n: x * scale for n, x in self.now.numbers.items()}
        return stack_numbers(numbers, placed.groups)
