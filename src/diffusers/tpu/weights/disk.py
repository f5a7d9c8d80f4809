"""Checkpoint files: memory-mapped without being read, and read ahead by the operating system's kernel."""

import contextlib
import ctypes
import errno
import math
import mmap
import os
import re
import sys
import threading
from pathlib import Path

import safetensors.torch
import torch
from safetensors import safe_open


HEADER_LENGTH = 8  # bytes before a safetensors header, which hold its length
AHEAD_BYTES = 8 << 20  # most that the kernel reads ahead per request
WILLNEED, POPULATE_READ = 3, 22  # of Linux's `madvise`
_one_file = threading.Lock()


def load_file(path: str | os.PathLike, device="cpu") -> dict[str, torch.Tensor]:
    """As safetensors' function of this name, which reads the first byte of every tensor; here none is read."""
    with safe_open(path, framework="pt", device=device) as file, open(path, "rb") as header:
        slices = {name: file.get_slice(name) for name in file.offset_keys()}  # in the order of the file
        kinds = [safetensors.torch._TYPES.get(one.get_dtype()) for one in slices.values()]
        start, places = HEADER_LENGTH + int.from_bytes(header.read(HEADER_LENGTH), "little"), {}
        for (name, one), dtype in zip(slices.items(), kinds):
            if dtype is None or start % dtype.itemsize or str(device) != "cpu":
                return file.get_tensors()
            shape = one.get_shape()
            places[name] = dtype, shape, start, start + math.prod(shape) * dtype.itemsize
            start = places[name][-1]
    path = os.fspath(path)
    storage = torch.UntypedStorage.from_file(path, False, os.path.getsize(path))
    if "jax" not in sys.modules or not sys.modules["jax"].distributed.is_initialized():
        # Processes that share a model each read only a part of a file.
        threading.Thread(target=_read_ahead, args=(path,), name="diffusers-tpu-read-ahead", daemon=True).start()
    with torch.utils._mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
        return {
            # Each has its own storage: upstream does not save tensors that share one.
            name: torch.empty(0, dtype=dtype, device="cpu").set_(storage[start:stop], 0, shape)
            for name, (dtype, shape, start, stop) in places.items()
        }


def _read_ahead(path: str):
    """Lets the kernel read this file into its cache, one file at a time, if that has room. Exit does not wait for it."""
    with _one_file, contextlib.suppress(OSError, AttributeError), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        free = 1024 * int(re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())[1])
        for at in range(0, size if size <= free // 2 else 0, AHEAD_BYTES):
            os.posix_fadvise(file.fileno(), at, min(AHEAD_BYTES, size - at), os.POSIX_FADV_WILLNEED)


def fetch(address: int, nbytes: int, what: str):
    """Reads the mapped pages at this address in one request; page faults would read them one by one. Other memory is unaffected.

    Raises OSError if the file of `what` was cut after it was mapped.
    """
    if sys.platform != "linux":
        return
    start = address - address % mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    for advice in (WILLNEED, POPULATE_READ):
        failed = libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + nbytes - start), advice)
    if failed and ctypes.get_errno() == errno.EFAULT:
        raise OSError(
            f"expected {nbytes} bytes of {what} in its checkpoint's file, which was cut while it was loaded. Download it again, and"
            " load it anew."
        )
