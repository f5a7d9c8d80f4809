"""Attention masks, split into parts that stay small: by key, by query, by band.

Query i sees key j where every part allows it. Only `Mask.dense` has tokens x tokens entries.
"""

import functools
import itertools
import math
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ..pallas import LANES, parts_of, round_up
from . import provenance
from .sparse import Nearest


BELOW = -1e30  # a bias at or below it hides the key: -inf, and the lowest float32 and bfloat16

Band = tuple[int | None, int | None]
OPEN: Band = (None, None)


def takes_part(values):
    """Which entries of a mask leave the key visible: True, or a bias above `BELOW`. Takes JAX and numpy arrays and scalars."""
    if values.dtype == jnp.bool_:
        return values
    has_lower = float(jnp.finfo(values.dtype).max) > -BELOW  # float16 has no number below it
    return values > (BELOW if has_lower else -math.inf)


def is_bias(values):
    """Which entries of a mask change the score of a visible key."""
    return takes_part(values) & (values != 0) if values.dtype != jnp.bool_ else np.zeros(values.shape, bool)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mask:
    """The parts of a mask; b and n are the batch and the heads, or one.

    Args:
        keys: bool (True takes part), or a bias added to the scaled scores (natural units).
        queries: rows that are False give zeros.
        dense: as `keys`, for every pair.
        band: static (left, right): query i sees keys i - left to i + right; None is open. Causal is (None, 0).
        frame: static (queries, keys) of a frame: the band counts in frames, from the first query and key on.
        whole: static: how many of the first keys `keys` neither hides nor biases.
        product: (by query, by key) factors; their product is added to the scaled scores.
        nearest: static: a video's tokens see those nearest in time and space; only `keys` may be combined with it.
    """

    keys: Bool[Array, "b n 1 S"] | Float[Array, "b n 1 S"] | None = None
    queries: Bool[Array, "b n T 1"] | None = None
    dense: Bool[Array, "b n T S"] | Float[Array, "b n T S"] | None = None
    band: Band | None = field(default=None, metadata={"static": True})
    frame: tuple[int, int] = field(default=(1, 1), metadata={"static": True})
    whole: int = field(default=0, metadata={"static": True})
    product: tuple[Float[Array, "b n T 1"], Float[Array, "b n 1 S"]] | None = None
    nearest: Nearest | None = field(default=None, metadata={"static": True})

    @property
    def kind(self) -> str:
        """ "keys", "outer" (of queries, and keys if any), "causal", "window", either by frame, "dense" or "bias", "product", "nearest",
        joined by +."""
        names = []
        if self.keys is not None or self.queries is not None:
            names.append("keys" if self.queries is None else "outer")
        if self.band is not None:
            by = "" if self.frame == (1, 1) else " by frame"
            names.append(("causal" if self.band == (None, 0) else "window") + by)
        if self.dense is not None:
            names.append("dense" if self.dense.dtype == jnp.bool_ else "bias")
        if self.product is not None:
            names.append("product")
        if self.nearest is not None:
            names.append("nearest")
        return "+".join(names)


def classify(
    mask, batch: int, heads: int, q_len: int, kv_len: int, is_causal=False, window: Band | None = None
) -> Mask | None:
    """A mask of any form that upstream uses, split into parts; None if it has no effect.

    Args:
        mask: None, bool (True takes part) or a bias, broadcastable to [batch, heads, q_len, kv_len].
        window: (left, right) as `Mask.band`.

    Raises:
        ValueError: it does not broadcast.
        TypeError: neither bool nor floating.
    """
    parts = Mask() if mask is None else _parts(mask, (batch, heads, q_len, kv_len))
    left, right = _narrowed(((None, 0) if is_causal else OPEN, window or OPEN, parts.band or OPEN))
    left = None if left is None or left >= q_len - 1 else left  # open where it hides no key
    right = None if right is None or right >= kv_len - 1 else right
    parts = replace(parts, band=None if left is right is None else (left, right))
    return parts if parts.kind else None


