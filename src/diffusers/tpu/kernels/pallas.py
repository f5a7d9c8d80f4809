"""What the Pallas kernels share: sizes of registers, a product, a layout, and the cost that the compiler is told."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float


LANES, SUBLANES = 128, 8  # of a register of 32-bit numbers


def round_up(n: int, multiple: int) -> int:
    """The least multiple that is not less than n."""
    return -(-n // multiple) * multiple


def cost(*arrays, flops: float = 0, transcendentals: float = 0) -> pl.CostEstimate:
    """Of a kernel that reads or writes these arrays once. Without it the compiler starts exchanges far too early."""
    return pl.CostEstimate(
        flops=int(flops),
        transcendentals=int(transcendentals),
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays),
    )


def product(x, y, axis: int = 0):
    """x [M, K] times y, whose `axis` is K, in float32."""
    # Products of bfloat16 operands are exact; asked for more, the compiler refuses them.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((1,), (axis,)), ((), ()))
    return lax.dot_general(x, y, dimensions, precision=precision, preferred_element_type=jnp.float32)


def by_token(x: Float[Array, "B K S D"]) -> Float[Array, "B S K*D"]:
    """All heads of a token side by side, as linear layers give them."""
    return jnp.swapaxes(x, 1, 2).reshape(x.shape[0], x.shape[2], -1)
