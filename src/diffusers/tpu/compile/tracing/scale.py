"""Numbers that a program is given: upstream's code multiplies and divides by them, and a new value needs no new program."""

import jax
import jax.numpy as jnp

from ...bridge import Tensor, View


class NumberRead(Exception):
    """A trace asked for the value of a number that it multiplies by, to decide something: it must be a constant then."""


class Scale:
    """Stands where upstream's code has a Python number. Products with tensors are computed in float32 and rounded once, as torch's are.

    Raises NumberRead where its value is asked for.
    """

    def __init__(self, array: jax.Array):
        self.array = array

    def _applied(self, operator, other: Tensor | View) -> Tensor:
        x = other.jax()
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        return Tensor(operator(wide, self._beside(x)).astype(x.dtype), other._env)

    def _beside(self, x: jax.Array) -> jax.Array:
        return self.array

    def __mul__(self, other):
        if isinstance(other, (Tensor, View)):
            return self._applied(jnp.multiply, other)
        return type(self)(self.array * _factor(other))

    __rmul__ = __mul__

    def __truediv__(self, other):
        return type(self)(self.array / _factor(other))

    def __neg__(self):
        return type(self)(-self.array)

    def _read(self, *args):
        raise NumberRead

    __bool__ = __float__ = __int__ = __index__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __add__ = __radd__ = (
        _read
    )
    __sub__ = __rsub__ = __rtruediv__ = __pow__ = __rpow__ = __abs__ = __format__ = _read
    __hash__ = None


class Elapsed(Scale):
    """Steps from one call to another, never none, of each of the batch [B]."""

    def _beside(self, x: jax.Array) -> jax.Array:
        return self.array.reshape(-1, *[1] * (x.ndim - 1))

    def __sub__(self, since: int):
        return Elapsed(self.array - since)

    def __eq__(self, other):
        return False

    __hash__ = None

    def __pow__(self, order: int):
        return Elapsed(self.array**order)

    def __rtruediv__(self, tensor: Tensor):
        return self._applied(jnp.divide, tensor)


def _factor(other):
    if isinstance(other, Scale):
        return other.array
    if isinstance(other, (int, float)):
        return other
    raise NumberRead
