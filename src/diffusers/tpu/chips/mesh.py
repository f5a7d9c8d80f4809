"""The mesh and its degrees. Axes: `dp` guidance branches and prompts, `sp` sequence, `tp` heads and features.

Slices are connected by the data centre's network (DCN), which is far slower than the links within a slice: `dp` crosses it, with
one exchange a step, then `sp`, never `tp`. Links within a slice are of one kind, also between hosts.
"""

import functools
import math

import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh


AXES = ("dp", "sp", "tp")


def plan_degrees(
    chips: int, wanted: tuple[int, int, int] | None, branches: int = 1, slices: int = 1, tp: int = 1
) -> tuple[int, int, int]:
    """Degrees `(dp, sp, tp)` for `chips`: the wanted ones, which may use fewer chips; else as many guidance branches on dp as
    divide the chips, `tp` if it divides the rest, and what remains on sp. With several slices dp is a multiple of their number, so
    that only dp crosses slices.

    Raises ValueError if the wanted degrees need more chips than there are.
    """
    if wanted is None:
        dp = math.lcm(math.gcd(branches, chips), slices)
        dp = dp if chips % dp == 0 else slices
        tp = tp if chips // dp % tp == 0 else 1
        return dp, chips // dp // tp, tp
    used = wanted[0] * wanted[1] * wanted[2]
    if used > chips:
        raise ValueError(
            f"expected a mesh dp,sp,tp whose product is at most the {chips} chips here, got {','.join(map(str, wanted))}"
            f" = {used}. Lower one degree, or (simulated) set DIFFUSERS_TPU_DEVICES={used}."
        )
    return wanted


def slices_of(devices: tuple) -> int:
    """The number of slices to which these devices belong."""
    return len({getattr(device, "slice_index", None) or 0 for device in devices})


@functools.cache
def make_mesh(devices: tuple, degrees: tuple[int, int, int]) -> Mesh:
    """The mesh of these degrees over the first devices of each process; on a real TPU in the order of its interconnect.

    Raises ValueError if the mesh cannot have equally many chips of each process, or if the slices do not divide dp x sp.
    """
    count, slices = degrees[0] * degrees[1] * degrees[2], slices_of(devices)
    if count < len(devices):
        devices = _of_each_process(devices, count, degrees)
    elif devices[0].platform == "tpu" and slices == 1:
        # Degrees need not match the interconnect's axes: (2, 8, 1) on 4 x 4 chips.
        return Mesh(mesh_utils.create_device_mesh(degrees, devices, allow_split_physical_axes=True), AXES)
    return Mesh(np.array(devices).reshape(degrees) if slices == 1 else _over_slices(devices, degrees, slices), AXES)


@functools.cache
def regrouped(mesh: Mesh, dp: int) -> Mesh:
    """The chips of a mesh in their order, with this `dp` and the rest of dp x sp on `sp`."""
    return mesh if mesh.shape["dp"] == dp else Mesh(mesh.devices.reshape(dp, -1, mesh.shape["tp"]), AXES)


def _of_each_process(devices: tuple, count: int, degrees: tuple[int, int, int]) -> tuple:
    """Equally many devices of each process: a process without a chip of the mesh could not take part in the run."""
    by_process = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device)
    share, rest = divmod(count, len(by_process))
    if rest or any(len(own) < share for own in by_process.values()):
        raise ValueError(
            f"expected a mesh with as many chips of each of the {len(by_process)} processes, got"
            f" {','.join(map(str, degrees))} = {count} chips. All {len(devices)} are a mesh, or start fewer processes"
        )
    return tuple(device for own in by_process.values() for device in own[:share])


def _over_slices(devices: tuple, degrees: tuple[int, int, int], slices: int) -> np.ndarray:
    dp, sp, tp = degrees
    outer = math.gcd(dp, slices)
    sequence = slices // outer
    if sp % sequence:
        raise ValueError(
            f"expected a mesh whose dp, or dp and sp, the {slices} slices divide, got {','.join(map(str, degrees))}: heads and"
            f" features do not cross from slice to slice. Use dp {slices}, or a multiple of it"
        )
    inside, between = (dp // outer, sp // sequence, tp), (outer, sequence, 1)
    return mesh_utils.create_hybrid_device_mesh(inside, between, devices, allow_split_physical_axes=True)
