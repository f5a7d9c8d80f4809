"""Factors by which limits are widened on a TPU, as its float32 is less exact than that of the host, where upstream runs.

A TPU makes float32 products of bfloat16 ones (`TPUConfig.matmul_precision`, `convolution_precision`) and has its own functions.
Factors are measured against float64, and bounded by the bits that a precision keeps of 24. On simulated chips they are 1.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from ..common.config import TPUConfig
from ..pipelines.attach import target_devices


MOST = {"highest": 2.0**3, "high": 2.0**8, "default": 2.0**16}  # 6, 3 and 1 of 9 products keep 24, 16 and 8 bits
MOST_OF_FUNCTIONS = 2.0**6
FUNCTIONS = {
    torch.exp: jnp.exp,
    torch.tanh: jnp.tanh,
    torch.sigmoid: jax.nn.sigmoid,
    torch.sin: jnp.sin,
    torch.erf: lax.erf,
    torch.reciprocal: jnp.reciprocal,
    lambda x: torch.rsqrt(x * x + 1): lambda x: lax.rsqrt(x * x + 1),
}


@dataclass(frozen=True)
class Widening:
    """Factors of a limit: `plain` for a module without convolutions, `convolutions` for one with them."""

    plain: float = 1.0
    convolutions: float = 1.0

    def of(self, module: torch.nn.Module) -> float:
        """The factor of a module. A layer is a convolution if its class has "conv" in its name."""
        return self.convolutions if any("conv" in type(m).__name__.lower() for m in module.modules()) else self.plain


def widening_here() -> Widening:
    """The factors of the TPU path's chips at the default precisions."""
    config = TPUConfig()
    return widening(target_devices()[0], config.matmul_precision, config.convolution_precision)


@functools.cache
def widening(device: jax.Device, products: str, convolutions: str) -> Widening:
    """The factors of a device at these precisions of products and of convolutions."""
    if _rounds_as_the_host(device):
        return Widening()
    draw, least = np.random.default_rng(0), np.float32(0.1)
    x = np.sign(draw.standard_normal(4096, np.float32)) * draw.uniform(least, 4, 4096).astype(np.float32)
    a, b = draw.standard_normal((256, 512), np.float32), draw.standard_normal((512, 256), np.float32)
    maps, taps = draw.standard_normal((1, 64, 16, 16), np.float32), draw.standard_normal((64, 64, 3, 3), np.float32)

    def ratio(host: Callable, chips: Callable, most: float, *values: np.ndarray) -> float:
        exact = host(*(torch.from_numpy(value).double() for value in values)).numpy()
        theirs = host(*map(torch.from_numpy, values)).double().numpy()
        ours = np.asarray(jax.jit(chips)(*(jax.device_put(value, device) for value in values)), np.float64)
        # The host's function may be exact up to its last rounding.
        least = 2.0**-25 * np.linalg.norm(exact)
        return min(most, max(1.0, np.linalg.norm(ours - exact) / max(least, np.linalg.norm(theirs - exact))))

    of_functions = max(ratio(host, chips, MOST_OF_FUNCTIONS, x) for host, chips in FUNCTIONS.items())
    with jax.default_matmul_precision(products):
        plain = max(of_functions, ratio(torch.matmul, jnp.matmul, MOST[products], a, b))
    with jax.default_matmul_precision(convolutions):
        of_maps = ratio(torch.nn.functional.conv2d, _convolved, MOST[convolutions], maps, taps)
    return Widening(plain, max(plain, of_maps))


def _rounds_as_the_host(device: jax.Device) -> bool:
    return device.platform == "cpu"


def _convolved(x, w):
    return lax.conv(x, w, (1, 1), "VALID")
