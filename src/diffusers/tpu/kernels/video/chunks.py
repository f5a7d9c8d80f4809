"""A causal model's loop over chunks of frames as one scan, which carries the last frames of its layers.

`scan_chunks`: the first chunk is the first frame. `scan_batches`: the first chunk has the remainder too.
"""

import contextvars
import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from ..settings import bound, current


SETTLED = 5  # chunks after which cache shapes are final: of one-frame chunks two frames are kept, once there are two


def scan_chunks(step: Callable, x: jax.Array, size: int, empty, axis: int = 1) -> jax.Array:
    """Scans `step` over chunks of `size` frames of a traced x and concatenates its outputs in time.

    The first chunk is zero frames, then the first frame, so that one program computes all chunks; of its output only the last
    frame is kept. `step` must keep the zeros out of that frame and the cache. If x has only one frame, its number is None.

    Args:
        step: (chunk, cache, number of the chunk, a traced scalar) -> (output, cache for the next chunk). The first chunk
            gets a cache of zeros.
        size: divides the number of frames less one.
        empty: the cache of a step without an earlier one.
        axis: of time.

    Raises:
        ValueError: a number of frames that does not fit.
        NotImplementedError: a cache entry whose shape keeps changing.
    """
    frames = x.shape[axis]
    if (frames - 1) % size:
        raise ValueError(f"expected one frame and a multiple of {size} more, got {frames} frames")
    if frames == 1:
        return step(x, empty, None)[0]
    x = jnp.pad(x, [(size - 1, 0) if a == axis else (0, 0) for a in range(x.ndim)])
    chunks = _in_parts(x, size, axis)

    @functools.partial(jax.jit, inline=True)  # traced once per shape of the cache
    def one(cache, numbered):
        number, chunk = numbered
        out, cache = step(chunk, cache, number)
        return cache, _columns_minor(out, axis)

    numbered = jnp.arange(len(chunks)), chunks
    first = jax.tree.map(lambda a: a[0], numbered)
    cache = _as_it_stays(lambda cache: jax.eval_shape(one, cache, first)[0], empty)
    _, outs = lax.scan(one, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), cache), numbered)
    dropped, outs = outs.shape[axis + 1] - 1, _joined(outs, axis)
    return lax.slice_in_dim(outs, dropped, outs.shape[axis], axis=axis)


# Of the batch being traced: (whether it is the video's first, as a traced scalar; None: it is if no frames were kept; whether the
# first batch has one more frame at its front). In the other batches that place is empty, at every level.
_batch = contextvars.ContextVar("diffusers_tpu_batch", default=(None, False))


def full_places(frames: int) -> jax.Array | None:
    """Which of a map's `frames` hold data in this batch; None: all."""
    first, longer = _batch.get()
    return first | (jnp.arange(frames) > 0) if longer else None


@dataclass(frozen=True)
class Behind:
    """Frames x that follow other frames along `axis`.

    Attributes:
        before: the other frames. The last `over` of them replace x's first ones.
        first: a traced bool; where True, x's first frame replaces each frame of `before`. None: never.
    """

    before: jax.Array
    x: jax.Array
    axis: int
    first: jax.Array | None = None
    over: int = 0

    @property
    def place(self) -> int:
        """The position of x's first frame."""
        return self.before.shape[self.axis] - self.over

    def frames_before(self, own: jax.Array) -> jax.Array:
        """`before`, given x's first frame `own`."""
        return self.before if self.first is None else jnp.where(self.first, own, self.before)

    def joined(self) -> jax.Array:
        before = self.frames_before(lax.slice_in_dim(self.x, 0, 1, axis=self.axis))
        rest = lax.slice_in_dim(self.x, self.over, self.x.shape[self.axis], axis=self.axis)
        return jnp.concatenate([before, rest], self.axis)


def causal_pad(x: jax.Array, kept: jax.Array | None, frames: int, axis: int = 1) -> jax.Array:
    """The `causal_frames` of x as one array."""
    return causal_frames(x, kept, frames, axis).joined()


