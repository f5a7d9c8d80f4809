"""Transfer of values from host tensors and files to chips: read in parallel, converted, and sent in order.

An array is sent in chunks: some layers of a stack, or some chips' parts of a tensor. While one is sent, the next are filled. What
several chips hold is sent once, a part to each, and they exchange parts. The host holds `STAGED_BYTES` to be sent and as many being
read, or one chip's part of a tensor if that is larger.
"""

import functools
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import device_put, lax
from jax.sharding import NamedSharding

from ..chips.figures import MIB
from ..chips.sharding import LARGE_ELEMENTS, Packed, spread
from .checkpoint import FileTensor, values
from .convert import as_numpy
from .disk import fetch


READERS = min(8, max(2, os.cpu_count() or 1))
STAGED_BYTES = 64 * MIB  # of values on their way to the chips
PIECE_BYTES = 8 * MIB
SMALL = MIB // 16  # bytes of a tensor that are not worth a request of their own
ALIGNMENT = 64  # of memory that JAX's CPU backend uses without a copy
Target = tuple[tuple[slice, ...], np.ndarray]  # an index of a tensor, and the array that its values go to


@dataclass(frozen=True)
class PlacementRequest:
    """An array to be placed."""

    key: str
    aval: jax.ShapeDtypeStruct  # shape, dtype and sharding
    tensors: list[torch.Tensor | None]  # of a stack, or a single one; None: zeros; smaller ones are padded with zeros
    stacked: bool  # the first axis is of tensors
    packed: Packed | None = None  # an axis of each tensor is stored in this order

    @property
    def simulated(self) -> bool:
        return next(iter(self.aval.sharding.addressable_devices)).platform == "cpu"

    def sent(self, shape: tuple[int, ...]) -> NamedSharding:
        """The sharding in which values of this shape, layers or the whole array, are sent to the chips."""
        sharding = self.aval.sharding
        return sharding if self.simulated or math.prod(shape) < LARGE_ELEMENTS else spread(sharding, shape)


@dataclass
class Part:
    """An index of a chunk, the chips that hold it, and its values, at the start of `buffer`."""

    index: tuple[slice, ...]
    devices: list
    buffer: np.ndarray
    values: np.ndarray


@dataclass
class Chunk:
    """Parts of a tensor, or of a stack's layers from `start` on, that `jobs` fill together."""

    wanted: PlacementRequest
    start: int
    shape: tuple[int, ...]
    sharding: NamedSharding
    parts: list[Part]
    jobs: list[Future]
    is_last: bool  # of these layers

    @property
    def nbytes(self) -> int:
        return sum(part.values.nbytes for part in self.parts)


