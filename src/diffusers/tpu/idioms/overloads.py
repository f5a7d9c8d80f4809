"""torchax 0.0.13 under torch 2.13, wherever a script imports it: its tables name overloads with dimension names, which torch
no longer has. While a file of torchax's is executed they get placeholders, under which nothing is ever looked up."""

import contextlib
import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Iterator

from torch._ops import OpOverloadPacket


_lookup = OpOverloadPacket.__getattr__
_lock, _open = threading.Lock(), 0


class _OfTorchax(importlib.abc.MetaPathFinder):
    """Finds torchax's files where they are."""

    def find_spec(self, name: str, path, target=None):
        if name.partition(".")[0] != "torchax":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def run(module):
                with _placeholders():
                    execute(module)

            spec.loader.exec_module = run
        return spec


_finder = _OfTorchax()


def serve():
    """From here on torchax can be imported; nothing is imported now."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


@contextlib.contextmanager
def _placeholders() -> Iterator[None]:
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


def _lookup_or_placeholder(packet, name):
    try:
        return _lookup(packet, name)
    except AttributeError:
        if "imname" in name or "names" in name:
            return f"{packet}.{name} (removed)"
        raise