def causal_frames(x: jax.Array, kept: jax.Array | None, frames: int, axis: int = 1) -> Behind:
    """x with `frames` frames before it: those `kept` of the previous batch, in the first batch copies of its own first frame.

    If x's first place may be empty, they precede the second place, and a filler frame precedes them.
    """
    first, longer = _batch.get()
    if kept is None:
        kept = jnp.concatenate([lax.slice_in_dim(x, 0, 1, axis=axis)] * frames, axis)
    if not longer:
        return Behind(kept, x, axis, first)
    return Behind(jnp.concatenate([lax.slice_in_dim(kept, 0, 1, axis=axis), kept], axis), x, axis, first, over=1)


def scan_batches(step: Callable, x: jax.Array, size: int, axis: int = 1) -> jax.Array:
    """Scans `step` over batches of `size` frames of a traced x and concatenates its outputs in time.

    The first batch also holds the remainder. If that is one frame and `size` is even, the other batches get an empty place, which
    `causal_frames` and `full_places` leave out, so that one program computes all. With any other remainder the first batch is
    computed separately. `step`: (batch, cache, which is None for the first) -> (output, cache, whose shapes do not change).
    """
    frames = x.shape[axis]
    first = frames if frames < 2 * size else size + frames % size
    longer = first - size
    by_itself = longer > 1 or (longer == 1 and size % 2)
    if first == frames or by_itself:
        out, kept = step(lax.slice_in_dim(x, 0, first, axis=axis), None)
        if first == frames:
            return out
        rest = _in_parts(lax.slice_in_dim(x, first, frames, axis=axis), size, axis)
        _, outs = lax.scan(lambda kept, part: step(part, kept)[::-1], kept, rest)
        return jnp.concatenate([out, _joined(outs, axis)], axis)
    parts = _in_parts(x[(slice(None),) * axis + (slice(longer, None),)], size, axis)
    if longer:
        shape = (len(parts), *x.shape[:axis], 1, *x.shape[axis + 1 :])
        places = jnp.broadcast_to(lax.slice_in_dim(x, 0, 1, axis=axis), shape)
        parts = jnp.concatenate([places, parts], axis + 1)

    def one(kept, numbered):
        number, part = numbered
        with bound(_batch, (number == 0, bool(longer))):
            out, kept = step(part, kept)
            return kept, _columns_minor(out, axis)

    empty = jax.eval_shape(lambda part: step(part, None)[1], parts[0])
    empty = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), empty)
    _, outs = lax.scan(one, empty, (jnp.arange(len(parts)), parts))
    if not longer:
        return _joined(outs, axis)
    rest = lax.slice_in_dim(outs[1:], 1, outs.shape[axis + 1], axis=axis + 1)
    return jnp.concatenate([outs[0], _joined(rest, axis)], axis)


def _columns_minor(out: jax.Array, axis: int) -> jax.Array:
    """On TPU, a video with channels before frames, stored columns minor: as convolutions return it, 3 channels take 128 lanes."""
    if axis != 2 or current().platform != "tpu":
        return out
    return with_layout_constraint(out, Layout(tuple(range(out.ndim))))


def _in_parts(x: jax.Array, size: int, axis: int) -> jax.Array:
    return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)


def _joined(parts: jax.Array, axis: int) -> jax.Array:
    parts = jnp.moveaxis(parts, 0, axis)
    return parts.reshape(*parts.shape[:axis], -1, *parts.shape[axis + 2 :])


def _as_it_stays(after: Callable, cache):
    """The final shapes of the cache. `after`: cache before a chunk -> cache after it."""
    for _ in range(SETTLED):
        before, cache = cache, after(cache)
        if cache == before:
            return cache
    leaves = functools.partial(jax.tree_util.tree_leaves_with_path, is_leaf=lambda entry: entry is None)
    growing = [
        f"entry {jax.tree_util.keystr(path)} of {old and old.shape} and then {new and new.shape}"
        for (path, old), (_, new) in zip(leaves(before), leaves(cache))
        if old != new
    ]
    raise NotImplementedError(
        f"expected a cache whose shapes stay from chunk to chunk, got after {SETTLED} chunks: {'; '.join(growing)}. What looks"
        " at all frames so far is no scan: compute it for all frames at once, or keep a fixed number of them"
    )