def _parts(mask, target: tuple[int, int, int, int]) -> Mask:
    if mask.ndim > 4 or any(m not in (1, t) for m, t in zip(mask.shape[::-1], target[::-1])):
        raise ValueError(
            f"expected an attention mask that broadcasts to [B, N, T, S] = {list(target)}, got {list(mask.shape)}"
        )
    if mask.dtype != jnp.bool_ and not jnp.issubdtype(mask.dtype, jnp.floating):
        raise TypeError(f"expected a bool or floating attention mask, got {mask.dtype}; cast it with .to(torch.bool)")
    shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    known = isinstance(mask, np.ndarray) or (
        not isinstance(mask, jax.core.Tracer) and (mask.is_fully_addressable or mask.is_fully_replicated)
    )
    found = _of_values(np.asarray(mask).reshape(shape)) if known else _of_lineage(mask.reshape(shape))
    keys, queries = found.keys, found.queries
    keys = None if keys is None else jnp.broadcast_to(keys, (*keys.shape[:3], target[3]))
    queries = None if queries is None else jnp.broadcast_to(queries, (*queries.shape[:2], target[2], 1))
    return replace(found, keys=keys, queries=queries)


def _of_lineage(mask: jax.Array) -> Mask:
    """The parts of a traced mask, read from the equations that computed it; key and query axes are full or one."""
    value = provenance.read(mask)
    if isinstance(value, provenance.Choice):
        on, off = (None if is_bias(x) else bool(takes_part(x)) for x in (value.on, value.off))
        if on is not None and on == off:
            return Mask() if on else Mask(keys=jnp.zeros((1, 1, 1, 1), bool))
        if on is not None and off is not None:
            return _of_parts(value.parts if on else (value.where(value.off),))
        value = value.part()
    if 2 not in value.varies:
        return Mask(keys=value.make())
    if (product := _factors(value)) is not None:
        return Mask(product=product)
    return Mask(dense=mask) if 3 in value.varies else Mask(queries=takes_part(value.make()))


def _factors(value: provenance.Part) -> tuple[jax.Array, jax.Array] | None:
    """(by query, by key) factors of the part; None if unknown."""
    sides = sorted(value.factors or (), key=lambda factor: 3 in factor.varies)
    if [{2, 3} & factor.varies for factor in sides] != [{2}, {3}]:
        return None
    queries, keys = (factor.make() for factor in sides)
    return queries, keys


def product_of(mask: jax.Array) -> tuple[jax.Array, jax.Array] | None:
    """(by query, by key) factors of a traced mask [.., T, S], read from the equations that computed it; None if unknown."""
    value = provenance.read(mask.reshape((1,) * (4 - mask.ndim) + mask.shape))
    return _factors(value) if isinstance(value, provenance.Part) else None


def in_scores(q, k, v, mask: Mask | None, scale: float) -> tuple[jax.Array, jax.Array, jax.Array, Mask | None]:
    """(q, k, v, mask) of the same scores without `Mask.product`: it becomes further entries of q and k, or else `Mask.dense`.

    Heads grow to whole rows of lanes; 128 more are free on matrix units of 256 rows. In bfloat16 one factor of q meets three
    entries of k, whose sum is the factor by key over the scale.
    """
    if mask is None or mask.product is None:
        return q, k, v, mask
    queries, keys = mask.product
    if scale == 0 or queries.dtype != q.dtype or keys.shape[1] not in (1, k.shape[1]):
        return q, k, v, replace(mask, dense=queries * keys, product=None)
    # In the product the lowest numbers would become infinite, and infinity times a factor of zero is NaN.
    keys = jnp.clip(keys.astype(jnp.float32), -1e36, 1e36) / scale
    parts = [*parts_of(keys, k.dtype, 1 if k.dtype == jnp.float32 else 3)]
    further = round_up(q.shape[-1] + len(parts), LANES) - q.shape[-1]

    def longer(x, entries):
        # Pad to whole lanes before broadcasting to heads.
        entries = jnp.pad(entries, [(0, 0)] * 3 + [(0, further - len(parts))])
        return jnp.concatenate([x, jnp.broadcast_to(entries, (*x.shape[:3], further))], -1)

    of_queries, of_keys = (
        jnp.concatenate(of, -1) for of in ([queries] * len(parts), [jnp.swapaxes(p, 2, 3) for p in parts])
    )
    left = replace(mask, product=None)
    return longer(q, of_queries), longer(k, of_keys), v, left if left.kind else None


