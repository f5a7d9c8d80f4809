"""Checkpoint files: mapped without being read, read ahead by the kernel, and read in parallel straight to where bytes go.

A mapped tensor is memory like any other, but pages that come by faults come one after the other, each to be waited for. Here
`Mapped` says which bytes of which file a tensor's memory is, so that `Files` can ask the disk for many of them at once.
"""

import bisect
import contextlib
import math
import os
import queue
import re
import sys
import threading

import torch
from safetensors import safe_open


DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
HEADER_LENGTH = 8  # bytes before a safetensors header, which say how long it is
AHEAD_BYTES = 8 << 20  # the kernel reads no more ahead at one request
MEMORY, AVAILABLE = "/proc/self/smaps", "/proc/meminfo"
AREA = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) (\d+)\s+(/.*)$")


def load_file(path: str | os.PathLike, device="cpu") -> dict[str, torch.Tensor]:
    """As safetensors' function of this name, of a file that is mapped and not touched: reading ahead is asked for.

    The library's own looks at the first byte of every tensor, and then waits for it and the megabytes behind it.
    """
    with safe_open(path, framework="pt", device=device) as file:  # checks the header, and that the file has its length
        slices = {name: file.get_slice(name) for name in file.offset_keys()}
        kinds = {name: DTYPES.get(one.get_dtype()) for name, one in slices.items()}
        shapes = {name: one.get_shape() for name, one in slices.items()}
        places = _places(path, kinds, shapes) if str(device) == "cpu" and None not in kinds.values() else None
        if places is None:
            return file.get_tensors()
    storage = torch.UntypedStorage.from_file(os.fspath(path), False, os.path.getsize(path))
    read_ahead(os.fspath(path))
    with torch.utils._mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
        return {name: _view(storage, kinds[name], places[name], shapes[name]) for name in slices}


def _places(path, kinds: dict[str, torch.dtype], shapes: dict[str, list[int]]) -> dict[str, int] | None:
    """Where in the file each tensor begins: one follows the other. None where one lies across its elements' size."""
    with open(path, "rb") as file:
        at = HEADER_LENGTH + int.from_bytes(file.read(HEADER_LENGTH), "little")
    places = {}
    for name, dtype in kinds.items():
        if at % dtype.itemsize:
            return None
        places[name] = at
        at += math.prod(shapes[name]) * dtype.itemsize
    return places


def _view(storage: torch.UntypedStorage, dtype: torch.dtype, at: int, shape: list[int]) -> torch.Tensor:
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    own = storage[at : at + math.prod(shape) * dtype.itemsize]  # who shares one with another is not saved, by upstream
    return torch.empty(0, dtype=dtype, device="cpu").set_(own, 0, shape, strides)


# Ahead of need


_wanted: queue.SimpleQueue = queue.SimpleQueue()
_reader: threading.Thread | None = None


def read_ahead(path: str):
    """Let the kernel read this file into its cache, after those that were asked for before, while other things are done.

    Not where several processes share a model: each has only its part of a file to read.
    """
    global _reader
    if not hasattr(os, "posix_fadvise") or "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized():
        return
    _wanted.put(path)
    if _reader is None or not _reader.is_alive():
        _reader = threading.Thread(target=_read_ahead, name="diffusers-tpu-read-ahead", daemon=True)
        _reader.start()  # it waits in system calls only and holds nothing: no exit waits for it


def _read_ahead():
    while True:
        path = _wanted.get()
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError:  # whoever needs its values says so
            continue
        try:
            size = os.fstat(file).st_size
            if size <= _free_memory() // 2:
                for at in range(0, size, AHEAD_BYTES):
                    os.posix_fadvise(file, at, min(AHEAD_BYTES, size - at), os.POSIX_FADV_WILLNEED)
        finally:
            os.close(file)


def _free_memory() -> int:
    """Bytes that the kernel could use for files; 0 on another system than Linux."""
    with contextlib.suppress(FileNotFoundError), open(AVAILABLE) as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    return 0


# Which bytes are mapped where


class Mapped:
    """Which memory of this process is which bytes of which file, as it is now.

    An area that was written to (its pages are copies, which the kernel counts as anonymous) is no file's any more.
    """

    def __init__(self):
        self._areas: list[tuple[int, int, int, str]] = []  # by address, as the kernel tells them
        with contextlib.suppress(FileNotFoundError), open(MEMORY) as file:  # another system than Linux has none
            self._read(file)
        self._starts = [area[0] for area in self._areas]

    def _read(self, lines):
        is_a_file = False
        for line in lines:
            if (match := AREA.match(line)) is not None:
                start, stop, offset, major, minor = (int(x, 16) for x in match.groups()[:5])
                is_a_file = _is(match[7], major, minor, int(match[6]))
                self._areas += [(start, stop, offset, match[7])] if is_a_file else []
            elif line[:1] in "0123456789abcdef":
                is_a_file = False
            elif is_a_file and line.startswith(("Anonymous:", "Swap:")) and line.split()[1] != "0":
                self._areas.pop()
                is_a_file = False

    def find(self, tensor: torch.Tensor) -> tuple[str, int] | None:
        """File and offset of the tensor's bytes, which lie one after the other; None where they are memory's own."""
        address = tensor.data_ptr()
        number = bisect.bisect(self._starts, address) - 1
        if number < 0 or address + tensor.nbytes > self._areas[number][1]:
            return None
        start, _, offset, path = self._areas[number]
        return path, offset + address - start


def _is(path: str, major: int, minor: int, inode: int) -> bool:
    """Whether the file of this name still is the one that is mapped."""
    try:
        found = os.stat(path)
    except OSError:
        return False
    return (os.major(found.st_dev), os.minor(found.st_dev), found.st_ino) == (major, minor, inode)


class Files:
    """Files open for reading, by several threads at once, until `close`. `read_bytes`: of all of them, by all of these."""

    read_bytes = 0

    def __init__(self):
        self._open: dict[str, int] = {}
        self._lock = threading.Lock()

    def read(self, path: str, offset: int, into: memoryview):
        """Fill `into` with the file's bytes from `offset` on. Raises OSError where the file ends before."""
        with self._lock:
            if path not in self._open:
                self._open[path] = os.open(path, os.O_RDONLY)
            file = self._open[path]
            Files.read_bytes += len(into)
        done = 0
        while done < len(into):
            count = os.preadv(file, [into[done:]], offset + done)
            if not count:
                raise OSError(
                    f"expected {len(into)} bytes at {offset} of {path}, got {done}: the file was cut while it was loaded."
                    " Download it again, and load it anew."
                )
            done += count

    def close(self):
        while self._open:
            os.close(self._open.popitem()[1])
