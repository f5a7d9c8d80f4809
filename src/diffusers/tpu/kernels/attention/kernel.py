"""Attention for one TPU chip: scores transposed (keys along sublanes, queries along lanes), exponentials to base 2.

Sums over keys run down the sublanes. Scores are computed some tiles ahead of their exponentials (`Tile.lag`), which keeps the
matrix units busy. `softmax_modes` says what is subtracted from scores. The grid is (head h of all batches, block i of queries,
step j over blocks of keys). Blocks of keys that no query sees are neither fetched nor computed. Only blocks that a mask or the
end of the keys cuts run code with masking. `blocks.vmem_bytes` gives the VMEM.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from ..pallas import LANES, LOG2_E, SUBLANES, as_heads, by_token, call_kernel, cost, round_up
from . import kernel_body, pieces, short
from .blocks import Blocks, Shape, choose, folded_parts, of_tiles, vmem_bytes
from .kernel_body import MASKED, MIXED, SKIPPED, WHOLE, Call, band_ends, block_of_keys
from .key_bounds import LARGEST_SMALL, KeyBounds, by_kernel, key_bounds
from .masks import Mask, takes_part
from .reference import Keys, LogSumExp, Out, Queries, Values, padded_to
from .softmax_modes import BOUND, CENTRED, MODES, ONLINE, ModeCounter
from .sparse import Tiles, by_tiles


Operands = dict[str, tuple[Array, pl.BlockSpec]]

VMEM_MARGIN = 8 << 20  # for the compiler, beside what `blocks.vmem_bytes` counts


def unsupported(q, k, v, mask: Mask | None) -> str | None:
    """What the kernel does not support of this call, or None."""
    return None if q.dtype in (jnp.bfloat16, jnp.float32) else f"{q.dtype}"


def shape_of(q, k, v, mask: Mask | None, with_lse: bool = False) -> Shape:
    """What the block sizes of this call depend on. Takes arrays, or their shapes and dtypes."""
    mask = mask or Mask()
    return Shape(
        q_len=q.shape[2],
        kv_len=k.shape[2],
        dim=q.shape[3],
        out_dim=v.shape[3],
        bytes=q.dtype.itemsize,
        out_bytes=4 if with_lse else q.dtype.itemsize,
        masked=0 if mask.keys is None else k.shape[2] - mask.whole,
        dense_bytes=0 if mask.dense is None else mask.dense.dtype.itemsize,
    )


def tpu_attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    scale: float,
    mask: Mask | None = None,
    first_row: int | Array = 0,
    first_key: int | Array = 0,
    with_lse: bool = False,
    bounds: KeyBounds | None = None,
    generation: str | None = None,
    wanted: tuple[int, int, int] | None = None,
    blocks: Blocks | None = None,
    smoothing: bool = True,
    modes: tuple[str, ...] = MODES,
    tally: ModeCounter | None = None,
    tiles: Tiles | None = None,
    turned: bool = False,
    interpret=False,
) -> Out | tuple[Out, LogSumExp]:
    """Attention with the arguments of `reference_attention`.

    Args:
        bounds: of the keys and values that some query sees; None: they are computed here.
        generation: of the chip; None: `figures.DEFAULT_GENERATION`.
        wanted, blocks: sizes for `blocks.choose` (queries, keys, keys of one product), or all sizes in its place.
        smoothing: False: the mode "centred" is not compiled, unless it is the only one.
        modes: the compiled modes. "bound" alone is not checked on the device: for benchmarks.
        tally: counts the mode of each head and block of queries; costs a call to the host.
        tiles: which keys each tile of queries sees; the keys behind the video's are seen by all.
        turned: queries and results have tokens minor; False: the layout of linear layers if `Shape.whole_lanes`.
        interpret: True, or parameters of Pallas's TPU interpreter.

    Raises TypeError unless q is bfloat16 or float32, and as `blocks.choose`.
    """
    if reason := unsupported(q, k, v, mask):
        raise TypeError(
            f"expected bfloat16 or float32 for the attention kernel, got {reason}; cast the model with .to()"
        )
    if mask is not None and mask.nearest is not None:
        how = {"bounds": bounds, "generation": generation, "smoothing": smoothing, "modes": modes, "tally": tally}
        return by_tiles(tpu_attention, q, k, v, mask, scale=scale, interpret=interpret, turned=turned, **how)
    plain = all(x is None for x in (mask, bounds, blocks, wanted, tally, tiles)) and not with_lse
    if plain and short.takes(q, k, v):
        return short.attention_of_each(q, k, v, scale=scale, generation=generation, interpret=interpret)
    mask = mask or Mask()
    shape = shape_of(q, k, v, mask, with_lse)
    if tiles is not None:
        blocks = of_tiles(shape, generation, tiles.queries, tiles.keys)
    blocks = blocks or choose(shape, generation, wanted)
    bias = key_bias(mask.keys)
    if scale < 0:
        q, scale = -q, -scale
    if mask.dense is not None or (bias is not None and mask.keys.dtype != jnp.bool_):
        modes = (ONLINE,)  # a bias on scores has no bound
    elif shape.kv_len <= LANES and len(modes) > 1:
        modes = (ONLINE,)  # the dozen small operations of a bound take longer than so few keys
    elif not smoothing and len(modes) > 1:
        modes = tuple(mode for mode in modes if mode != CENTRED)
    folded = folded_parts(shape, generation) if set(modes) != {BOUND} else 0
    visited = None if tiles is None else tiles.visited(shape.q_len, shape.kv_len)
    in_rows = not turned and shape.whole_lanes
    call = Call(blocks, shape, mask, modes, scale * LOG2_E, folded, q.shape[1], k.shape[1], visited, in_rows)
    scalars, inputs = make_operands(call, q, k, v, bias, first_row - first_key, bounds, interpret, turned)
    scores = math.prod(q.shape[:3]) * min(shape.kv_len, call.steps * blocks.keys)
    results = call_kernel(
        functools.partial(kernel_body.run, call=call),
        "attention_kernel",
        (q.shape[0] * q.shape[1], pl.cdiv(shape.q_len, blocks.queries), call.steps),
        inputs,
        _outputs(call, q, with_lse, tally is not None),
        parallel=2,
        work=cost(q, k, v, q, flops=2 * scores * (q.shape[3] + v.shape[3]), transcendentals=scores),
        interpret=interpret,
        vmem_bytes=vmem_bytes(blocks, shape) + VMEM_MARGIN,
        scalars=scalars,
        scratch=_scratch(call, q.dtype),
    )
    if tally is not None:
        add = functools.partial(tally.add, f"{list(q.shape)} with {k.shape[2]} keys")
        jax.debug.callback(add, results["went"][:, :, 0, 0])
    return _as_asked(call, q.shape, results["o"], results.get("lse"))


def _outputs(call: Call, q, with_lse: bool, with_mode: bool) -> dict:
    """Name -> (array, its block of a grid step): the result (tokens minor, or in rows), log-sum-exp, code of the mode."""
    shape, queries, rows = call.shape, call.blocks.queries, q.shape[0] * q.shape[1]

    def of_rows(height: int, dtype):
        spec = pl.BlockSpec((None, height, queries), lambda h, i, j, *s: (h, 0, i))
        return jax.ShapeDtypeStruct((rows, height, shape.q_len), dtype), spec

    dtype = jnp.float32 if with_lse else q.dtype
    in_rows = jax.ShapeDtypeStruct((q.shape[0], shape.q_len, q.shape[1] * shape.out_dim), dtype)
    outputs = {"o": (in_rows, _rows_of(call, shape.out_dim)) if call.in_rows else of_rows(shape.out_dim, dtype)}
    if with_lse:
        outputs["lse"] = of_rows(1, jnp.float32)
    if with_mode:
        spec = pl.BlockSpec((None, None, 1, LANES), lambda h, i, j, *s: (h, i, 0, 0))
        went = jax.ShapeDtypeStruct((rows, pl.cdiv(shape.q_len, queries), 1, LANES), jnp.int32)
        outputs["went"] = went, spec
    return outputs


def _scratch(call: Call, dtype) -> dict:
    """Scratch kept between blocks of keys: what is subtracted, sums, the result; q and k as products need them."""
    turned = {"q": pltpu.VMEM((call.shape.dim, call.blocks.queries), dtype)} if call.in_rows else {}
    dim, out_dim, queries, keys = call.shape.dim, call.shape.out_dim, call.blocks.queries, call.blocks.keys
    return turned | {
        "m": pltpu.VMEM((SUBLANES, queries), jnp.float32),
        "l": pltpu.VMEM((SUBLANES, queries), jnp.float32),
        "acc": pltpu.VMEM((out_dim, queries), jnp.float32),
        "true_v": pltpu.VMEM((out_dim, keys), dtype),
        "column": pltpu.VMEM((SUBLANES if call.mask.keys is None else keys, LANES), jnp.float32),
        "folded": pltpu.VMEM((dim * call.folded or SUBLANES, queries if call.folded else LANES), dtype),
        "twice": pltpu.VMEM((keys, 2 * dim) if call.twice else (SUBLANES, LANES), dtype),
        "mode": pltpu.SMEM((1,), jnp.int32),
    }


def _as_asked(call: Call, shape, out, lse=None):
    """The kernel's result as [B, N, T, E]; rows that the mask hides are zero, with log-sum-exp -inf."""
    (batch, heads, q_len, _), mask = shape, call.mask
    out = out if call.in_rows else jnp.swapaxes(out.reshape(batch, -1, q_len), 1, 2)
    out = jnp.swapaxes(out.reshape(batch, q_len, heads, -1), 1, 2)
    out = out if mask.queries is None else jnp.where(mask.queries, out, 0)
    if lse is None:
        return out
    lse = lse.reshape(batch, heads, q_len)
    return out, lse if mask.queries is None else jnp.where(mask.queries[..., 0], lse, -jnp.inf)


