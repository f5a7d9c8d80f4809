"""Convolution of a video with its columns for the batch.

A convolution of one map in its usual form the TPU compiler takes apart into pieces of the width, at many times the cost in
both times. Here each tap along the width gives features of its own, which are then summed one column apart.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ..settings import current


# A float32 is the sum of three bfloat16 numbers; which of their products make up one of float32, by precision.
PRODUCTS = {
    "default": ((0, 0),),
    "high": ((0, 0), (1, 0), (0, 1)),
    "highest": ((0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (0, 2)),
}


def by_columns(
    x: Float[Array, "B W T H C"],
    w: Float[Array, "t h w C O"],
    b: Float[Array, " O"] | None,
    padding: list[tuple[int, int]],
    strides: tuple[int, int] = (1, 1),
) -> Float[Array, "B V U G O"]:
    """A convolution in float32: `padding` and `strides` of time and height; the width is padded already, its stride is 1."""
    if x.dtype == w.dtype == jnp.float32 and current().platform == "tpu":
        x, w = as_bfloat16_products(x, w, PRODUCTS[current().convolutions])
    *spatial, taps, channels, features = w.shape
    w = w.transpose(0, 1, 3, 2, 4).reshape(*spatial, channels, taps * features)
    y = lax.conv_general_dilated(
        x.reshape(-1, *x.shape[2:]),
        w,
        window_strides=strides,
        padding=padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision=current().convolutions,
        preferred_element_type=jnp.float32,
    )
    y = y.reshape(*x.shape[:2], *y.shape[1:])
    columns = x.shape[1] - taps + 1
    y = sum(y[:, tap : tap + columns, ..., tap * features : (tap + 1) * features] for tap in range(taps))
    return y if b is None else y + b


def as_bfloat16_products(x, w, products):
    """x [..., C] and w [..., C, O] in bfloat16 with more channels, whose convolution is that of the float32 ones.

    What the compiler does with a float32 convolution, but as one convolution: with channels for one matrix unit to take.
    """

    def terms(a):
        for _ in range(3):
            term = lax.reduce_precision(a, exponent_bits=8, mantissa_bits=7)  # which no optimisation leaves out
            yield term.astype(jnp.bfloat16)
            a = a - term

    xs, ws = list(terms(x)), list(terms(w))
    return jnp.concatenate([xs[i] for i, _ in products], -1), jnp.concatenate([ws[j] for _, j in products], -2)
