"""What a result was made of, for whoever reads it next and can do the whole at once: what came between is dead code then."""

from typing import NamedTuple

import jax
from torchax.tensor import Tensor

from ..kernels.settings import Settings


def made_of(result: Tensor, operator, *operands) -> Tensor:
    """The result, which remembers of what `operator` made it: who reads it next may do that operator's work with its own.

    In a trace only: elsewhere it would keep the operands' memory.
    """
    if isinstance(result.jax(), jax.core.Tracer):
        result._made = result.jax(), operator, operands
    return result


def operands(x, operator) -> tuple | None:
    """What `operator` made x of; None where another did, or x was written to since."""
    array, made_by, of = getattr(x, "_made", (None, None, None))
    return of if made_by is operator and x.jax() is array else None


def beside(result: Tensor, first: jax.Array, last: jax.Array) -> Tensor:
    """The result, in whose last axis two arrays lie side by side."""
    return made_of(result, beside, first, last)


def same_as(x: Tensor) -> Tensor:
    """Another tensor of x's values, which remembers what x does."""
    result = Tensor(x.jax(), x._env)
    if hasattr(x, "_made"):
        result._made = x._made
    return result


class Layer(NamedTuple):
    """What a linear layer made a result of. `sizes`: of the map [B, N, *sizes] that the result [B, T, N] is for upstream; None: none."""

    x: jax.Array
    w: jax.Array
    b: jax.Array | None
    settings: Settings
    lies: dict  # as `kernels.linear` takes it
    sizes: tuple[int, ...] | None = None
    by_kernel: bool = True


def of_layer(result: Tensor, layer: Layer) -> Tensor:
    """The result, which remembers its layer."""
    return made_of(result, Layer, layer)


def layer_of(x, by_kernel: bool = True) -> Layer | None:
    """The layer that x comes from as it is, of any where not `by_kernel`; None where it comes from none."""
    (layer,) = operands(x, Layer) or (None,)
    return layer if layer is None or layer.by_kernel or not by_kernel else None


class Widened(NamedTuple):
    """What was made of a narrower array by a cast, and what that comes from: a layer, or a norm; None: another operator."""

    narrow: jax.Array
    layer: Layer | None
    norm: tuple | None


def widened(x) -> Widened | None:
    """How x was widened; None where it was not."""
    of = operands(x, Widened)
    return of and Widened(*of)
