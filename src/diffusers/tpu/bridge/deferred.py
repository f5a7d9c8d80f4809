"""A device tensor whose value is computed when someone first asks for it; its shape and dtype are known before."""

from collections.abc import Callable

import jax
import torch
from torchax.ops import mappings
from torchax.tensor import Tensor


class Deferred(Tensor):
    """`compute()` gives it its value by `settle(value)`, perhaps others too. Everything else is torchax's tensor."""

    @staticmethod
    def __new__(cls, aval: jax.ShapeDtypeStruct, env, compute: Callable[[], None]):
        return Tensor.__new__(cls, aval, env)

    def __init__(self, aval: jax.ShapeDtypeStruct, env, compute: Callable[[], None]):
        self._aval, self._env, self._compute, self._array = aval, env, compute, None

    @property
    def waits(self) -> bool:
        """Whether nobody has asked for its value yet."""
        return self._array is None

    def settle(self, value: jax.Array):
        self._array, self._compute = value, None

    @property
    def shape(self):
        return torch.Size((self._aval if self.waits else self._array).shape)

    ndim = property(lambda self: len(self.shape))

    @property
    def dtype(self):
        return mappings.j2t_dtype((self._aval if self.waits else self._array).dtype)
