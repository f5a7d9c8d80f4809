"""Two streams in one softmax: latents, split over the chips by tokens, and text, which every chip has whole.

    [out; out'] = softmax(scale [q; q'] [k; k']^T) [v; v']

Upstream concatenates them along the sequence, latents or text first. A softmax knows no order, so on a chip the text's
tokens stand behind the latents' of its heads, where they are joined after the exchange anyway; nothing is concatenated along an
axis that is split. On a ring the text's keys are one more part of the keys, merged like a hop's.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from .exchange import Exchange
from .key_bounds import key_bounds, mean_key
from .masks import Mask
from .parallel import AXES, around_ring, attention_by_heads, merged, padded_to, plan_ring


@dataclass(frozen=True)
class Text:
    """The stream that every chip has whole. `seen`: its tokens that are no padding, None: all; others' answers are zeros."""

    q: Float[Array, "B N L D"]
    k: Float[Array, "B K L D"]
    v: Float[Array, "B K L E"]
    seen: Bool[Array, "B|1 L"] | None = None


jax.tree_util.register_dataclass(Text, data_fields=["q", "k", "v", "seen"], meta_fields=[])


def joint_attention(
    q: Float[Array, "B N T D"],
    k: Float[Array, "B K T D"],
    v: Float[Array, "B K T E"],
    text: Text,
    *,
    scale: float,
    mesh: Mesh | None,
    local: Callable,
    ring: int | None = None,
    interpret=None,
    fill: int = 0,
) -> tuple[Float[Array, "B N T E"], Float[Array, "B N L E"]]:
    """(the latents' answer, split as they are; the text's, whole). The arguments are those of `parallel_attention`.

    `fill`: the last latents, which are none; their answers are anything.
    """
    batch, heads, tokens, _ = q.shape
    if mesh is None or mesh.size == 1 or tokens < mesh.shape["sp"]:
        run = (
            local if mesh is None or mesh.size == 1 else functools.partial(attention_by_heads, mesh=mesh, local=local)
        )
        both = (jnp.concatenate(pair, 2) for pair in ((q, text.q), (k, text.k), (v, text.v)))
        out = run(*both, mask=joint_mask(tokens - fill, tokens, text), scale=scale)
        return out[:, :, :tokens], _without_padding(out[:, :, tokens:], text)
    dp, sp, tp = (mesh.shape[axis] for axis in ("dp", "sp", "tp"))
    on_dp = "dp" if batch % dp == 0 else None
    on_tp = "tp" if heads % tp == 0 and k.shape[1] % tp == 0 else None
    share = tp if on_tp else 1
    ring, ulysses = plan_ring(sp, heads // share, k.shape[1] // share, ring)
    padded = tokens + -tokens % sp
    spec, whole = P(on_dp, on_tp, ("ring", "ulysses")), P(on_dp, on_tp)
    seen = P(on_dp if text.seen is not None and text.seen.shape[0] > 1 else None)
    out, words = jax.shard_map(
        functools.partial(
            _per_chip, scale=scale, local=local, tokens=tokens - fill, ring=ring, ulysses=ulysses, interpret=interpret
        ),
        mesh=Mesh(mesh.devices.reshape(dp, ring, ulysses, tp), AXES),
        in_specs=(spec, spec, spec, Text(whole, whole, whole, None if text.seen is None else seen)),
        out_specs=(spec, whole),
        check_vma=False,
    )(*(padded_to(x, 2, padded) for x in (q, k, v)), text)
    return out[:, :, :tokens], _without_padding(words, text)


def _per_chip(q, k, v, text: Text, *, scale, local, tokens: int, ring: int, ulysses: int, interpret):
    """`tokens`: the latents of all chips that are no padding."""
    chunk = k.shape[2] * ulysses
    place = lax.axis_index("ring") if ring > 1 else 0
    exchange = Exchange.of(q, k, v, ulysses, ring > 1 or tokens < chunk, interpret)
    own = _of_heads(text, ulysses)
    words = own.q.shape[2]
    local = functools.partial(local, scale=scale)
    if ring == 1:
        bounds = {} if interpret is None else {"bounds": _bounds(k, v, text, tokens, ulysses, interpret)}
        q, v = (exchange.to_heads(x, True, other) for x, other in ((q, own.q), (v, own.v)))
        k = exchange.to_heads(k, behind=own.k)
        out = local(q, k, v, mask=joint_mask(tokens, chunk, own), **bounds)
    else:
        q = exchange.to_heads(q, True, own.q)
        k, v = exchange.to_heads(k), exchange.to_heads(v, True)
        of_latents = around_ring(q, k, v, local=local, kv_len=tokens, ring=ring, place=place)
        of_text = local(q, own.k, own.v, mask=joint_mask(0, 0, own), with_lse=True)
        out = merged(*of_latents, *of_text)[0].astype(q.dtype)
    answer = out[:, :, chunk:]
    if ulysses > 1:
        answer = lax.all_gather(answer, "ulysses", axis=1, tiled=True)
    return exchange.to_sequence(out, words) if ulysses > 1 else out[:, :, :chunk], answer


def _of_heads(text: Text, ulysses: int) -> Text:
    """The heads that this chip has after the exchange."""
    if ulysses == 1:
        return text

    def own(x):
        heads = x.shape[1] // ulysses
        return lax.dynamic_slice_in_dim(x, lax.axis_index("ulysses") * heads, heads, 1)

    return Text(own(text.q), own(text.k), own(text.v), text.seen)


def joint_mask(tokens: int, chunk: int, text: Text) -> Mask | None:
    """Of `chunk` latents, of which `tokens` are no padding, and the text behind them."""
    if text.seen is None and tokens == chunk:
        return None
    seen = jnp.ones((1, text.k.shape[2]), bool) if text.seen is None else text.seen
    latents = jnp.broadcast_to(jnp.arange(chunk) < tokens, (seen.shape[0], chunk))
    return Mask(keys=jnp.concatenate([latents, seen], 1)[:, None, None], whole=tokens)


def _without_padding(out, text: Text):
    return out if text.seen is None else jnp.where(text.seen[:, None, :, None], out, 0)


def _bounds(k, v, text: Text, tokens: int, ulysses: int, interpret):
    """Of latents' keys and the text's, before they are exchanged; of the heads that this chip then has."""
    place = lax.axis_index("ulysses")
    seen = None
    if tokens < k.shape[2] * ulysses:
        seen = jnp.clip(tokens - place * k.shape[2], 0, k.shape[2])
    words = None if text.seen is None else text.seen[:, None, :, None]
    centre = mean_key(k, seen, "ulysses", ulysses, (text.k, words))
    bounds = key_bounds(k, v, centre, seen, "ulysses", ulysses, interpret, (text.k, text.v, words))
    heads = k.shape[1] // ulysses
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, place * heads, heads, 1), bounds)
