"""Stage 1, the chips: JAX's description of them, compared with the compiler's of the same slice."""

import os

import jax

from ...chips.devices import find_target, flags_of_jax, jax_devices
from ...chips.figures import TOPOLOGIES, Topology, chip_of_kind, find_topology
from ...common.config import read_environment
from ...planner.aot import Compiler, run_in_child


def devices_here() -> tuple:
    """JAX's devices, as a run uses them."""
    return jax_devices(find_target(read_environment()))


def topology_of(devices, request: dict) -> Topology:
    """The slice of these devices; for simulated chips the request's. Raises ValueError for an unknown slice."""
    if "topology" in request:
        return find_topology(request["topology"])
    chip = chip_of_kind(devices[0].device_kind)
    for topology in TOPOLOGIES.values():
        if topology.chip == chip and topology.devices == len(devices):
            return topology
    raise ValueError(
        f"expected a slice among {' '.join(TOPOLOGIES)}, got {len(devices)} devices {devices[0].device_kind!r}"
    )


def place(device) -> list | None:
    """Coordinates and core; None for a device that has none."""
    return [*device.coords, device.core_on_chip] if hasattr(device, "coords") else None


def described(devices) -> list[list]:
    """Id, place and process of each device."""
    return [[device.id, place(device), device.process_index] for device in devices]


def places(argument: dict, progress) -> dict:
    """Runs in the compiler's process: describes the devices of a slice."""
    return {"devices": described(Compiler(find_topology(argument["topology"])).devices)}


def run(rows, request: dict):
    rows.add("LIBTPU_INIT_ARGS before JAX's start", os.environ.get("LIBTPU_INIT_ARGS", ""))
    devices = devices_here()
    chip = chip_of_kind(devices[0].device_kind)
    rows.add("platform_version", devices[0].client.platform_version)
    kinds = sorted({device.device_kind for device in devices})
    rows.equal("device_kind", kinds, [next((kind for kind in chip.kinds if kind in kinds), None)] if chip else ["cpu"])
    note = f"of {jax.process_count()} processes; {len(jax.local_devices())} are of this one"
    rows.add("devices", len(devices), note=note)
    with rows.trying("places of devices"):
        topology = topology_of(devices, request)
        there = run_in_child(f"{__name__}:places", {"topology": topology.name}, seconds=25, schedules=False)["devices"]
        here = described(devices)
        name = f"id, place and process of each device of {topology.name}"
        if here[0][1] is None:
            rows.skip(name, "these devices have no coordinates", expected=there)
        else:
            rows.equal(name, *(sorted(one, key=lambda d: d[1]) for one in (here, there)))
    given = {*os.environ.get("LIBTPU_INIT_ARGS", "").split()}
    missing = sorted(flags_of_jax() - given)
    status = not missing if chip else "not applicable"
    rows.add("JAX's flags in LIBTPU_INIT_ARGS", len(missing), status, expected=0, note=" ".join(missing))
    rows.add("LIBTPU_INIT_ARGS after JAX's start", " ".join(sorted(given)))
    stats = devices[0].memory_stats()
    if not stats:
        return rows.skip("memory_stats", "this device has none")
    rows.add("keys of memory_stats", sorted(stats))
    measured, within = stats.get("bytes_limit", 0), request["hbm_within"]
    near = abs(measured / chip.hbm_bytes - 1) <= within
    rows.add("bytes_limit", measured, near, expected=chip.hbm_bytes, limit=within, unit="bytes")
