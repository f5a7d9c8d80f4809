"""Attention for one TPU chip: scores transposed (keys along sublanes, queries along lanes), exponentials to base 2.

Sums over keys then run down the sublanes without a transposition, and e^x is 2^(x log2 e). Scores are computed some tiles
ahead of their exponentials (`Blocks.lag`), so that the matrix units never wait: that, not the number of operations, is
what the time hangs on.

Where scores need the factor scale * log2 e: instead of a subtraction (way "bound"), which costs the same; else, as q
times the factor is no bfloat16, in a second half of the matrix unit's depth, which heads of 128 leave unused on v6e and
later: [q_high; q_low] against [k, k]. One bfloat16 rounding of q more would double the error of scores of deviation 4.

Softmax may subtract any number per query, nothing included. Which, is chosen per head and block of queries, on the
device, by what scores (here times scale * log2 e) can be at most:

* bound: |q| max_j |k_j|, at most 100 and so small that sums stay finite: nothing is subtracted, no maximum, no rescaling.
* centred: with c the mean of the true keys and R = max_j |k_j - c|, q.k_j = q.c + e_j with |e_j| <= |q| R, and max_j e_j >= 0
  as the mean of e is 0 up to rounding. Subtracting q.c + max(0, |q| R - FREE) keeps every exponential below 2^FREE and the
  largest above 2^-(|q| R - FREE): exact in float32 as long as |q| R is at most `limit`.
* online: the running maximum (Milakov and Gimelshein 2018), for all others.

Blocks of keys that no query may see are neither fetched nor computed; those that a mask or the end of the keys cuts take
a body with masking, all others one without.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from . import kernel_body
from .blocks import DEFAULT, LANES, Blocks, Shape, choose, folded_parts, vmem_bytes
from .kernel_body import FREE, LOG2_E, MASKED, SMALLEST, SUBLANES, Call, band_ends
from .masks import BELOW, Mask


PATHS = ("bound", "centred", "online")
LARGEST = 126.0  # exponent of the largest sum
VMEM_MARGIN = 8 << 20  # the compiler's own, beside what `blocks.vmem_bytes` counts


def unsupported(q, k, v, mask: Mask | None) -> str | None:
    """What of this call the kernel does not take, or None."""
    return None if q.dtype in (jnp.bfloat16, jnp.float32) else f"{q.dtype}"


def shape_of(q, k, v, mask: Mask | None, with_lse: bool = False) -> Shape:
    """What the sizes of blocks for this call depend on; arrays, or their shapes and dtypes."""
    mask = mask or Mask()
    return Shape(
        q_len=q.shape[2],
        kv_len=k.shape[2],
        dim=q.shape[3],
        out_dim=v.shape[3],
        bytes=q.dtype.itemsize,
        out_bytes=4 if with_lse else q.dtype.itemsize,
        keys=mask.keys is not None,
        dense_bytes=0 if mask.dense is None else mask.dense.dtype.itemsize,
    )


def tpu_attention(
    q: Float[Array, "B N T D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S E"],
    *,
    scale: float,
    mask: Mask | None = None,
    first_row: int | Array = 0,
    first_key: int | Array = 0,
    with_lse: bool = False,
    generation: str | None = None,
    wanted: tuple[int, int, int] | None = None,
    blocks: Blocks | None = None,
    smoothing: bool = True,
    paths: tuple[str, ...] = PATHS,
    interpret: bool = False,
) -> Float[Array, "B N T E"] | tuple[Float[Array, "B N T E"], Float[Array, "B N T"]]:
    """Attention with the arguments of `reference_attention`.

    Args:
        generation: of the chip, for the sizes of blocks.
        wanted, blocks: queries, keys and keys of one product instead of those of `blocks.choose`; or all sizes.
        smoothing: with the way "centred"; False: without, for which fewer heads are tame enough and less is compiled.
        paths: ways to subtract that are compiled. With "bound" alone the caller vouches for the bound: for benchmarks.

    Raises:
        TypeError: a dtype that is neither bfloat16 nor float32.
        ValueError: blocks that do not fit VMEM.
    """
    mask = mask or Mask()
    if reason := unsupported(q, k, v, mask):
        raise TypeError(
            f"expected bfloat16 or float32 for the attention kernel, got {reason}; cast the model with .to()"
        )
    batch, heads, q_len, dim = q.shape
    kv_heads, kv_len, out_dim = k.shape[1], k.shape[2], v.shape[3]
    groups = heads // kv_heads
    shape = shape_of(q, k, v, mask, with_lse)
    blocks = blocks or choose(shape, generation or DEFAULT, wanted)
    bias = None if mask.keys is None else _bias(mask.keys)
    if mask.dense is not None or (bias is not None and mask.keys.dtype != jnp.bool_):
        paths = ("online",)  # what is added to scores has no bound

    elif not smoothing and len(paths) > 1:
        paths = tuple(path for path in paths if path != "centred")
    if scale < 0:
        q, scale = -q, -scale
    folded = folded_parts(shape, generation or DEFAULT) if set(paths) - {"bound"} else 0
    # Where rows see different keys, their largest score may lie as far below the mean as the bound is above it.
    alike = mask.band is None and (bias is None or bias.shape[1] == 1 or groups == 1)
    call = Call(
        blocks=blocks,
        names=(),
        q_len=q_len,
        kv_len=kv_len,
        paths=paths,
        factor=scale * LOG2_E,
        folded=folded,
        twice=folded == 2 and dim % LANES != 0,
        limit=(FREE + SMALLEST) / (1 if alike else 2),
        band=mask.band,
        keys=bias is not None,
        dense=mask.dense is not None,
        dtype=q.dtype,
        row_of_keys=None if bias is None else functools.partial(_row, bias.shape, heads),
        row_of_kv=lambda h: lax.div(h, groups),
    )
    seen = _seen(mask, first_row - first_key, q_len, k)
    v = jnp.where(seen, v, jnp.zeros_like(v))  # a weight of zero times NaN would be NaN
    scalars = {}
    if mask.band is not None:
        scalars["shift"] = jnp.asarray(first_row - first_key, jnp.int32).reshape(1)
    if bias is not None:
        scalars["state"], scalars["fetch"] = _states(bias, blocks.keys)
    by_token = dim % LANES == 0  # keys as linear layers give them, all heads of a token side by side: no copy
    fetched = functools.partial(_block_to_fetch, call, tuple(scalars))
    inputs = {
        "q": (
            _heads_beside_tokens(q),
            pl.BlockSpec((None, dim, blocks.queries), lambda h, i, j, *s: (h, 0, i)),
        ),
        "k": (
            _by_token(k) if by_token else k.reshape(batch * kv_heads, kv_len, dim),
            pl.BlockSpec(
                (None, blocks.keys, dim),
                lambda h, i, j, *s: (
                    (lax.div(h, heads), fetched(h, i, j, s), lax.rem(call.row_of_kv(h), kv_heads))
                    if by_token
                    else (call.row_of_kv(h), fetched(h, i, j, s), 0)
                ),
            ),
        ),
        "v": (
            _heads_beside_tokens(v),
            pl.BlockSpec(
                (None, out_dim, blocks.keys), lambda h, i, j, *s: (call.row_of_kv(h), 0, fetched(h, i, j, s))
            ),
        ),
    }
    if "bound" in paths and len(paths) > 1:
        scalars["reach"] = _reach(k, v, seen).reshape(-1)
    if "centred" in paths:
        centre, radius = _centre_and_radius(k, seen)
        scalars["radius"] = radius.reshape(-1)
        inputs["centre"] = (
            centre.reshape(batch * kv_heads, SUBLANES, dim),
            pl.BlockSpec((None, SUBLANES, dim), lambda h, i, j, *s: (call.row_of_kv(h), 0, 0)),
        )
    if bias is not None:
        inputs["bias"] = (
            bias.reshape(-1, 1, kv_len),
            pl.BlockSpec((None, 1, blocks.keys), lambda h, i, j, *s: (call.row_of_keys(h), 0, fetched(h, i, j, s))),
        )
    if mask.dense is not None:
        dense = mask.dense.astype(jnp.int8) if mask.dense.dtype == jnp.bool_ else mask.dense
        row_of_dense = functools.partial(_row, mask.dense.shape, heads)
        inputs["dense"] = (
            dense.reshape(-1, *dense.shape[2:]),
            pl.BlockSpec(
                (None, blocks.queries, blocks.keys), lambda h, i, j, *s: (row_of_dense(h), i, fetched(h, i, j, s))
            ),
        )
    outputs = {
        "o": (
            jax.ShapeDtypeStruct((batch * heads, out_dim, q_len), jnp.float32 if with_lse else q.dtype),
            pl.BlockSpec((None, out_dim, blocks.queries), lambda h, i, j, *s: (h, 0, i)),
        ),
        "lse": (
            jax.ShapeDtypeStruct((batch * heads, 1, q_len), jnp.float32),
            pl.BlockSpec((None, 1, blocks.queries), lambda h, i, j, *s: (h, 0, i)),
        ),
    }
    if not with_lse:
        del outputs["lse"]
    scratch = {
        "m": pltpu.VMEM((SUBLANES, blocks.queries), jnp.float32),
        "l": pltpu.VMEM((SUBLANES, blocks.queries), jnp.float32),
        "acc": pltpu.VMEM((out_dim, blocks.queries), jnp.float32),
        "true_v": pltpu.VMEM((out_dim, blocks.keys), v.dtype),
        "column": pltpu.VMEM((blocks.keys if bias is not None else SUBLANES, LANES), jnp.float32),
        "folded": pltpu.VMEM((dim * folded or SUBLANES, blocks.queries if folded else LANES), q.dtype),
        "twice": pltpu.VMEM((blocks.keys, 2 * dim) if call.twice else (SUBLANES, LANES), k.dtype),
        "way": pltpu.SMEM((1,), jnp.int32),
    }
    call = replace(call, names=(*scalars, *inputs, *outputs, *scratch))
    out, *rest = pl.pallas_call(
        functools.partial(kernel_body.run, call=call),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(batch * heads, pl.cdiv(q_len, blocks.queries), call.kv_blocks),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=[spec for _, spec in outputs.values()],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[shape for shape, _ in outputs.values()],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_bytes(blocks, shape) + VMEM_MARGIN,
        ),
        interpret=interpret,
        name="attention_kernel",
    )(*scalars.values(), *(x for x, _ in inputs.values()))
    out = jnp.swapaxes(out.reshape(batch, heads * out_dim, q_len), 1, 2).reshape(batch, q_len, heads, out_dim)
    out = jnp.swapaxes(out, 1, 2)
    if mask.queries is not None:
        out = jnp.where(mask.queries, out, 0)
    if not with_lse:
        return out
    lse = rest[0].reshape(batch, heads, q_len)
    return out, lse if mask.queries is None else jnp.where(mask.queries[..., 0], lse, -jnp.inf)


def _by_token(x) -> Float[Array, "B S K*D"]:
    """[B, K, S, D] with all heads of a token side by side: what it was made from by a transposition."""
    return jnp.swapaxes(x, 1, 2).reshape(x.shape[0], x.shape[2], -1)


def _heads_beside_tokens(x) -> Float[Array, "B*K D S"]:
    """[B, K, S, D] with tokens minor, as one transposition of a matrix of tokens and heads."""
    return jnp.swapaxes(_by_token(x), 1, 2).reshape(-1, x.shape[3], x.shape[2])


def _row(shape, heads: int, h):
    """The row of an operand [b|1, n|1, ...], its first two axes made one, that head h of all batches reads."""
    b, n = shape[:2]
    return (lax.div(h, heads) if b > 1 else 0) * n + (lax.rem(h, heads) if n > 1 else 0)


def _block_to_fetch(call: Call, names, h, i, j, scalars):
    """The block of keys of step j; one that is there already where the step is skipped."""
    named = dict(zip(names, scalars))
    keys = call.blocks.keys
    if call.band is not None:
        low, high = band_ends(call.band, named["shift"][0], i * call.blocks.queries, call.blocks.queries)
        j = j if low is None else jnp.maximum(j, lax.div(jnp.maximum(low, 0), keys))
        j = j if high is None else jnp.minimum(j, lax.div(jnp.maximum(high, 0), keys))
        j = jnp.clip(j, 0, call.kv_blocks - 1)
    return j if call.row_of_keys is None else named["fetch"][call.row_of_keys(h) * call.kv_blocks + j]


def _bias(keys) -> Float[Array, "b n 1 S"]:
    """A key mask as what is added to scores in base 2; MASKED where the key takes no part."""
    if keys.dtype == jnp.bool_:
        return jnp.where(keys, 0.0, MASKED)
    keys = keys.astype(jnp.float32)
    return jnp.where(keys > BELOW, keys * LOG2_E, MASKED)


def _seen(mask: Mask, shift, q_len: int, k) -> Bool[Array, "B K S 1"]:
    """Keys that some query sees, of any head of the group. Others may hold anything, NaN too."""
    batch, kv_heads, s_len, _ = k.shape
    seen = jnp.ones((1, 1, 1, s_len), bool)
    if mask.keys is not None:
        seen = seen & (mask.keys if mask.keys.dtype == jnp.bool_ else mask.keys > BELOW)
    if mask.dense is not None:
        seen = seen & (mask.dense if mask.dense.dtype == jnp.bool_ else mask.dense > BELOW).any(2, keepdims=True)
    if mask.band is not None:
        key, (low, high) = jnp.arange(s_len), band_ends(mask.band, shift, 0, q_len)
        seen = seen if low is None else seen & (key >= low)
        seen = seen if high is None else seen & (key <= high)
    b, n = seen.shape[:2]
    seen = seen.reshape(b, kv_heads if n > 1 else 1, -1, s_len).any(2)
    return jnp.broadcast_to(seen[..., None], (batch, kv_heads, s_len, 1))


def _reach(k, v, seen) -> Float[Array, "B K"]:
    """max |k| over the keys that are seen; larger where exponentials of 2^SMALLEST times the values do not add up to a float32."""
    k, v = (jnp.where(seen, x.astype(jnp.float32), 0.0) for x in (k, v))
    room = LARGEST - jnp.log2(k.shape[2] * jnp.maximum(jnp.abs(v).max((2, 3)), 1.0))
    longest = jnp.sqrt((k * k).sum(-1).max(-1))
    return jnp.where(room > 0, longest * jnp.maximum(SMALLEST / room, 1.0), jnp.inf)


def _centre_and_radius(k, seen):
    """c, the mean of the keys that are seen, as rows [B, K, 8, D] in k's dtype that add up to it, and R [B, K] float32.

    R is the largest distance of such a key from c. One row of bfloat16 would be off by as much as keys may differ.
    """
    k32 = jnp.where(seen, k.astype(jnp.float32), 0.0)
    left, rows = k32.sum(2) / jnp.maximum(seen.sum(2), 1), []
    for _ in range(1 if k.dtype == jnp.float32 else 3):
        rows.append(left.astype(k.dtype))
        left = left - rows[-1].astype(jnp.float32)
    centre = sum(row.astype(jnp.float32) for row in rows)
    distance = jnp.where(seen, k32 - centre[:, :, None], 0.0)
    rows += [jnp.zeros_like(rows[0])] * (SUBLANES - len(rows))
    return jnp.stack(rows, 2), jnp.sqrt((distance * distance).sum(-1).max(-1))


def _states(bias, block: int):
    """Per row of the key mask and block of keys: 0 none takes part, 1 all do as they are, 2 mixed; and what to fetch."""
    b, n, _, s_len = bias.shape
    blocks = pl.cdiv(s_len, block)
    rows = jnp.pad(bias.reshape(b * n, s_len), ((0, 0), (0, blocks * block - s_len)), constant_values=MASKED)
    rows = rows.reshape(b * n, blocks, block)
    state = jnp.where((rows == 0).all(-1), 1, jnp.where((rows <= MASKED).all(-1), 0, 2)).astype(jnp.int32)
    before = lax.cummax(jnp.where(state > 0, jnp.arange(blocks), -1), axis=1)
    fetch = jnp.where(before >= 0, before, jnp.argmax(state > 0, axis=1)[:, None])
    return state.reshape(-1), fetch.astype(jnp.int32).reshape(-1)
