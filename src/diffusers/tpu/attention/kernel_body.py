"""What the attention kernel does on the chip with one block of queries and one of keys; `kernel` calls it."""

import functools
import math
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .blocks import LANES, Blocks, round_up
from .masks import BELOW


SUBLANES = 8
LOWEST = -1e30  # where the running maximum starts
MASKED = -3e38  # a masked score: far enough below LOWEST that its exponential is 0 there too
FREE = 60.0  # around the mean, exponentials may grow to 2^FREE: sums over 2^20 keys times values of 2^40 stay finite
SMALLEST = 100.0  # the largest exponential of a row may be 2^-SMALLEST: what is 2^-26 of it is still a normal number
LOG2_E = math.log2(math.e)
RARER_SCORES = 4_500_000  # of one piece of code of a way that fewer heads go: what compiles in some 10 s on two cores
WAYS = {
    "bound": 1_000_001,
    "centred": 1_000_002,
    "online": 1_000_003,
}  # no loop counts so far: whoever reads the schedule can tell them apart


@dataclass(frozen=True)
class Call:
    """What is static of one call.

    Attributes:
        names: of the references, in the order in which the kernel gets them.
        paths: the ways that are compiled.
        factor: scale * log2 e, positive: scores times this are exponents of 2.
        limit: the largest bound for which the way "centred" is exact.
        folded: how many matrices of q's dtype add up to q * factor, to float32 or to 2^-17 of it, one below the other; 0
            where there is no room for them and scores are multiplied by the factor instead.
        twice: the keys beside themselves, which they then meet, are laid out once per block: not whole vector registers.
        keys, dense: there is a mask by key; of queries x keys.
        row_of_keys, row_of_kv: from a program's first index to the row of the key mask, of keys and values.
    """

    blocks: Blocks
    names: tuple[str, ...]
    q_len: int
    kv_len: int
    paths: tuple[str, ...]
    factor: float
    limit: float
    folded: int
    twice: bool
    band: tuple[int | None, int | None] | None
    keys: bool
    dense: bool
    dtype: jnp.dtype
    row_of_keys: object = None
    row_of_kv: object = None

    @property
    def kv_blocks(self) -> int:
        return pl.cdiv(self.kv_len, self.blocks.keys)

    @property
    def ragged(self) -> bool:
        return self.kv_len % self.blocks.keys != 0

    @property
    def cut_by_length_alone(self) -> bool:
        return not (self.keys or self.dense or self.band)

    @property
    def precision(self):
        # Products of bfloat16 operands are exact; asked for more, the compiler refuses them.
        return lax.Precision.HIGHEST if self.dtype == jnp.float32 else lax.Precision.DEFAULT


def band_ends(band, shift, first, rows: int):
    """The first and last key any of the `rows` queries from `first` on may see; None where the band is open."""
    left, right = band
    low = None if left is None else first + shift - left
    high = None if right is None else first + rows - 1 + shift + right
    return low, high


def run(*refs, call: Call):
    """The kernel: program (head, block of queries, block of keys)."""
    r = SimpleNamespace(**dict(zip(call.names, refs)))
    head, i, j = (pl.program_id(axis) for axis in range(3))
    first_query, first_key = i * call.blocks.queries, j * call.blocks.keys
    pl.when(j == 0)(lambda: _start(r, call, first_query, call.row_of_kv(head)))

    some, cut = [], []  # conditions: any score of this block counts; not all of them do as they are
    if call.keys:
        state = r.state[call.row_of_keys(head) * call.kv_blocks + j]
        some.append(state != 0)
        cut.append(state == 2)
    if call.band is not None:
        left, right = call.band
        low, high = band_ends(call.band, r.shift[0], first_query, call.blocks.queries)
        if low is not None:
            some.append(first_key + call.blocks.keys > low)
            cut.append(first_key < low + call.blocks.queries - 1)
        if high is not None:
            some.append(first_key <= high)
            cut.append(first_key + call.blocks.keys - 1 > high - call.blocks.queries + 1)
    if call.ragged:
        cut.append(j == call.kv_blocks - 1)

    def visit(is_cut: bool):
        for path in call.paths:
            _for_way(r, call, path, functools.partial(_visit, r, call, first_query, first_key, path, is_cut))

    if call.dense or (call.ragged and call.kv_blocks == 1):  # no block is whole
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
    if len(call.paths) > 1:
        norm = _norm(r, call)
        rows = first_query + lax.broadcasted_iota(jnp.int32, norm.shape, 1)
        largest, way = jnp.max(jnp.where(rows < call.q_len, norm, 0.0)), WAYS["online"]
        if "centred" in call.paths:
            way = jnp.where(largest * r.radius[kv] <= call.limit, WAYS["centred"], way)
        if "bound" in call.paths:
            way = jnp.where(largest * r.reach[kv] <= SMALLEST, WAYS["bound"], way)
        r.way[0] = way
    for path in call.paths:
        _for_way(r, call, path, functools.partial(_start_way, r, call, kv, path))


