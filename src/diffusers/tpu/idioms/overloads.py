"""Makes torchax 0.0.13 importable under torch 2.13, wherever a script imports it. Its tables name overloads with dimension names,
which torch has removed. Where torchax looks them up, those names give placeholders, which nothing ever dispatches."""

import sys

from torch._ops import OpOverloadPacket


_lookup = OpOverloadPacket.__getattr__


def serve():
    """Make torchax importable from here on; imports nothing itself."""
    OpOverloadPacket.__getattr__ = _lookup_or_placeholder


def _lookup_or_placeholder(packet, name):
    try:
        return _lookup(packet, name)
    except AttributeError:
        asked_by = sys._getframe(1).f_globals.get("__name__", "")
        if ("imname" in name or "names" in name) and asked_by.partition(".")[0] == "torchax":
            return f"{packet}.{name} (removed)"
        raise
