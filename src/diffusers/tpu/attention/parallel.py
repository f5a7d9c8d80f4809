"""Attention over a mesh: heads on `tp`, batch on `dp`, the sequence on `sp`.

Queries arrive split over the sequence. With heads that `sp` divides, an all-to-all trades sequence for heads and back
(Ulysses; Jacobs et al. 2023); else, and for keys of another length (cross-attention), every chip sees all keys.
A sequence that `sp` does not divide is padded; its true length goes to the local attention.

Where nobody says how activations lie, heads are split over as many chips as divide them: a kernel cannot be left to the
compiler to split.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from .masks import Mask
from .reference import reference_attention


def parallel_attention(q, k, v, *, mask: Mask | None, is_causal: bool, scale: float, mesh: Mesh, local: Callable):
    """q [B, N, T, D], k and v [B, K, S, D] as one device would see them; `local` is the attention of one chip."""
    batch, heads, q_len, _ = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    dp, sp, tp = (mesh.shape[axis] for axis in ("dp", "sp", "tp"))
    if q_len < sp:
        return attention_by_heads(q, k, v, mask=mask, is_causal=is_causal, scale=scale, mesh=mesh, local=local)
    on_dp = "dp" if batch % dp == 0 else None
    on_tp = "tp" if heads % tp == 0 and kv_heads % tp == 0 else None
    share = tp if on_tp else 1
    split_keys = kv_len == q_len
    ulysses = sp > 1 and split_keys and not (heads // share) % sp and not (kv_heads // share) % sp
    if is_causal and not ulysses:
        local = reference_attention  # the one that can start its rows in the middle of the sequence

    q = _pad_sequence(q, sp)
    k, v = (_pad_sequence(x, sp if split_keys else 1) for x in (k, v))
    kv_spec = P(on_dp, on_tp, "sp" if split_keys else None)
    operands, specs = [q, k, v], [P(on_dp, on_tp, "sp"), kv_spec, kv_spec]
    if mask is not None:
        values, spec = _mask_operand(
            mask.values, batch, heads, q_len, kv_len, q.shape[2], k.shape[2], on_dp, on_tp, ulysses
        )
        operands.append(values)
        specs.append(spec)
    body = functools.partial(
        _per_chip,
        kind=mask and mask.kind,
        is_causal=is_causal,
        scale=scale,
        kv_len=kv_len,
        ulysses=ulysses,
        gather=split_keys and not ulysses and sp > 1,
        local=local,
    )
    out = jax.shard_map(body, mesh=mesh, in_specs=tuple(specs), out_specs=specs[0], check_vma=False)(*operands)
    return out[:, :, :q_len]


def attention_by_heads(q, k, v, *, mask: Mask | None, is_causal: bool, scale: float, mesh: Mesh, local: Callable):
    """As `parallel_attention`, for activations that lie anywhere: batch on `dp`, heads on `sp` and `tp` where they divide."""
    if local is reference_attention:  # plain operations: the compiler splits them as what is around them
        return local(q, k, v, mask=mask, is_causal=is_causal, scale=scale)
    batch, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
    on_dp = "dp" if batch % mesh.shape["dp"] == 0 else None
    choices = (("sp", "tp"), ("sp",), ("tp",), ())
    axes = next(a for a in choices if not any(n % math.prod(mesh.shape[x] for x in a) for n in (heads, kv_heads)))
    spec = P(on_dp, axes or None)
    operands, specs = [q, k, v], [spec] * 3
    if mask is not None:
        b, n = mask.values.shape[:2]
        operands.append(mask.values)
        specs.append(P(on_dp if b == batch and b > 1 else None, axes or None if n == heads and n > 1 else None))

    def per_chip(q, k, v, *values):
        part = Mask(mask.kind, *values) if values else None
        return local(q, k, v, mask=part, is_causal=is_causal, scale=scale)

    return jax.shard_map(per_chip, mesh=mesh, in_specs=tuple(specs), out_specs=spec, check_vma=False)(*operands)


def _per_chip(q, k, v, mask=None, *, kind, is_causal, scale, kv_len, ulysses, gather, local):
    if ulysses:
        q, k, v = (lax.all_to_all(x, "sp", split_axis=1, concat_axis=2, tiled=True) for x in (q, k, v))
    elif gather:
        k, v = (lax.all_gather(x, "sp", axis=2, tiled=True) for x in (k, v))
    mask = None if mask is None else Mask(kind, mask)
    if is_causal and not ulysses:
        local = functools.partial(local, first_row=lax.axis_index("sp") * q.shape[2])
    out = local(q, k, v, mask=mask, is_causal=is_causal, scale=scale, kv_len=kv_len)
    return lax.all_to_all(out, "sp", split_axis=2, concat_axis=1, tiled=True) if ulysses else out


def _pad_sequence(x, ways: int):
    extra = -x.shape[2] % ways
    return jnp.pad(x, ((0, 0), (0, 0), (0, extra), (0, 0))) if extra else x


def _mask_operand(values, batch, heads, q_len, kv_len, q_padded, s_padded, on_dp, on_tp, ulysses):
    """The mask padded as q and k are, and its spec: split with the queries, or with the heads they were traded for."""
    b, n, t, s = values.shape
    widths = ((0, 0), (0, 0), (0, q_padded - q_len if t > 1 else 0), (0, s_padded - kv_len if s > 1 else 0))
    heads_axes = tuple(axis for axis in (on_tp, "sp" if ulysses else None) if axis)
    spec = P(
        on_dp if b == batch and b > 1 else None,
        heads_axes or None if n == heads and n > 1 else None,
        "sp" if t > 1 and not ulysses else None,
        None,
    )
    return jnp.pad(values, widths), spec
