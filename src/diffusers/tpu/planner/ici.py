"""Seconds of a collective on the links between chips: bytes on the busiest link over its bandwidth.

Half of every message goes along the axes in one order and half in reverse order, as the compiler's algorithms use several routes.
The links are a grid without wraparound, and one between the halves of a v7x chip. Latency (a microsecond) is not counted.
"""

import math
import re
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from ..chips.figures import Chip
from .hlo import Instruction


COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
Place = tuple[int, ...]  # x, y, z and half of a device


def places_of(mesh) -> list[Place]:
    """The places of a TPU mesh's devices, in the mesh's order."""
    return [(*device.coords, device.core_on_chip) for device in mesh.devices.flat]


@dataclass(frozen=True)
class Transfer:
    """The cost of a collective: seconds, and bytes that each chip sends (the mean; a message counts once, not once per link)."""

    bytes_sent: int
    seconds: float


def transfer(instruction: Instruction, places: list[Place], chip: Chip) -> Transfer:
    """The cost of one collective instruction. `places`: x, y, z and half of each device, in the mesh's order."""
    kind = next(k for k in COLLECTIVES if instruction.opcode.startswith(k))
    arrays = instruction.arrays
    if instruction.opcode.endswith("-start"):  # (operands, results, ...)
        arrays = arrays[1:2] if kind != "all-reduce" or len(arrays) > 1 else arrays
    size = sum(a.stored_bytes for a in arrays)
    load: dict[tuple, float] = defaultdict(float)
    sent = 0.0
    for group in groups_of(instruction, len(places)):
        n = len(group)
        if kind == "collective-permute":
            sent += size
            messages = [(group[0], group[1:], size)]
        elif kind in ("all-to-all", "ragged-all-to-all"):
            sent += size * (n - 1)
            messages = [(a, [b], size / n) for a in group for b in group if a != b]
        else:
            whole, rounds = size * n if kind == "reduce-scatter" else size, 2 if kind == "all-reduce" else 1
            sent += rounds * whole * (n - 1)
            messages = [(source, group, rounds * whole / n) for source in group]
        for source, targets, amount in messages:  # crosses each link at most once per order of axes
            for backwards in (False, True):
                for link in {x for to in targets for x in _route(places[source], places[to], backwards)}:
                    load[link] += amount / 2
    bandwidths = {True: chip.die_bandwidth, False: chip.link_bandwidth}  # True: the link between a chip's halves
    seconds = max((of / bandwidths[a[-1] != b[-1]] for (a, b), of in load.items()), default=0.0)
    return Transfer(int(sent / max(len(places), 1)), seconds)


def received(instruction: Instruction, chip: Chip) -> Transfer:
    """The cost of receiving an array from another slice, over the chip's share of its host's network."""
    size = instruction.arrays[0].stored_bytes
    return Transfer(size, size / chip.dcn_bandwidth)


def _route(start: Place, stop: Place, backwards: bool) -> list[tuple[Place, Place]]:
    """The links from one place to another, axis by axis; chip halves change first."""
    here, links = start, []
    axes = list(range(len(start) - 1))
    for axis in [len(start) - 1, *(reversed(axes) if backwards else axes)]:
        while here[axis] != stop[axis]:
            step = 1 if stop[axis] > here[axis] else -1
            there = (*here[:axis], here[axis] + step, *here[axis + 1 :])
            links.append((here, there))
            here = there
    return links


def groups_of(instruction: Instruction, devices: int) -> list[list[int]]:
    """The groups of devices that a collective runs over, by number in the mesh; for a permute, pairs.

    Raises ValueError for an unknown notation.
    """
    text = instruction.rest
    if listed := re.search(r"(?:source_target_pairs|replica_groups)=\{((?:\{[\d,]*\},?)*)\}", text):
        groups = [[int(d) for d in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed[1])]
        return groups or [list(range(devices))]
    if counted := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        grid = np.arange(devices).reshape([int(d) for d in counted[3].split(",")])
        grid = grid.transpose([int(d) for d in counted[4].split(",")]) if counted[4] else grid
        return grid.reshape(int(counted[1]), int(counted[2])).tolist()
    if meshed := re.search(r"replica_groups=@?\w*\[([^\]]*)\][^{]*\{([^}]*)\}", text):
        axes = {name: int(size) for name, size in re.findall(r"'?(\w+)'?=(\d+)", meshed[1])}
        chosen = re.findall(r"'(\w+)'", meshed[2])
        grid = np.arange(devices).reshape(tuple(axes.values()))
        order = [*(name for name in axes if name not in chosen), *chosen]
        width = math.prod(axes[name] for name in chosen)
        return grid.transpose([[*axes].index(name) for name in order]).reshape(-1, width).tolist()
    if "replica_groups" not in text:
        return [list(range(devices))]
    raise ValueError(f"expected replica groups in a form of XLA's, got {text[:200]!r}")
