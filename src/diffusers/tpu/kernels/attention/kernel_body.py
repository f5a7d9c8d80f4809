"""The body of the attention kernel: one block of queries and one of keys; `kernel` calls it.

`Call` holds a call's static parameters, `run` is one grid step, `_piece` its straight-line code.
"""

import functools
import itertools
from collections import deque
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ..pallas import LANES, LOG2_E, SUBLANES, in_steps, parts_of, product
from .blocks import Blocks, Shape, Tile
from .masks import Mask, takes_part
from .softmax_modes import BOUND, CENTRED, CODES, FREE, ONLINE, SMALLEST, largest_radius


LOWEST = -1e30  # where the running maximum starts
MASKED = -3e38  # a masked score: far enough below LOWEST that its exponential is 0 there too
MOST_TURNED = 2048  # queries transposed at once; with fewer, units wait for each other
SKIPPED, WHOLE, MIXED = 0, 1, 2  # of a block of keys: all masked; none masked, no bias; neither


@dataclass(frozen=True)
class Call:
    """The static parameters of one call.

    Attributes:
        mask: its parts and their shapes are used; its arrays are not read.
        modes: the compiled modes (see `softmax_modes`).
        factor: scale * log2 e, positive: scores times this are exponents of 2.
        folded: number of stacked matrices in q's dtype that sum to q * factor (exact in float32, else to within 2^-17 of it);
            0: there is no room for them, and scores are multiplied by the factor instead.
        heads, kv_heads: number of heads of queries, of keys and values.
        visited: [block of queries, step]: the block of keys to visit; None: all, in order.
        in_rows: queries come, and results go, with all heads of a token side by side; else with tokens minor.
    """

    blocks: Blocks
    shape: Shape
    mask: Mask
    modes: tuple[str, ...]
    factor: float
    folded: int
    heads: int
    kv_heads: int
    visited: np.ndarray | None = None
    in_rows: bool = False

    @property
    def turned_at_once(self) -> int:
        """Queries, or results, that one piece of straight-line code transposes."""
        whole = range(LANES, min(self.blocks.queries, MOST_TURNED) + 1, LANES)
        return max(n for n in whole if self.blocks.queries % n == 0)

    @property
    def twice(self) -> bool:
        """Keys are copied side by side once per block, because heads do not fill whole vector registers."""
        return self.folded == 2 and self.shape.dim % LANES != 0

    @property
    def kv_blocks(self) -> int:
        return pl.cdiv(self.shape.kv_len, self.blocks.keys)

    @property
    def steps(self) -> int:
        """Grid steps of a block of queries."""
        return self.kv_blocks if self.visited is None else self.visited.shape[1]

    @property
    def last_whole(self) -> int:
        """With `visited`: leading steps whose blocks lie wholly within the first `q_len` keys."""
        return self.steps - (self.kv_blocks - self.shape.q_len // self.blocks.keys)

    @property
    def ragged(self) -> bool:
        return self.shape.kv_len % self.blocks.keys != 0

    @property
    def before_last(self) -> int:
        """Keys of all blocks but the last."""
        return (self.kv_blocks - 1) * self.blocks.keys

    @property
    def cut_at_end(self) -> bool:
        """Only scores of the last block of keys are masked."""
        mask = self.mask
        return mask.dense is None and not mask.band and (mask.keys is None or mask.whole >= self.before_last)

    def row_of(self, operand, h):
        """The row that head h of all batches reads of an operand [b|1, n|1, ...] with its first two axes merged."""
        b, n = operand.shape[:2]
        return (lax.div(h, self.heads) if b > 1 else 0) * n + (lax.rem(h, self.heads) if n > 1 else 0)

    def row_of_kv(self, h):
        return lax.div(h, self.heads // self.kv_heads)


def band_ends(mask: Mask, shift, row):
    """The first and last key that query `row`, a scalar or an array, may see; None where the band is open."""
    (left, right), (queries, keys) = mask.band, mask.frame
    if mask.frame == (1, 1):
        own = row + shift
    elif getattr(row, "ndim", 0) == 0:
        # `//` needs to know which chip runs it, which is unknown when compiling ahead of time
        own = lax.div(row, jnp.int32(queries))
    else:
        # vector units divide floats only; half a step from whole numbers the result is exact up to 2^22
        own = jnp.floor((row.astype(jnp.float32) + 0.5) * (1 / queries)).astype(jnp.int32)
    low = None if left is None else (own - left) * keys
    high = None if right is None else (own + right + 1) * keys - 1
    return low, high


def block_of_keys(call: Call, visited, i, step):
    """The block of keys that block i of queries visits in a step. `visited`: `Call.visited` as scalars."""
    return step if call.visited is None else visited[i * call.steps + step]


def run(r, call: Call):
    """One grid step (head, block of queries, step). `r`: the references by name."""
    head, i, step = (pl.program_id(axis) for axis in range(3))
    j = block_of_keys(call, getattr(r, "visited", None), i, step)
    first_query, first_key = i * call.blocks.queries, j * call.blocks.keys
    pl.when(step == 0)(lambda: _start(r, call, first_query, call.row_of_kv(head)))

    def visit(is_cut: bool):
        _each_mode(r, call, lambda mode: _visit(r, call, first_query, first_key, mode, is_cut))

    if call.visited is None:
        where_seen(r, call, head, j, first_query, visit)
    else:
        whole = call.last_whole
        _when([step < whole] if whole < call.steps else [], functools.partial(visit, False))
        if whole < call.steps:
            _when([step >= whole], functools.partial(visit, True))
    pl.when(step == call.steps - 1)(lambda: _finish(r, call))


def where_seen(r, call: Call, head, j, first_query, visit):
    """Calls `visit(is_cut)` if any score of this block of queries and block j of keys is visible; `is_cut`: some need masking."""
    mask, first_key = call.mask, j * call.blocks.keys
    some, cut = [], []
    if mask.keys is not None and not call.cut_at_end:
        state = r.state[call.row_of(mask.keys, head) * call.kv_blocks + j]
        some.append(state != SKIPPED)
        cut.append(state == MIXED)
    if mask.band is not None:
        last_query, last_key = first_query + call.blocks.queries - 1, first_key + call.blocks.keys - 1
        (low, high), (last_low, last_high) = (band_ends(mask, r.shift[0], row) for row in (first_query, last_query))
        if low is not None:
            some.append(last_key >= low)
            cut.append(first_key < last_low)
        if high is not None:
            some.append(first_key <= last_high)
            cut.append(last_key > high)
    if call.ragged or (mask.keys is not None and call.cut_at_end):
        cut.append(j == call.kv_blocks - 1)

    if mask.dense is not None or (cut and call.cut_at_end and call.kv_blocks == 1):  # every block needs masking
        _when(some, functools.partial(visit, True))
    elif cut:
        is_cut = functools.reduce(jnp.logical_or, cut)
        _when([*some, is_cut], functools.partial(visit, True))
        _when([*some, jnp.logical_not(is_cut)], functools.partial(visit, False))
    else:
        _when(some, functools.partial(visit, False))


def _start(r, call: Call, first_query, kv):
    """Sets the state before the first key, and chooses the mode."""
    if call.in_rows:

        def turn(queries):
            r.q[:, queries] = r.rows[queries, :].T

        in_steps(call.blocks.queries, call.turned_at_once, turn)
    r.l[...] = jnp.zeros_like(r.l)
    r.acc[...] = jnp.zeros_like(r.acc)
    if len(call.modes) > 1:
        norm = _norm(r, call)
        rows = first_query + lax.broadcasted_iota(jnp.int32, norm.shape, 1)
        largest, code = jnp.max(jnp.where(rows < call.shape.q_len, norm, 0.0)), CODES[ONLINE]
        if CENTRED in call.modes:
            keys = call.mask.keys
            alike = keys is None or 1 in (keys.shape[1], call.heads // call.kv_heads)
            alike = alike and call.mask.band is None and call.visited is None
            code = jnp.where(largest * r.radius[kv] <= largest_radius(alike), CODES[CENTRED], code)
        if BOUND in call.modes:
            code = jnp.where(largest * r.reach[kv] <= SMALLEST, CODES[BOUND], code)
        r.mode[0] = code
    if hasattr(r, "went"):
        r.went[...] = jnp.full(r.went.shape, r.mode[0] if len(call.modes) > 1 else CODES[call.modes[0]], jnp.int32)
    _each_mode(r, call, functools.partial(_start_mode, r, call, kv))


def _each_mode(r, call: Call, run):
    """Calls `run` with the mode of this head and block of queries."""
    for mode in call.modes:
        _when([] if len(call.modes) == 1 else [r.mode[0] == CODES[mode]], functools.partial(run, mode))


def _when(conditions, run):
    if conditions:
        pl.when(functools.reduce(jnp.logical_and, conditions))(run)
    else:
        run()


def _norm(r, call: Call):
    """|q| times the factor: [1, queries]."""
    q = r.q[...].astype(jnp.float32)
    return jnp.sqrt((q * q).sum(axis=0, keepdims=True)) * call.factor


def _start_mode(r, call: Call, kv, mode: str):
    """Sets what is subtracted, and q times the factor."""
    if mode == BOUND:
        r.m[...] = jnp.zeros_like(r.m)
        return
    if mode == ONLINE:
        r.m[...] = jnp.full_like(r.m, LOWEST)
    else:
        mean = product(r.centre[...], r.q[...]).sum(axis=0, keepdims=True)
        offset = mean * call.factor + jnp.maximum(_norm(r, call) * r.radius[kv] - FREE, 0.0)
        r.m[...] = jnp.broadcast_to(offset, r.m.shape)

    def fold(queries):
        wide, dim = r.q[:, queries].astype(jnp.float32) * call.factor, r.q.shape[0]
        for n, part in enumerate(parts_of(wide, r.q.dtype, call.folded)):
            r.folded[n * dim : (n + 1) * dim, queries] = part

    if call.folded:
        in_steps(call.blocks.queries, call.blocks.tile(mode).queries, fold)


def _finish(r, call: Call):
    def give(queries):
        l = r.l[:, queries].sum(axis=0, keepdims=True)  # noqa: E741
        empty = l == 0
        out = (r.acc[:, queries] / jnp.where(empty, 1.0, l)).astype(r.o.dtype)
        if call.in_rows:
            r.o[queries, :] = out.T
        else:
            r.o[:, queries] = out
        if hasattr(r, "lse"):
            r.lse[:, queries] = jnp.where(empty, -jnp.inf, (r.m[:1, queries] + jnp.log2(l)) / LOG2_E)

    if call.in_rows:
        in_steps(call.blocks.queries, call.turned_at_once, give)
    else:
        give(slice(None))


def _visit(r, call: Call, first_query, first_key, mode: str, cut: bool):
    """All queries of the block with all its keys, piece by piece."""
    blocks = call.blocks

    def double(keys):  # to match the parts that `fold` stacks
        r.twice[keys, :] = jnp.concatenate([r.k[keys, :]] * 2, axis=1)

    if call.twice and mode != BOUND:
        in_steps(blocks.keys, blocks.tile(mode).keys, double)
    if cut:
        _prepare_cut(r, call, first_key)
    piece, keys = blocks.straight(mode, call.shape.kv_len, cut, call.cut_at_end, call.visited is None)
    masked = functools.partial(masked_scores, r, call, first_query, first_key) if cut else None

    def run(n):
        start = 0 if isinstance(n, int) else pl.multiple_of(n * piece, piece)
        _piece(r, call, mode, masked, start, piece, keys)

    if piece == blocks.queries:
        run(0)
    else:
        pl.loop(0, blocks.queries // piece)(run)


def _prepare_cut(r, call: Call, first_key):
    """Zeroes values beyond the end, which may hold anything, and lays out the key mask."""

    def without_end(keys):
        v = r.v[:, keys]
        key = first_key + keys.start + lax.broadcasted_iota(jnp.int32, v.shape, 1)
        r.true_v[:, keys] = jnp.where(key < call.shape.kv_len, v, jnp.zeros_like(v))

    if call.ragged:
        in_steps(call.blocks.keys, LANES, without_end)
    lay_out_key_mask(r, call)


def lay_out_key_mask(r, call: Call):
    """Lays out this block's key mask along sublanes, for `masked_scores`."""
    if call.mask.keys is not None:
        r.column[...] = jnp.broadcast_to(r.bias[...], (LANES, call.blocks.keys)).T


def _piece(r, call: Call, mode: str, masked, start, queries: int, keys: int):
    """`queries` of the block, from `start` on, with its first `keys`: straight-line code, scores of tile t + lag before values of t.

    `masked` masks scores; None: no masking.
    """
    tile, folded, state = call.blocks.tile(mode), call.folded and mode != BOUND, {}

    def queries_of(t: int):
        return pl.ds(start + t * tile.queries, tile.queries)

    def keys_of(c: int):
        return pl.ds(c * tile.keys, tile.keys)

    def times_factor(x):
        return x if folded or call.factor == 1.0 or masked else x * call.factor

    def scores(t: int, c: int):
        """(scores of a tile [keys / 8, 8, queries], what to subtract, factor on earlier sums or None)."""
        queries, keys = queries_of(t), keys_of(c)
        if c == 0:  # what is subtracted, sum and result
            state[t] = [ref[:, queries] for ref in (r.m, r.l, r.acc)]
        if folded:
            k = r.twice[keys, :] if call.twice else jnp.concatenate([r.k[keys, :]] * call.folded, axis=1)
            s = product(k, r.folded[:, queries])
        else:
            s = product(r.k[keys, :], r.q[:, queries])
        if masked:
            s = masked(s * (1.0 if folded else call.factor), queries, keys)
        s = s.reshape(-1, SUBLANES, tile.queries)
        m, rescale = state[t][0], None
        if mode == ONLINE:
            top = jnp.maximum(m, times_factor(s.max(axis=0).max(axis=0, keepdims=True)))
            rescale = jnp.exp2(m - top)
            state[t][0] = m = top
        return s, m, rescale

    def values(t: int, c: int, s, m, rescale):
        """Adds the exponentials of a tile's scores to its sums."""
        p = jnp.exp2(times_factor(s) if mode == BOUND else times_factor(s) - m[None])
        m, l, acc = state[t]  # noqa: E741
        if rescale is not None:
            l, acc = l * rescale, acc * rescale[:1]  # noqa: E741
        v = (r.true_v if masked and call.ragged else r.v)[:, keys_of(c)]
        l = l + p.sum(axis=0)  # noqa: E741
        acc = acc + product(v, p.reshape(-1, tile.queries).astype(v.dtype))
        state[t] = [m, l, acc]
        if c == keys // tile.keys - 1:
            r.l[:, queries_of(t)], r.acc[:, queries_of(t)] = l, acc
            if mode == ONLINE:
                r.m[:, queries_of(t)] = m

    each_tile(tile, queries, keys, scores, values)


def each_tile(tile: Tile, queries: int, keys: int, before, after):
    """`after(t, c, *before(t, c))` of each tile, `tile.lag` tiles later: the matrix units work in program order."""
    waiting = deque()
    for t, c in itertools.product(range(queries // tile.queries), range(keys // tile.keys)):
        waiting.append((t, c, *before(t, c)))
        if len(waiting) > tile.lag:
            after(*waiting.popleft())
    for given in waiting:
        after(*given)


def masked_scores(r, call: Call, first_query, first_key, s, queries, keys):
    """Scores [keys, queries] of a tile with the mask applied."""
    mask = call.mask
    end = call.shape.kv_len if mask.keys is None else mask.whole
    if call.cut_at_end and end - call.before_last >= keys.start + keys.size:
        return s
    key = first_key + keys.start + lax.broadcasted_iota(jnp.int32, s.shape, 0)
    allowed = key < call.shape.kv_len
    if mask.keys is not None:
        column = jnp.concatenate([r.column[keys, :]] * pl.cdiv(s.shape[1], LANES), axis=1)
        s, allowed = s + column, allowed & (column > MASKED)
    if mask.band is not None:
        row = first_query + queries.start + lax.broadcasted_iota(jnp.int32, (1, s.shape[1]), 1)
        low, high = band_ends(mask, r.shift[0], row)
        allowed = allowed if low is None else allowed & (key >= low)
        allowed = allowed if high is None else allowed & (key <= high)
    if mask.dense is not None:
        dense = r.dense[queries, keys]
        is_bool = dense.dtype == jnp.int8
        dense = dense.astype(jnp.float32).T
        allowed = allowed & (dense != 0 if is_bool else takes_part(dense))
        s = s if is_bool else s + dense * LOG2_E
    return jnp.where(allowed, s, MASKED)
