"""What goes into the attention kernel: arrays with the blocks that a program gets of them, and scalars fetched before it runs.

A program is (head of all batches h, block of queries i, block of keys j). A dictionary of operands is name ->
(array, BlockSpec); scalars are one-dimensional. By group:

* queries, keys and values: `q` and `v` with tokens minor, so that scores come out transposed; `k` as it lies.
* a band: `shift`, how far the first query lies behind the first key.
* a mask by key: `bias`, in base 2; unless it concerns the last block alone, per row and block of keys `state` (`SKIPPED`,
  `WHOLE` or `MIXED`) and `fetch`, the block to fetch, one that is there already where the step is skipped.
* a mask of queries x keys: `dense`, bool as int8.
* for the ways "bound" and "centred" (see `ways`): per head of keys `reach`, max |k|; `radius` R and `centre` c.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float

from .blocks import LANES
from .kernel_call import LOG2_E, MASKED, MIXED, SKIPPED, WHOLE, Call, band_ends
from .key_bounds import KeyBounds, key_bounds, mean_key
from .masks import Mask, takes_part
from .softmax_modes import BOUND, CENTRED


Operands = dict[str, tuple[Array, pl.BlockSpec]]


def make_operands(
    call: Call, q, k, v, mask: Mask, bias, shift, bounds: KeyBounds | None, interpret
) -> tuple[dict[str, Array], Operands]:
    """(scalars, arrays with their blocks), in the order in which the kernel gets them.

    Args:
        bias: `key_bias` of the mask.
        shift: position of the first query less that of the first key.
        bounds: of the keys; None: of these, as they are here.
        interpret: how kernels run.
    """
    seen = keys_seen(mask, shift, call.q_len, k)
    if seen is not None:
        end = mask.whole if call.cut_at_end else 0
        v = v.at[:, :, end:].set(
            jnp.where(seen[:, :, end:], v[:, :, end:], 0)
        )  # a weight of zero times NaN would be NaN
    if bounds is None and (CENTRED in call.ways or call.ways[0] == BOUND):
        bounds = key_bounds(k, v, mean_key(k, seen), seen, interpret=interpret)
    scalars = {}
    if mask.band is not None:
        scalars["shift"] = jnp.asarray(shift, jnp.int32).reshape(1)
    if bias is not None and not call.cut_at_end:
        scalars["state"], scalars["fetch"] = _states(bias, call.blocks.keys)
    fetched = functools.partial(_block_to_fetch, call, tuple(scalars))
    inputs = _queries_keys_values(call, q, k, v, fetched)
    chosen_by, centre = _bounds(call, bounds)
    inputs |= centre
    if bias is not None:
        inputs |= _key_mask(call, bias, fetched)
    if mask.dense is not None:
        inputs |= _dense_mask(call, mask.dense, q.shape[1], fetched)
    return scalars | chosen_by, inputs


def key_bias(keys) -> Float[Array, "b n 1 S"] | None:
    """A key mask as what is added to scores in base 2; MASKED where the key takes no part."""
    if keys is None:
        return None
    if keys.dtype == jnp.bool_:
        return jnp.where(keys, 0.0, MASKED)
    keys = keys.astype(jnp.float32)
    return jnp.where(takes_part(keys), keys * LOG2_E, MASKED)


def keys_seen(mask: Mask, shift, q_len: int, k) -> Bool[Array, "B K S 1"] | None:
    """Keys that some query sees, of any head of the group; None: all. Others may hold anything, NaN too."""
    batch, kv_heads, s_len, _ = k.shape
    if mask.keys is None and mask.dense is None and mask.band is None:
        return None
    seen = jnp.ones((1, 1, 1, s_len), bool)
    if mask.keys is not None:
        seen = seen & takes_part(mask.keys)
    if mask.dense is not None:
        seen = seen & takes_part(mask.dense).any(2, keepdims=True)
    if mask.band is not None:
        key, (low, high) = jnp.arange(s_len), _ends_of_rows(mask.band, mask.frame, shift, 0, q_len)
        seen = seen if low is None else seen & (key >= low)
        seen = seen if high is None else seen & (key <= high)
    b, n = seen.shape[:2]
    seen = seen.reshape(b, kv_heads if n > 1 else 1, -1, s_len).any(2)
    return jnp.broadcast_to(seen[..., None], (batch, kv_heads, s_len, 1))


def _ends_of_rows(band, frame, shift, first, rows: int):
    """The first and last key any of the `rows` queries from `first` on may see; None where the band is open."""
    return band_ends(band, frame, shift, first)[0], band_ends(band, frame, shift, first + rows - 1)[1]


def row_of(shape, heads: int, h):
    """The row of an operand [b|1, n|1, ...], its first two axes made one, that head h of all batches reads."""
    b, n = shape[:2]
    return (lax.div(h, heads) if b > 1 else 0) * n + (lax.rem(h, heads) if n > 1 else 0)


def _queries_keys_values(call: Call, q, k, v, fetched) -> Operands:
    blocks, (batch, heads, _, dim), (kv_heads, kv_len, out_dim) = call.blocks, q.shape, v.shape[1:]
    q = _heads_beside_tokens(q)
    if dim % LANES == 0:  # as linear layers give them, all heads of a token side by side: no copy
        k = _by_token(k)

        def place_of_keys(h, i, j, *s):
            return lax.div(h, heads), fetched(h, i, j, s), lax.rem(call.row_of_kv(h), kv_heads)
    else:
        k = k.reshape(batch * kv_heads, kv_len, dim)

        def place_of_keys(h, i, j, *s):
            return call.row_of_kv(h), fetched(h, i, j, s), 0

    def place_of_values(h, i, j, *s):
        return call.row_of_kv(h), 0, fetched(h, i, j, s)

    return {
        "q": (q, pl.BlockSpec((None, dim, blocks.queries), lambda h, i, j, *s: (h, 0, i))),
        "k": (k, pl.BlockSpec((None, blocks.keys, dim), place_of_keys)),
        "v": (_heads_beside_tokens(v), pl.BlockSpec((None, out_dim, blocks.keys), place_of_values)),
    }


def _by_token(x) -> Float[Array, "B S K*D"]:
    """[B, K, S, D] with all heads of a token side by side: what it was made from by a transposition."""
    return jnp.swapaxes(x, 1, 2).reshape(x.shape[0], x.shape[2], -1)


def _heads_beside_tokens(x) -> Float[Array, "B*K D S"]:
    """[B, K, S, D] with tokens minor, as one transposition of a matrix of tokens and heads."""
    return jnp.swapaxes(_by_token(x), 1, 2).reshape(-1, x.shape[3], x.shape[2])


def _block_to_fetch(call: Call, names, h, i, j, scalars):
    """The block of keys of step j; one that is there already where the step is skipped."""
    named = dict(zip(names, scalars))
    keys = call.blocks.keys
    if call.band is not None:
        rows = i * call.blocks.queries, call.blocks.queries
        low, high = _ends_of_rows(call.band, call.frame, named["shift"][0], *rows)
        j = j if low is None else jnp.maximum(j, lax.div(jnp.maximum(low, 0), keys))
        j = j if high is None else jnp.minimum(j, lax.div(jnp.maximum(high, 0), keys))
        j = jnp.clip(j, 0, call.kv_blocks - 1)
    return j if "fetch" not in named else named["fetch"][call.row_of_keys(h) * call.kv_blocks + j]


def _key_mask(call: Call, bias, fetched) -> Operands:
    def place(h, i, j, *s):
        return call.row_of_keys(h), 0, call.kv_blocks - 1 if call.cut_at_end else fetched(h, i, j, s)

    return {"bias": (bias.reshape(-1, 1, call.kv_len), pl.BlockSpec((None, 1, call.blocks.keys), place))}


def _states(bias, block: int):
    """`state` and `fetch` of a key mask, by row and block of keys."""
    b, n, _, s_len = bias.shape
    blocks = pl.cdiv(s_len, block)
    rows = jnp.pad(bias.reshape(b * n, s_len), ((0, 0), (0, blocks * block - s_len)), constant_values=MASKED)
    rows = rows.reshape(b * n, blocks, block)
    whole = (rows == 0).all(-1)
    state = jnp.where(whole, WHOLE, jnp.where((rows <= MASKED).all(-1), SKIPPED, MIXED)).astype(jnp.int32)
    before = lax.cummax(jnp.where(state > SKIPPED, jnp.arange(blocks), -1), axis=1)
    fetch = jnp.where(before >= 0, before, jnp.argmax(state > SKIPPED, axis=1)[:, None])
    return state.reshape(-1), fetch.astype(jnp.int32).reshape(-1)


def _dense_mask(call: Call, dense, heads: int, fetched) -> Operands:
    shape, blocks = dense.shape, call.blocks
    dense = dense.astype(jnp.int8) if dense.dtype == jnp.bool_ else dense

    def place(h, i, j, *s):
        return row_of(shape, heads, h), i, fetched(h, i, j, s)

    return {"dense": (dense.reshape(-1, *shape[2:]), pl.BlockSpec((None, blocks.queries, blocks.keys), place))}


def _bounds(call: Call, bounds: KeyBounds | None) -> tuple[dict[str, Array], Operands]:
    """What the ways are chosen by (scalars), and the centre that is subtracted."""
    scalars, centre = {}, {}
    if BOUND in call.ways and len(call.ways) > 1:
        scalars["reach"] = bounds.reach.reshape(-1)
    if CENTRED in call.ways:
        scalars["radius"] = bounds.radius.reshape(-1)
        rows = bounds.centre.reshape(-1, *bounds.centre.shape[2:])
        place = pl.BlockSpec((None, *rows.shape[1:]), lambda h, i, j, *s: (call.row_of_kv(h), 0, 0))
        centre["centre"] = rows, place
    return scalars, centre