def make_operands(
    call: Call, q, k, v, bias, shift, bounds: KeyBounds | None, interpret, turned: bool
) -> tuple[dict, Operands]:
    """(prefetched scalars, arrays with their blocks), in the order in which the kernel gets them.

    * `q` and `v` with tokens minor, so that scores come out transposed; or q as `rows`, which the kernel transposes; `k` as given.
    * for a band: `shift`, how far the first query lies behind the first key.
    * for a key mask: `bias`, in base 2. Unless it concerns the last block alone, also per row and block of keys `state` (`SKIPPED`,
      `WHOLE` or `MIXED`) and `fetch`, the block to fetch; skipped steps repeat the block of another step, which costs no copy.
    * for a dense mask: `dense`, bool as int8.
    * for modes "bound" and "centred": `KeyBounds` per key head.
    """
    mask, blocks = call.mask, call.blocks
    if (seen := keys_seen(mask, shift, q.shape[2], k)) is not None:  # a weight of zero times NaN would be NaN
        end = mask.whole if mask.dense is None and mask.band is None else 0
        v = _zero_unseen(v, seen, end)
    if bounds is None and (CENTRED in call.modes or call.modes[0] == BOUND):
        bounds = key_bounds(k, v, seen, interpret=interpret)
        apart = not turned and call.shape.dim <= LARGEST_SMALL and pieces.takes(k, 1, in_order=False)
        if apart and by_kernel(
            k, seen, interpret
        ):  # set apart from the rows that it reads; XLA takes up to three passes
            k = pieces.join(by_token(k)[None], call.shape.dim, False, interpret)
    scalars = {} if call.visited is None else {"visited": jnp.asarray(call.visited.reshape(-1))}
    if mask.band is not None:
        scalars["shift"] = jnp.asarray(shift, jnp.int32).reshape(1)
    if bias is not None and not call.cut_at_end and call.visited is None:
        scalars["state"] = states_of(bias, blocks.keys)
        scalars["fetch"] = _fetched_blocks(scalars["state"], math.prod(bias.shape[:2]))

    def fetched(h, i, j, given):
        return _block_to_fetch(call, dict(zip(scalars, given)), h, i, j)

    def place_of_bias(h, i, j, *s):
        return call.row_of(mask.keys, h), 0, call.kv_blocks - 1 if call.cut_at_end else fetched(h, i, j, s)

    def place_of_dense(h, i, j, *s):
        return call.row_of(mask.dense, h), i, fetched(h, i, j, s)

    inputs = _queries_keys_values(call, q, k, v, fetched)
    if BOUND in call.modes and len(call.modes) > 1:
        scalars["reach"] = bounds.reach.reshape(-1)
    if CENTRED in call.modes:
        scalars["radius"] = bounds.radius.reshape(-1)
        rows = bounds.centre.reshape(-1, *bounds.centre.shape[2:])
        inputs["centre"] = rows, pl.BlockSpec((None, *rows.shape[1:]), lambda h, *_: (call.row_of_kv(h), 0, 0))
    if bias is not None:
        spec = pl.BlockSpec((None, 1, blocks.keys), place_of_bias)
        inputs["bias"] = bias.reshape(-1, 1, call.shape.kv_len), spec
    if mask.dense is not None:
        dense = mask.dense.astype(jnp.int8) if mask.dense.dtype == jnp.bool_ else mask.dense
        spec = pl.BlockSpec((None, blocks.queries, blocks.keys), place_of_dense)
        inputs["dense"] = dense.reshape(-1, *dense.shape[2:]), spec
    return scalars, inputs


