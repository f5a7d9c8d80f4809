"""Stage 2, primitives: the largest relative errors of basic operations, against float64 on the host."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ...kernels.pallas import LANES, product
from .chips import devices_here
from .programs import error_of


COLUMNS = 4 * LANES
BLOCK = 64  # rows
FUNCTIONS = {
    "exp": (jnp.exp, np.exp),
    "exp2": (jnp.exp2, np.exp2),
    "rsqrt": (lax.rsqrt, lambda x: 1 / np.sqrt(x)),
    "division": (lambda x: 1 / x, lambda x: 1 / x),
    "tanh": (jnp.tanh, np.tanh),
    "sin": (jnp.sin, np.sin),
}


def run(rows, request: dict):
    interpret = devices_here()[0].platform == "cpu"
    rng, spec = np.random.default_rng(0), pl.BlockSpec((BLOCK, COLUMNS), lambda i: (i, 0))
    blocks = {"grid": (request["rows"] // BLOCK,), "in_specs": [spec], "out_specs": spec}
    for name, (low, high) in request["functions"].items():
        ours, exact = FUNCTIONS[name]
        x = rng.uniform(low, high, (request["rows"], COLUMNS)).astype(np.float32)
        for where, function in (("XLA", jax.jit(ours)), ("Mosaic", in_kernel(ours, name, interpret, **blocks))):
            with rows.trying(title := f"{name} in {where}"):
                y, wanted = np.asarray(function(x), np.float64), exact(x.astype(np.float64))
                error = float(np.max(np.abs(y / wanted - 1)))
                rows.error(title, error, request["function_limit"], note=f"{low} to {high}")
    x = rng.uniform(*request["large"], (request["rows"], COLUMNS)).astype(np.float32)
    worst = np.max(np.abs(np.asarray(jax.jit(jnp.sin)(x), np.float64) - np.sin(x.astype(np.float64))))
    low, high = request["large"]
    rows.error(f"sin of {low} to {high}", float(worst), request["large_limit"], unit="error")
    products(rows, request, rng, interpret)
    others(rows, request, rng)


def in_kernel(function, name: str, interpret: bool, **blocks):
    """The function in a kernel. `blocks`: its grid and specs; without them it is one block."""

    def kernel(*refs):
        *given, out = refs
        out[...] = function(*(ref[...] for ref in given))

    def run(*arrays):
        out = jax.eval_shape(function, *arrays)
        return pl.pallas_call(kernel, out_shape=out, name=name, interpret=interpret, **blocks)(*arrays)

    return jax.jit(run)


def products(rows, request: dict, rng, interpret: bool):
    """Adds rows for x [256, K] times y [K, 256], by dtype and precision; in a kernel by `kernels.pallas.product`."""
    shape = (256, request["depth"])
    for dtype, limits in request["products"].items():
        x, y = jnp.asarray(rng.standard_normal(shape), dtype), jnp.asarray(rng.standard_normal(shape[::-1]), dtype)
        wanted = np.asarray(x, np.float64) @ np.asarray(y, np.float64)
        for precision, limit in limits.items():
            with rows.trying(name := f"product of {dtype}, {precision}, in XLA"):
                how = {"precision": precision, "preferred_element_type": jnp.float32}
                rows.error(name, error_of(jax.jit(lambda x, y, how=how: jnp.matmul(x, y, **how))(x, y), wanted), limit)
        if dtype != "float16":
            with rows.trying(name := f"product of {dtype} in Mosaic"):
                rows.error(
                    name, error_of(in_kernel(product, "product", interpret)(x, y), wanted), [*limits.values()][-1]
                )


def others(rows, request: dict, rng):
    """Adds rows for a convolution, complex numbers and a Fourier transform."""
    with rows.trying(name := "convolution of float32, high"):
        x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 16, 16, 64), (3, 3, 64, 32)))
        how = {"padding": "VALID", "dimension_numbers": ("NHWC", "HWIO", "NHWC"), "precision": "high"}
        y = jax.jit(lambda x, w: lax.conv_general_dilated(x, w, (1, 1), **how))(x, w)
        windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), (3, 3), (1, 2))
        wanted = np.einsum("bhwcij,ijco->bhwo", windows, w.astype(np.float64))
        rows.error(name, error_of(y, wanted), request["convolution_limit"])
    z = rng.standard_normal((2, 64, 256)).astype(np.float32)
    z = z[0] + 1j * z[1]
    for name, function, limit in (
        ("complex64", lambda np, z: z * np.exp(1j * z.real) / np.conj(z), "complex_limit"),
        ("Fourier transform of 256", lambda np, z: np.fft.fft(z), "fft_limit"),
    ):
        with rows.trying(name):
            ours, exact = jax.jit(functools.partial(function, jnp))(z), function(np, z.astype(np.complex128))
            rows.error(name, error_of(ours, exact), request[limit])
