"""Parts of arrays filled with tensors' values, in pieces, by several threads at once.

A piece is some rows of a tensor. Where the tensor's memory is a file's, the piece is read from the file, once for all parts that
want of it, and straight into the part where that wants all of it as it is stored; other values are taken from memory.
"""

import functools
import math
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np
import torch

from ..chips.figures import MIB
from .checkpoint import FileTensor, values
from .convert import as_numpy
from .disk import Files, Mapped


PIECE_BYTES = 8 * MIB
SMALL = MIB // 16  # bytes of a tensor that are not worth a request of their own
ALIGNMENT = 64  # of memory that JAX's CPU backend takes as it is
READERS = min(8, max(2, os.cpu_count() or 1))


@dataclass(frozen=True)
class PlacementRequest:
    """An array to be placed.

    Attributes:
        key: its name.
        aval: shape, dtype and sharding.
        tensors: those of a stack, in order, or the only one; None: zeros. A smaller one is filled up with zeros.
        stacked: the first axis is of tensors.
    """

    key: str
    aval: jax.ShapeDtypeStruct
    tensors: list[torch.Tensor | None]
    stacked: bool

    @property
    def simulated(self) -> bool:
        return next(iter(self.aval.sharding.addressable_devices)).platform == "cpu"


@dataclass
class Part:
    """One index of a chunk, that some chips hold, and its values, which lie at the begin of `buffer`."""

    index: tuple[slice, ...]
    devices: list
    buffer: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Place:
    """Where a tensor's values are in a file, and the dtypes they pass through; `row` bytes lie in each of its rows."""

    path: str
    offset: int
    row: int
    stored: torch.dtype
    dtypes: tuple[torch.dtype, ...]


Target = tuple[tuple[slice, ...], np.ndarray]  # an index of a tensor, and the array that its values go to


class ShardReader:
    """The threads that fill parts, until `close`."""

    def __init__(self):
        self._pool = ThreadPoolExecutor(READERS, "diffusers-tpu-weights")
        self._files, self._own = Files(), threading.local()

    def close(self):
        """End them; what has not begun is left."""
        self._pool.shutdown(cancel_futures=True)
        self._files.close()

    @functools.cached_property
    def _mapped(self) -> Mapped:
        return Mapped()

    def start(self, wanted: PlacementRequest, tensors: list[torch.Tensor | None], parts: list[Part]) -> list[Future]:
        """Jobs that fill the parts with the tensors' values, the layers of a stack or the only one."""
        jobs = []
        shape = wanted.aval.shape[1:] if wanted.stacked else wanted.aval.shape
        for layer, tensor in enumerate(tensors):
            targets = [_of_layer(part, layer) if wanted.stacked else (part.index, part.values) for part in parts]
            if tensor is None or tuple(tensor.shape) != shape or not shape:
                jobs.append(self._pool.submit(_fill_padded, tensor, targets))
                continue
            box = tuple(
                slice(min(s.start for s in some), max(s.stop for s in some)) for some in zip(*(i for i, _ in targets))
            )
            place = self._place(tensor, box)
            rows = max(1, PIECE_BYTES * shape[0] // max(1, tensor.nbytes))
            for first in range(box[0].start, box[0].stop, rows):
                piece = (slice(first, min(first + rows, box[0].stop)), *box[1:])
                if not any(i[0].start < piece[0].stop and piece[0].start < i[0].stop for i, _ in targets):
                    continue  # rows of other processes' chips
                jobs.append(self._pool.submit(self._fill, tensor, place, piece, targets))
        return jobs

    def _place(self, tensor: torch.Tensor, box: tuple[slice, ...]) -> Place | None:
        """Where a tensor is whose rows are wanted whole; None: its values are to be taken from memory."""
        if tensor.nbytes < SMALL or any((s.start, s.stop) != (0, n) for s, n in zip(box[1:], tensor.shape[1:])):
            return None
        of_file = type(tensor) is FileTensor and tensor.source.values is not None
        stored, dtypes = (tensor.source.values, tensor.source.dtypes) if of_file else (tensor, ())
        with torch.utils._mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
            found = self._mapped.find(stored) if stored.is_contiguous() else None
        row = math.prod(tensor.shape[1:]) * stored.dtype.itemsize
        return found and Place(*found, row, stored.dtype, tuple(dtypes))

    def _fill(self, tensor: torch.Tensor, place: Place | None, piece: tuple[slice, ...], targets: list[Target]):
        """What targets want of the piece."""
        if place is None:
            rows = as_numpy(values(tensor, piece))
        else:
            rows = self._rows(place, piece, targets)
        for index, into in targets if rows is not None else ():
            common = [slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(piece, index)]
            if all(s.start < s.stop for s in common):
                to = tuple(slice(s.start - i.start, s.stop - i.start) for s, i in zip(common, index))
                at = tuple(slice(s.start - p.start, s.stop - p.start) for s, p in zip(common, piece))
                _copy(into[to], rows[at])

    def _rows(self, place: Place, piece: tuple[slice, ...], targets: list[Target]) -> np.ndarray | None:
        """The piece's values, read from its file; None: they were read to the only target."""
        first, stop = piece[0].start, piece[0].stop
        offset, nbytes = place.offset + first * place.row, (stop - first) * place.row
        if len(targets) == 1 and not place.dtypes:
            (index, into), into_is_stored = targets[0], targets[0][1].dtype.itemsize == place.stored.itemsize
            if into_is_stored:
                self._files.read(place.path, offset, _bytes(into[first - index[0].start : stop - index[0].start]))
                return None
        if len(getattr(self._own, "buffer", ())) < nbytes:
            self._own.buffer = aligned(nbytes)
        buffer = self._own.buffer[:nbytes]
        self._files.read(place.path, offset, memoryview(buffer))
        shape = (stop - first, *(s.stop for s in piece[1:]))
        with torch.utils._mode_utils.no_dispatch(), torch._C.DisableTorchFunction(), torch.no_grad():
            stored = torch.frombuffer(buffer, dtype=place.stored).reshape(shape)
            return as_numpy(functools.reduce(torch.Tensor.to, place.dtypes, stored))


def aligned(nbytes: int) -> np.ndarray:
    """Memory of so many bytes, begun where every backend takes it as it is."""
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    skipped = -memory.ctypes.data % ALIGNMENT
    return memory[skipped : skipped + nbytes]


def _of_layer(part: Part, layer: int) -> Target:
    return part.index[1:], part.values[layer]


def _fill_padded(tensor: torch.Tensor | None, targets: list[Target]):
    """Of a tensor that is smaller than its place zeros behind it, of none zeros; also a number by itself."""
    some = None if tensor is None else as_numpy(tensor)
    for index, into in targets:
        into[...] = 0
        if some is not None and not index:
            into[...] = some
        elif some is not None:
            part = some[tuple(slice(min(s.start, n), min(s.stop, n)) for s, n in zip(index, some.shape))]
            _copy(into[tuple(map(slice, part.shape))], part)


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))


def _copy(into: np.ndarray, values: np.ndarray):
    """Values of one dtype by their bits: numpy knows those of bfloat16 only one by one."""
    if into.dtype == values.dtype and into.itemsize in (1, 2, 4, 8):
        bits = np.dtype(f"u{into.itemsize}")
        into, values = into.view(bits), values.view(bits)
    np.copyto(into, values, casting="unsafe")
