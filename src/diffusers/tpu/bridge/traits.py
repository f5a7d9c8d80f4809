"""What a torch function or operator does, as far as the environment treats it differently."""

import functools
from dataclasses import dataclass

import torch
from torchax.tensor import TENSOR_CONSTRUCTORS

from . import host_values
from .on_host import is_draw


RANDOM_CONSTRUCTORS = {torch.randn, torch.rand, torch.randint, torch.randperm}


@dataclass(frozen=True)
class Traits:
    """What a torch function or operator does: it `draws` random numbers, `draws_new` tensors of them, `constructs` a tensor, makes
    one of `lists` (`torch.tensor`), `moves` one between devices, `asks` for a tensor's value."""

    name: str
    is_overload: bool
    draws: bool
    draws_new: bool
    constructs: bool
    lists: bool
    moves: bool
    asks: bool
    pointwise: bool


@functools.cache
def traits_of(func) -> Traits:
    is_overload = isinstance(func, torch._ops.OpOverload)
    name = func.name() if is_overload else func.__name__
    return Traits(
        name=name,
        is_overload=is_overload,
        draws=is_draw(func),
        draws_new=func in RANDOM_CONSTRUCTORS,
        constructs=func in TENSOR_CONSTRUCTORS,
        lists=func == torch.tensor,  # true for its replacement as well (`idioms`)
        moves=func == torch.Tensor.to or "_to_copy" in name or "lift_fresh" in name,
        asks=func in host_values.ASKING,
        pointwise=is_overload and torch.Tag.pointwise in func.tags,
    )
