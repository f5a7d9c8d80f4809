"""Brings two forms' values of one tensor to one layout and computes their error.

The layout is found from shapes: channels last or first, frames in the batch or on an axis, a chip's part of a map or the whole, all frames
at once or in chunks. A form may be longer than the oracle along an axis (frames before the first, padding). Where several layouts fit, the
one with the smallest error counts.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .forms import Value


NEAR = 1e-4  # below this error no other layout is tried
EDGES = (0, 1, 2)  # columns by which parts of neighbouring chips overlap


@dataclass(frozen=True)
class Error:
    """The distance of a tensor x from the oracle's o."""

    mean: float  # of |x - o|, as `maximum`
    maximum: float
    relative: float  # mean |x - o| / mean |o|; mean |x - o| where o is zero
    euclidean: float  # |x - o| / |o|, Euclidean norms; |x| where o is zero
    cosine: float  # of the angle between both; 1 where both are zero


def error_of(values: list[Value], oracle: Value) -> tuple[Error, bool] | None:
    """Returns the error of a value, or of one in several pieces, in the layout of the oracle's; None where no layout fits.

    The second item is False where a part of the value was cut off to fit.
    """
    o, nearest = oracle.array.astype(np.float64), None
    for x, sure in arranged(values, o.shape):
        error = measured(x.astype(np.float64), o)
        if nearest is None or not error.relative >= nearest[0].relative:
            nearest = error, sure
        if error.relative < NEAR:
            break
    return nearest


def measured(x: np.ndarray, o: np.ndarray) -> Error:
    """Returns the error between float64 arrays of one shape."""
    if not x.size:
        return Error(0.0, 0.0, 0.0, 0.0, 1.0)
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.where(x == o, 0.0, np.abs(x - o))  # infinities that agree are no error
        usual, lengths = np.abs(o).mean(), (np.linalg.norm(x), np.linalg.norm(o))
        relative = apart.mean() / (usual or 1.0) if np.isfinite(usual) else apart.mean()
        euclidean = np.linalg.norm(apart) / (lengths[1] or 1.0) if np.isfinite(usual) else np.linalg.norm(apart)
        cosine = np.vdot(x, o) / (lengths[0] * lengths[1]) if all(lengths) else lengths[0] == lengths[1]
    return Error(*map(float, (apart.mean(), apart.max(), relative, euclidean, cosine)))


def arranged(values: list[Value], shape: tuple[int, ...]) -> Iterator[tuple[np.ndarray, bool]]:
    """Yields the value in each layout that has this shape, and whether nothing was cut off.

    Several pieces are concatenated along some axis.
    """
    cuts = 2 if any(value.by_chip for value in values) else 1
    for whole, sure in _joined(values):
        for x in _layouts(whole, len(shape)):
            if x.shape == shape:
                yield x, sure
            elif x.ndim == len(shape):
                longer = [axis for axis, (has, wanted) in enumerate(zip(x.shape, shape)) if has > wanted]
                if len(longer) <= cuts and all(has >= wanted for has, wanted in zip(x.shape, shape)):
                    yield from ((cut, False) for cut in _cut(x, longer, shape))
            elif [n for n in x.shape if n > 1] == [n for n in shape if n > 1]:
                yield x.reshape(shape), sure


def _cut(x: np.ndarray, axes: list[int], shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Yields `x` cut to this shape, from either end of each of these axes."""
    for starts in itertools.product(*((0, x.shape[axis] - shape[axis]) for axis in axes)):
        first = dict(zip(axes, starts))
        yield x[tuple(slice(first.get(axis, 0), first.get(axis, 0) + size) for axis, size in enumerate(shape))]


def _joined(values: list[Value]) -> Iterator[tuple[np.ndarray, bool]]:
    """Yields the pieces concatenated along each axis that allows it, in order and in reverse order (text before latents)."""
    for found in zip(*map(_wholes, values)):
        pieces, sure = [x for x, _ in found], all(sure for _, sure in found)
        if len(pieces) == 1:
            yield pieces[0], sure
            continue
        for axis in range(pieces[0].ndim):
            if len({(*x.shape[:axis], *x.shape[axis + 1 :]) for x in pieces}) == 1:
                yield np.concatenate(pieces, axis), sure
                yield np.concatenate(pieces[::-1], axis), sure


def _wholes(value: Value) -> Iterator[tuple[np.ndarray, bool]]:
    """Yields the whole of a value [chips, ...]: the first chip's, or all parts concatenated along an axis, overlapping by `EDGES`."""
    x = value.array
    if not value.by_chip:
        yield x, True
        return
    yield x[0], True
    for axis in range(x.ndim - 1) if len(x) > 1 else ():
        for edge in EDGES:
            if x.shape[axis + 1] > edge:
                parts = [np.take(part, range(part.shape[axis] - edge), axis) for part in x[:-1]]
                yield np.concatenate([*parts, x[-1]], axis), edge == 0


def _layouts(x: np.ndarray, axes: int) -> Iterator[np.ndarray]:
    yield x
    if x.ndim >= 3:
        yield np.moveaxis(x, -1, 1)
        yield np.moveaxis(x, 1, -1)
    if x.ndim == 5 and axes == 4:  # frames, which upstream has in the batch
        for channels in (1, -1):
            first = np.moveaxis(x, channels, 2)
            yield first.reshape(-1, *first.shape[2:])
