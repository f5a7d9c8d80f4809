"""The all-to-all of Ulysses on one chip: tokens traded for heads, and back.

What is sent and what comes lies token by token, all heads of a token side by side, as linear layers give and take it:
a chip's heads by themselves would be padded to whole tiles, and heads before tokens is another copy on either side.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ..pallas import by_token
from . import exchange_kernels as kernels


TILE_ROWS = 16  # of bfloat16, twice those of float32


@dataclass(frozen=True)
class Exchange:
    """How the tensors of one attention call are exchanged over `ways` chips of the axis "ulysses".

    Attributes:
        in_order: rows must stay in the order of the sequence. They need not where nothing tells them apart but what they hold.
        interpret: how the kernels run that lay out what is sent and what comes; None: XLA does.
    """

    ways: int
    in_order: bool
    interpret: object

    @classmethod
    def of(cls, q, k, v, ways: int, in_order: bool, interpret) -> "Exchange":
        """For these tensors, by kernels where they take all of them: the rows of all come in one order."""
        taken = all(kernels.takes(x, ways, in_order) for x in (q, k, v))
        return cls(ways, in_order, interpret if taken else None)

    def to_heads(
        self, x: Float[Array, "B N T D"], turned: bool = False, behind: Float[Array, "B N/W L D"] | None = None
    ) -> Float[Array, "B N/W W*T+L D"]:
        """All heads of some tokens to all tokens of some heads.

        Args:
            turned: who takes it wants tokens minor.
            behind: tokens of this chip's heads that stand behind those of all chips.
        """
        batch, heads, _, dim = x.shape
        behind = None if behind is None else by_token(behind)
        x, heads = by_token(x), heads // self.ways
        if self.interpret is not None:
            pieces = self._traded(kernels.cut(x, self.ways, self.interpret))
            x = kernels.join(pieces, turned, self.interpret, behind)
            if turned:
                return jnp.swapaxes(x.reshape(batch, heads, dim, -1), 2, 3)
        else:
            # Columns cut as such: a reshape that does the same took the compiler a minute (v6e, 8,190 rows).
            x = self._joined(self._traded(jnp.stack(jnp.split(x, self.ways, 2))))
            x = x if behind is None else jnp.concatenate([x, behind], 1)
        return jnp.swapaxes(x.reshape(batch, -1, heads, dim), 1, 2)

    def to_sequence(self, x: Float[Array, "B N/W W*T+L D"], behind: int = 0) -> Float[Array, "B N T D"]:
        """The way back of `to_heads`, of what has tokens minor, without the tokens `behind`."""
        batch, heads, tokens, dim = x.shape
        tokens -= behind
        if self.interpret is not None:
            turned = jnp.swapaxes(x, 2, 3).reshape(batch, heads * dim, -1)
            pieces = kernels.part(turned, self.ways, tokens // self.ways, self.interpret)
            x = kernels.paste(self._traded(pieces), self.interpret)
        else:
            x = self._traded(self._parted(by_token(x[:, :, :tokens])))
            x = jnp.concatenate(list(x), 2)
        # Without the barrier the compiler makes tokens minor here, for the heads' axis, and turns all back for the layer after it.
        x = lax.optimization_barrier(x)
        return jnp.swapaxes(x.reshape(batch, tokens // self.ways, self.ways * heads, dim), 1, 2)

    def _traded(self, pieces):
        return lax.all_to_all(pieces, "ulysses", split_axis=0, concat_axis=0, tiled=True)

    def _joined(self, x):
        """Rows of all chips, [W, B, T, C] -> [B, W T, C]; where order does not count, those that fill no tile come last.

        Chips' rows one after another would each begin within a tile: a copy that shifts them takes the compiler 25 s a
        tensor (v6e, 18,900 rows).
        """
        ways, batch, tokens, width = x.shape
        fill = self._fill(tokens)
        last = jnp.moveaxis(x[:, :, fill:], 0, 1).reshape(batch, ways * (tokens - fill), width)
        return jnp.concatenate([*x[:, :, :fill], last], 1)

    def _parted(self, x):
        """The way back of `_joined`."""
        ways, (batch, tokens, width) = self.ways, x.shape
        tokens = tokens // ways
        fill = self._fill(tokens)
        last = x[:, ways * fill :].reshape(batch, ways, tokens - fill, width)
        return jnp.stack([jnp.concatenate([x[:, i * fill : (i + 1) * fill], last[:, i]], 1) for i in range(ways)])

    def _fill(self, tokens: int) -> int:
        """How many of a chip's rows are joined with the others' one chip after the other."""
        return tokens if self.in_order or tokens < TILE_ROWS else tokens - tokens % TILE_ROWS
