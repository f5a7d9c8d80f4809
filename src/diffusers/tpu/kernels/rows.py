"""How the rows of activations lie on the chips, for kernels whose rows are computed one by one: each chip has whole ones."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from .pallas import LANES
from .settings import Settings


LEAST_ROWS = 1024  # a chip; with fewer the compiler's way is no slower
LEAST_WHOLE_ROWS = 128  # where every chip computes all rows: text, for which the compiler takes seconds a layer
LEAST_UNEVEN = 2 * LANES  # columns or depth that are not whole lanes but half of them: of less most would be padding


def whole_lanes(size: int) -> bool:
    """Whether columns or depth of so many are whole lanes, or half of them at the end of several."""
    return not size % LANES or (size >= LEAST_UNEVEN and not size % (LANES // 2))


@dataclass(frozen=True)
class Rows:
    """How the rows of [B, T, C] lie on the chips of `mesh`, each of which has whole ones.

    Attributes:
        rows: of one chip.
        least: the number from which on a kernel is better than the compiler.
        spec: of arrays with these rows.
        pad_tokens: tokens behind the others, so that the chips of `sp` have equally many.
    """

    mesh: Mesh | None
    rows: int
    least: int
    spec: P = P()
    pad_tokens: int = 0

    def run(self, local: Callable, operands: tuple, specs: tuple[P, ...]) -> Array:
        """`local` of every chip's part of the operands: those of this spec are filled up, and the result is cut again."""
        if self.mesh is None:
            return local(*operands)

        def filled(x, spec):
            if x is None or isinstance(x, tuple) or not self.pad_tokens or "sp" not in spec:
                return x
            return jnp.pad(x, [(0, self.pad_tokens if n == tuple(spec).index("sp") else 0) for n in range(x.ndim)])

        run = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=self.spec, check_vma=False)
        out = run(*(filled(x, spec) for x, spec in zip(operands, specs)))
        return out[:, : out.shape[1] - self.pad_tokens]


def rows_over_mesh(shape: tuple[int, ...], settings: Settings, split: bool = False) -> Rows | None:
    """How rows of [B, T, C], or of any axes on one chip, lie on the chips; None where chips share columns too, or nothing is known.
    `split`: who asks knows how columns lie over `tp`."""
    mesh, least = settings.mesh, 1 if settings.interpreted else LEAST_ROWS
    if settings.chips == 1:
        return Rows(None, math.prod(shape[:-1]), least)
    dp, sp, tp = (mesh.shape[axis] for axis in ("dp", "sp", "tp"))
    if not (settings.sequence or settings.replicated) or (tp > 1 and not split) or len(shape) != 3 or shape[0] % dp:
        return None
    if settings.replicated:
        return Rows(mesh, shape[0] // dp * shape[1], min(least, LEAST_WHOLE_ROWS), P("dp", None, None))
    pad_tokens = -shape[1] % sp
    return Rows(mesh, shape[0] // dp * (shape[1] + pad_tokens) // sp, least, P("dp", "sp", None), pad_tokens)
