"""Calls of a module's method with weights and numbers other than the module's own."""

import contextlib
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import torch

from ...bridge import Tensor, environment, from_numpy, numpy_dtype, on_device
from ..state import Trace, read, undone
from ..state.adapters import Adapters, named_tensors
from ..state.watch import replaced


class Method(torch.nn.Module):
    """A call of `call`, any bound method of `module`, as a module's: what watches modules' calls sees it too."""

    def __init__(self, module: torch.nn.Module, call: Callable):
        super().__init__()
        self.__dict__.update(module=module, forward=call)


def with_weights(
    module: torch.nn.Module, weights: dict[str, torch.Tensor], call: Callable, *args, **kwargs
) -> tuple[object, dict[str, torch.Tensor]]:
    """What `call`, a method of the module, returns while the module has these weights, by name; and the weights afterwards.

    `torch.func.functional_call` does not give a submodule that occurs twice its own weights back (torch 2.13).
    """
    names = {id(tensor): name for name, tensor in named_tensors(module).items() if name in weights}
    owned = (held for owner in module.modules() for held in (owner._parameters, owner._buffers))
    places = [(held, key, names[id(t)]) for held in owned for key, t in held.items() if id(t) in names]
    with replaced((held, key, weights[name]) for held, key, name in places):
        output = Method(module, call)(*args, **kwargs)
        return output, {name: held[key] for held, key, name in reversed(places) if key in held}


def written(
    module: torch.nn.Module, weights: dict[str, torch.Tensor], call: Callable, args, kwargs
) -> tuple[object, dict[str, torch.Tensor]]:
    """As `with_weights`, with those weights only that the call wrote to or replaced."""
    before = {name: weight.jax() for name, weight in weights.items()}
    output, after = with_weights(module, weights, call, *args, **kwargs)
    return output, {name: w for name, w in after.items() if not isinstance(w, Tensor) or w.jax() is not before[name]}


def numbered(
    module: torch.nn.Module, numbers: dict[str, jax.Array], adapters: Adapters
) -> contextlib.AbstractContextManager:
    """While this is open, the module's scales of adapters are those that the program is given, by name as in `State.numbers`."""

    def places():
        for key, array in numbers.items():
            path, place, *number = key.split("/")
            layer = module.get_submodule(path)
            if place != "scale":
                yield layer.scaling, adapters.order[int(place)], Scale(array)
            elif not number:
                yield vars(layer), "scale", Scale(array, layer.scale == 0)
            else:
                scales, n = [*layer.scale], int(*number)
                scales[n] = Scale(array, scales[n] == 0)
                yield vars(layer), "scale", scales

    return replaced(places())


@contextlib.contextmanager
def undone_trace(module: torch.nn.Module) -> Iterator[Trace]:
    """Around a trace: its effects on the module are undone. Gives these as a `Trace`, filled at the end."""
    env = environment()
    drawn = env.draws
    with undone(read(module)) as effects:
        yield effects
    effects.draws += env.draws - drawn


def put(module: torch.nn.Module, name: str, weight: torch.Tensor):
    """Set the module's weight of this name to the value that a call on the chips computed."""
    path, _, name = name.rpartition(".")
    owner, value = module.get_submodule(path), from_numpy(weight.jax()) if on_device(weight) else weight
    before = getattr(owner, name)
    if numpy_dtype(before.dtype) == numpy_dtype(value.dtype):
        value = value.to(before.dtype)  # 64 bits again
    setattr(owner, name, torch.nn.Parameter(value, before.requires_grad) if name in owner._parameters else value)


# Numbers as a program's arguments: upstream's code multiplies and divides by them, and a new value needs no new program


class NumberRead(Exception):
    """A trace read the value of a number that is an argument of its program: the number has to be a constant."""


class Scale:
    """Replaces a Python number in upstream's code. Products with tensors are computed in float32 and rounded once, as in torch.

    Raises NumberRead if its value is read; whether it is zero may be known.
    """

    def __init__(self, array: jax.Array, zero: bool | None = None):
        self.array, self.zero = array, zero

    def __eq__(self, other):
        if self.zero is None or other != 0:
            raise NumberRead
        return self.zero

    def _applied(self, operator, other: Tensor) -> Tensor:
        x = other.jax()
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        return Tensor(operator(wide, self._beside(x)).astype(x.dtype), other._env)

    def _beside(self, x: jax.Array) -> jax.Array:
        return self.array

    def __mul__(self, other):
        if isinstance(other, Tensor):
            return self._applied(jnp.multiply, other)
        return type(self)(self.array * _factor(other))

    __rmul__ = __mul__

    def __truediv__(self, other):
        return type(self)(self.array / _factor(other))

    def __neg__(self):
        return type(self)(-self.array)

    def _read(self, *args):
        raise NumberRead

    __bool__ = __float__ = __int__ = __index__ = __lt__ = __le__ = __gt__ = __ge__ = _read
    __add__ = __radd__ = __sub__ = __rsub__ = __rtruediv__ = __pow__ = __rpow__ = __abs__ = __format__ = _read
    __getitem__ = __iter__ = __len__ = __floordiv__ = __mod__ = __round__ = _read


class Elapsed(Scale):
    """Steps from one call to another, never zero, for each row of the batch [B]."""

    def _beside(self, x: jax.Array) -> jax.Array:
        return self.array.reshape(-1, *[1] * (x.ndim - 1))

    def __sub__(self, since: int):
        return Elapsed(self.array - since)

    def __eq__(self, other):
        return False

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
