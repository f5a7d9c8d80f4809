"""What the ways of the attention kernel are chosen by (see `ways`), of the keys and values of each head.

A mean, a few maxima: where keys lie split over chips, each takes those of its own, and collectives of a few kilobytes make
them everyone's. So nothing of the size of the keys is joined for their sake.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from .blocks import LANES
from .kernel_call import SUBLANES
from .key_norms import LEAST_ROWS, longest
from .softmax_modes import SMALLEST


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


def mean_key(
    k: Float[Array, "B K S D"],
    seen: Bool[Array, "B|1 K|1 S 1"] | Int[Array, ""] | None = None,
    axis: str | None = None,
    chips: int = 1,
    beside: tuple | None = None,
) -> Float[Array, "B K 8 D"]:
    """`KeyBounds.centre` of a head's keys, the same on all chips.

    Args:
        seen: keys that some query sees, or how many of the first; None: all. Others may hold anything, NaN too.
        axis: of the mesh, over which `chips` chips hold other keys of the same heads.
        beside: (keys, which are seen) of the same heads that every chip has whole.
    """
    total = functools.partial(lax.psum, axis_name=axis) if axis else lambda x: x
    batch, heads, tokens, dim = k.shape
    if seen is None:
        count, sums = tokens * chips, _by_token(k).astype(jnp.float32).sum(1).reshape(batch, heads, dim)
    elif seen.ndim == 0:
        count = jnp.maximum(total(seen), 1)
        wide = jnp.where(jnp.arange(tokens)[:, None] < seen, _by_token(k).astype(jnp.float32), 0.0)
        sums = wide.sum(1).reshape(batch, heads, dim)
    else:
        count = jnp.maximum(total(seen.sum(2)), 1)
        sums = jnp.where(seen, k.astype(jnp.float32), 0.0).sum(2)
    sums = total(sums)
    if beside is not None:
        others, seen = beside
        wide = others.astype(jnp.float32)
        sums = sums + (wide if seen is None else jnp.where(seen, wide, 0.0)).sum(2)
        count = count + (others.shape[2] if seen is None else seen.sum(2))
    return _as_rows(sums / count, k.dtype)


def key_bounds(
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S E"],
    centre: Float[Array, "B K 8 D"],
    seen: Bool[Array, "B|1 K|1 S 1"] | Int[Array, ""] | None = None,
    axis: str | None = None,
    chips: int = 1,
    interpret=None,
    beside: tuple | None = None,
) -> KeyBounds:
    """The bounds of a head's keys and values around their `mean_key`; the other arguments are that function's.

    Args:
        interpret: how a kernel for it runs; None: without one.
        beside: (keys, values, which are seen) that every chip has whole.
    """
    highest = functools.partial(lax.pmax, axis_name=axis) if axis else lambda x: x
    point = centre.astype(jnp.float32).sum(2)
    reach, radius, largest = (highest(x) for x in _measured(k, v, point, seen, interpret))
    tokens = k.shape[2] * chips
    if beside is not None:
        tokens += beside[0].shape[2]
        others = _measured(*beside[:2], point, beside[2], None)
        reach, radius, largest = (jnp.maximum(x, y) for x, y in zip((reach, radius, largest), others))
    room = LARGEST - jnp.log2(tokens * jnp.maximum(largest, 1.0))
    reach = jnp.where(room > 0, reach * jnp.maximum(SMALLEST / room, 1.0), jnp.inf)
    return KeyBounds(reach, centre, radius)


def _measured(k, v, point, seen, interpret):
    """max |k|, max |k - point|, max |v|, by head."""

    own = seen if seen is not None and seen.ndim == 0 else None
    if own is not None:
        seen = jnp.arange(k.shape[2])[:, None] < own

    def among_seen(x):
        return x if seen is None else jnp.where(seen, x, 0.0)

    by_kernel = interpret is not None and (seen is None or own is not None)
    if by_kernel and k.shape[3] % LANES == 0 and (interpret or k.shape[2] >= LEAST_ROWS):
        reach, radius = longest(_by_token(k), point, interpret, own)
    else:
        wide = among_seen(k.astype(jnp.float32))
        reach, radius = _longest(wide), _longest(among_seen(wide - point[:, :, None]))
    return reach, radius, jnp.abs(among_seen(v.astype(jnp.float32))).max((2, 3))


def _by_token(k: Float[Array, "B K S D"]) -> Float[Array, "B S K*D"]:
    """As linear layers give them: widened to float32 on the way to a sum, not in memory."""
    return jnp.swapaxes(k, 1, 2).reshape(k.shape[0], k.shape[2], -1)


def _as_rows(mean, dtype) -> Float[Array, "B K 8 D"]:
    rows, left = [], mean
    for _ in range(1 if dtype == jnp.float32 else 3):
        rows.append(left.astype(dtype))
        left = left - rows[-1].astype(jnp.float32)
    rows += [jnp.zeros_like(rows[0])] * (SUBLANES - len(rows))
    return jnp.stack(rows, 2)


def _longest(x: Float[Array, "B K S D"]) -> Float[Array, "B K"]:
    return jnp.sqrt((x * x).sum(-1).max(-1))
