"""Stage 5, exchanges between chips: equal bits with SparseCores and without, bytes per second, and one hop along each axis."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from ...chips.devices import compiler_options
from ...chips.figures import Topology
from ...kernels.attention.softmax_modes import BOUND
from .chips import devices_here, place, topology_of
from .programs import Program, measured_seconds, planning


AXES = "xyzc"  # of a slice, and the halves of a chip
SPARSE = {"on": True, "off": False}


def mesh_of(devices: tuple, shape: tuple[int, ...]) -> Mesh:
    """A mesh of the devices, ordered by their coordinates in a slice of this shape."""
    if place(devices[0]):
        devices = sorted(devices, key=lambda d: (tuple(reversed(d.coords)), d.core_on_chip))
    count = len(devices) // int(np.prod(shape))
    grid = np.array(devices).reshape(*reversed(shape), count)
    grid = grid.transpose(*reversed(range(len(shape))), len(shape))  # x, y, z, half
    return Mesh(grid if count > 1 else grid[..., 0], tuple(AXES[: len(shape)]) + ((AXES[-1],) if count > 1 else ()))


def programs(request: dict, devices: tuple, topology: Topology) -> dict[str, Program]:
    """ "EXCHANGE, SparseCores on|off" -> its program over all devices. EXCHANGE: all-gather, all-to-all or "hop AXIS"."""
    mesh = mesh_of(devices, tuple(request["mesh"]) if "mesh" in request else topology.shape)
    axes = tuple(axis for axis in mesh.axis_names if mesh.shape[axis] > 1)
    whole, split = PartitionSpec(), PartitionSpec(axes)
    arguments = (jax.ShapeDtypeStruct((mesh.size * request["rows"], request["columns"]), jnp.bfloat16),)
    kinds = {
        "all-gather": (lambda x: lax.all_gather(x, axes, tiled=True), whole),
        "all-to-all": (lambda x: lax.all_to_all(x, axes, 1, 0, tiled=True), PartitionSpec(None, axes)),
    }
    for axis in axes:
        ring = [(n, (n + 1) % mesh.shape[axis]) for n in range(mesh.shape[axis])]
        kinds[f"hop {axis}"] = functools.partial(lax.ppermute, axis_name=axis, perm=ring), split
    found = {}
    for name, (function, out) in kinds.items():
        exchange = jax.shard_map(function, mesh=mesh, in_specs=split, out_specs=out, check_vma=False)
        for word, wanted in SPARSE.items():
            options = compiler_options(mesh.devices.flat[0], wanted)
            found[f"{name}, SparseCores {word}"] = Program(exchange, arguments, mesh, (split,), options)
    return found


def hopped(x: np.ndarray, mesh: Mesh, axis: str) -> np.ndarray:
    """The rows of all devices after each device has sent its rows to the next along an axis."""
    parts = x.reshape(*mesh.devices.shape, -1, x.shape[-1])
    return np.roll(parts, 1, mesh.axis_names.index(axis)).reshape(x.shape)


def received_bytes(name: str, request: dict, chips: int) -> float:
    """Bytes that each chip receives in an exchange."""
    shard = 2 * request["rows"] * request["columns"]
    return {"all-gather": (chips - 1) * shard, "all-to-all": (chips - 1) / chips * shard}.get(name, shard)


def run(rows, request: dict):
    devices = devices_here()
    if len(devices) == 1:
        return rows.skip("exchanges", "there is one device")
    topology = topology_of(devices, request)
    plan, measured = planning(f"{__name__}:programs", request, topology.name), {}
    ours = {}
    for title, program in programs(request, devices, topology).items():
        name = title.partition(",")[0]
        with rows.trying(title):
            shape = program.arguments[0].shape
            # Integers that bfloat16 represents exactly.
            x = np.arange(shape[0], dtype=np.float32)[:, None] % 251 + np.arange(shape[1]) % 5
            (placed,), compiled = program.placed([jnp.asarray(x, jnp.bfloat16)]), program.compile()
            y = np.asarray(compiled(placed), np.float32)
            wanted = hopped(x, program.mesh, name.split()[1]) if name.startswith("hop") else x
            rows.equal(f"{title}: every number is where it belongs", bool((y == wanted).all()), True)
            if name in ours:
                rows.equal(f"{name}: the same bits with SparseCores and without", bool((y == ours[name]).all()), True)
            ours[name] = y
            measured[title] = measured_seconds(functools.partial(compiled, placed), request["repeats"])
    planned = {}
    with rows.trying("plan of the exchanges"):
        planned = plan.result()
    for title, seconds in measured.items():
        size, found = received_bytes(title.partition(",")[0], request, len(devices)), planned.get(title)
        expected = size / found[BOUND] / 1e9 if isinstance(found, dict) else None
        how = {"unit": "GB/s", "note": "that each chip receives", "rate": True, "why": found}
        rows.beside_plan(f"{title}: rate", size / seconds / 1e9, expected, request.get("ratio"), **how)