def key_bias(keys) -> Float[Array, "b n 1 S"] | None:
    """A key mask as a bias on scores in base 2; MASKED where the key is hidden."""
    if keys is None:
        return None
    if keys.dtype == jnp.bool_:
        return jnp.where(keys, 0.0, MASKED)
    keys = keys.astype(jnp.float32)
    return jnp.where(takes_part(keys), keys * LOG2_E, MASKED)


def keys_seen(mask: Mask, shift, q_len: int, k) -> Bool[Array, "B|1 K|1 S 1"] | None:
    """Keys that some query of any head of the group sees; None: all. Other keys may hold anything, even NaN."""
    kv_heads, s_len = k.shape[1:3]
    if mask.keys is None and mask.dense is None and mask.band is None:
        return None
    seen = jnp.ones((1, 1, 1, s_len), bool)
    seen = seen if mask.keys is None else seen & takes_part(mask.keys)
    by_query = [] if mask.dense is None else [takes_part(mask.dense)]
    if mask.band is not None:
        key, rows = jnp.arange(s_len), jnp.arange(q_len)[:, None]
        low, high = _ends_of_rows(mask, shift, 0, q_len) if mask.dense is None else band_ends(mask, shift, rows)
        by_query += ([] if low is None else [key >= low]) + ([] if high is None else [key <= high])
    if mask.dense is None:
        seen = functools.reduce(jnp.logical_and, by_query, seen)
    else:
        seen = seen & functools.reduce(jnp.logical_and, by_query).any(2, keepdims=True)
    b, n = seen.shape[:2]
    return seen.reshape(b, kv_heads if n > 1 else 1, -1, s_len).any(2)[..., None]


