"""Short sequences one after another as one, each seeing itself: the frames of each position of a video's map, say.

A program of the kernel takes some 430 bundles whatever it computes (`blocks.PER_STEP`, `PER_PIECE`), as many as the scores of 512 tokens.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..pallas import LANES, ROWS, round_up
from .masks import Mask
from .reference import padded_to


TOKENS = 512  # of what they become: with fewer and with more a token takes longer


def number_of(q: Float[Array, "B N T D"], k: Float[Array, "B N T D"]) -> int:
    """How many sequences of the batch become one; 1: none do."""
    batch, _, tokens, _ = q.shape
    short = tokens == k.shape[2] <= LANES
    return math.gcd(batch, TOKENS // round_up(tokens, ROWS)) if short else 1


def together(x: Float[Array, "B N T D"], number: int) -> Float[Array, "b N t D"]:
    """So many sequences as one, each filled up to whole registers."""
    x = padded_to(x, 2, round_up(x.shape[2], ROWS))
    batch, heads, tokens, dim = x.shape
    x = x.reshape(batch // number, number, heads, tokens, dim)
    return jnp.swapaxes(x, 1, 2).reshape(-1, heads, number * tokens, dim)


def apart(x: Float[Array, "b N t D"], number: int, tokens: int) -> Float[Array, "B N T D"]:
    """The sequences of `tokens` that `together` has put together."""
    batch, heads, length, dim = x.shape
    x = x.reshape(batch, heads, number, length // number, dim)
    return jnp.swapaxes(x, 1, 2).reshape(-1, heads, length // number, dim)[:, :, :tokens]


def each_by_itself(number: int, tokens: int) -> Mask:
    """The mask of what `together` gives of sequences of so many tokens."""
    length = round_up(tokens, ROWS)
    own = jnp.arange(number * length) % length < tokens
    return Mask(keys=None if length == tokens else own[None, None, None], band=(0, 0), frame=(length, length))
