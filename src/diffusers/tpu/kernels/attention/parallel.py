"""Attention over a mesh: batch on `dp`, heads on `tp`, the sequence on `sp`.

Keys as long as the queries are split with them, and `sp` is ring x ulysses chips. In each group of `ulysses` chips, as
many as divide the heads, an all-to-all trades sequence for heads and back (Ulysses; Jacobs et al. 2023). Around the ring
of the groups the keys travel (Ring Attention; Liu et al. 2023): hop h gives out_h and lse_h of one chunk of the keys, and

    lse' = log(e^lse + e^lse_h);   out' = out e^(lse - lse') + out_h e^(lse_h - lse')        in float32.

`ulysses` is the inner factor: what a chip holds after the all-to-all is one chunk of the sequence without gaps. A sequence
that `sp` does not divide is padded, and its padding masked. Keys of another length (cross-attention) lie whole on every chip.

Where nobody says how activations lie, heads are split over as many chips as divide them: a kernel cannot be left to the
compiler to split.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from . import masks
from .exchange import Exchange
from .key_bounds import KeyBounds, key_bounds, mean_key
from .masks import Mask
from .reference import reference_attention


AXES = ("dp", "ring", "ulysses", "tp")  # of the mesh dp, sp, tp with sp in its two factors


def plan_ring(sp: int, heads: int, kv_heads: int, ring: int | None = None) -> tuple[int, int]:
    """`sp` as (ring, ulysses): as much ulysses as heads and kv heads (of one share of `tp`) allow, or the ring asked for.

    Raises ValueError where `ring` does not divide `sp`, or what it leaves of `sp` does not divide the heads.
    """
    most = math.gcd(sp, heads, kv_heads)
    if ring is None:
        return sp // most, most
    if ring < 1 or sp % ring:
        raise ValueError(f"expected a ring that divides sp {sp}, got ring {ring}")
    if most % (sp // ring):
        raise ValueError(
            f"expected heads that ulysses {sp // ring} (sp {sp} over ring {ring}) divides, got {heads} query and"
            f" {kv_heads} key heads a chip; use ring {sp // most}, or None"
        )
    return ring, sp // ring


def parallel_attention(
    q: Float[Array, "B N T D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S E"],
    *,
    mask: Mask | None,
    scale: float,
    mesh: Mesh,
    local: Callable,
    ring: int | None = None,
    interpret=None,
) -> Float[Array, "B N T E"]:
    """Attention of whole arrays, the sequence split over `sp`. Fewer queries than that go to `attention_by_heads`.

    Args:
        local: attention of one chip, with the arguments of `reference_attention`.
        interpret: where `local` is our kernel, as it runs (see `kernel.tpu_attention`): what it asks of the keys is looked at
            where they are, before they travel, and what travels is laid out by kernels. None: it is not.
        ring: chips of `sp` around which keys travel, where T = S; None as few as the heads allow. See `plan_ring`, which
            raises.
    """
    batch, heads, q_len, _ = q.shape
    kv_heads, kv_len = k.shape[1:3]
    dp, sp, tp = (mesh.shape[axis] for axis in ("dp", "sp", "tp"))
    if q_len < sp:
        return attention_by_heads(q, k, v, mask=mask, scale=scale, mesh=mesh, local=local)
    on_dp = "dp" if batch % dp == 0 else None
    on_tp = "tp" if heads % tp == 0 and kv_heads % tp == 0 else None
    share = tp if on_tp else 1
    split_keys = kv_len == q_len
    ring, ulysses = plan_ring(sp, heads // share, kv_heads // share, ring) if split_keys else (sp, 1)
    travel = split_keys and ring > 1

    rows = None if mask is None else mask.queries
    if rows is not None:  # such a row is zeros whatever its keys: its place is after the merge
        mask = dataclasses.replace(mask, queries=None)
        mask = mask if mask.kind else None
    padded = q_len + -q_len % sp
    q = padded_to(q, 2, padded)
    k, v = (padded_to(x, 2, padded if split_keys else kv_len) for x in (k, v))
    mask = jax.tree.map(lambda x: padded_to(x, 2, padded) if x.shape[2] > 1 else x, mask)
    mask = jax.tree.map(lambda x: padded_to(x, 3, padded), mask) if travel else mask

    spec = P(on_dp, on_tp, ("ring", "ulysses"))
    kv_spec = spec if split_keys else P(on_dp, on_tp)
    traded = ("tp", "ulysses") if on_tp else "ulysses"  # where heads are after the all-to-all, and rows on the ring
    out = jax.shard_map(
        functools.partial(
            _per_chip,
            scale=scale,
            local=local,
            kv_len=kv_len,
            ring=ring,
            ulysses=ulysses,
            travel=travel,
            interpret=interpret,
            bounded=interpret is not None and split_keys and mask is None,
        ),
        mesh=Mesh(mesh.devices.reshape(dp, ring, ulysses, tp), AXES),
        in_specs=(spec, kv_spec, kv_spec, _mask_specs(mask, on_dp, traded, "ring")),
        out_specs=spec,
        check_vma=False,
    )(q, k, v, mask)[:, :, :q_len]
    return out if rows is None else jnp.where(rows, out, 0)


def attention_by_heads(
    q: Float[Array, "B N T D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S E"],
    *,
    mask: Mask | None,
    scale: float,
    mesh: Mesh,
    local: Callable,
) -> Float[Array, "B N T E"]:
    """As `parallel_attention`, for activations that lie anywhere: batch on `dp`, heads on `sp` and `tp` where they divide."""
    if (local.func if isinstance(local, functools.partial) else local) is reference_attention:
        # Plain operations: the compiler splits them as what is around them.
        return local(q, k, v, mask=mask, scale=scale)
    on_dp = "dp" if q.shape[0] % mesh.shape["dp"] == 0 else None
    choices = (("sp", "tp"), ("sp",), ("tp",), ())
    heads = math.gcd(q.shape[1], k.shape[1])
    axes = next(a for a in choices if heads % math.prod(mesh.shape[axis] for axis in a) == 0)
    spec = P(on_dp, axes)
    return jax.shard_map(
        lambda q, k, v, mask: local(q, k, v, mask=mask, scale=scale),
        mesh=mesh,
        in_specs=(spec, spec, spec, _mask_specs(mask, on_dp, axes, None)),
        out_specs=spec,
        check_vma=False,
    )(q, k, v, mask)


def _per_chip(
    q, k, v, mask: Mask | None, *, scale, local, kv_len: int, ring: int, ulysses: int, travel: bool, interpret, bounded
):
    """`kv_len`: keys of all chips that are no padding. `travel`: every chip of the ring holds one chunk of them."""
    bounds = {"bounds": _bounds(k, v, kv_len, ring, ulysses, interpret)} if bounded else {}
    # Rows of one call may lie in any order where nothing tells them apart but what they hold.
    in_order = mask is not None or ring > 1 or kv_len < k.shape[2] * ulysses
    exchange = Exchange.of(q, k, v, ulysses, in_order, interpret)
    if ulysses > 1:
        q, k, v = exchange.to_heads(q, turned=True), exchange.to_heads(k), exchange.to_heads(v, turned=True)
    place = lax.axis_index("ring") if ring > 1 else 0
    local = functools.partial(local, scale=scale, first_row=place * q.shape[2])
    if travel:
        out, _ = around_ring(q, k, v, mask, bounds, local=local, kv_len=kv_len, ring=ring, place=place)
        out = out.astype(q.dtype)
    else:
        out = local(q, k[:, :, :kv_len], v[:, :, :kv_len], mask=mask, **bounds)
    return exchange.to_sequence(out) if ulysses > 1 else out


def _bounds(k, v, kv_len: int, ring: int, ulysses: int, interpret) -> KeyBounds:
    """Of the keys that this chip has after the all-to-all: all its group's, of its heads."""
    tokens, heads = k.shape[2], k.shape[1] // ulysses
    place, seen = lax.axis_index("ulysses"), None
    if kv_len < ring * ulysses * tokens:
        seen = jnp.clip(kv_len - (lax.axis_index("ring") * ulysses + place) * tokens, 0, tokens)
    centre = mean_key(k, seen, "ulysses", ulysses)
    bounds = key_bounds(k, v, centre, seen, "ulysses", ulysses, interpret)
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, place * heads, heads, 1), bounds)


