"""The Python state of one module, read again when it has changed, and the keys that are made from it."""

import itertools

import torch

from . import tracing
from .lru import LRUCache
from .state import State, process_key, read
from .weights import PlacedWeights, stack_numbers


class ModuleState:
    """The state of one module, `now` as last read; `most` states are remembered.

    Attributes:
        step_cache: the upstream cache on the module whose steps are compiled; None: there is none, or upstream's hooks run it.
        numbers_are_static: a trace has read the values of adapters' scales: they are in the key instead of arguments.
    """

    def __init__(self, module: torch.nn.Module, most: int):
        self.module = module
        self.now: State | None = None
        self.numbers_are_static = False
        self._cache: tracing.StepCache | None = None
        self._ids, self._next_id = LRUCache(most), itertools.count()
        self._key = (), ()

    def changed(self, scan: bool | None) -> bool:
        """Whether the state has changed; it is then read again. `scan`: as in `TPUConfig`; None: the module is a submodule."""
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
        """Leave the step cache to upstream's hooks. Once that is for good, they are read as part of the state, like other hooks."""
        if self.step_cache is not None:
            self._cache.leave()
            self.now = None if self._cache.left else self.now

    def forget(self):
        self.now = None
        if self._cache is not None:
            self._cache.reset()  # it keeps tensors on the chips

    @property
    def read(self) -> tuple:
        """What a trace reads of the module's Python state."""
        return self.now.key, tuple(self.now.numbers.items()) if self.numbers_are_static else ()

    def key(self, placed: PlacedWeights) -> tuple:
        """The part of a program's key that is of the current state and the weights' layout; the call's key is the rest."""
        of = self.now, placed, self.numbers_are_static
        if self._key[0] != of:
            weights = tuple((key, a.shape, a.dtype, a.sharding.spec) for key, a in placed.avals.items())
            key = (*self.read, weights)
            if key not in self._ids:
                self._ids[key] = next(self._next_id)
            self._key = of, self._ids[key]
        return (self._key[1], *process_key())

    def numbers(self, placed: PlacedWeights, scale: float = 1.0) -> dict:
        """Scales that are arguments of programs, those of LoRA multiplied by `scale`."""
        numbers = {} if self.numbers_are_static else self.now.numbers
        return stack_numbers({n: x if "/scale" in n else x * scale for n, x in numbers.items()}, placed.groups)
