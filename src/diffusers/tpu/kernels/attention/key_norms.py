"""The longest key of each head, and the longest seen from a centre, in one pass over keys as linear layers give them.

Head by head XLA wants tokens before heads: it widens all keys to float32, turns them in memory and reads them twice.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from ..cost import cost


BLOCK_ROWS = 512
TILE_ROWS = 64  # of one head, in registers
SUBLANES = 8
LEAST_ROWS = 1024  # with fewer XLA's way is no slower


def longest(
    k: Float[Array, "B S K*D"], centre: Float[Array, "B K D"], interpret, own: Int[Array, ""] | None = None
) -> tuple[Float[Array, "B K"], Float[Array, "B K"]]:
    """max |k| and max |k - centre|, computed in float32; D is a multiple of 128. `own`: so many of the first count, None: all."""
    batch, tokens, columns = k.shape
    heads, dim = centre.shape[1:]

    def kernel(k_ref, c_ref, *refs):
        *own_ref, o_ref = refs

        @pl.when(pl.program_id(1) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        first = pl.program_id(1) * BLOCK_ROWS
        last = own_ref[0][0] if own_ref else tokens

        @pl.loop(0, BLOCK_ROWS // TILE_ROWS)
        def _(n):
            rows = pl.ds(pl.multiple_of(n * TILE_ROWS, TILE_ROWS), TILE_ROWS)
            there = first + n * TILE_ROWS + lax.broadcasted_iota(jnp.int32, (TILE_ROWS, 1), 0) < last
            for head in range(heads):
                of_head = slice(head * dim, (head + 1) * dim)
                keys = k_ref[rows, of_head].astype(jnp.float32)
                for row, x in enumerate((keys, keys - c_ref[:, of_head])):
                    squares = jnp.where(there, (x * x).sum(-1, keepdims=True), 0.0)
                    most = squares.reshape(-1, SUBLANES, 1).max(
                        0
                    )  # down the sublanes outside: once, not for each tile
                    o_ref[row, :, of_head] = jnp.maximum(o_ref[row, :, of_head], most)

    squares = pl.pallas_call(
        kernel,
        grid=(batch, pl.cdiv(tokens, BLOCK_ROWS)),
        in_specs=[
            pl.BlockSpec((None, BLOCK_ROWS, columns), lambda b, t: (b, t, 0)),
            pl.BlockSpec((None, 1, columns), lambda b, t: (b, 0, 0)),
            *([] if own is None else [pl.BlockSpec(memory_space=pltpu.SMEM)]),
        ],
        out_specs=pl.BlockSpec((None, 2, SUBLANES, columns), lambda b, t: (b, 0, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((batch, 2, SUBLANES, columns), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=cost(k, flops=6 * k.size),
        interpret=interpret,
        name="key_norms_kernel",
    )(k, centre.reshape(batch, 1, columns), *([] if own is None else [own.reshape(1).astype(jnp.int32)]))
    reach, radius = jnp.moveaxis(jnp.sqrt(squares[..., ::dim].max(2)), 1, 0)
    return reach, radius
