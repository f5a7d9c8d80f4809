"""torchax 0.0.13 under torch 2.13, wherever a script imports it: its tables name overloads with dimension names, which torch
no longer has. While a file of torchax's is executed they get placeholders, under which nothing is ever looked up."""

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
    """Several threads may import at once, and files import each other: the last one puts torch's own lookup back."""
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
    """From here on torchax can be imported; nothing is imported now."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def _lookup_or_placeholder(packet, name):
    try:
        return _lookup(packet, name)
    except AttributeError:
        if "imname" in name or "names" in name:
            return f"{packet}.{name} (removed)"
        raise