def _zero_unseen(v, seen: Bool[Array, "B|1 K|1 S 1"], first: int):
    """Values with zeros where no query sees the key, from key `first` on; in the layout of linear layers, which costs no copy."""
    rows, dim = by_token(v), v.shape[3]
    seen = jnp.repeat(by_token(seen), 1 if seen.shape[1] == 1 else dim, axis=2)[:, first:]
    return as_heads(rows.at[:, first:].set(jnp.where(seen, rows[:, first:], 0)), dim)


def _ends_of_rows(mask: Mask, shift, first, rows: int):
    """The first and last key that any of the `rows` queries from `first` on may see; None where the band is open."""
    return band_ends(mask, shift, first)[0], band_ends(mask, shift, first + rows - 1)[1]


def _queries_keys_values(call: Call, q, k, v, fetched) -> Operands:
    blocks, shape, kv_heads = call.blocks, call.shape, call.kv_heads
    in_rows = shape.dim % LANES == 0  # the layout of linear layers, all heads of a token side by side: no copy
    k = by_token(k) if in_rows else k.reshape(-1, *k.shape[2:])

    def place_of_keys(h, i, j, *s):
        if in_rows:
            return lax.div(h, call.heads), fetched(h, i, j, s), lax.rem(call.row_of_kv(h), kv_heads)
        return call.row_of_kv(h), fetched(h, i, j, s), 0

    def place_of_values(h, i, j, *s):
        return call.row_of_kv(h), 0, fetched(h, i, j, s)

    if call.in_rows:
        queries = {"rows": (by_token(q), _rows_of(call, shape.dim))}
    else:
        spec = pl.BlockSpec((None, shape.dim, blocks.queries), lambda h, i, j, *s: (h, 0, i))
        queries = {"q": (heads_beside_tokens(q), spec)}
    return queries | {
        "k": (k, pl.BlockSpec((None, blocks.keys, shape.dim), place_of_keys)),
        "v": (heads_beside_tokens(v), pl.BlockSpec((None, shape.out_dim, blocks.keys), place_of_values)),
    }