class Transfer:
    """A context in which arrays are placed while the next are read; when it exits, every transfer is done."""

    def __enter__(self) -> "Transfer":
        self._waiting: deque[tuple[Part, list[jax.Array]]] = deque()
        self._free: list[np.ndarray] = []  # buffers by size; the kernel would clear every page of new memory
        self._pool = ThreadPoolExecutor(READERS, "diffusers-tpu-weights")
        return self

    def __exit__(self, *error):
        self._pool.shutdown(cancel_futures=True)
        jax.block_until_ready([arrays for _, arrays in self._waiting])

    def arrays(self, wanted: Iterable[PlacementRequest]) -> Iterator[tuple[str, jax.Array]]:
        """(key, array) of each, in order; transfers may still be running."""
        sent, whole = [], None
        for chunk in self._ahead(wanted):
            for job in chunk.jobs:
                job.result()
            sent += self._send(chunk)
            if not chunk.is_last:
                continue
            aval = chunk.wanted.aval
            some, sent = jax.make_array_from_single_device_arrays(chunk.shape, chunk.sharding, sent), []
            if chunk.shape == aval.shape:
                yield chunk.wanted.key, some if chunk.sharding == aval.sharding else _handed_on(aval.sharding)(some)
                continue
            whole = _zeros(aval.shape, aval.dtype, aval.sharding)() if whole is None else whole
            whole = _write(aval.sharding)(whole, some, chunk.start)
            if chunk.start + chunk.shape[0] == aval.shape[0]:
                yield chunk.wanted.key, whole
                whole = None

    def _ahead(self, wanted: Iterable[PlacementRequest]) -> Iterator[Chunk]:
        """The chunks in order, being filled; as many as `STAGED_BYTES` hold are filled ahead of the one that is yielded."""
        reading, held = deque(), 0
        for chunk in (chunk for one in wanted for chunk in self._chunks(one)):
            reading.append(chunk)
            held += chunk.nbytes
            while held > STAGED_BYTES and reading:
                held -= reading[0].nbytes
                yield reading.popleft()
        yield from reading

    def _chunks(self, wanted: PlacementRequest) -> Iterator[Chunk]:
        layers = _layers_at_once(wanted)
        for start in range(0, len(wanted.tensors), layers):
            shape = (layers, *wanted.aval.shape[1:]) if wanted.stacked else wanted.aval.shape
            sharding, devices_of = wanted.sent(shape), {}
            for device, index in sharding.addressable_devices_indices_map(shape).items():
                bounds = tuple(s.indices(n)[:2] for s, n in zip(index, shape))
                devices_of.setdefault(bounds, []).append(device)
            groups = [[]]  # as much together as `STAGED_BYTES` hold
            for item in devices_of.items():
                together = sum(_nbytes(bounds, wanted) for bounds, _ in (*groups[-1], item))
                if not wanted.simulated and groups[-1] and together > STAGED_BYTES:
                    groups.append([])
                groups[-1].append(item)
            for group in groups:
                parts = [self._part(bounds, devices, wanted) for bounds, devices in group]
                jobs = fill(self._pool, wanted, wanted.tensors[start : start + layers], parts)
                yield Chunk(wanted, start, shape, sharding, parts, jobs, is_last=group is groups[-1])

    def _part(self, bounds: tuple[tuple[int, int], ...], devices: list, wanted: PlacementRequest) -> Part:
        nbytes = _nbytes(bounds, wanted)
        fits = next((n for n, buffer in enumerate(self._free) if len(buffer) >= nbytes), None)
        buffer = aligned(nbytes) if wanted.simulated or fits is None else self._free.pop(fits)
        values = buffer[:nbytes].view(wanted.aval.dtype).reshape([stop - start for start, stop in bounds])
        return Part(tuple(slice(*b) for b in bounds), devices, buffer, values)

    def _send(self, chunk: Chunk) -> list[jax.Array]:
        """Sends the parts to their chips and returns the arrays."""
        sent = []
        for part in chunk.parts:
            arrays = [device_put(part.values, device) for device in part.devices]
            sent += arrays
            if not chunk.wanted.simulated:  # else JAX's CPU backend keeps using the buffer
                self._waiting.append((part, arrays))
        while sum(part.values.nbytes for part, _ in self._waiting) > STAGED_BYTES:
            part, arrays = self._waiting.popleft()
            jax.block_until_ready(arrays)
            self._free = sorted([*self._free, part.buffer], key=len)
            while sum(map(len, self._free)) > STAGED_BYTES:
                self._free.pop(0)
        return sent


