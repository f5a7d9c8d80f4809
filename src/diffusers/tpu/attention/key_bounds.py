"""What the ways of the attention kernel are chosen by (see `ways`), of the keys and values of each head.

A mean, a few maxima: where keys lie split over chips, each takes those of its own, and collectives of a few kilobytes make
them everyone's. So nothing of the size of the keys is joined for their sake.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from .kernel_call import SUBLANES
from .ways import SMALLEST


LARGEST = 126.0  # exponent of the largest sum


@dataclass(frozen=True)
class KeyBounds:
    """Of the keys that some query sees, per head of keys.

    Attributes:
        reach: max |k|; larger where exponentials of 2^SMALLEST times the values do not add up to a float32.
        centre: their mean c, as rows in the keys' dtype that add up to it: one row of bfloat16 would be off by as much as
            keys may differ.
        radius: max |k - c|.
    """

    reach: Float[Array, "B K"]
    centre: Float[Array, "B K 8 D"]
    radius: Float[Array, "B K"]


jax.tree_util.register_dataclass(KeyBounds, data_fields=["reach", "centre", "radius"], meta_fields=[])


def key_bounds(
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S E"],
    seen: Bool[Array, "B|1 K|1 S 1"] | None = None,
    axis: str | None = None,
    chips: int = 1,
) -> KeyBounds:
    """The bounds of a head's keys and values.

    Args:
        seen: keys that some query sees; None: all. Others may hold anything, NaN too.
        axis: of the mesh, over which `chips` chips hold other keys of the same heads; the answer is the same on all of them.
    """

    def highest(x):
        return lax.pmax(x, axis) if axis else x

    def total(x):
        return lax.psum(x, axis) if axis else x

    def among_seen(x):
        return x if seen is None else jnp.where(seen, x, 0.0)

    k32, v32 = (among_seen(x.astype(jnp.float32)) for x in (k, v))
    count = k.shape[2] * chips if seen is None else jnp.maximum(total(seen.sum(2)), 1)
    rows = _as_rows(total(k32.sum(2)) / count, k.dtype)
    radius = highest(_longest(among_seen(k32 - rows.astype(jnp.float32).sum(2)[:, :, None])))
    room = LARGEST - jnp.log2(k.shape[2] * chips * jnp.maximum(highest(jnp.abs(v32).max((2, 3))), 1.0))
    reach = jnp.where(room > 0, highest(_longest(k32)) * jnp.maximum(SMALLEST / room, 1.0), jnp.inf)
    return KeyBounds(reach, rows, radius)


def _as_rows(mean, dtype) -> Float[Array, "B K 8 D"]:
    rows, left = [], mean
    for _ in range(1 if dtype == jnp.float32 else 3):
        rows.append(left.astype(dtype))
        left = left - rows[-1].astype(jnp.float32)
    rows += [jnp.zeros_like(rows[0])] * (SUBLANES - len(rows))
    return jnp.stack(rows, 2)


def _longest(x: Float[Array, "B K S D"]) -> Float[Array, "B K"]:
    return jnp.sqrt((x * x).sum(-1).max(-1))
