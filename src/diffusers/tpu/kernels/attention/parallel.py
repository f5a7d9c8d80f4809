"""Attention over a mesh: batch on `dp`, heads on `tp`, the sequence on `sp`, which is ring x ulysses chips.

In each group of `ulysses` chips, as many as divide the heads, an all-to-all exchanges sequence for heads and back (Ulysses;
Jacobs et al. 2023). Where a few more heads of zeros (`MOST_FILLED`) let all chips of `sp` divide them, these are added. Keys pass
around the ring of groups (Ring Attention; Liu et al. 2023). Hop h gives out_h and lse_h:

    lse' = log(e^lse + e^lse_h);   out' = out e^(lse - lse') + out_h e^(lse_h - lse')        in float32.

`ulysses` is the inner factor: after the all-to-all a chip holds one contiguous chunk of the sequence. A sequence that `sp` does
not divide is padded, and its padding masked. Keys of another length (cross-attention) are replicated; of `MANY_KEYS` each chip has
all tokens of some heads, and all queries. Text that shares a softmax with latents: `joint`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from ..pallas import as_heads, by_token, round_up
from ..settings import current
from . import masks
from .exchange import Exchange
from .key_bounds import KeyBounds, key_bounds
from .masks import Mask
from .reference import Keys, Out, Queries, Values, padded_to, reference_attention
from .sparse import Nearest


AXES = ("dp", "ring", "ulysses", "tp")  # of the mesh dp, sp, tp, with sp split into its two factors
MANY_KEYS = 4  # for each query
MOST_FILLED = 1 / 12  # of the heads: of Z-Image's 30 for eight chips; a ring of four takes a third more of its step


def plan_ring(sp: int, heads: int, kv_heads: int, ring: int | None = None, fill: bool = True) -> tuple[int, int]:
    """`sp` as (ring, ulysses): the largest ulysses that divides heads and kv_heads (per chip of `tp`), or the given ring.

    `fill`: heads may be added.

    Raises ValueError if `ring` does not divide `sp`, or `sp / ring` does not divide the heads.
    """
    fill = fill and round_up(kv_heads, sp) <= (1 + MOST_FILLED) * kv_heads
    most = sp if fill else math.gcd(sp, heads, kv_heads)
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


def with_heads(q, k, v, chips: int) -> list[Array]:
    """q, k and v with heads of zeros, so that the chips divide them. They are added as columns of tokens, as data lies in memory."""
    own, heads = k.shape[1], round_up(k.shape[1], chips)
    if heads == own:
        return [q, k, v]
    columns = (x.shape[1] // own * heads * x.shape[3] for x in (q, k, v))
    return [as_heads(padded_to(by_token(x), 2, n), x.shape[3]) for x, n in zip((q, k, v), columns)]


def parallel_attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    mask: Mask | None,
    scale: float,
    mesh: Mesh,
    local: Callable,
    ring: int | None = None,
    interpret=None,
) -> Out:
    """Attention of global arrays, the sequence split over `sp`; `attention_by_heads` if there are fewer queries than chips of `sp`,
    `attention_to_many` if there are `MANY_KEYS`.

    Args:
        local: attention of one chip, with the arguments of `reference_attention`.
        interpret: of `local` if it is our kernel: key bounds are then computed before the exchange, and kernels lay out what
            is sent. None: `local` is another kernel.
        ring: chips of `sp` in the key ring, where T = S; None: as few as the heads allow. Raises as `plan_ring`.
    """
    q_len, kv_len = q.shape[2], k.shape[2]
    if q_len < mesh.shape["sp"]:
        return attention_by_heads(q, k, v, mask=mask, scale=scale, mesh=mesh, local=local)
    if has_many_keys(mesh, q, k, mask):
        return attention_to_many(q, k, v, mask=mask, scale=scale, mesh=mesh, local=local)
    split, split_keys = split_over(mesh, q, k, ring, mask), kv_len == q_len
    refuse_ring(mask and mask.nearest, split)
    if split.ring > 1 and mask is not None and mask.frame != (1, 1):
        raise NotImplementedError(
            f"expected a causal mask of tokens on a ring of {split.ring}, got one of frames of {mask.frame} queries and keys; use a"
            " mesh with a smaller sp"
        )

    rows = None if mask is None else mask.queries
    if rows is not None:  # such a row is zero whatever its keys: applied after the merge
        mask = dataclasses.replace(mask, queries=None)
        mask = mask if mask.kind else None
    padded = q_len + -q_len % mesh.shape["sp"]
    q = padded_to(q, 2, padded)
    k, v = (padded_to(x, 2, padded if split_keys else kv_len) for x in (k, v))
    # Padding rows see no key: a key that no real query sees may hold NaN.
    hidden = lambda x: padded_to(x, 2, padded, 0 if x.dtype == bool else -jnp.inf)  # noqa: E731
    mask = jax.tree.map(lambda x: hidden(x) if x.shape[2] > 1 else x, mask)
    if split_keys and split.ring > 1:
        mask = jax.tree.map(lambda x: padded_to(x, 3, padded), mask)
    kv_spec = split.spec if split_keys else P(split.dp, split.tp)
    traded = ("tp", "ulysses") if split.tp else "ulysses"  # of heads after the all-to-all, when rows are on the ring
    how = {"scale": scale, "local": local, "kv_len": kv_len, "split": split, "keys": split_keys}
    run = functools.partial(_per_chip, **how, interpret=interpret)
    specs = split.spec, kv_spec, kv_spec, _mask_specs(mask, split.dp, traded, "ring")
    sharding = {"mesh": split.mesh, "in_specs": specs, "out_specs": split.spec, "check_vma": False}
    out = jax.shard_map(run, **sharding)(q, k, v, mask)[:, :, :q_len]
    return out if rows is None else jnp.where(rows, out, 0)


class Split(NamedTuple):
    """How a call's arrays are sharded over `mesh`, with axes `AXES`; None: one chip. `dp`, `tp`: of batch and heads, None: replicated."""

    mesh: Mesh | None
    dp: str | None
    tp: str | None
    ring: int
    ulysses: int

    @property
    def spec(self) -> P:
        """The spec of arrays whose sequence is split."""
        return P(self.dp, self.tp, ("ring", "ulysses"))


