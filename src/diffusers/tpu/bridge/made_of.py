"""What a result was made of, for whoever reads it next and can do the whole at once: what came between is dead code then."""

from typing import NamedTuple

import jax
from torchax.tensor import Tensor


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


def same_as(x: Tensor) -> Tensor:
    """Another tensor of x's values, which remembers what x does."""
    result = Tensor(x.jax(), x._env)
    if hasattr(x, "_made"):
        result._made = x._made
    return result


class Widened(NamedTuple):
    """What was made of a narrower array by a cast, and what that comes from: a layer, or a norm; None: another operator."""

    narrow: jax.Array
    layer: tuple | None
    norm: tuple | None


def widened(x) -> Widened | None:
    """How x was widened; None where it was not."""
    of = operands(x, Widened)
    return of and Widened(*of)
