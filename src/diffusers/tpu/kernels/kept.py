"""Results by name, of which scanned blocks keep some for the way back and compute the others again."""

import contextvars
import itertools

from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from .settings import bound, current


ATTENTION = "attention"  # what is always kept: half of a block's time for as much memory as its inputs
EXCHANGE = 10_000  # products that a chip computes of each number while it exchanges that: v6e, over eight chips
_numbers = contextvars.ContextVar("diffusers_tpu_kept", default=None)


def numbered_anew():
    """A context in which results are numbered from the first on: the same ones of each trace of a block."""
    return bound(_numbers, itertools.count())


def _named(x: Array, products: int) -> Array:
    if not current().differentiable:
        return x
    return checkpoint_name(x, f"{products} products, {next(_numbers.get() or itertools.count())}")


def layer_result(x: Array, depth: int) -> Array:
    """x of a layer that sums `depth` products for each number."""
    return _named(x, depth)


def exchanged(*arrays: Array) -> list[Array]:
    """q, k and v [B, N, T, D] as a chip has them after the exchange."""
    return [_named(x, EXCHANGE) for x in arrays]


def worth(name: str) -> int:
    """Products that a number of this name takes."""
    return int(name.split()[0])
