"""A causal model's loop over chunks of frames as one scan; its layers' last frames are what is handed on."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


SETTLED = 5  # chunks after which every cache has its shape: two frames are kept of chunks of one, once there are two


def scan_chunks(step: Callable, x: jax.Array, size: int, empty, axis: int = 1) -> jax.Array:
    """`step` of each chunk of `size` frames of a traced x, one after another, its outputs joined in time.

    The first chunk is the first frame with frames of zeros before it, so that it is computed by the same program: of its
    output the last frame is kept. Nothing in the zeros' places may reach that frame, or what is handed on: that is the
    step's duty. One frame in all is no chunk: its number is None, and its cache is thrown away.

    Args:
        step: (chunk, cache, number of the chunk, a traced scalar) -> (output, cache for the next chunk). The first chunk
            gets the cache that the others get, filled with zeros.
        size: divides the number of frames less one.
        empty: the cache of a step that has no other before it.
        axis: of time.

    Raises:
        ValueError: a number of frames that does not fit.
        NotImplementedError: an entry of the cache that never keeps its shape: there is no scan over what grows.
    """
    frames = x.shape[axis]
    if (frames - 1) % size:
        raise ValueError(f"expected one frame and a multiple of {size} more, got {frames} frames")
    if frames == 1:
        return step(x, empty, None)[0]
    x = jnp.pad(x, [(size - 1, 0) if a == axis else (0, 0) for a in range(x.ndim)])
    chunks = jnp.moveaxis(x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)

    @functools.partial(jax.jit, inline=True)  # traced once for one shape of cache
    def one(cache, numbered):
        number, chunk = numbered
        out, cache = step(chunk, cache, number)
        return cache, out

    numbered = jnp.arange(len(chunks)), chunks
    first = jax.tree.map(lambda a: a[0], numbered)
    cache = _as_it_stays(lambda cache: jax.eval_shape(one, cache, first)[0], empty)
    _, outs = lax.scan(one, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), cache), numbered)
    outs = jnp.moveaxis(outs, 0, axis)
    dropped = outs.shape[axis + 1] - 1
    outs = outs.reshape(*outs.shape[:axis], -1, *outs.shape[axis + 2 :])
    return lax.slice_in_dim(outs, dropped, outs.shape[axis], axis=axis)


def scan_batches(step: Callable, x: jax.Array, size: int, axis: int = 1) -> jax.Array:
    """`step` of batches of `size` frames of a traced x, one after another, its outputs joined in time.

    The first batch holds the remainder as well and is computed by itself, the others by one scan.

    Args:
        step: (batch, what the one before handed on, None for the first) -> (output, what is handed on). Its shapes stay.
        axis: of time.
    """
    frames = x.shape[axis]
    first = frames if frames < 2 * size else size + frames % size
    out, kept = step(lax.slice_in_dim(x, 0, first, axis=axis), None)
    if first == frames:
        return out
    rest = lax.slice_in_dim(x, first, frames, axis=axis)
    batches = jnp.moveaxis(rest.reshape(*rest.shape[:axis], -1, size, *rest.shape[axis + 1 :]), axis, 0)

    def one(kept, batch):
        out, kept = step(batch, kept)
        return kept, out

    _, outs = lax.scan(one, kept, batches)
    outs = jnp.moveaxis(outs, 0, axis)
    outs = outs.reshape(*outs.shape[:axis], -1, *outs.shape[axis + 2 :])
    return jnp.concatenate([out, outs], axis)


def _as_it_stays(after: Callable, cache):
    """Shapes of the cache that a chunk hands on as it got them. `after`: (the cache before a chunk) -> that after it."""
    for _ in range(SETTLED):
        before, cache = cache, after(cache)
        if cache == before:
            return cache
    pairs = zip(*(jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_none) for tree in (before, cache)))
    growing = [
        f"entry {jax.tree_util.keystr(path)} of {old and old.shape} and then {new and new.shape}"
        for (path, old), (_, new) in pairs
        if old != new
    ]
    raise NotImplementedError(
        f"expected a cache whose shapes stay from chunk to chunk, got after {SETTLED} chunks: {'; '.join(growing)}. What looks"
        " at all frames so far is no scan: compute it for all frames at once, or keep a fixed number of them"
    )


def _is_none(entry) -> bool:
    return entry is None
