"""The only importer of torchax: its environment, operators, and tensors that cross between torch and JAX."""

import jax
import torch
from accelerate.hooks import ModelHook

from ..chips.hosts import put
from ..idioms import overloads
from ..weights.convert import as_numpy, from_numpy, numpy_dtype


overloads.serve()  # before any import of torchax, whose tables name overloads that torch has removed

import torchax.decompositions
import torchax.ops.jaten
from torchax.tensor import OperatorNotFound, Tensor

from . import autocast
from .decisions import Decisions, Guard, deciding
from .environment import DEVICE, Deferred, environment, on_device, quiet_integers
from .host_values import READS, ValueRead, plain
from .host_values import apart as known_apart
from .host_values import of_tensor as known_values
from .indexing import whole_on_chips
from .joined import rotated
from .layers import by_output, lying, unpacked
from .lines import Line, asked_by_ours, line_of, raised_inside, whole_tracebacks
from .on_host import is_refused
from .operators import scaled_dot_product_attention
from .views import decomposing, parts, storage


def to_jax(tensor: torch.Tensor, sharding) -> jax.Array:
    """A device tensor's array, or a host tensor's values as they are now, placed by `sharding`."""
    return put(tensor.jax() if on_device(tensor) else as_numpy(tensor, own=True), sharding)


def to_torch(array: jax.Array) -> torch.Tensor:
    """A device tensor around an array."""
    return Tensor(array, environment())


class ExecutionDevice(ModelHook):
    """An accelerate hook that tells upstream's glue where a module's inputs go: the module's own tensors are on the host.

    `former`: the hook that the module had before.
    """

    def __init__(self, former: ModelHook | None):
        self.former = former

    @property
    def execution_device(self) -> torch.device | None:
        return DEVICE if environment().active else None


def write(tensor: torch.Tensor, value: torch.Tensor):
    """Write these values into a host or device tensor in place; its views change too."""
    if on_device(tensor):
        with environment(), torch.no_grad():
            tensor.copy_(value)
    else:
        with plain(), torch.no_grad():
            tensor.copy_(value if not on_device(value) else from_numpy(value.jax()))
