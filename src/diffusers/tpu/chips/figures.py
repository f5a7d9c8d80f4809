"""All figures of chips, one entry per generation in `CHIPS`, and the slices that are made of them."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path


MIB, GIB = 2**20, 2**30
SUMS = "xla_tpu_enable_sparse_core_collective_offload_all_reduce"


@dataclass(frozen=True)
class Chip:
    """One JAX device of a generation: a chip, or one of the two halves of a v7x chip. Peak figures, per second and in bytes.

    `figures.json` has them, each with its source. `slices`: their chips along x, y and perhaps z. A slice's name counts `cores` per
    chip; JAX sees `devices` per chip. `aliases`: other names of the generation.
    `tiles`: of the attention kernel, queries, keys and `lag` for mode "bound" and for the others, by schedules of head size 128;
    `branch_slots`: bundles until a branch takes effect. `splash_blocks`: of JAX's attention kernel, queries, keys, keys computed at once,
    the largest usual ones that compile, for benchmarks; empty: not compared there.
    `most_scores`: of one piece of our attention kernel's code; as many compile in some 10 s on two cores.
    `stalls`: time of kernels on hardware over our estimate, for the upper end of a range.
    `has_erf`: whether the error function is one instruction.
    `narrow`: the 8-bit type, "int8" or "fp8", of which it multiplies twice as many numbers a second as of bfloat16.
    `exchange_options`: compiler options with which the core computes during exchanges; without them it waits for each.
    """

    generation: str
    flops: float
    narrow: str
    clock: float
    hbm_bytes: int
    hbm_bandwidth: float
    link_bandwidth: float
    matrix_side: int
    matrix_units: int
    vmem_bytes: int
    pci_devices: tuple[str, ...]
    kinds: tuple[str, ...]
    slices: tuple[tuple[int, ...], ...]
    tiles: tuple[tuple[int, int, int], ...]
    die_bandwidth: float = 0.0
    dcn_bandwidth: float = 0.0
    cores: int = 1
    devices: int = 1
    aliases: tuple[str, ...] = ()
    compiler_name: str = ""
    most_scores: int = 5_600_000
    branch_slots: int = 4
    splash_blocks: tuple[int, ...] = ()
    has_erf: bool = False
    stalls: float = 1.06
    exchange_options: Mapping[str, bool | str] = field(default_factory=dict, hash=False)

    @property
    def sums_beside(self) -> bool:
        """Whether SparseCores sum arrays of several chips while the cores compute."""
        return SUMS in self.exchange_options

    def matrix_cycles(self, rows: int) -> float:
        """The least cycles for which so many rows of bfloat16 occupy a matrix unit, at the chip's peak."""
        return rows * 2 * self.matrix_side**2 * self.matrix_units * self.clock / self.flops


@dataclass(frozen=True)
class Topology:
    """A slice by its public name, or several equal ones. `shape`: chips of one along x, y and perhaps z; `host_shape`: of one host.

    No slice here is large enough for its axes to be rings (16 chips on v5e and v6e; whole cubes of 4 on v5p and v7x).
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]
    host_shape: tuple[int, int, int]
    devices: int
    slices: int = 1

    @property
    def compiler_name(self) -> str:
        """The compiler's name of the generation."""
        return self.chip.compiler_name or self.chip.generation


def _tuples(x):
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


_FIGURES = json.loads(Path(__file__).with_name("figures.json").read_text())
del _FIGURES["sources"]
CHIPS = {name: Chip(name, **{k: _tuples(x) for k, x in figures.items()}) for name, figures in _FIGURES.items()}
OLDER = {"0x0027": "v3", "0x005e": "v4", "TPU v3": "v3", "TPU v4": "v4"}  # recognised, to be refused by name
GENERATIONS = OLDER | {name: chip.generation for chip in CHIPS.values() for name in (*chip.pci_devices, *chip.kinds)}
DEFAULT_GENERATION = "v6e"  # simulated chips and interpreted kernels have its block sizes


def chip_of(generation: str | None) -> Chip:
    """The figures of a generation; None: of `DEFAULT_GENERATION`. Raises NotImplementedError for one not among `CHIPS`."""
    if generation is not None and generation not in CHIPS:
        raise NotImplementedError(
            f"expected a TPU of a generation among {' '.join(CHIPS)}, got {generation}, whose sizes nobody has looked at;"
            " set DIFFUSERS_TPU=off for plain diffusers"
        )
    return CHIPS[generation or DEFAULT_GENERATION]


def chip_of_kind(device_kind: str) -> Chip | None:
    """The chip of this JAX device kind; None for simulated chips, and for a generation not among `CHIPS`."""
    return CHIPS.get(GENERATIONS.get(device_kind))


def generation_of(device) -> str | None:
    """The generation of a JAX device; None: simulated. Raises NotImplementedError for a TPU not among `CHIPS`."""
    if device.platform != "tpu":
        return None
    return chip_of(GENERATIONS.get(device.device_kind, f"{device.device_kind!r}")).generation


def _slice(chip: Chip, shape: tuple[int, ...]) -> Topology:
    chips = math.prod(shape)
    host = (*shape, 1) if len(shape) == 2 and chips <= 8 else (2, 2, 1)  # one host has up to 8 chips, several 4 each
    return Topology(f"{chip.generation}-{chips * chip.cores}", chip, shape, host, chips * chip.devices)


TOPOLOGIES = {one.name: one for chip in CHIPS.values() for one in (_slice(chip, shape) for shape in chip.slices)}


def find_topology(name: str) -> Topology:
    """The slice of this name, or several of it: "2xv6e-8". Raises ValueError with the known names."""
    several = re.fullmatch(r"([1-9]\d*)x(v.*)", name.strip().lower())
    slices, one = (int(several[1]), several[2]) if several else (1, name.strip().lower())
    generation, _, count = one.partition("-")
    generation = next((chip.generation for chip in CHIPS.values() if generation in chip.aliases), generation)
    if (topology := TOPOLOGIES.get(f"{generation}-{count}")) is None:
        raise ValueError(f"expected a topology among {' '.join(TOPOLOGIES)}, or several (2xv6e-8), got {name!r}")
    if slices == 1:
        return topology
    if not topology.chip.dcn_bandwidth:
        known = " ".join(chip.generation for chip in CHIPS.values() if chip.dcn_bandwidth)
        raise ValueError(
            f"expected several slices of {known}, got {name!r}: of others nobody publishes the network between"
        )
    devices = slices * topology.devices
    return replace(topology, name=f"{slices}x{topology.name}", devices=devices, slices=slices)