def around_ring(
    q, k, v, mask: Mask | None = None, bounds: dict | None = None, *, local, kv_len: int, ring: int, place
):
    """(out, lse) in float32 of this chip's queries over the keys of all chips of the ring, of which `kv_len` are no padding."""
    chunk, bounds = k.shape[2], bounds or {}
    hops = _hops(mask and mask.band, ring, chunk)
    state = None
    for hop, following in zip(hops, [*hops[1:], None]):
        if following is not None:
            steps = [(i, (i + following - hop) % ring) for i in range(ring)]
            sent = jax.tree.map(lambda x: lax.ppermute(x, "ring", steps), (k, v, bounds))
        first_key = (place - hop) % ring * chunk
        part = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first_key, chunk, 3), mask)
        if kv_len < ring * chunk:
            part = masks.with_length(part, kv_len - first_key, chunk)
        seen = local(q, k, v, mask=part, first_key=first_key, with_lse=True, **bounds)
        state = seen if state is None else merged(*state, *seen)
        if following is not None:
            # One chunk is in flight while one is computed with. Unbound, the compiler (v5e, libtpu 0.0.42) sends all of
            # them ahead of the kernels, whose time it does not know, and keeps every hop's result to the end.
            (k, v, bounds), state = lax.optimization_barrier((sent, state))
    return state


def _hops(band: tuple[int | None, int | None] | None, ring: int, chunk: int) -> list[int]:
    """The hops that are of use to some chip: on hop h its keys lie h chunks before its queries, or ring - h after them."""
    left, right = band or (None, None)

    def reach(chunks: int, side: int | None) -> bool:
        return side is None or (chunks - 1) * chunk < side

    return [hop for hop in range(ring) if hop == 0 or reach(hop, left) or reach(ring - hop, right)]


def merged(out, lse, out_h, lse_h):
    """Two parts of the keys as one. A row without keys has lse -inf and stays zeros: exp(-inf - 0)."""
    both = jnp.logaddexp(lse, lse_h)
    base = jnp.where(jnp.isneginf(both), 0.0, both)[..., None]
    return out * jnp.exp(lse[..., None] - base) + out_h * jnp.exp(lse_h[..., None] - base), both


def _mask_specs(mask: Mask | None, on_batch, on_heads, on_rows) -> Mask | None:
    """The spec of every part: an axis of one is whole on every chip, and so are all keys."""
    return jax.tree.map(
        lambda x: P(*(on if n > 1 else None for n, on in zip(x.shape, (on_batch, on_heads, on_rows)))), mask
    )


def padded_to(x: Array, axis: int, size: int) -> Array:
    widths = [(0, size - n if a == axis else 0) for a, n in enumerate(x.shape)]
    return jnp.pad(x, widths) if size != x.shape[axis] else x
