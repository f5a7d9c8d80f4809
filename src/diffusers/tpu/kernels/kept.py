"""Results by name, of which scanned blocks keep some for the way back and compute the others again."""

import contextvars
import itertools

from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from ..chips.figures import chip_of
from .settings import bound, current


ATTENTION = "attention"  # what is always kept: half of a block's time for as much memory as its inputs
# Bytes of memory that a number's way takes which is kept: into the stack and out of it, each a copy (two bytes, v6e).
MOVED = 12
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


def exchanged(x: Array) -> Array:
    """q, k or v [B, N, T, D] as a chip has it after the exchange."""
    return _named(x, EXCHANGE)


def is_worth_its_room(products: int, generation: str | None) -> bool:
    """Whether a number that takes so many takes longer to compute again than to be kept."""
    chip = chip_of(generation)
    return 2 * products / chip.flops > MOVED / chip.hbm_bandwidth


def worth(name: str) -> int:
    """Products that a number of this name takes."""
    return int(name.split()[0])
