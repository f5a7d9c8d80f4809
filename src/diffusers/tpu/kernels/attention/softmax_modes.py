"""The modes of the attention kernel: what it subtracts from scores, so that exponentials are finite and do not all vanish.

The device chooses one per head and block of queries, by a bound on scores (here times scale * log2 e):

* bound: |q| max_j |k_j| is at most `SMALLEST`, and so small that sums stay finite. Nothing is subtracted or rescaled.
* centred: with c the mean of the true keys and R = max_j |k_j - c|, q.k_j = q.c + e_j with |e_j| <= |q| R, and max_j e_j >= 0
  as the mean of e is 0 up to rounding. Subtracting q.c + max(0, |q| R - FREE) keeps every exponential below 2^FREE and the
  largest above 2^-(|q| R - FREE): exact in float32 as long as |q| R is at most `largest_radius`.
* online: the running maximum (Milakov and Gimelshein 2018), for all others.
"""

import threading
from collections import Counter


BOUND, CENTRED, ONLINE = "bound", "centred", "online"
MODES = (BOUND, CENTRED, ONLINE)  # the cheapest first
FIRST_CODE = 1_000_001  # above any loop count: `planner.bundles` tells mode codes from loop counts in a schedule
CODES = {mode: FIRST_CODE + n for n, mode in enumerate(MODES)}

FREE = 60.0  # around the mean, exponentials may grow to 2^FREE: sums over 2^20 keys times values of 2^40 stay finite
SMALLEST = 100.0  # the largest exponential of a row may be 2^-SMALLEST: what is 2^-26 of it is still a normal number


def largest_radius(alike: bool) -> float:
    """The largest |q| R for which "centred" is exact; half of it unless all rows see the same keys (`alike`)."""
    return (FREE + SMALLEST) / (1 if alike else 2)


class ModeCounter:
    """Counts, per call, the blocks of queries of all heads that ran in each mode. A debugging aid."""

    def __init__(self):
        self._blocks: dict[str, Counter] = {}
        self._lock = threading.Lock()  # each chip reports from its own thread

    def add(self, called: str, codes):
        """Counts the mode codes of one chip's call."""
        with self._lock:
            counts = {mode: int((codes == code).sum()) for mode, code in CODES.items()}
            self._blocks.setdefault(called, Counter()).update(counts)

    def clear(self):
        """Resets all counts."""
        with self._lock:
            self._blocks.clear()

    def shares(self) -> dict[str, dict[str, float]]:
        """Call -> mode -> share of blocks counted so far."""
        with self._lock:
            return {
                called: {mode: count / blocks.total() for mode, count in blocks.items()}
                for called, blocks in self._blocks.items()
            }
