"""Convolution of a video, with its columns as the batch.

The TPU compiler splits the usual convolution of one map into pieces of the width, which takes many times as long to compile and
to run. Here columns are the lines of our kernel. For calls that it does not support, each tap along the width gives separate
features, which are then summed one column apart.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ..convolution import convolution
from ..settings import current


# By precision, the products of bfloat16 parts that make up a float32 product; a float32 is the sum of three parts.
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
    repeated: bool = False,
    residual: Float[Array, "B V U G O"] | None = None,
) -> Float[Array, "B V U G O"]:
    """A convolution summed in float32 and rounded once. `padding`, `strides`: of time and height; the width has padding, stride 1.

    `repeated`: the height is padded by its edge rows, not by zeros. `residual`: is added to the result.
    """
    dtype, taps, features, (in_time, (top, bottom)) = x.dtype, w.shape[2], w.shape[4], padding
    x, w = _as_the_unit_has_it(x, w)
    if tuple(strides) == (1, 1) and top == bottom:
        how = {"edge": top, "zeros": ((0, 0), in_time), "repeated": repeated, "wide": dtype == jnp.float32}
        y = convolution(x, w.transpose(2, 0, 1, 4, 3), b, current(), residual, **how)
        if y is not None:
            return y
    if repeated:
        x, padding = jnp.pad(x, [(0, 0)] * 3 + [(top, bottom), (0, 0)], mode="edge"), [in_time, (0, 0)]
    y, columns = _taps(x, w, padding, strides), x.shape[1] - taps + 1
    y = sum(y[:, tap : tap + columns, ..., tap * features : (tap + 1) * features] for tap in range(taps))
    y = (y if b is None else y + b).astype(dtype)
    return y if residual is None else y + residual


def doubled_by_lines(
    x: Float[Array, "B L+2 T P C"], w: Float[Array, "l p C O"], b: Float[Array, " O"]
) -> Float[Array, "B 2*L T 2*P O"]:
    """The convolution, rounded once, of frames that are doubled in lines and positions; x has one more line on both sides.

    Lines are columns or rows. Our kernel reads x undoubled; for calls that it does not support, equal lines are convolved once.
    """
    dtype = x.dtype
    x, w = _as_the_unit_has_it(x, w)
    how = {"edge": 1, "doubled": True, "wide": dtype == jnp.float32}
    y = convolution(x, w.swapaxes(2, 3)[:, None], b, current(), **how)
    if y is not None:
        return y
    y = _taps(jnp.repeat(x, 2, 3), w.swapaxes(0, 1)[None], [(0, 0), (1, 1)], (1, 1))
    first, second, third = jnp.split(y, 3, -1)
    left, here, right = slice(0, -2), slice(1, -1), slice(2, None)
    even = first[:, left] + second[:, here] + third[:, here]
    odd = first[:, here] + second[:, here] + third[:, right]
    return (jnp.stack([even, odd], 2).reshape(len(x), -1, *even.shape[2:]) + b).astype(dtype)


def _taps(x, w, padding, strides):
    """The features of each tap along the width side by side, in float32 [B, W, U, G, taps * O]."""
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
    return y.reshape(*x.shape[:2], *y.shape[1:])


def _as_the_unit_has_it(x, w):
    """x and w unchanged, or if float32 on a TPU by `as_bfloat16_products`."""
    if x.dtype == w.dtype == jnp.float32 and current().platform == "tpu":
        return as_bfloat16_products(x, w, PRODUCTS[current().convolutions])
    return x, w


def as_bfloat16_products(x, w, products):
    """x [..., C] and w [..., C, O] in bfloat16 with more channels, whose convolution is that of the float32 arrays.

    The compiler computes a float32 convolution by the same products, but not as one convolution that matrix units sum.
    """

    def terms(a):
        for _ in range(3):
            term = lax.reduce_precision(a, exponent_bits=8, mantissa_bits=7)  # optimisations do not remove it
            yield term.astype(jnp.bfloat16)
            a = a - term

    xs, ws = list(terms(x)), list(terms(w))
    return jnp.concatenate([xs[i] for i, _ in products], -1), jnp.concatenate([ws[j] for _, j in products], -2)
