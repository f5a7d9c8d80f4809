"""torchax 0.0.13 under torch 2.13: imported first, so that the other files of this room may import torchax.

torchax's tables name overloads with dimension names, which torch 2.13 no longer has; they get placeholders, under which
nothing is ever looked up, while torchax loads.
"""

from torch._ops import OpOverloadPacket


def load_torchax():
    """Import torchax and the tables that name removed overloads."""
    lookup = OpOverloadPacket.__getattr__

    def lookup_or_placeholder(packet, name):
        try:
            return lookup(packet, name)
        except AttributeError:
            if "imname" in name or "names" in name:
                return f"{packet}.{name} (removed)"
            raise

    OpOverloadPacket.__getattr__ = lookup_or_placeholder
    try:
        import torchax.decompositions
        import torchax.ops.jaten  # noqa: F401
    finally:
        OpOverloadPacket.__getattr__ = lookup


load_torchax()
