"""The ways of the attention kernel: what it subtracts from scores, so that exponentials are finite and do not all vanish.

Softmax may subtract any number per query, nothing included. Which, is chosen per head and block of queries, on the
device, by what scores (here times scale * log2 e) can be at most:

* bound: |q| max_j |k_j|, at most `SMALLEST` and so small that sums stay finite: nothing is subtracted, no maximum, no
  rescaling.
* centred: with c the mean of the true keys and R = max_j |k_j - c|, q.k_j = q.c + e_j with |e_j| <= |q| R, and max_j e_j >= 0
  as the mean of e is 0 up to rounding. Subtracting q.c + max(0, |q| R - FREE) keeps every exponential below 2^FREE and the
  largest above 2^-(|q| R - FREE): exact in float32 as long as |q| R is at most `largest_radius`.
* online: the running maximum (Milakov and Gimelshein 2018), for all others.

Each way that is compiled is code of its own, which the kernel enters where a scalar has the way's code.
"""

import threading
from collections import Counter
from collections.abc import Callable


BOUND, CENTRED, ONLINE = "bound", "centred", "online"
WAYS = (BOUND, CENTRED, ONLINE)  # the cheapest first
FIRST_CODE = (
    1_000_001  # no loop counts so far: whoever reads a schedule (`planner.bundles`) tells ways and rounds apart
)
CODES = {way: FIRST_CODE + n for n, way in enumerate(WAYS)}

FREE = 60.0  # around the mean, exponentials may grow to 2^FREE: sums over 2^20 keys times values of 2^40 stay finite
SMALLEST = 100.0  # the largest exponential of a row may be 2^-SMALLEST: what is 2^-26 of it is still a normal number


def open_ways(ways: tuple[str, ...], added: bool, smoothing: bool) -> tuple[str, ...]:
    """Those of `ways` that a call may go.

    Args:
        added: something is added to scores, for which there is no bound.
        smoothing: False: not "centred", unless it is the only one.
    """
    if added:
        return (ONLINE,)
    return ways if smoothing or len(ways) == 1 else tuple(way for way in ways if way != CENTRED)


def largest_radius(alike: bool) -> float:
    """The largest |q| R for which "centred" is exact.

    Args:
        alike: all rows see the same keys. Else a row's largest score may lie as far below the mean as the bound is above it.
    """
    return (FREE + SMALLEST) / (1 if alike else 2)


class ModeCounter:
    """Which ways heads went: of the blocks of queries of all heads, by what was called. A debugging aid."""

    def __init__(self):
        self._blocks: dict[str, Counter] = {}
        self._lock = threading.Lock()  # every chip reports from a thread of its own

    def of(self, called: str) -> Callable:
        """What takes the codes of one chip's call."""

        def add(codes):
            with self._lock:
                self._blocks.setdefault(called, Counter()).update(
                    {w: int((codes == c).sum()) for w, c in CODES.items()}
                )

        return add

    def shares(self) -> dict[str, dict[str, float]]:
        """By what was called, the share of blocks that went each way so far."""
        with self._lock:
            return {
                called: {way: count / blocks.total() for way, count in blocks.items()}
                for called, blocks in self._blocks.items()
            }
