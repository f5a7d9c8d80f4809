"""The straight code of the attention kernel: the tiles of one piece of queries, with the keys of one block."""

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .blocks import LANES, Tile
from .kernel_call import LOG2_E, MASKED, SUBLANES, Call
from .masks import takes_part
from .softmax_modes import BOUND, ONLINE


def product(call: Call, x, y):
    """x y in float32."""
    return lax.dot_general(
        x, y, (((1,), (0,)), ((), ())), precision=call.precision, preferred_element_type=jnp.float32
    )


@dataclass
class Piece:
    """Queries from `start` on of a block, some way with some of the block's keys.

    Attributes:
        r: the kernel's references by name.
        cut: not all of the scores count as they are.
        block: the block's first query and first key.
        state: of the tiles of queries that are under way, what is subtracted, sum and result.
    """

    r: SimpleNamespace
    call: Call
    way: str
    cut: bool
    block: tuple
    start: object
    state: dict[int, list] = field(default_factory=dict)

    def run(self, queries: int, keys: int):
        """So many queries with the block's first keys.

        Scores of tile t + lag are asked for before the values of tile t: the matrix units take work in this order.
        """
        tile, waiting = self.tile, deque()
        chunks = keys // tile.keys
        for t in range(queries // tile.queries):
            for c in range(chunks):
                waiting.append((t, c, c == chunks - 1, *self._scores(t, c)))
                if len(waiting) > tile.lag:
                    self._values(*waiting.popleft())
        while waiting:
            self._values(*waiting.popleft())

    @property
    def tile(self) -> Tile:
        return self.call.blocks.tile(self.way)

    @property
    def is_folded(self) -> bool:
        """q has the factor already."""
        return bool(self.call.folded) and self.way != BOUND

    def _queries(self, t: int):
        return pl.ds(self.start + t * self.tile.queries, self.tile.queries)

    def _keys(self, c: int):
        return pl.ds(c * self.tile.keys, self.tile.keys)

    def _times_factor(self, x):
        return x if self.is_folded or self.call.factor == 1.0 or self.cut else x * self.call.factor

    def _scores(self, t: int, c: int):
        """Scores of a tile [keys / 8, 8, queries], what to subtract, and what the running maximum does to sums before."""
        r, call, queries, keys = self.r, self.call, self._queries(t), self._keys(c)
        if c == 0:
            self.state[t] = [ref[:, queries] for ref in (r.m, r.l, r.acc)]
        if self.is_folded:
            k = r.twice[keys, :] if call.twice else jnp.concatenate([r.k[keys, :]] * call.folded, axis=1)
            s = product(call, k, r.folded[:, queries])
        else:
            s = product(call, r.k[keys, :], r.q[:, queries])
        if self.cut:
            s = self._masked(s * (1.0 if self.is_folded else call.factor), queries, keys)
        s = s.reshape(-1, SUBLANES, self.tile.queries)
        m, rescale = self.state[t][0], None
        if self.way == ONLINE:
            top = jnp.maximum(m, self._times_factor(s.max(axis=0).max(axis=0, keepdims=True)))
            rescale = jnp.exp2(m - top)
            self.state[t][0] = m = top
        return s, m, rescale

    def _values(self, t: int, c: int, last: bool, s, m, rescale):
        """Exponentials of a tile's scores, added to its sums."""
        r, call = self.r, self.call
        p = jnp.exp2(self._times_factor(s) if self.way == BOUND else self._times_factor(s) - m[None])
        _, l, acc = self.state[t]  # noqa: E741
        if rescale is not None:
            l, acc = l * rescale, acc * rescale[:1]  # noqa: E741
        v = (r.true_v if self.cut and call.ragged else r.v)[:, self._keys(c)]
        l = l + p.sum(axis=0)  # noqa: E741
        acc = acc + product(call, v, p.reshape(-1, self.tile.queries).astype(v.dtype))
        self.state[t][1:] = l, acc
        if last:
            self._store(t)

    def _store(self, t: int):
        r, (m, l, acc) = self.r, self.state.pop(t)  # noqa: E741
        r.l[:, self._queries(t)], r.acc[:, self._queries(t)] = l, acc
        if self.way == ONLINE:
            r.m[:, self._queries(t)] = m

    def _masked(self, s, queries, keys):
        """Scores [keys, queries] of a tile with what the mask takes away."""
        r, call, (first_query, first_key) = self.r, self.call, self.block
        end = call.whole if call.keys else call.kv_len
        if call.cut_at_end and end - call.before_last >= keys.start + keys.size:
            return s
        key = first_key + keys.start + lax.broadcasted_iota(jnp.int32, s.shape, 0)
        allowed = key < call.kv_len
        if call.keys:
            column = r.column[keys, :]
            column = jnp.concatenate([column] * pl.cdiv(s.shape[1], LANES), axis=1)
            s, allowed = s + column, allowed & (column > MASKED)
        if call.band is not None:
            row = first_query + queries.start + lax.broadcasted_iota(jnp.int32, (1, s.shape[1]), 1)
            low, high = call.ends(r.shift[0], row)
            allowed = allowed if low is None else allowed & (key >= low)
            allowed = allowed if high is None else allowed & (key <= high)
        if call.dense:
            dense = r.dense[queries, keys]
            is_bool = dense.dtype == jnp.int8
            dense = dense.astype(jnp.float32).T
            allowed = allowed & (dense != 0 if is_bool else takes_part(dense))
            s = s if is_bool else s + dense * LOG2_E
        return jnp.where(allowed, s, MASKED)