def _rows_of(call: Call, dim: int) -> pl.BlockSpec:
    """One head's block of queries, in an array [B, T, N D]."""
    shape, heads = (None, call.blocks.queries, dim), call.heads
    return pl.BlockSpec(shape, lambda h, i, j, *s: (lax.div(h, heads), i, lax.rem(h, heads)))


def heads_beside_tokens(x) -> Float[Array, "B*K D S"]:
    """[B, K, S, D] with tokens minor, as one transposition of a matrix of tokens and heads."""
    return jnp.swapaxes(by_token(x), 1, 2).reshape(-1, x.shape[3], x.shape[2])


def _block_to_fetch(call: Call, scalars: dict, h, i, j):
    """The block of keys that step j fetches; a skipped step repeats that of another step, which costs no copy."""
    keys, mask = call.blocks.keys, call.mask
    j = block_of_keys(call, scalars.get("visited"), i, j)
    if mask.band is not None:
        first = i * call.blocks.queries
        low, high = _ends_of_rows(mask, scalars["shift"][0], first, call.blocks.queries)
        j = j if low is None else jnp.maximum(j, lax.div(jnp.maximum(low, 0), keys))
        j = j if high is None else jnp.minimum(j, lax.div(jnp.maximum(high, 0), keys))
        j = jnp.clip(j, 0, call.kv_blocks - 1)
    return j if "fetch" not in scalars else scalars["fetch"][call.row_of(mask.keys, h) * call.kv_blocks + j]


def states_of(bias, block: int):
    """The state of each row and block of keys under a key mask: `SKIPPED`, `WHOLE` or `MIXED`."""
    b, n, _, s_len = bias.shape
    rows = padded_to(bias.reshape(b * n, s_len), 1, round_up(s_len, block), MASKED).reshape(b * n, -1, block)
    whole = (rows == 0).all(-1)
    return jnp.where(whole, WHOLE, jnp.where((rows <= MASKED).all(-1), SKIPPED, MIXED)).astype(jnp.int32).reshape(-1)


def _fetched_blocks(state, rows: int):
    """`fetch` of `make_operands`, from the states of `rows` rows."""
    state = state.reshape(rows, -1)
    before = lax.cummax(jnp.where(state > SKIPPED, jnp.arange(state.shape[1]), -1), axis=1)
    fetch = jnp.where(before >= 0, before, jnp.argmax(state > SKIPPED, axis=1)[:, None])
    return fetch.astype(jnp.int32).reshape(-1)
