"""How the rows of activations are sharded, for kernels that compute rows independently: each chip has whole rows."""

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


LEAST_ROWS = 1024  # of a chip; with fewer the compiler is no slower
LEAST_WHOLE_ROWS = 128  # where rows are replicated: text, for which the compiler takes seconds a layer
LEAST_UNEVEN = 2 * LANES  # columns or depth that may end in half a row of lanes; of fewer, most would be padding


def whole_lanes(size: int) -> bool:
    """Whether `size` columns or depth are whole rows of lanes, or several rows of which the last is half full."""
    return not size % LANES or (size >= LEAST_UNEVEN and not size % (LANES // 2))


@dataclass(frozen=True)
class Rows:
    """How the rows of [B, T, C] are sharded over `mesh`; each chip has whole rows.

    Attributes:
        rows: their number on one chip.
        least: the number from which on a kernel is faster than the compiler.
        spec: of arrays with these rows.
        pad_tokens: padding behind the tokens, so that the chips of `sp` have equally many.
    """

    mesh: Mesh | None
    rows: int
    least: int
    spec: P = P()
    pad_tokens: int = 0

    def run(self, local: Callable, operands: tuple, specs: tuple[P, ...]) -> Array:
        """`local` of every chip's part of the operands. Those split over `sp` are padded, and the result is cut again."""
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
    """How rows of [B, T, C], or of any shape on one chip, are sharded; None if columns are split too, or if it is unknown.
    `split`: the caller handles columns that are split over `tp`."""
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
