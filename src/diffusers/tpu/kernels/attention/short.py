"""Packs short sequences into one long one, in which each sees itself only: e.g. the frames at each position of a video's map.

A grid step of the kernel has an overhead of some 430 bundles (`blocks.PER_STEP`, `PER_PIECE`), as much as the scores of 512 tokens.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..pallas import LANES, ROWS, round_up
from .masks import Mask
from .reference import padded_to


TOKENS = 512  # of a packed sequence; with fewer, and with more, a token takes longer


def number_of(q: Float[Array, "B N T D"], k: Float[Array, "B N T D"]) -> int:
    """How many sequences of the batch are packed into one; 1: none are."""
    batch, _, tokens, _ = q.shape
    short = tokens == k.shape[2] <= LANES
    return math.gcd(batch, TOKENS // round_up(tokens, ROWS)) if short else 1


def together(x: Float[Array, "B N T D"], number: int) -> Float[Array, "b N t D"]:
    """Packs `number` sequences into one, each padded to whole registers."""
    x = padded_to(x, 2, round_up(x.shape[2], ROWS))
    batch, heads, tokens, dim = x.shape
    x = x.reshape(batch // number, number, heads, tokens, dim)
    return jnp.swapaxes(x, 1, 2).reshape(-1, heads, number * tokens, dim)


def apart(x: Float[Array, "b N t D"], number: int, tokens: int) -> Float[Array, "B N T D"]:
    """The inverse of `together`, for sequences of `tokens`."""
    batch, heads, length, dim = x.shape
    x = x.reshape(batch, heads, number, length // number, dim)
    return jnp.swapaxes(x, 1, 2).reshape(-1, heads, length // number, dim)[:, :, :tokens]


def each_by_itself(number: int, tokens: int) -> Mask:
    """The mask of the sequences that `together` packs: each sees its own `tokens` only."""
    length = round_up(tokens, ROWS)
    own = jnp.arange(number * length) % length < tokens
    return Mask(keys=None if length == tokens else own[None, None, None], band=(0, 0), frame=(length, length))
