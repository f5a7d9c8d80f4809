"""Names of results in a trace that will be differentiated: by them scanned blocks keep some and compute the others again."""

import contextvars
import itertools

from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from ..chips.figures import chip_of
from .settings import bound, current


ATTENTION = "attention"  # always kept: saves half of a block's time for as much memory as its inputs
# Bytes of HBM traffic to keep one number: into the stack of all blocks and out of it, each a copy (two bytes, v6e).
MOVED = 12
EXCHANGE = 10_000  # products that a chip computes in the time to exchange a number: v6e, over eight chips
_numbers = contextvars.ContextVar("diffusers_tpu_kept", default=None)


def numbered_anew():
    """A context in which results are numbered from zero, so that every trace of a block has the same names."""
    return bound(_numbers, itertools.count())


def _named(x: Array, products: int) -> Array:
    if not current().differentiable:
        return x
    return checkpoint_name(x, f"{products} products, {next(_numbers.get() or itertools.count())}")


def layer_result(x: Array, depth: int) -> Array:
    """Names x, the result of a layer that sums `depth` products for each number."""
    return _named(x, depth)


def exchanged(x: Array) -> Array:
    """Names q, k or v [B, N, T, D] as a chip has it after the exchange."""
    return _named(x, EXCHANGE)


def is_worth_its_room(products: int, generation: str | None) -> bool:
    """Whether it takes longer to compute a number of so many products again than to keep it."""
    chip = chip_of(generation)
    return 2 * products / chip.flops > MOVED / chip.hbm_bandwidth


def worth(name: str) -> int:
    """Products of each number of the result with this name."""
    return int(name.split()[0])
