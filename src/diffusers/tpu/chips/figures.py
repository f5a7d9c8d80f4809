"""Every figure of a chip, one entry a generation in `CHIPS`, and the slices that are made of them."""

import math
import re
from dataclasses import dataclass, replace


MIB, GIB = 2**20, 2**30
ALL_GATHER = "xla_tpu_enable_sparse_core_collective_offload_all_gather"
ALL_TO_ALL = "xla_tpu_enable_sparse_core_collective_offload_dense_all_to_all"


@dataclass(frozen=True)
class Chip:
    """One JAX device of a generation: a chip; of v7x one of its two halves. Peak figures, per second and in bytes.

    Sources: Google's pages "TPU v5e", "TPU v5p", "TPU v6e" and "TPU7x (Ironwood)" for `flops` (bfloat16) and
    `hbm_bandwidth`; for `link_bandwidth` (one way of one ICI link) "How To Scale Your Model", chapter on TPUs, and for
    v7x the page's 1.2 TB/s over six links both ways; `die_bandwidth`, between the halves of a v7x: its page, six times a link.
    `clock`: of that chapter (v5e), else peak / (4 * side^2 * passes per cycle) of the matrix units, which measured
    kernels agree with. `hbm_bytes`: what the compiler (libtpu 0.0.42.1) lets a program use, from its own message.
    `dcn_bandwidth`, between slices, one way: the pages' bandwidth of a pod's data centre network over its 256 chips; 0: not
    said there. `matrix_units`: of the same pages. `vmem_bytes` of one core: JAX 0.10.2, `jax/_src/pallas/mosaic/tpu_info.py`.
    `pci_devices`, `kinds`: how the bus and JAX name it (JAX 0.10.2, `jax/_src/hardware_utils.py`). `slices`: their chips along x, y
    and perhaps z; a slice's name counts `cores` a chip, and JAX sees `devices` a chip. `aliases`: other names of the generation.
    `tiles`: of the attention kernel, queries, keys and `lag` of the mode "bound" and of the others, by schedules of head size 128;
    `branch_slots`: bundles until a branch takes effect. `splash_blocks`: of JAX's attention kernel, queries, keys, keys computed at once,
    the largest usual ones that compile, for benchmarks; none: not compared there.
    `most_scores` of one piece of its code: as many as compile in some 10 s on two cores.
    `sparse_core_options`: exchanges between chips by the SparseCores, while the core computes; without, the core waits for each.
    The compiler's default is with them on v7x, without on v5p and v6e (MaxText, pull request 2997). All-to-alls of sp 4 on v7x its
    emitter refuses (libtpu 0.0.42.1: "num_blocks_per_replica % kGroupSize == 0").
    """

    generation: str
    flops: float
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
    sparse_core_options: tuple[str, ...] = ()

    def matrix_cycles(self, rows: int) -> float:
        """Cycles that so many rows of bfloat16 occupy a matrix unit at least, at the chip's peak."""
        return rows * 2 * self.matrix_side**2 * self.matrix_units * self.clock / self.flops


@dataclass(frozen=True)
class Topology:
    """A slice by the name users know, or several alike. `shape`: chips of one along x, y and perhaps z; `host_shape`: of one host.

    No slice here is so large that its axes are closed to rings (16 chips on v5e and v6e; whole cubes of 4 on v5p and v7x).
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]
    host_shape: tuple[int, int, int]
    devices: int
    slices: int = 1

    @property
    def compiler_name(self) -> str:
        """The generation as the compiler calls it."""
        return self.chip.compiler_name or self.chip.generation


FLAT = (1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8)
CUBES = (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)
CHIPS = {
    chip.generation: chip
    for chip in (
        Chip(
            "v5e", 197e12, 1.5e9, int(15.75 * GIB), 819e9, 45e9, 128, 4, 128 * MIB, ("0x0063",), ("TPU v5 lite", "TPU v5e"), FLAT,
            tiles=((128, 256, 6), (128, 256, 6)), dcn_bandwidth=3.125e9, aliases=("v5litepod",), splash_blocks=(1024, 1024, 512),
        ),
        Chip(
            "v5p", 459e12, 1.75e9, int(95.74 * GIB), 2765e9, 90e9, 128, 8, 64 * MIB, ("0x0062",), ("TPU v5", "TPU v5p"), CUBES,
            tiles=((128, 256, 6), (128, 256, 6)), cores=2, sparse_core_options=(ALL_GATHER, ALL_TO_ALL),
        ),
        Chip(
            "v6e", 918e12, 1.75e9, int(31.25 * GIB), 1638e9, 90e9, 256, 2, 128 * MIB, ("0x006f",), ("TPU v6 lite", "TPU v6e"), FLAT,
            tiles=((256, 256, 6), (256, 256, 6)), dcn_bandwidth=12.5e9, sparse_core_options=(ALL_GATHER, ALL_TO_ALL),
            splash_blocks=(2048, 2048, 1024),
        ),
        Chip(
            "v7x", 1153.5e12, 2.2e9, int(94.75 * GIB), 3690e9, 100e9, 256, 2, 64 * MIB, ("0x0076",), ("TPU7x",), CUBES[:3],
            tiles=((512, 512, 1), (256, 256, 6)), die_bandwidth=600e9, cores=2, devices=2, aliases=("tpu7x", "v7"),
            compiler_name="tpu7x", most_scores=4_500_000, sparse_core_options=(ALL_GATHER,),
            branch_slots=6, splash_blocks=(2048, 2048, 1024),
        ),
    )
}  # fmt: skip
OLDER = {"0x0027": "v3", "0x005e": "v4", "TPU v3": "v3", "TPU v4": "v4"}  # recognised, to be refused by name
GENERATIONS = OLDER | {name: chip.generation for chip in CHIPS.values() for name in (*chip.pci_devices, *chip.kinds)}
DEFAULT_GENERATION = "v6e"  # whose sizes of blocks simulated chips and interpreted kernels have


def chip_of(generation: str | None) -> Chip:
    """What is known of a generation; None: of `DEFAULT_GENERATION`. Raises NotImplementedError for one not among `CHIPS`."""
    if generation is not None and generation not in CHIPS:
        raise NotImplementedError(
            f"expected a TPU of a generation among {' '.join(CHIPS)}, got {generation}, whose sizes nobody has looked at;"
            " set DIFFUSERS_TPU=off for plain diffusers"
        )
    return CHIPS[generation or DEFAULT_GENERATION]


def chip_of_kind(device_kind: str) -> Chip | None:
    """The chip that JAX names so; None for one that is simulated, and for a generation not among `CHIPS`."""
    return CHIPS.get(GENERATIONS.get(device_kind))


def generation_of(device) -> str | None:
    """The generation of a JAX device; None: simulated. Raises NotImplementedError for a TPU not among `CHIPS`."""
    if device.platform != "tpu":
        return None
    return chip_of(GENERATIONS.get(device.device_kind, f"{device.device_kind!r}")).generation


def _slice(chip: Chip, shape: tuple[int, ...]) -> Topology:
    chips = math.prod(shape)
    host = (*shape, 1) if len(shape) == 2 and chips <= 8 else (2, 2, 1)  # one has up to 8 chips, of several each has 4
    return Topology(f"{chip.generation}-{chips * chip.cores}", chip, shape, host, chips * chip.devices)


TOPOLOGIES = {one.name: one for chip in CHIPS.values() for one in (_slice(chip, shape) for shape in chip.slices)}


def find_topology(name: str) -> Topology:
    """The slice of this name, or as many as stand before it: "2xv6e-8". Raises ValueError that lists the names."""
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