def _layers_at_once(wanted: PlacementRequest) -> int:
    """How many layers of a stack are sent together: a divisor of all, so that one program writes them."""
    layers, aval = len(wanted.tensors), wanted.aval
    if wanted.simulated or not wanted.stacked:
        return layers
    fit = max(1, STAGED_BYTES * layers // max(1, aval.size * aval.dtype.itemsize))
    return max(n for n in range(1, layers + 1) if layers % n == 0 and n <= fit)


def _nbytes(bounds: tuple[tuple[int, int], ...], wanted: PlacementRequest) -> int:
    return math.prod(stop - start for start, stop in bounds) * wanted.aval.dtype.itemsize


@functools.lru_cache(256)
def _zeros(shape: tuple, dtype: np.dtype, sharding: NamedSharding):
    return jax.jit(functools.partial(jnp.zeros, shape, dtype), out_shardings=sharding)


@functools.cache
def _handed_on(sharding: NamedSharding):
    return jax.jit(lambda x: x, out_shardings=sharding)


@functools.cache
def _write(sharding: NamedSharding):
    write = functools.partial(lax.dynamic_update_slice_in_dim, axis=0)
    return jax.jit(write, donate_argnums=0, out_shardings=sharding)


# Filling parts: by several threads at once, in pieces, which are some rows of a tensor


def fill(
    pool: Executor, wanted: PlacementRequest, tensors: list[torch.Tensor | None], parts: list[Part]
) -> list[Future]:
    """Jobs that fill the parts with the values of the tensors, layers of a stack or a single one."""
    jobs = []
    shape = wanted.aval.shape[1:] if wanted.stacked else wanted.aval.shape
    for layer, tensor in enumerate(tensors):
        targets = [(p.index[1:], p.values[layer]) if wanted.stacked else (p.index, p.values) for p in parts]
        if wanted.packed is not None:
            targets = [piece for target in targets for piece in _in_order(target, wanted.packed)]
        if tensor is None or tuple(tensor.shape) != shape or not shape:
            jobs.append(pool.submit(_fill_padded, tensor, targets))
            continue
        ranges = zip(*(index for index, _ in targets))
        rows_of, *box = (slice(min(s.start for s in some), max(s.stop for s in some)) for some in ranges)
        rows = max(1, PIECE_BYTES * shape[0] // max(1, tensor.nbytes))
        for first in range(rows_of.start, rows_of.stop, rows):
            piece = (slice(first, min(first + rows, rows_of.stop)), *box)
            # Rows outside of all targets belong to chips of other processes.
            if any(i[0].start < piece[0].stop and piece[0].start < i[0].stop for i, _ in targets):
                jobs.append(pool.submit(_fill, wanted.key, tensor, piece, targets))
    return jobs


def _in_order(target: Target, packed: Packed) -> Iterator[Target]:
    """Splits a target, indexed in the stored order, into targets that are indexed in the tensor's order."""
    (index, into), at, axis = target, 0, packed.axis
    wanted = index[axis]
    for part in packed.order():
        first, last = max(at, wanted.start), min(at + part.stop - part.start, wanted.stop)
        if first < last:
            source, place = part.start - at, [slice(None)] * into.ndim
            place[axis] = slice(first - wanted.start, last - wanted.start)
            yield (*index[:axis], slice(source + first, source + last), *index[axis + 1 :]), into[tuple(place)]
        at += part.stop - part.start


def _fill(key: str, tensor: torch.Tensor, piece: tuple[slice, ...], targets: list[Target]):
    """Copies the piece of the tensor into the targets that overlap it."""
    values_of_file = tensor.source.values if type(tensor) is FileTensor else None
    stored = tensor if values_of_file is None else values_of_file
    with torch.utils._mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
        if stored.nbytes >= SMALL and stored.is_contiguous():
            row = stored.nbytes // len(stored)
            fetch(stored.data_ptr() + piece[0].start * row, (piece[0].stop - piece[0].start) * row, key)
    rows = as_numpy(values(tensor, piece))
    for index, into in targets:
        common = [slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(piece, index)]
        if all(s.start < s.stop for s in common):
            to = tuple(slice(s.start - i.start, s.stop - i.start) for s, i in zip(common, index))
            at = tuple(slice(s.start - p.start, s.stop - p.start) for s, p in zip(common, piece))
            _copy(into[to], rows[at])


def aligned(nbytes: int) -> np.ndarray:
    """Memory of so many bytes, aligned so that every backend uses it without a copy."""
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    skipped = -memory.ctypes.data % ALIGNMENT
    return memory[skipped : skipped + nbytes]


def _fill_padded(tensor: torch.Tensor | None, targets: list[Target]):
    """Fills targets from a tensor that is smaller, with zeros behind it; with zeros if None; or from a scalar."""
    some = None if tensor is None else as_numpy(tensor)
    for index, into in targets:
        into[...] = 0
        if some is not None and not index:
            into[...] = some
        elif some is not None:
            part = some[tuple(slice(min(s.start, n), min(s.stop, n)) for s, n in zip(index, some.shape))]
            _copy(into[tuple(map(slice, part.shape))], part)


def _copy(into: np.ndarray, values: np.ndarray):
    """Copies values; of one dtype as bits, because numpy copies bfloat16 values one by one."""
    if into.dtype == values.dtype and into.itemsize in (1, 2, 4, 8):
        bits = np.dtype(f"u{into.itemsize}")
        into, values = into.view(bits), values.view(bits)
    np.copyto(into, values, casting="unsafe")