def _of_parts(parts: tuple[provenance.Part, ...]) -> Mask:
    keys, queries, dense, band = [], [], [], OPEN
    for part in parts:
        stripe = part.stripe
        if 2 not in part.varies:
            keys.append(part)
        elif 3 not in part.varies:
            queries.append(part)
        elif stripe is None or {stripe.behind, stripe.ahead} != {2, 3}:
            dense.append(part)
        else:
            sides = None if stripe.low is None else -stripe.low, stripe.high
            band = _narrowed((band, sides if stripe.ahead == 3 else sides[::-1]))
    keys, queries, dense = (
        functools.reduce(jnp.logical_and, [p.make() for p in some]) if some else None
        for some in (keys, queries, dense)
    )
    return Mask(keys, queries, dense, None if band == OPEN else band)


def _of_values(mask: np.ndarray) -> Mask:
    """The parts of a mask whose values are known; key and query axes are full or one.

    Each candidate (visible rows, visible columns, the band around them) covers all visible pairs. One with as many pairs
    as are visible equals the mask.
    """
    b, n, t, s = mask.shape
    columns, rows = np.zeros((b, n, s), bool), np.zeros((b, n, t), bool)
    seen, left, right = 0, -s, -t
    for at, start, values in _blocks(mask):
        if is_bias(values).any():
            return _of_bias(mask)
        allowed = takes_part(values)
        some = allowed.any(1)
        rows[at][start : start + len(values)] = some
        columns[at] |= allowed.any(0)
        seen += np.count_nonzero(allowed)
        places = np.flatnonzero(some) + start
        left = max(left, (places - allowed[some].argmax(1)).max(initial=left))
        right = max(right, (s - 1 - allowed[some, ::-1].argmax(1) - places).max(initial=right))
    left, right = int(left), int(right)
    for band in (OPEN, (None, right), (left, None), (left, right)):
        for queries, keys in itertools.product((None, rows), (None, columns)):
            if _pairs(keys, queries, band, mask.shape) == seen:
                keys = None if keys is None else jnp.asarray(keys[:, :, None])
                queries = None if queries is None else jnp.asarray(queries[..., None])
                return Mask(keys, queries, band=None if band == OPEN else band)
    return Mask(dense=jnp.asarray(takes_part(mask)))


def _blocks(mask: np.ndarray):
    """(batch and head, first row, rows) of a mask, a few megabytes at a time."""
    step = max(1, (1 << 22) // mask.shape[3])
    for at in np.ndindex(mask.shape[:2]):
        for start in range(0, mask.shape[2], step):
            yield at, start, mask[at][start : start + step]


def _pairs(keys, queries, band: Band, shape) -> int:
    """How many pairs a mask of bool keys [b, n, s], queries [b, n, t] and a band allows."""
    b, n, t, s = shape
    ones = np.ones((b, n, s), bool) if keys is None else keys
    before = np.concatenate([np.zeros((b, n, 1), np.int64), np.cumsum(ones, -1, dtype=np.int64)], -1)
    places, (left, right) = np.arange(t), band
    first = np.zeros(t, int) if left is None else np.clip(places - left, 0, s)
    stop = np.full(t, s) if right is None else np.clip(places + right + 1, 0, s)
    counts = before[..., np.maximum(first, stop)] - before[..., first]
    return int((counts if queries is None else counts * queries).sum())


def _of_bias(mask: np.ndarray) -> Mask:
    if all(np.array_equal(rows, np.broadcast_to(mask[at][:1], rows.shape)) for at, _, rows in _blocks(mask)):
        return Mask(keys=jnp.asarray(mask[:, :, :1]))
    if all(np.array_equal(rows, np.broadcast_to(rows[:, :1], rows.shape)) for _, _, rows in _blocks(mask)):
        queries = takes_part(mask[..., :1])
        return Mask() if queries.all() else Mask(queries=jnp.asarray(queries))
    return Mask(dense=jnp.asarray(mask))


def with_length(mask: Mask | None, kv_len: int | jax.Array, s_len: int) -> Mask | None:
    """The mask with keys from `kv_len` on, of `s_len`, hidden as well (a bias becomes -inf there)."""
    if isinstance(kv_len, int) and kv_len == s_len:
        return mask
    mask = mask or Mask()
    valid = (jnp.arange(s_len) < kv_len)[None, None, None]
    if mask.keys is None:
        keys = valid
    else:
        keys = mask.keys & valid if mask.keys.dtype == jnp.bool_ else jnp.where(valid, mask.keys, -jnp.inf)
    return replace(mask, keys=keys)


def _narrowed(bands) -> Band:
    """The intersection of the bands."""
    left, right = ([x for x in side if x is not None] for side in zip(*bands))
    return min(left, default=None), min(right, default=None)
