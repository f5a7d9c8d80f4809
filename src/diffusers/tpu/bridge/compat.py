"""torchax and the tables that name overloads which torch has removed (`idioms.overloads`): imported before the other files of this room."""

from ..idioms import overloads


overloads.serve()

import torchax.decompositions  # noqa: E402
import torchax.ops.jaten  # noqa: E402, F401
