"""A device tensor whose value is computed when someone first asks for it; its shape and dtype are known before."""

from collections.abc import Callable

import jax
import torch
from torchax.ops import mappings
from torchax.tensor import Tensor

from .host_twin import written


class Deferred(Tensor):
    """`compute()` gives it its value by `settle(value)`, perhaps others too. Everything else is torchax's tensor."""

    @staticmethod
    def __new__(cls, aval: jax.ShapeDtypeStruct, env, compute: Callable[[], None]):
        return Tensor.__new__(cls, aval, env)

    def __init__(self, aval: jax.ShapeDtypeStruct, env, compute: Callable[[], None]):
        self._aval, self._env, self._compute, self._value = aval, env, compute, None

    @property
    def _elem(self) -> jax.Array:
        compute = self._compute  # before its value: another thread may settle it meanwhile
        if self._value is None:
            compute()
        return self._value if vars(self).get("_twin") is None else written(self, self._value)

    @_elem.setter
    def _elem(self, value: jax.Array):
        self._value, self._twin = value, None

    @property
    def waits(self) -> bool:
        """Whether nobody has asked for its value yet."""
        return self._value is None

    def settle(self, value: jax.Array):
        self._value, self._compute = value, None

    @property
    def shape(self):
        return torch.Size(self._aval.shape if self._value is None else self._value.shape)

    ndim = property(lambda self: len(self.shape))

    @property
    def dtype(self):
        return mappings.j2t_dtype(self._aval.dtype if self._value is None else self._value.dtype)
