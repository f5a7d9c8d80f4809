"""What a forward returns, flattened into tensors and static parts; and upstream's return value, rebuilt from other tensors."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from itertools import compress

import jax
import torch
from torch.utils._pytree import TreeSpec, register_pytree_node, tree_flatten, tree_leaves, tree_unflatten

from ....models.autoencoders.vae import DiagonalGaussianDistribution
from ...bridge import Decisions, Tensor, on_device, storage
from ..state import Written, opened


class TENSOR:
    """Among static leaves, where a tensor is."""


PLAIN = (torch.Tensor, type(None), bool, int, float, str, torch.dtype, torch.device)  # hides no tensors


def flattened(tree, plain: Callable = lambda leaf: leaf) -> tuple[list[Tensor], TreeSpec, tuple]:
    """The tensors of a tree, its spec and its static leaves. `plain`: leaf that is no tensor -> what is stored for it."""
    flat, spec = tree_flatten(tree)
    found = [isinstance(x, Tensor) for x in flat]
    return [*compress(flat, found)], spec, tuple(TENSOR if tensor else plain(x) for x, tensor in zip(flat, found))


def unflattened(spec: TreeSpec, leaves: Iterable, tensors: Iterable):
    tensors = iter(tensors)
    return tree_unflatten([next(tensors) if leaf is TENSOR else leaf for leaf in leaves], spec)


@dataclass(eq=False)
class TraceResult:
    """What a trace found beside its arrays, which are those of the return value, of writes to arguments and of the step cache.

    Attributes:
        spec, leaves: the flattened return value; TENSOR stands for an array.
        written: what the call leaves in its arguments.
        results, form: how many of the last arrays the step cache keeps, and their static form.
        decisions: branches on values, with the values of this call. avals: shapes and dtypes of weights, inputs and numbers.
    """

    spec: TreeSpec
    leaves: tuple
    written: Written = field(default_factory=Written)
    results: int = 0
    form: Hashable = None
    decisions: Decisions | None = None
    avals: tuple = ()

    def output(self, tensors: list):
        """Upstream's return value with these tensors in place of the traced ones."""
        return unflattened(self.spec, self.leaves, tensors)

    def __getstate__(self) -> dict:
        """Pickled for another process, without `decisions` and `avals`, which only a trace needs."""
        return vars(self) | {"decisions": None, "avals": ()}


class NoProgram(NotImplementedError):
    """The call cannot be compiled: the message says why."""


class WeightWritten(NoProgram):
    """The trace wrote to a parameter or buffer."""


class Entangled(NoProgram):
    """A part of a model shares memory with its caller."""


def refuse_shared(given: list[Tensor], arrays: list[jax.Array], output):
    """Raises Entangled if a call wrote to its arguments or returned one: the caller may read them afterwards."""
    if any(tensor.jax() is not array for tensor, array in zip(given, arrays)):
        raise Entangled("it writes into an argument")
    own = {id(array) for array in arrays}
    answers = (x for x in tree_leaves(opened(output)) if on_device(x))
    if any(id(storage(x)) in own for x in answers):
        raise Entangled("it answers with an argument")


def plain(leaf):
    """A static part of a return value. Raises NoProgram for an object that may hide tensors, whose values would be lost."""
    if leaf is None or isinstance(leaf, (bool, int, float, str)):
        return leaf
    raise NoProgram(
        f"expected tensors, plain values or pytrees of them in a model's output, got {type(leaf).__name__}; register it with"
        " torch.utils._pytree"
    )


# A VAE's posterior is its parameters; mean, variance and samples are computed from them where they are used.
register_pytree_node(
    DiagonalGaussianDistribution,
    lambda posterior: ([posterior.parameters], posterior.deterministic),
    lambda leaves, deterministic: DiagonalGaussianDistribution(*leaves, deterministic=deterministic),
)
