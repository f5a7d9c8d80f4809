"""Makes torchax 0.0.13 importable under torch 2.13, wherever a script imports it. Its tables name overloads with dimension names,
which torch has removed. While a module of torchax is executed, those names give placeholders, which nothing ever dispatches."""

import contextlib
import sys
import threading
from collections.abc import Iterator

from torch._ops import OpOverloadPacket

from .replacing import OnImport


_lookup = OpOverloadPacket.__getattr__
_lock, _open = threading.Lock(), 0


@contextlib.contextmanager
def _placeholders(module) -> Iterator[None]:
    """Imports nest and run in several threads at once: the last one to end restores torch's own lookup."""
    global _open
    with _lock:
        _open += 1
        OpOverloadPacket.__getattr__ = _lookup_or_placeholder
    try:
        yield
    finally:
        with _lock:
            _open -= 1
            if not _open:
                OpOverloadPacket.__getattr__ = _lookup


_finder = OnImport(lambda name: name.partition(".")[0] == "torchax", _placeholders)


def serve():
    """Make torchax importable from here on; imports nothing itself."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def _lookup_or_placeholder(packet, name):
    try:
        return _lookup(packet, name)
    except AttributeError:
        if "imname" in name or "names" in name:
            return f"{packet}.{name} (removed)"
        raise