def split_over(mesh: Mesh, q, k, wanted: int | None, mask: Mask | None = None) -> Split:
    """The split of a call over a mesh dp, sp, tp; keys are replicated if longer or shorter than queries. Raises as `plan_ring`.

    No heads are added for a mask that has an axis of heads.
    """
    dp, sp, tp = (mesh.shape[axis] for axis in ("dp", "sp", "tp"))
    share = tp if q.shape[1] % tp == 0 and k.shape[1] % tp == 0 else 1
    ring, ulysses = sp, 1
    if q.shape[2] == k.shape[2]:
        fill = all(x.shape[1] == 1 for x in jax.tree.leaves(mask))
        ring, ulysses = plan_ring(sp, q.shape[1] // share, k.shape[1] // share, wanted, fill)
    on_tp = "tp" if share == tp else None
    devices = mesh.devices.reshape(dp, ring, ulysses, tp)
    return Split(Mesh(devices, AXES), "dp" if q.shape[0] % dp == 0 else None, on_tp, ring, ulysses)


def refuse_ring(near: Nearest | None, split: Split):
    if near is not None and split.ring > 1:
        raise NotImplementedError(
            f"expected heads that sp {split.ring * split.ulysses} divides, for TPUConfig(attention_sparsity={near.sparsity}), got a ring"
            f" of {split.ring}, whose keys come in parts; use a mesh with a smaller sp, or leave attention_sparsity out"
        )


def attention_by_heads(
    q: Queries, k: Keys, v: Values, *, mask: Mask | None, scale: float, mesh: Mesh, local: Callable
) -> Out:
    """As `parallel_attention`, for activations of any sharding: batch on `dp`, heads on `sp` and `tp`, where these divide them."""
    if (local.func if isinstance(local, functools.partial) else local) is reference_attention:
        # Plain operations: the compiler shards them like those around them.
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


def has_many_keys(mesh: Mesh, q, k, mask: Mask | None) -> bool:
    """Whether `attention_to_many` moves less than whole keys would: `MANY_KEYS` for each query, and heads that `sp` and `tp` divide."""
    divided = all(x.shape[1] % (mesh.shape["tp"] * mesh.shape["sp"]) == 0 for x in (q, k))
    by_head = any(x.shape[1] > 1 for x in jax.tree.leaves(mask))
    return mesh.shape["sp"] > 1 and divided and not by_head and k.shape[2] >= MANY_KEYS * q.shape[2]


def attention_to_many(
    q: Queries, k: Keys, v: Values, *, mask: Mask | None, scale: float, mesh: Mesh, local: Callable
) -> Out:
    """As `parallel_attention`, where keys are split over `sp` and queries are few: tokens of keys are exchanged for heads."""
    sp, kv_len, on_dp = mesh.shape["sp"], k.shape[2], "dp" if q.shape[0] % mesh.shape["dp"] == 0 else None

    def attend(q, k, v, mask):
        k, v = (lax.all_to_all(x, "sp", 1, 2, tiled=True)[:, :, :kv_len] for x in (k, v))
        own = q.shape[1] // sp
        q = lax.dynamic_slice_in_dim(q, lax.axis_index("sp") * own, own, 1)
        return lax.all_gather(local(q, k, v, mask=mask, scale=scale), "sp", axis=1, tiled=True)

    k, v = (padded_to(x, 2, kv_len + -kv_len % sp) for x in (k, v))
    whole, split = P(on_dp, "tp"), P(on_dp, "tp", "sp")
    specs = whole, split, split, _mask_specs(mask, on_dp, None, None)
    return jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=whole, check_vma=False)(q, k, v, mask)