def _product(call: Call, x, y):
    return lax.dot_general(
        x, y, (((1,), (0,)), ((), ())), precision=call.precision, preferred_element_type=jnp.float32
    )


def _for_way(r, call: Call, path: str, run):
    """Runs if `path` is the way of this head and block of queries."""
    _when([] if len(call.paths) == 1 else [r.way[0] == WAYS[path]], run)


def _when(conditions, run):
    if conditions:
        pl.when(functools.reduce(jnp.logical_and, conditions))(run)
    else:
        run()


def _norm(r, call: Call):
    """|q| times the factor: [1, queries]."""
    q = r.q[...].astype(jnp.float32)
    return jnp.sqrt((q * q).sum(axis=0, keepdims=True)) * call.factor


def _start_way(r, call: Call, kv, path: str):
    """What is subtracted, and q with the factor folded in."""
    if path == "bound":
        r.m[...] = jnp.zeros_like(r.m)
        return
    if path == "online":
        r.m[...] = jnp.full_like(r.m, LOWEST)
    else:
        mean = _product(call, r.centre[...], r.q[...]).sum(axis=0, keepdims=True)
        offset = mean * call.factor + jnp.maximum(_norm(r, call) * r.radius[kv] - FREE, 0.0)
        r.m[...] = jnp.broadcast_to(offset, r.m.shape)
    if call.folded:
        _in_steps(call.blocks.queries, call.blocks.tile(path).queries, functools.partial(_fold, r, call))


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


