"""Records of what a result was made of. A later operator may compute the whole chain; the steps between are then dead code."""

from typing import NamedTuple

import jax
from torchax.tensor import Tensor

from ..kernels.settings import Settings


def made_of(result: Tensor, operator, *operands) -> Tensor:
    """The result; records that `operator` made it of `operands`, so that a later operator can fuse that step with its own.

    In a trace only: elsewhere the record would keep the operands' memory.
    """
    if isinstance(result.jax(), jax.core.Tracer):
        result._made = result.jax(), operator, operands
    return result


def operands(x, operator) -> tuple | None:
    """The operands that `operator` made x of; None where another operator did, or x was written to since."""
    array, made_by, of = getattr(x, "_made", (None, None, None))
    return of if made_by is operator and x.jax() is array else None


def beside(result: Tensor, first: jax.Array, last: jax.Array) -> Tensor:
    """The result; records the two arrays that it concatenates along its last axis."""
    return made_of(result, beside, first, last)


def same_as(x: Tensor) -> Tensor:
    """A new tensor of x's array, with x's record."""
    result = Tensor(x.jax(), x._env)
    if hasattr(x, "_made"):
        result._made = x._made
    return result


class Layer(NamedTuple):
    """The operands of a linear layer. `sizes`: of upstream's map [B, N, *sizes] if the result [B, T, N] is one; None: no map."""

    x: jax.Array
    w: jax.Array
    b: jax.Array | None
    settings: Settings
    lies: dict  # keyword arguments of `kernels.linear.linear`
    sizes: tuple[int, ...] | None = None
    by_kernel: bool = True


def of_layer(result: Tensor, layer: Layer) -> Tensor:
    """The result; records its layer."""
    return made_of(result, Layer, layer)


def layer_of(x, by_kernel: bool = True) -> Layer | None:
    """The layer whose unchanged result x is, or None. `by_kernel`: only one that the kernel computed."""
    (layer,) = operands(x, Layer) or (None,)
    return layer if layer is None or layer.by_kernel or not by_kernel else None


class Widened(NamedTuple):
    """A narrower array that was cast, and the layer or the norm that it comes from; None: another operator."""

    narrow: jax.Array
    layer: Layer | None
    norm: tuple | None


def widened(x) -> Widened | None:
    """The record of the cast that widened x, or None."""
    of = operands(x, Widened)
    return of and Widened(*of)