def _per_chip(q, k, v, mask: Mask | None, *, scale, local, kv_len: int, split: Split, keys: bool, interpret):
    """Attention on one chip. `kv_len`: keys of all chips without padding. `keys`: keys are split like queries."""
    ring, ulysses, bounds_of, heads = split.ring, split.ulysses, None, q.shape[1]
    q, k, v = with_heads(q, k, v, ulysses)
    if interpret is not None and keys and (mask is None or mask.kind == "nearest") and not current().differentiable:
        bounds_of = functools.partial(bounds_of_group, k, v, kv_len, split, interpret, None)
    # Rows may be in any order if neither a mask nor their position matters.
    in_order, padding = mask is not None or ring > 1, k.shape[2] * ulysses - kv_len if keys else 0
    alike = all(x.shape[1] == 1 for x in jax.tree.leaves(mask))
    exchange = Exchange.of(q, k, v, ulysses, in_order, interpret, grouped=ring == 1 and alike, padding=padding)
    place = lax.axis_index("ring") if ring > 1 else 0
    local = functools.partial(local, scale=scale, first_row=place * q.shape[2] * ulysses, **exchange.gives)

    def attend(group, q, k, v, bounds):
        if keys and ring > 1:
            out, _ = around_ring(q, k, v, mask, bounds, local=local, kv_len=kv_len, ring=ring, place=place)
            return out.astype(q.dtype)
        return local(q, k[:, :, :kv_len], v[:, :, :kv_len], mask=mask, **bounds)

    return exchange.attended(attend, q, k, v, bounds_of=bounds_of)[0][:, :heads]


def bounds_of_group(k, v, kv_len: int, split: Split, interpret, text, *meanwhile: Callable) -> KeyBounds:
    """`key_bounds` of all heads, over the keys of all chips of a Ulysses group. With text there is no ring."""
    tokens, ulysses = k.shape[2], split.ulysses
    seen = count = None
    if kv_len < split.ring * ulysses * tokens:
        # The count is not summed over chips: even the sum of one number waits for what is on the links.
        left = kv_len if text is not None else kv_len - lax.axis_index("ring") * ulysses * tokens
        seen = jnp.clip(left - (lax.axis_index("ulysses") if ulysses > 1 else 0) * tokens, 0, tokens)
        count = jnp.clip(left, 0, ulysses * tokens)
    beside = text and (text.k, text.v, None if text.seen is None else text.seen[:, None, :, None])
    return key_bounds(
        k, v, seen, "ulysses" if ulysses > 1 else None, ulysses, interpret, beside, *meanwhile, count=count
    )


def around_ring(q, k, v, mask: Mask | None = None, bounds=None, *, local, kv_len: int, ring: int, place):
    """(out, lse) in float32 of this chip's queries over the keys of the whole ring; those after `kv_len` are padding."""
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
            # One chunk is in flight while another is used. Without the barrier the compiler (v5e, libtpu 0.0.42) sends all
            # chunks before the kernels, whose time it cannot estimate, and keeps every hop's result to the end.
            (k, v, bounds), state = lax.optimization_barrier((sent, state))
    return state


def _hops(band: tuple[int | None, int | None] | None, ring: int, chunk: int) -> list[int]:
    """The hops that some chip needs: on hop h its keys lie h chunks before its queries, or ring - h after them."""
    left, right = band or (None, None)

    def reach(chunks: int, side: int | None) -> bool:
        return side is None or (chunks - 1) * chunk < side

    return [hop for hop in range(ring) if hop == 0 or reach(hop, left) or reach(ring - hop, right)]


def merged(out, lse, out_h, lse_h):
    """Merges the results of two parts of the keys. A row without keys has lse -inf and stays zero: exp(-inf - 0)."""
    both = jnp.logaddexp(lse, lse_h)
    base = jnp.where(jnp.isneginf(both), 0.0, both)[..., None]
    return out * jnp.exp(lse[..., None] - base) + out_h * jnp.exp(lse_h[..., None] - base), both


def _mask_specs(mask: Mask | None, on_batch, on_heads, on_rows) -> Mask | None:
    """The spec of each part of a mask. Keys, and axes of length one, are replicated."""
    return jax.tree.map(
        lambda x: P(*(on if n > 1 else None for n, on in zip(x.shape, (on_batch, on_heads, on_rows)))), mask
    )
