"""Gradients of attention: one kernel for dq, dk and dv, which computes the scores again.

With p the weights, o the output, g its gradient and l that of the log-sum-exp (Dao 2023, algorithm 2; scores s = scale q k^T),

    dv = p^T g;   ds = p (g v^T - rowsum(g o) + l);   dk = scale ds^T q;   dq = scale ds k.

As in the forward kernel, scores are transposed, [keys, queries], and exponentials are to base 2. What is subtracted from scores
and from g v^T is a row. dq, dk and dv are transposed too, [head size, tokens], so that their products fill the matrix units; q k^T
and g v^T, only as deep as a head, fill `head size / side` of them. The grid is (head h, chunk c of queries, block j of keys,
block i of queries). dk and dv of a block of keys stay in VMEM for all queries of a chunk, dq of a chunk for all keys. All sums
are float32.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..kept import ATTENTION
from ..pallas import LANES, LOG2_E, SUBLANES, call_kernel, cost, product, round_up, vmem_room
from . import kernel_body
from .blocks import Blocks, Shape, Tile
from .kernel import heads_beside_tokens, key_bias, keys_seen, shape_of, states_of, tpu_attention
from .kernel_body import Call
from .masks import Mask
from .reference import Keys, LogSumExp, Out, Queries, Values, padded_to, reference_attention


PER_BLOCK = 60  # overhead of a block, as the time of so many tokens
NEVER = 3e38  # the log-sum-exp used for rows without keys: their weights are 0


def differentiable_attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    scale: float,
    mask: Mask | None = None,
    first_row=0,
    first_key=0,
    with_lse: bool = False,
    generation: str | None = None,
    back: Blocks | None = None,
    interpret=False,
    **forward,
) -> Out | tuple[Out, LogSumExp]:
    """`tpu_attention` with gradients of q, k, v and a bias.

    Args:
        back: block sizes of the gradient kernel; None: `blocks_of`.
        forward: further arguments of `tpu_attention`.
    """
    forward |= {"scale": scale, "generation": generation, "interpret": interpret}
    how = {"scale": scale, "generation": generation, "blocks": back, "interpret": interpret}

    @jax.custom_vjp
    def attend(q, k, v, mask, first_row, first_key):
        out = tpu_attention(q, k, v, mask=mask, first_row=first_row, first_key=first_key, with_lse=with_lse, **forward)
        return out if with_lse else (out, None)

    def run(*arguments):
        q, k, v, mask, first_row, first_key = jax.tree.map(lambda x: x.value, arguments)
        learnt = mask if any(x.perturbed for x in jax.tree.leaves(arguments[3])) else None
        places = {"first_row": first_row, "first_key": first_key}
        out, lse = tpu_attention(q, k, v, mask=mask, with_lse=True, **places, **forward)
        if not with_lse:  # with_lse is for a ring, which would keep those of every hop
            out, lse = (checkpoint_name(x, ATTENTION) for x in (out.astype(q.dtype), lse))
        return (out, lse if with_lse else None), (q, k, v, mask, places, out, lse, learnt)

    def go_back(kept, gradients):
        q, k, v, mask, places, out, lse, learnt = kept
        of_out, of_lse = (None if isinstance(x, SymbolicZero) else x for x in gradients)
        of_out = jnp.zeros_like(out) if of_out is None else of_out
        found = attention_gradients(q, k, v, mask, out, lse, of_out, of_lse, **places, **how)
        of_mask = learnt and _gradient_of_bias(q, k, v, learnt, of_out, of_lse, scale=scale, **places)
        return *found, of_mask, None, None

    attend.defvjp(run, go_back, symbolic_zeros=True)
    out, lse = attend(q, k, v, mask, first_row, first_key)
    return (out, lse) if with_lse else out


def _gradient_of_bias(q, k, v, mask: Mask, of_out, of_lse, **how) -> Mask:
    """The gradient of a bias, by `reference_attention`: learnt biases are too rare for a kernel."""

    def outputs_of(mask):
        out, lse = reference_attention(q, k, v, mask=mask, with_lse=True, again=True, **how)
        return out, jnp.where(jnp.isneginf(lse), 0.0, lse)

    (out, lse), back = jax.vjp(outputs_of, mask)
    return back((of_out.astype(out.dtype), jnp.zeros_like(lse) if of_lse is None else of_lse))[0]


def blocks_of(shape: Shape) -> Blocks:
    """Block sizes of gradients: up to 1,024 tokens that pad little. Float32, heads over 128: 512, and pieces of one tile."""
    tile = Tile(*(min(256, round_up(n, LANES)) for n in (shape.q_len, shape.kv_len)), 3)
    short = shape.bytes == 2 and max(shape.dim, shape.out_dim) <= LANES
    most = 1024 if short else 512
    queries, keys = (
        min(range(size, most + 1, size), key=lambda block: round_up(n, block) * (1 + PER_BLOCK / block))
        for n, size in ((shape.q_len, tile.queries), (shape.kv_len, tile.keys))
    )
    return Blocks(queries, keys, queries if short else tile.queries, tile, tile)


def chunk_of(blocks: Blocks, shape: Shape, generation: str | None) -> int:
    """Blocks of queries in a chunk, whose dq stays in VMEM: chunks are as few as fit, and equal."""
    fixed, per_block = _vmem_bytes(blocks, shape)
    room = (vmem_room(generation) - fixed) // per_block
    if room < 1:
        raise ValueError(f"expected heads whose gradients fit VMEM, got head size {max(shape.dim, shape.out_dim)}")
    count = pl.cdiv(shape.q_len, blocks.queries)
    return pl.cdiv(count, pl.cdiv(count, room))


def _vmem_bytes(blocks: Blocks, shape: Shape) -> tuple[int, int]:
    """(VMEM of a kernel without dq, VMEM of dq of one block of queries); each block has two buffers."""
    dim, out_dim = round_up(shape.dim, SUBLANES * 2), round_up(shape.out_dim, SUBLANES * 2)
    wide = round_up(shape.dim, LANES) + round_up(shape.out_dim, LANES)
    of_queries = blocks.queries * ((dim + out_dim) * shape.bytes + 2 * SUBLANES * 4)
    of_keys = blocks.keys * ((wide + dim) * shape.bytes + (dim + out_dim) * 4)
    of_mask = blocks.queries * blocks.keys * shape.dense_bytes + blocks.keys * SUBLANES * 4
    tile = blocks.bound
    spilled = (tile.lag + 2) * tile.queries * tile.keys * 16 + 8 * (dim + out_dim) * max(tile.queries, tile.keys)
    return 2 * (of_queries + of_keys + of_mask) + blocks.keys * LANES * 4 + spilled, 2 * blocks.queries * dim * 4


def attention_gradients(
    q: Queries,
    k: Keys,
    v: Values,
    mask: Mask | None,
    out: Out,
    lse: LogSumExp,
    of_out: Out,
    of_lse: LogSumExp | None = None,
    *,
    scale: float,
    first_row=0,
    first_key=0,
    generation: str | None = None,
    blocks: Blocks | None = None,
    interpret=False,
) -> tuple[Queries, Keys, Values]:
    """Gradients of q, k and v in their dtypes.

    Args:
        out, lse: results of `tpu_attention`.
        of_out, of_lse: gradients of these; None: zeros.
        blocks: block sizes; None: `blocks_of`.

    Raises ValueError for heads so large that no block fits VMEM.
    """
    mask, shape = mask or Mask(), shape_of(q, k, v, mask)
    blocks = blocks or blocks_of(shape)
    batch, heads, q_len, dim = q.shape
    call = Call(blocks, shape, mask, (), scale * LOG2_E, 0, heads, k.shape[1])
    seen = keys_seen(mask, first_row - first_key, q_len, k)
    if seen is not None:  # other keys may hold anything
        k, v = (jnp.where(seen, x, 0) for x in (k, v))
    if mask.queries is not None:
        of_out = jnp.where(mask.queries, of_out, 0)
    of_out = of_out.astype(q.dtype)
    less = (of_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
    less = less if of_lse is None else less - jnp.where(jnp.isneginf(lse), 0, of_lse)
    lse = jnp.where(jnp.isneginf(lse), NEVER, lse * LOG2_E)

    per_chunk = chunk_of(blocks, shape, generation)
    chunks = pl.cdiv(q_len, blocks.queries * per_chunk)
    queries, keys = blocks.queries * per_chunk * chunks, blocks.keys * call.kv_blocks
    q, of_out = (padded_to(x, 2, queries) for x in (q, of_out))
    less, lse = padded_to(less, 2, queries), padded_to(lse, 2, queries, NEVER)
    k, v = (padded_to(x, 2, keys) for x in (k, v))
    scalars, operands = _operands(call, per_chunk, q, k, v, of_out, lse, less, first_row - first_key)
    rows, work = batch * heads, math.prod(q.shape[:3]) * keys
    results = call_kernel(
        functools.partial(run, call=call),
        "attention_gradients",
        (rows, chunks, call.kv_blocks, per_chunk),
        operands,
        _outputs(call, rows, per_chunk, chunks),
        parallel=2,
        work=cost(q, k, v, of_out, q, k, v, flops=2 * work * (3 * dim + 2 * shape.out_dim), transcendentals=work),
        interpret=interpret,
        vmem_bytes=vmem_room(generation),
        scalars=scalars,
        scratch={"column": pltpu.VMEM((SUBLANES if mask.keys is None else blocks.keys, LANES), jnp.float32)},
    )
    of_k, of_v = (
        results[name].sum(0).reshape(batch, call.kv_heads, -1, *results[name].shape[2:]).sum(2)
        for name in ("dk", "dv")
    )
    of_q = results["dq"].reshape(batch, heads, dim, queries)
    return tuple(
        jnp.swapaxes(x * by, 2, 3)[:, :, :tokens].astype(q.dtype)
        for x, by, tokens in ((of_q, scale, q_len), (of_k, scale, shape.kv_len), (of_v, 1, shape.kv_len))
    )


def _operands(call: Call, per_chunk: int, q, k, v, of_out, lse, less, shift):
    """As `kernel.make_operands`: q, k and of_out with tokens minor, k and v also as given; lse and `less` as rows."""
    blocks, mask, scalars = call.blocks, call.mask, {}
    if mask.band is not None:
        scalars["shift"] = jnp.asarray(shift, jnp.int32).reshape(1)
    bias = key_bias(mask.keys)
    if bias is not None and not call.cut_at_end:
        scalars["state"] = states_of(bias, blocks.keys)

    def of_queries(x):
        return x, pl.BlockSpec((None, x.shape[1], blocks.queries), lambda h, c, j, i, *s: (h, 0, c * per_chunk + i))

    def of_keys(x):
        return x, pl.BlockSpec((None, blocks.keys, x.shape[2]), lambda h, c, j, i, *s: (call.row_of_kv(h), j, 0))

    operands = {
        "q": of_queries(heads_beside_tokens(q)),
        "g": of_queries(heads_beside_tokens(of_out)),
        "lse": of_queries(lse.reshape(-1, 1, lse.shape[2])),
        "less": of_queries(less.reshape(-1, 1, less.shape[2])),
        "k": of_keys(k.reshape(-1, *k.shape[2:])),
        "v": of_keys(v.reshape(-1, *v.shape[2:])),
    }
    turned = heads_beside_tokens(k)
    spec = pl.BlockSpec((None, turned.shape[1], blocks.keys), lambda h, c, j, i, *s: (call.row_of_kv(h), 0, j))
    operands["k_turned"] = turned, spec
    if bias is not None:
        bias = padded_to(bias, 3, k.shape[2])
        spec = pl.BlockSpec((None, 1, blocks.keys), lambda h, c, j, i, *s: (call.row_of(mask.keys, h), 0, j))
        operands["bias"] = bias.reshape(-1, 1, bias.shape[3]), spec
    if mask.dense is not None:
        dense = mask.dense.astype(jnp.int8) if mask.dense.dtype == jnp.bool_ else mask.dense
        dense = padded_to(padded_to(dense, 2, q.shape[2]), 3, k.shape[2])
        spec = pl.BlockSpec(
            (None, blocks.queries, blocks.keys),
            lambda h, c, j, i, *s: (call.row_of(mask.dense, h), c * per_chunk + i, j),
        )
        operands["dense"] = dense.reshape(-1, *dense.shape[2:]), spec
    return scalars, operands


def _outputs(call: Call, rows: int, per_chunk: int, chunks: int) -> dict:
    """Sums in float32, tokens minor: dq per head, dk and dv per chunk of queries and query head."""
    shape, blocks = call.shape, call.blocks
    queries = blocks.queries * per_chunk
    spec = pl.BlockSpec((None, shape.dim, queries), lambda h, c, j, i, *s: (h, 0, c))
    outputs = {"dq": (jax.ShapeDtypeStruct((rows, shape.dim, queries * chunks), jnp.float32), spec)}
    for name, dim in (("dk", shape.dim), ("dv", shape.out_dim)):
        spec = pl.BlockSpec((None, None, dim, blocks.keys), lambda h, c, j, i, *s: (c, h, 0, j))
        array = jax.ShapeDtypeStruct((chunks, rows, dim, blocks.keys * call.kv_blocks), jnp.float32)
        outputs[name] = array, spec
    return outputs


def run(r, call: Call):
    """One grid step (head, chunk of queries, block of keys, block of queries)."""
    head, chunk, j, i = (pl.program_id(axis) for axis in range(4))
    blocks = call.blocks
    first = pl.multiple_of(i * blocks.queries, blocks.queries)
    first_query, first_key = chunk * pl.num_programs(3) * blocks.queries + first, j * blocks.keys

    @pl.when(j == 0)
    def _():
        r.dq[:, pl.ds(first, blocks.queries)] = jnp.zeros((call.shape.dim, blocks.queries), jnp.float32)

    @pl.when(i == 0)
    def _():
        r.dk[...], r.dv[...] = jnp.zeros_like(r.dk), jnp.zeros_like(r.dv)

    def visit(is_cut: bool):
        masked = None
        if is_cut:
            kernel_body.lay_out_key_mask(r, call)
            masked = functools.partial(kernel_body.masked_scores, r, call, first_query, first_key)

        @pl.loop(0, blocks.queries // blocks.piece)
        def _(n):
            start = pl.multiple_of(n * blocks.piece, blocks.piece)
            _piece(r, call, masked, start, pl.multiple_of(first + start, blocks.piece))

    kernel_body.where_seen(r, call, head, j, first_query, visit)


def _piece(r, call: Call, masked, start, place):
    """One piece of queries, from `start` on in the block, with all its keys, as straight-line code. `place`: where its dq begins.

    Both products of tile t + lag come before the three of tile t.
    """
    blocks, tile = call.blocks, call.blocks.bound

    def queries_of(t: int, start=start):
        return pl.ds(start + t * tile.queries, tile.queries)

    def keys_of(c: int):
        return pl.ds(c * tile.keys, tile.keys)

    def products(t: int, c: int):
        queries, keys = queries_of(t), keys_of(c)
        return product(r.k[keys, :], r.q[:, queries]), product(r.v[keys, :], r.g[:, queries])

    def sums(t: int, c: int, s, of_p):
        queries, keys, there = queries_of(t), keys_of(c), queries_of(t, place)
        s = s * call.factor
        if masked:  # weights are at most 1; those beyond the last query could be anything
            s = jnp.minimum(masked(s, queries, keys) - r.lse[:, queries], 0.0)
        else:
            s = s - r.lse[:, queries]
        p = jnp.exp2(s)
        of_s = (p * (of_p - r.less[:, queries])).astype(r.q.dtype)
        p = p.astype(r.q.dtype)
        r.dv[:, keys] += product(r.g[:, queries], p, axis=1)
        r.dk[:, keys] += product(r.q[:, queries], of_s, axis=1)
        r.dq[:, there] += product(r.k_turned[:, keys], of_s)

    kernel_body.each_tile(tile, blocks.piece, blocks.keys, products, sums)
