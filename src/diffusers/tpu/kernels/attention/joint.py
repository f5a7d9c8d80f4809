"""Attention of latents and text in one softmax, over a mesh or on one chip: latents are split over `sp`, text is on every chip."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from ..pallas import as_heads, by_token
from ..settings import current
from .exchange import Exchange
from .masks import Mask
from .parallel import (
    Split,
    around_ring,
    attention_by_heads,
    bounds_of_group,
    merged,
    refuse_ring,
    split_over,
    with_heads,
)
from .reference import Keys, Out, Queries, Values, padded_to
from .sparse import Nearest


class Text(NamedTuple):
    """Text tokens, replicated on every chip. `seen`: those that are not padding, None: all; results of the others are zero."""

    q: Float[Array, "B N L D"]
    k: Float[Array, "B K L D"]
    v: Float[Array, "B K L E"]
    seen: Bool[Array, "B|1 L"] | None = None


def joint_attention(
    q: Queries,
    k: Keys,
    v: Values,
    text: Text,
    *,
    scale: float,
    mesh: Mesh | None,
    local: Callable,
    ring: int | None = None,
    interpret=None,
    pad_tokens: int = 0,
    sequence: bool = True,
    near: Nearest | None = None,
) -> tuple[Out, Out]:
    """Attention of latents, split over `sp`, and replicated text in one softmax: (result of latents, of text), sharded alike.

        [out; out'] = softmax(scale [q; q'] [k; k']^T) [v; v']

    A softmax does not depend on order: after the exchange text tokens follow the latents, and nothing is concatenated along
    a sharded axis. On a ring the text is one more part of the keys, merged like a hop.

    Args:
        mesh, local, ring, interpret: as in `parallel_attention`; `sequence` False: latents have any sharding.
        pad_tokens: padding at the end of the latents; its results are undefined.
        near: which latents see which; None: all.
    """
    tokens, how = q.shape[2], {"scale": scale, "local": local, "tokens": q.shape[2] - pad_tokens, "near": near}
    if mesh is None or mesh.size == 1:
        out, words = _joint_per_chip(q, k, v, text, split=Split(None, None, None, 1, 1), interpret=interpret, **how)
        return out, _without_padding(words, text)
    if not sequence or tokens < mesh.shape["sp"]:
        local = functools.partial(attention_by_heads, mesh=mesh, local=local)
        # All heads of a token side by side: XLA writes single heads of 64 entries at a quarter of HBM's bandwidth.
        rows = (jnp.concatenate([by_token(x) for x in pair], 1) for pair in ((q, text.q), (k, text.k), (v, text.v)))
        both = (as_heads(x, of.shape[3]) for x, of in zip(rows, (q, k, v)))
        out = local(*both, mask=joint_mask(tokens - pad_tokens, tokens, text, near), scale=scale)
        return out[:, :, :tokens], _without_padding(out[:, :, tokens:], text)
    split, padded = split_over(mesh, q, k, ring), tokens + -tokens % mesh.shape["sp"]
    refuse_ring(near, split)
    spec, whole = split.spec, P(split.dp, split.tp)
    seen = None if text.seen is None else P(split.dp if text.seen.shape[0] > 1 else None)
    out, words = jax.shard_map(
        functools.partial(_joint_per_chip, split=split, interpret=interpret, **how),
        mesh=split.mesh,
        in_specs=(spec, spec, spec, Text(whole, whole, whole, seen)),
        out_specs=(spec, whole),
        check_vma=False,
    )(*(padded_to(x, 2, padded) for x in (q, k, v)), text)
    return out[:, :, :tokens], _without_padding(words, text)


def _joint_per_chip(q, k, v, text: Text, *, scale, local, tokens: int, split: Split, interpret, near):
    """`joint_attention` on one chip. `tokens`: latents of all chips without padding."""
    ring, ulysses, heads = split.ring, split.ulysses, q.shape[1]
    q, k, v = with_heads(q, k, v, ulysses)
    text = Text(*with_heads(*text[:3], ulysses), text.seen)
    chunk = k.shape[2] * ulysses
    place = lax.axis_index("ring") if ring > 1 else 0
    in_order = ring > 1 or near is not None
    exchange = Exchange.of(q, k, v, ulysses, in_order, interpret, grouped=ring == 1, padding=chunk - tokens)
    words = tuple(map(exchange.own, text[:3]))  # of q, k and v, by group
    own = [Text(*parts, text.seen) for parts in zip(*words)]
    local = functools.partial(local, scale=scale, **exchange.gives)
    if ring == 1:
        without = interpret is None or current().differentiable or (ulysses == 1 and exchange.interpret is None)
        bounds_of = None if without else functools.partial(bounds_of_group, k, v, tokens, split, interpret, text)

        def attend(group, q, k, v, bounds):
            return local(q, k, v, mask=joint_mask(tokens, chunk, own[group], near), **bounds)

        out, answers = exchange.attended(attend, q, k, v, words, bounds_of)
    else:
        q = exchange.to_heads(q, True, own[0].q)
        k, v = exchange.to_heads(k), exchange.to_heads(v, True)
        of_latents = around_ring(q, k, v, local=local, kv_len=tokens, ring=ring, place=place)
        of_text = local(q, own[0].k, own[0].v, mask=joint_mask(0, 0, own[0]), with_lse=True)
        out = merged(*of_latents, *of_text)[0].astype(q.dtype)
        answers = [out[:, :, chunk:]]
        out = exchange.to_sequence(out, own[0].q.shape[2])
    if ulysses > 1:
        answers = [lax.all_gather(of_group, "ulysses", axis=1, tiled=True) for of_group in answers]
    return out[:, :heads], jnp.concatenate(answers, 1)[:, :heads]


def joint_mask(tokens: int, chunk: int, text: Text, near: Nearest | None = None) -> Mask | None:
    """The mask of `chunk` latents, then text. Latents after `tokens` are padding; the others see each other as `near` says."""
    near = near and dataclasses.replace(near, stop=chunk)
    if text.seen is None and tokens == chunk:
        return near and Mask(nearest=near)
    seen = jnp.ones((1, text.k.shape[2]), bool) if text.seen is None else text.seen
    latents = jnp.broadcast_to(jnp.arange(chunk) < tokens, (seen.shape[0], chunk))
    return Mask(keys=jnp.concatenate([latents, seen], 1)[:, None, None], whole=tokens, nearest=near)


def _without_padding(out, text: Text):
    return out if text.seen is None else jnp.where(text.seen[:, None, :, None], out, 0)
