"""What a torch function or operator does, as far as the environment treats it differently."""

import functools

import torch
from torchax.tensor import TENSOR_CONSTRUCTORS

from . import host_values
from .on_host import is_draw


RANDOM_CONSTRUCTORS = {torch.randn, torch.rand, torch.randint, torch.randperm}


class Traits:
    """What a torch function or operator does: it `draws` random numbers, `draws_new` tensors of them, `constructs` a tensor, makes
    one of `lists` (`torch.tensor`), `moves` one between devices, `asks` for a tensor's value."""

    def __init__(self, func):
        self.is_overload = isinstance(func, torch._ops.OpOverload)
        self.name = func.name() if self.is_overload else func.__name__
        self.draws = is_draw(func)
        self.draws_new = func in RANDOM_CONSTRUCTORS
        self.constructs = func in TENSOR_CONSTRUCTORS
        self.lists = func == torch.tensor  # true for its replacement as well (`idioms`)
        self.moves = func == torch.Tensor.to or "_to_copy" in self.name or "lift_fresh" in self.name
        self.asks = func in host_values.ASKING
        self.pointwise = self.is_overload and torch.Tag.pointwise in func.tags


traits_of = functools.cache(Traits)
