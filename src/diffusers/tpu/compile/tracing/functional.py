"""Calls of a module's method with other weights and numbers than the module's own."""

import contextlib
from collections.abc import Callable, Iterator

import jax
import torch

from ...bridge import Tensor
from ...bridge.environment import environment, on_device
from ...weights.convert import from_numpy, numpy_dtype
from ..state import Number, Trace, read, undone
from ..state.adapters import Adapters
from ..state.watch import replaced
from .scale import Scale


class Method(torch.nn.Module):
    """`call`, any bound method of `module`, as a forward, so that functional_call can swap the module's weights."""

    def __init__(self, module: torch.nn.Module, call: Callable):
        super().__init__()
        self.module = module
        self.__dict__["call"] = call

    def forward(self, *args, **kwargs):
        return self.call(*args, **kwargs)


class WeightWritten(Exception):
    """A trace wrote into a parameter or buffer: its message names which."""


def written(method: Method, weights: dict[str, torch.Tensor], args, kwargs) -> tuple[object, dict[str, torch.Tensor]]:
    """What the method returns with these weights, by `module.NAME`; and those of them that it wrote into, or replaced."""
    before = {name: weight.jax() for name, weight in weights.items()}
    output = torch.func.functional_call(method, weights, args, kwargs)  # puts what is there afterwards into `weights`
    after = {name: w for name, w in weights.items() if not isinstance(w, Tensor) or w.jax() is not before[name]}
    return output, {name.removeprefix("module."): weight for name, weight in after.items()}


def numbered(
    module: torch.nn.Module, numbers: dict[str, jax.Array], adapters: Adapters
) -> contextlib.AbstractContextManager:
    """While this is open, the module's numbers are those that the program is given, by `str(Number)`."""
    found = ((Number.parse(key), array) for key, array in numbers.items())
    return replaced((n.holder(module), adapters.order[n.adapter], Scale(array)) for n, array in found)


@contextlib.contextmanager
def undone_trace(module: torch.nn.Module) -> Iterator[Trace]:
    """Around a trace: what it does to the module is undone. Gives what could not be, filled at the end: then no program stands for it."""
    env = environment()
    drawn = env.draws
    with undone(read(module)) as effects:
        yield effects
    effects.draws += env.draws - drawn


def put(module: torch.nn.Module, name: str, weight: torch.Tensor):
    """The module's own weight of this name is what a call on the chips made of it."""
    path, _, name = name.rpartition(".")
    owner, value = module.get_submodule(path), from_numpy(weight.jax()) if on_device(weight) else weight
    before = getattr(owner, name)
    if numpy_dtype(before.dtype) == numpy_dtype(value.dtype):
        value = value.to(before.dtype)  # 64 bits again
    setattr(owner, name, torch.nn.Parameter(value, before.requires_grad) if name in owner._parameters else value)
