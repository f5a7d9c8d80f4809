"""Values on their way from host tensors and files to chips: read in parallel, converted, and sent in order.

An array travels in chunks, some layers of a stack or some chips' parts of a tensor. While one is sent, the next are filled
(`shard_reader`).

Beside the file cache the host holds `STAGED_BYTES` that wait for their transfer and as much that is being read, or one chip's
part of one tensor where that is more. Simulated chips take the memory that was read to as theirs.
"""

import functools
import math
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import device_put, lax
from jax.sharding import NamedSharding

from ..chips.figures import MIB
from .shard_reader import Part, PlacementRequest, ShardReader, aligned


STAGED_BYTES = 64 * MIB  # of values on their way to the chips


@dataclass
class Chunk:
    """Layers of a stack from `start` on, or a tensor: parts of it that are filled together, by `jobs`."""

    wanted: PlacementRequest
    start: int
    shape: tuple[int, ...]
    parts: list[Part]
    jobs: list[Future]
    is_last: bool  # of these layers

    @property
    def nbytes(self) -> int:
        return sum(part.values.nbytes for part in self.parts)


class Transfer:
    """Arrays placed one after the other, what comes next being read meanwhile. Entered as a context.

    On the way out every transfer is done, and no thread is left.
    """

    def __enter__(self) -> "Transfer":
        self._waiting: deque[tuple[Part, list[jax.Array]]] = deque()
        self._buffers = Buffers()
        self._reader = ShardReader()
        return self

    def __exit__(self, *error):
        self._reader.close()
        jax.block_until_ready([arrays for _, arrays in self._waiting])

    def arrays(self, wanted: Iterable[PlacementRequest]) -> Iterator[tuple[str, jax.Array]]:
        """(key, array) of each, in order; its values may be on their way."""
        sent, whole = [], None
        for chunk in self._ahead(wanted):
            for job in chunk.jobs:
                job.result()
            sent += self._send(chunk)
            if not chunk.is_last:
                continue
            aval = chunk.wanted.aval
            some, sent = jax.make_array_from_single_device_arrays(chunk.shape, aval.sharding, sent), []
            if chunk.shape == aval.shape:
                yield chunk.wanted.key, some
                continue
            whole = _zeros(aval.shape, aval.dtype, aval.sharding)() if whole is None else whole
            whole = _write(aval.sharding)(whole, some, chunk.start)
            if chunk.start + chunk.shape[0] == aval.shape[0]:
                yield chunk.wanted.key, whole
                whole = None

    def _ahead(self, wanted: Iterable[PlacementRequest]) -> Iterator[Chunk]:
        """The chunks in order, being filled; beside the one that is given as many as `STAGED_BYTES` hold."""
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
            devices_of = {}
            for device, index in wanted.aval.sharding.addressable_devices_indices_map(shape).items():
                bounds = tuple(s.indices(n)[:2] for s, n in zip(index, shape))
                devices_of.setdefault(bounds, []).append(device)
            groups = list(_groups(devices_of, wanted))
            for number, group in enumerate(groups, 1):
                parts = [self._part(bounds, devices, wanted) for bounds, devices in group]
                jobs = self._reader.start(wanted, wanted.tensors[start : start + layers], parts)
                yield Chunk(wanted, start, shape, parts, jobs, is_last=number == len(groups))

    def _part(self, bounds: tuple[tuple[int, int], ...], devices: list, wanted: PlacementRequest) -> Part:
        nbytes, dtype = _nbytes(bounds, wanted), wanted.aval.dtype
        buffer = aligned(nbytes) if wanted.simulated else self._buffers.take(nbytes)
        shape = [stop - start for start, stop in bounds]
        return Part(tuple(slice(*b) for b in bounds), devices, buffer, buffer[:nbytes].view(dtype).reshape(shape))

    def _send(self, chunk: Chunk) -> list[jax.Array]:
        """The parts on their chips."""
        theirs = chunk.wanted.simulated  # the memory, which JAX's CPU backend takes as it is
        sent = []
        for part in chunk.parts:
            arrays = [device_put(part.values, device) for device in part.devices]
            sent += arrays
            if not theirs:
                self._waiting.append((part, arrays))
        while sum(part.values.nbytes for part, _ in self._waiting) > STAGED_BYTES:
            part, arrays = self._waiting.popleft()
            jax.block_until_ready(arrays)
            self._buffers.give(part.buffer)
        return sent


def _layers_at_once(wanted: PlacementRequest) -> int:
    """How many layers of a stack travel together: a divisor of all, so that one program writes them."""
    layers, aval = len(wanted.tensors), wanted.aval
    if wanted.simulated or not wanted.stacked:
        return layers
    fit = max(1, STAGED_BYTES * layers // max(1, aval.size * aval.dtype.itemsize))
    return max(n for n in range(1, layers + 1) if layers % n == 0 and n <= fit)


def _groups(devices_of: dict[tuple, list], wanted: PlacementRequest) -> Iterator[list[tuple[tuple, list]]]:
    """Bounds with their devices, as many together as `STAGED_BYTES` hold."""
    group, held = [], 0
    for item in devices_of.items():
        size = _nbytes(item[0], wanted)
        if group and not wanted.simulated and held + size > STAGED_BYTES:
            yield group
            group, held = [], 0
        group.append(item)
        held += size
    yield group


def _nbytes(bounds: tuple[tuple[int, int], ...], wanted: PlacementRequest) -> int:
    return math.prod(stop - start for start, stop in bounds) * wanted.aval.dtype.itemsize


class Buffers:
    """Memory of the host that is used again: new memory costs the kernel more than what is read into it."""

    def __init__(self):
        self._free: list[np.ndarray] = []

    def take(self, nbytes: int) -> np.ndarray:
        """A buffer of at least so many bytes, the smallest of those that are free."""
        fits = min((len(b) for b in self._free if len(b) >= nbytes), default=None)
        if fits is None:
            return aligned(nbytes)
        return self._free.pop(next(n for n, b in enumerate(self._free) if len(b) == fits))

    def give(self, buffer: np.ndarray):
        """It is free; of all that are, the largest `STAGED_BYTES` are kept."""
        self._free = sorted([*self._free, buffer], key=len)
        while sum(map(len, self._free)) > STAGED_BYTES:
            self._free.pop(0)


@functools.lru_cache(256)
def _zeros(shape: tuple, dtype: np.dtype, sharding: NamedSharding):
    return jax.jit(functools.partial(jnp.zeros, shape, dtype), out_shardings=sharding)


@functools.cache
def _write(sharding: NamedSharding):
    def write(stack, layers, start):
        return lax.dynamic_update_slice_in_dim(stack, layers, start, 0)

    return jax.jit(write, donate_argnums=0, out_shardings=sharding)