def _visit(r, call: Call, first_query, first_key, path: str, cut: bool):
    """All queries of the block with all its keys, piece by piece."""
    blocks, tile = call.blocks, call.blocks.tile(path)
    keys, share = blocks.keys, 1
    if path != "bound":  # rarer, and the running maximum takes twice the code
        share = max(2, -(-blocks.piece * keys // RARER_SCORES))
    if call.twice and path != "bound":
        _in_steps(blocks.keys, tile.keys, functools.partial(_double, r))
    if cut:
        _prepare_cut(r, call, first_key)
        share = blocks.piece  # masking is rare: its piece is small, so that its code is
        if call.cut_by_length_alone:  # the last block of keys, where it is one of many
            keys = round_up(call.kv_len % blocks.keys, tile.keys)
            share = max(-(-2 * keys // blocks.keys), min(4, call.kv_blocks // 4))
    piece = _divisor(blocks.piece, share, tile.queries)

    def run(n):
        first = 0 if isinstance(n, int) else pl.multiple_of(n * piece, piece)
        _run(r, call, tile, piece, keys, (first_query, first_key), first, path, cut)

    if piece == blocks.queries:
        run(0)
    else:
        pl.loop(0, blocks.queries // piece)(run)


def _double(r, keys):
    """Keys beside themselves, against what `_fold` lays one below the other."""
    r.twice[keys, :] = jnp.concatenate([r.k[keys, :]] * 2, axis=1)


def _divisor(whole: int, share: int, unit: int) -> int:
    """The largest multiple of `unit` that divides `whole`, a multiple of it, and is at most `whole / share`."""
    units = whole // unit
    return max((n for n in range(1, units + 1) if units % n == 0 and n * share <= units), default=1) * unit


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


def _run(r, call: Call, tile, piece: int, length: int, block, start, path: str, cut: bool):
    """One piece, straight code: `piece` queries from `start` on, with the first `length` keys, of the block at `block`.

    Scores of tile t + lag are asked for before the values of tile t: the matrix units take work in this order.
    """
    state, waiting = {}, deque()
    chunks = length // tile.keys
    is_folded = call.folded and path != "bound"
    factor = 1.0 if is_folded else call.factor

    def queries_of(t):
        return pl.ds(start + t * tile.queries, tile.queries)

    def keys_of(c):
        return pl.ds(c * tile.keys, tile.keys)

    def times(x):
        return x if factor == 1.0 or cut else x * factor

    def scores(t, c):
        queries, keys = queries_of(t), keys_of(c)
        if c == 0:
            state[t] = [ref[:, queries] for ref in (r.m, r.l, r.acc)]
        if is_folded:
            k = r.twice[keys, :] if call.twice else jnp.concatenate([r.k[keys, :]] * call.folded, axis=1)
            s = _product(call, k, r.folded[:, queries])
        else:
            s = _product(call, r.k[keys, :], r.q[:, queries])
        if cut:
            s = _masked(r, call, s * factor, block, queries, keys)
        s = s.reshape(-1, SUBLANES, tile.queries)
        m, rescale = state[t][0], None
        if path == "online":
            top = jnp.maximum(m, times(s.max(axis=0).max(axis=0, keepdims=True)))
            rescale = jnp.exp2(m - top)
            state[t][0] = m = top
        return s, m, rescale

    def values(t, c, s, m, rescale):
        p = jnp.exp2(times(s) if path == "bound" else times(s) - m[None])
        _, l, acc = state[t]  # noqa: E741
        if rescale is not None:
            l, acc = l * rescale, acc * rescale[:1]  # noqa: E741
        v = (r.true_v if cut and call.ragged else r.v)[:, keys_of(c)]
        state[t][1:] = l + p.sum(axis=0), acc + _product(call, v, p.reshape(-1, tile.queries).astype(v.dtype))
        if c == chunks - 1:
            m, l, acc = state.pop(t)  # noqa: E741
            r.l[:, queries_of(t)], r.acc[:, queries_of(t)] = l, acc
            if path == "online":
                r.m[:, queries_of(t)] = m

    for t in range(piece // tile.queries):
        for c in range(chunks):
            waiting.append((t, c, *scores(t, c)))
            if len(waiting) > tile.lag:
                values(*waiting.popleft())
    while waiting:
        values(*waiting.popleft())


def _masked(r, call: Call, s, block, queries, keys):
    """Scores [keys, queries] of a tile with what the mask takes away."""
    if call.cut_by_length_alone and call.kv_len % call.blocks.keys >= keys.start + keys.size:
        return s
    key = block[1] + keys.start + lax.broadcasted_iota(jnp.int32, s.shape, 0)
    allowed = key < call.kv_len
    if call.keys:
        column = r.column[keys, :]
        column = jnp.concatenate([column] * pl.cdiv(s.shape[1], LANES), axis=1)
        s, allowed = s + column, allowed & (column > MASKED)
    if call.band is not None:
        left, right = call.band
        distance = key - block[0] - queries.start - r.shift[0] - lax.broadcasted_iota(jnp.int32, s.shape, 1)
        allowed = allowed if left is None else allowed & (distance >= -left)
        allowed = allowed if right is None else allowed & (distance <= right)
    if call.dense:
        dense = r.dense[queries, keys]
        is_bool = dense.dtype == jnp.int8
        dense = dense.astype(jnp.float32).T
        allowed = allowed & (dense != 0 if is_bool else dense > BELOW)
        s = s if is_bool else s + dense * LOG2_E
    return jnp.where(allowed, s, MASKED)
