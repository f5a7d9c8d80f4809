"""What the attention kernel does on the chip with one block of queries and one of keys; `kernel` calls it."""

import functools
from types import SimpleNamespace

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .blocks import LANES
from .kernel_call import LOG2_E, LOWEST, MIXED, SKIPPED, Call
from .kernel_tiles import Piece, product
from .softmax_modes import BOUND, CENTRED, CODES, FREE, ONLINE, SMALLEST


def run(*refs, call: Call):
    """The kernel: program (head, block of queries, block of keys)."""
    r = SimpleNamespace(**dict(zip(call.names, refs)))
    head, i, j = (pl.program_id(axis) for axis in range(3))
    first_query, first_key = i * call.blocks.queries, j * call.blocks.keys
    pl.when(j == 0)(lambda: _start(r, call, first_query, call.row_of_kv(head)))

    some, cut = [], []  # conditions: any score of this block counts; not all of them do as they are
    if call.keys and not call.cut_at_end:
        state = r.state[call.row_of_keys(head) * call.kv_blocks + j]
        some.append(state != SKIPPED)
        cut.append(state == MIXED)
    if call.band is not None:
        last_query, last_key = first_query + call.blocks.queries - 1, first_key + call.blocks.keys - 1
        (low, high), (last_low, last_high) = (call.ends(r.shift[0], row) for row in (first_query, last_query))
        if low is not None:
            some.append(last_key >= low)
            cut.append(first_key < last_low)
        if high is not None:
            some.append(first_key <= last_high)
            cut.append(last_key > high)
    if call.ragged or (call.keys and call.cut_at_end):
        cut.append(j == call.kv_blocks - 1)

    def visit(is_cut: bool):
        for way in call.ways:
            _for_way(r, call, way, functools.partial(_visit, r, call, first_query, first_key, way, is_cut))

    if call.dense or (cut and call.cut_at_end and call.kv_blocks == 1):  # no block is whole
        _when(some, functools.partial(visit, True))
    elif cut:
        is_cut = functools.reduce(jnp.logical_or, cut)
        _when([*some, is_cut], functools.partial(visit, True))
        _when([*some, jnp.logical_not(is_cut)], functools.partial(visit, False))
    else:
        _when(some, functools.partial(visit, False))
    pl.when(j == call.kv_blocks - 1)(lambda: _finish(r))


def _start(r, call: Call, first_query, kv):
    """The state before the first key, and which way to go."""
    r.l[...] = jnp.zeros_like(r.l)
    r.acc[...] = jnp.zeros_like(r.acc)
    if len(call.ways) > 1:
        norm = _norm(r, call)
        rows = first_query + lax.broadcasted_iota(jnp.int32, norm.shape, 1)
        largest, code = jnp.max(jnp.where(rows < call.q_len, norm, 0.0)), CODES[ONLINE]
        if CENTRED in call.ways:
            code = jnp.where(largest * r.radius[kv] <= call.limit, CODES[CENTRED], code)
        if BOUND in call.ways:
            code = jnp.where(largest * r.reach[kv] <= SMALLEST, CODES[BOUND], code)
        r.way[0] = code
    if hasattr(r, "went"):
        r.went[...] = jnp.full(r.went.shape, r.way[0] if len(call.ways) > 1 else CODES[call.ways[0]], jnp.int32)
    for way in call.ways:
        _for_way(r, call, way, functools.partial(_start_way, r, call, kv, way))


def _for_way(r, call: Call, way: str, run):
    """Runs if this is the way of this head and block of queries."""
    _when([] if len(call.ways) == 1 else [r.way[0] == CODES[way]], run)


def _when(conditions, run):
    if conditions:
        pl.when(functools.reduce(jnp.logical_and, conditions))(run)
    else:
        run()


def _norm(r, call: Call):
    """|q| times the factor: [1, queries]."""
    q = r.q[...].astype(jnp.float32)
    return jnp.sqrt((q * q).sum(axis=0, keepdims=True)) * call.factor


def _start_way(r, call: Call, kv, way: str):
    """What is subtracted, and q with the factor folded in."""
    if way == BOUND:
        r.m[...] = jnp.zeros_like(r.m)
        return
    if way == ONLINE:
        r.m[...] = jnp.full_like(r.m, LOWEST)
    else:
        mean = product(call, r.centre[...], r.q[...]).sum(axis=0, keepdims=True)
        offset = mean * call.factor + jnp.maximum(_norm(r, call) * r.radius[kv] - FREE, 0.0)
        r.m[...] = jnp.broadcast_to(offset, r.m.shape)
    if call.folded:
        _in_steps(call.blocks.queries, call.blocks.tile(way).queries, functools.partial(_fold, r, call))


def _in_steps(length: int, step: int, run):
    """`run` on slices of `step`: short code."""
    pl.loop(0, length // step)(lambda n: run(pl.ds(pl.multiple_of(n * step, step), step)))


def _fold(r, call: Call, queries):
    left, dim = r.q[:, queries].astype(jnp.float32) * call.factor, r.q.shape[0]
    for n in range(call.folded):
        part = left.astype(call.dtype)
        r.folded[n * dim : (n + 1) * dim, queries] = part
        left = left - part.astype(jnp.float32)


def _finish(r):
    l = r.l[...].sum(axis=0, keepdims=True)  # noqa: E741
    empty = l == 0
    r.o[...] = (r.acc[...] / jnp.where(empty, 1.0, l)).astype(r.o.dtype)
    if hasattr(r, "lse"):
        r.lse[...] = jnp.where(empty, -jnp.inf, (r.m[:1, :] + jnp.log2(l)) / LOG2_E)


def _visit(r, call: Call, first_query, first_key, way: str, cut: bool):
    """All queries of the block with all its keys, piece by piece."""
    blocks, tile = call.blocks, call.blocks.tile(way)
    if call.twice and way != BOUND:
        _in_steps(blocks.keys, tile.keys, functools.partial(_double, r))
    if cut:
        _prepare_cut(r, call, first_key)
    piece, keys = blocks.straight(way, call.kv_len, cut, call.cut_at_end)

    def run(n):
        first = 0 if isinstance(n, int) else pl.multiple_of(n * piece, piece)
        Piece(r, call, way, cut, (first_query, first_key), first).run(piece, keys)

    if piece == blocks.queries:
        run(0)
    else:
        pl.loop(0, blocks.queries // piece)(run)


def _double(r, keys):
    """Keys beside themselves, against what `_fold` lays one below the other."""
    r.twice[keys, :] = jnp.concatenate([r.k[keys, :]] * 2, axis=1)


def _prepare_cut(r, call: Call, first_key):
    """Values without what lies beyond the end, which may hold anything; the key mask laid out along sublanes."""

    def without_end(keys):
        v = r.v[:, keys]
        key = first_key + keys.start + lax.broadcasted_iota(jnp.int32, v.shape, 1)
        r.true_v[:, keys] = jnp.where(key < call.kv_len, v, jnp.zeros_like(v))

    if call.ragged:
        _in_steps(call.blocks.keys, LANES, without_end)
    if call.keys:
        r.column[...] = jnp.broadcast_to(r.bias[...], (LANES, call.blocks.keys)).T
