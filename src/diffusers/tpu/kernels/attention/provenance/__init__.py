"""How a traced array came to be, as far as it takes to see that a mask of tokens x tokens is made of small arrays.

An array is read back through the equations of the trace that made it, and comes out as one of two:

- `Part`: the same along every axis that is not in `varies`;
- `Choice`: where(all of some bool parts, on, off), `on` and `off` numbers. Outer products of masks are that, and
  still are after comparisons, masked_fill, where, casts and arithmetic with numbers.

An equation not known here gives a Part that varies along all its axes: never wrong, only large. Reading computes
nothing; `Part.make` does, from small ancestors. The large array is then used by nobody, and the compiler drops it.
"""

from .parts import Choice, Index, Part, Stripe
from .trace import read


__all__ = ["Choice", "Index", "Part", "Stripe", "read"]
