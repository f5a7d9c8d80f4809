"""What is static of one call of the attention kernel, and what its parts have in common."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .blocks import Blocks


SUBLANES = 8
LOWEST = -1e30  # where the running maximum starts
MASKED = -3e38  # a masked score: far enough below LOWEST that its exponential is 0 there too
LOG2_E = math.log2(math.e)
SKIPPED, WHOLE, MIXED = 0, 1, 2  # of a block of keys: none takes part, all do as they are, neither


@dataclass(frozen=True)
class Call:
    """What is static of one call.

    Attributes:
        names: of the references, in the order in which the kernel gets them.
        ways: those that are compiled (see `ways`).
        factor: scale * log2 e, positive: scores times this are exponents of 2.
        limit: the largest bound for which the way "centred" is exact.
        folded: how many matrices of q's dtype add up to q * factor, to float32 or to 2^-17 of it, one below the other; 0
            where there is no room for them and scores are multiplied by the factor instead.
        twice: the keys beside themselves, which they then meet, are laid out once per block: not whole vector registers.
        keys, dense: there is a mask by key; of queries x keys.
        whole: so many first keys the mask by key leaves as they are.
        row_of_keys, row_of_kv: from a program's first index to the row of the key mask, of keys and values.
    """

    blocks: Blocks
    names: tuple[str, ...]
    q_len: int
    kv_len: int
    ways: tuple[str, ...]
    factor: float
    limit: float
    folded: int
    twice: bool
    band: tuple[int | None, int | None] | None
    frame: tuple[int, int]
    keys: bool
    whole: int
    dense: bool
    dtype: jnp.dtype
    row_of_keys: object = None
    row_of_kv: object = None

    @property
    def kv_blocks(self) -> int:
        return pl.cdiv(self.kv_len, self.blocks.keys)

    @property
    def ragged(self) -> bool:
        return self.kv_len % self.blocks.keys != 0

    @property
    def before_last(self) -> int:
        """Keys of all blocks but the last."""
        return (self.kv_blocks - 1) * self.blocks.keys

    @property
    def cut_at_end(self) -> bool:
        """No score counts other than as it is, but in the last block of keys."""
        return not (self.dense or self.band) and (not self.keys or self.whole >= self.before_last)

    def ends(self, shift, row):
        """`band_ends` of this call."""
        return band_ends(self.band, self.frame, shift, row)

    @property
    def precision(self):
        # Products of bfloat16 operands are exact; asked for more, the compiler refuses them.
        return lax.Precision.HIGHEST if self.dtype == jnp.float32 else lax.Precision.DEFAULT


def band_ends(band, frame, shift, row):
    """The first and last key that query `row` may see, a number or several; None where the band is open."""
    (left, right), (queries, keys) = band, frame
    own = row + shift if frame == (1, 1) else _whole_part(row, queries)
    low = None if left is None else (own - left) * keys
    high = None if right is None else (own + right + 1) * keys - 1
    return low, high


def _whole_part(x, divisor: int):
    if getattr(x, "ndim", 0) == 0:
        return x // divisor
    # the vector units divide floats alone; half a step away from any whole number they are right up to 2^22
    return jnp.floor((x.astype(jnp.float32) + 0.5) * (1 / divisor)).astype(jnp.int32)
