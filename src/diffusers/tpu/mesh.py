"""Degrees -> Mesh. Axes: `dp` guidance branches and prompts, `sp` sequence, `tp` heads and features."""

import functools

import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh


AXES = ("dp", "sp", "tp")


def plan_degrees(chips: int, wanted: tuple[int, int, int] | None, paired: bool) -> tuple[int, int, int]:
    """Degrees `(dp, sp, tp)` for `chips`: those wanted, else dp 2 for paired guidance branches on even chips, rest sp.

    Raises ValueError where the wanted degrees need more chips than there are. Fewer is allowed: the rest stays idle.
    """
    if wanted is None:
        dp = 2 if paired and chips % 2 == 0 else 1
        return dp, chips // dp, 1
    used = wanted[0] * wanted[1] * wanted[2]
    if used > chips:
        raise ValueError(
            f"expected a mesh dp,sp,tp whose product is at most the {chips} chips here, got {','.join(map(str, wanted))}"
            f" = {used}. Lower one degree, or (simulated) set DIFFUSERS_TPU_DEVICES={used}."
        )
    return wanted


@functools.cache
def make_mesh(devices: tuple, degrees: tuple[int, int, int]) -> Mesh:
    """The mesh of these degrees over the first devices; on a real TPU in the order of its interconnect."""
    count = degrees[0] * degrees[1] * degrees[2]
    if devices[0].platform == "tpu" and count == len(devices):
        # Degrees need not be those of the interconnect's axes: (2, 8, 1) on 4 x 4 chips.
        devices = mesh_utils.create_device_mesh(degrees, devices, allow_split_physical_axes=True)
        return Mesh(devices, AXES)
    return Mesh(np.array(devices[:count]).reshape(degrees), AXES)
