"""Is there a TPU, which generation, or are chips simulated on the CPU? And what is known of every chip and slice.

Detection reads the PCI bus, so that asking costs nothing and imports nothing. Device ids: JAX 0.10.2,
`jax/_src/hardware_utils.py`.
"""

import contextlib
import dataclasses
import functools
import glob
import os
import pathlib
import re
from dataclasses import dataclass

from ..config import Environment, read_environment
from ..errors import chips_are_there
from ..files import make_room
from . import hosts


GOOGLE_PCI_VENDOR = "0x1ae0"
GENERATION_OF_PCI_DEVICE = {
    "0x0027": "v3",
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "v7x",
}


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
    die_bandwidth: float = 0.0
    dcn_bandwidth: float = 0.0

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
        return {"v7x": "tpu7x"}.get(self.chip.generation, self.chip.generation)


MIB, GIB = 2**20, 2**30
CHIPS = {
    chip.generation: chip
    for chip in (
        Chip("v5e", 197e12, 1.5e9, int(15.75 * GIB), 819e9, 45e9, 128, 4, 128 * MIB, dcn_bandwidth=3.125e9),
        Chip("v5p", 459e12, 1.75e9, int(95.74 * GIB), 2765e9, 90e9, 128, 8, 64 * MIB),
        Chip("v6e", 918e12, 1.75e9, int(31.25 * GIB), 1638e9, 90e9, 256, 2, 128 * MIB, dcn_bandwidth=12.5e9),
        Chip("v7x", 1153.5e12, 2.2e9, int(94.75 * GIB), 3690e9, 100e9, 256, 2, 64 * MIB, die_bandwidth=600e9),
    )
}


DEFAULT_GENERATION = "v6e"  # whose sizes of blocks simulated chips and interpreted kernels have


def chip_of(generation: str | None) -> Chip:
    """What is known of a generation; None: of `DEFAULT_GENERATION`. Raises NotImplementedError for one not among `CHIPS`."""
    if generation is not None and generation not in CHIPS:
        raise NotImplementedError(
            f"expected a TPU of a generation among {' '.join(CHIPS)}, got {generation}, whose sizes nobody has looked at;"
            " set DIFFUSERS_TPU=off for plain diffusers"
        )
    return CHIPS[generation or DEFAULT_GENERATION]


GENERATION_OF_DEVICE_KIND = {
    "TPU v3": "v3",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "v7x",
}  # JAX 0.10.2, the same file


def generation_of(device) -> str | None:
    """The generation of a JAX device; None: simulated. Raises NotImplementedError for a TPU not among `CHIPS`."""
    if device.platform != "tpu":
        return None
    generation = GENERATION_OF_DEVICE_KIND.get(device.device_kind, f"{device.device_kind!r}")
    return chip_of(generation).generation


# Exchanges between chips by the SparseCores, while the core computes; without, the core waits for each. The compiler's default
# is with them on v7x, without on v5p and v6e (MaxText, pull request 2997). All-to-alls of sp 4 on v7x its emitter refuses
# (libtpu 0.0.42.1: "num_blocks_per_replica % kGroupSize == 0").
ALL_GATHER = "xla_tpu_enable_sparse_core_collective_offload_all_gather"
ALL_TO_ALL = "xla_tpu_enable_sparse_core_collective_offload_dense_all_to_all"
ON_SPARSE_CORES = {"v5p": (ALL_GATHER, ALL_TO_ALL), "v6e": (ALL_GATHER, ALL_TO_ALL), "v7x": (ALL_GATHER,)}


# The library that JAX's CPU backend hands sums to keeps float32 where the program rounds what it summed to bfloat16 and widens that
# again (jaxlib 0.10.2): 6.8e-4 in an attention whose rotated queries upstream rounds.
WITHOUT_LIBRARY = {"xla_cpu_experimental_ynn_fusion_type": ""}


def compiler_options(device, sparse_cores: bool) -> dict[str, bool | str]:
    """What the compiler is told beside the program for a mesh of devices such as this one."""
    if device.platform == "cpu":
        return {**WITHOUT_LIBRARY}
    generation = GENERATION_OF_DEVICE_KIND.get(device.device_kind)
    return dict.fromkeys(ON_SPARSE_CORES.get(generation, ()), sparse_cores)


def compile_lowered(lowered, options: dict[str, bool | str] | None):
    """The executable of a `jax.stages.Lowered`.

    Where the compiler cannot put exchanges on the SparseCores, they stay on the core, with a warning; an option that it does not
    have is left out, also with one.
    """
    import jax

    from ...utils import logging

    try:
        return lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        from .. import notices

        line = str(error).splitlines()[0]
        unknown = re.search(r"No such compile option: '([^']+)'", line)
        if unknown and unknown[1] in (options or {}):
            notices.warn_once(f"this compiler has no option {unknown[1]}, programs are compiled without it")
            return compile_lowered(lowered, {name: value for name, value in options.items() if name != unknown[1]})
        if "sparse_core" not in str(error) or not any((options or {}).values()):
            raise
        logging.get_logger(__name__).warning(
            "the compiler cannot put this program's exchanges between chips on the SparseCores, they stay on the core"
            f" (TPUConfig.sparse_cores=False asks for that): {line}"
        )
        return lowered.compile(dict.fromkeys(options, False))


def flags_of_jax() -> set[str]:
    """Flags that `import jax` adds to LIBTPU_INIT_ARGS where a TPU is: constants of the function of JAX's that does so."""
    from jax._src.cloud_tpu_init import cloud_tpu_init

    texts = [text for text in cloud_tpu_init.__code__.co_consts[1:] if isinstance(text, str)]  # behind its docstring
    return {word for text in texts for word in text.split() if word.startswith("--") and "=" in word}


def _slice(name: str, shape: tuple[int, ...], host_shape: tuple[int, int, int], devices: int) -> Topology:
    return Topology(name, CHIPS[name.split("-")[0]], shape, host_shape, devices)


TOPOLOGIES = {
    topology.name: topology
    for topology in (
        _slice("v5e-1", (1, 1), (1, 1, 1), 1),
        _slice("v5e-4", (2, 2), (2, 2, 1), 4),
        _slice("v5e-8", (2, 4), (2, 4, 1), 8),
        _slice("v5e-16", (4, 4), (2, 2, 1), 16),
        _slice("v5e-32", (4, 8), (2, 2, 1), 32),
        _slice("v5e-64", (8, 8), (2, 2, 1), 64),
        _slice("v5p-8", (2, 2, 1), (2, 2, 1), 4),  # v5p counts cores, two a chip, which JAX sees as one device
        _slice("v5p-16", (2, 2, 2), (2, 2, 1), 8),
        _slice("v5p-32", (2, 2, 4), (2, 2, 1), 16),
        _slice("v5p-64", (2, 4, 4), (2, 2, 1), 32),
        _slice("v6e-1", (1, 1), (1, 1, 1), 1),
        _slice("v6e-4", (2, 2), (2, 2, 1), 4),
        _slice("v6e-8", (2, 4), (2, 4, 1), 8),
        _slice("v6e-16", (4, 4), (2, 2, 1), 16),
        _slice("v6e-32", (4, 8), (2, 2, 1), 32),
        _slice("v6e-64", (8, 8), (2, 2, 1), 64),
        _slice("v7x-8", (2, 2, 1), (2, 2, 1), 8),  # v7x counts cores, two a chip, each a device of JAX
        _slice("v7x-16", (2, 2, 2), (2, 2, 1), 16),
        _slice("v7x-32", (2, 2, 4), (2, 2, 1), 32),
    )
}
TOPOLOGY_ALIASES = {"v5litepod": "v5e", "tpu7x": "v7x", "v7": "v7x"}


def find_topology(name: str) -> Topology:
    """The slice of this name, or as many as stand before it: "2xv6e-8". Raises ValueError that lists the names."""
    several = re.fullmatch(r"([1-9]\d*)x(v.*)", name.strip().lower())
    slices, one = (int(several[1]), several[2]) if several else (1, name.strip().lower())
    generation, _, count = one.partition("-")
    topology = TOPOLOGIES.get(f"{TOPOLOGY_ALIASES.get(generation, generation)}-{count}")
    if topology is None:
        raise ValueError(f"expected a topology among {' '.join(TOPOLOGIES)}, or several (2xv6e-8), got {name!r}")
    if slices == 1:
        return topology
    if not topology.chip.dcn_bandwidth:
        known = " ".join(chip.generation for chip in CHIPS.values() if chip.dcn_bandwidth)
        raise ValueError(
            f"expected several slices of {known}, got {name!r}: nobody publishes the network between those of others"
        )
    devices = slices * topology.devices
    return dataclasses.replace(topology, name=f"{slices}x{topology.name}", devices=devices, slices=slices)


@dataclass(frozen=True)
class Target:
    """What JAX will run on: `platform` "tpu" or "cpu"; `generation` of a real TPU, None before JAX runs where the bus of this host
    does not show it; `simulated` chips on the CPU."""

    platform: str
    generation: str | None = None
    simulated: int = 0

    def __str__(self) -> str:
        """As `torch.cuda.get_device_name` says it: "TPU v6e". Starts JAX where only that knows."""
        if self.simulated:
            return "TPU (simulated on the CPU)"
        return f"TPU {self.generation or generation_of(jax_devices(self)[0])}"


@functools.cache
def _generation_on_this_host(bus: str = "/sys/bus/pci/devices") -> str | None:
    for vendor in pathlib.Path(bus).glob("*/vendor"):
        try:
            if vendor.read_text().strip() == GOOGLE_PCI_VENDOR:
                generation = GENERATION_OF_PCI_DEVICE.get(vendor.with_name("device").read_text().strip())
                if generation:
                    return generation
        except OSError:
            continue
    return None


def find_target(environment: Environment) -> Target | None:
    """The target of this process, or None where plain diffusers runs."""
    if environment.mode == "off":
        return None
    if environment.mode == "cpu":
        return Target("cpu", simulated=environment.simulated_devices)
    if environment.mode == "tpu":
        return Target("tpu", _generation_on_this_host())
    if environment.leaves_tpu_out or (generation := _generation_on_this_host()) is None or not device_nodes():
        return None
    return Target("tpu", generation)


def device_nodes(root: str = "/dev") -> list[str]:
    """The files by which a process has this host's chips: a container without them sees the chips on the bus and has none."""
    return sorted(glob.glob(f"{root}/accel[0-9]*") + glob.glob(f"{root}/vfio/[0-9]*"))


def why_off(environment: Environment) -> str:
    """Why there is no target."""
    if environment.mode == "off":
        return "DIFFUSERS_TPU=off"
    if environment.leaves_tpu_out:
        return f"JAX_PLATFORMS={environment.platforms}"
    if (generation := _generation_on_this_host()) is not None:
        return f"a TPU {generation} on the bus of this host, but no /dev/vfio/N or /dev/accelN: a container has to be given them"
    return "no TPU on this host"


@functools.cache
def jax_devices(target: Target) -> tuple:
    """JAX's devices for this target, of all processes of the run; the first call starts JAX, and joins the other processes.

    Raises:
        RuntimeError: JAX was already started with other devices, or finds no TPU; ChipBusy: one that another process has.
        NotImplementedError: a TPU of a generation that nothing is known of.
    """
    import jax

    if target.platform == "cpu":
        _ask_for_simulated_chips(jax, target.simulated)
    hosts.join(target.platform)
    if target.platform == "cpu" and hosts.process_count() > 1:
        # Eigen cuts a sum by how many threads there are, which XLA's CPU client makes one for each of its chips or, if that is
        # more, for each processor, by this name: as many as one process would have that simulates all chips give the same bits.
        os.environ.setdefault("NPROC", str(target.simulated * hosts.process_count()))
    with chips_are_there(device_nodes()):
        devices = jax.devices(target.platform)
    if target.platform == "cpu" and len(devices) < target.simulated:
        raise RuntimeError(
            f"expected {target.simulated} simulated chips, got {len(devices)}: JAX was started before diffusers could"
            " ask for them. Run the pipeline before other JAX code, or set"
            f" XLA_FLAGS=--xla_force_host_platform_device_count={target.simulated}."
        )
    generation_of(devices[0])
    return tuple(devices[: target.simulated * hosts.process_count() or None])


def _ask_for_simulated_chips(jax, count: int):
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # JAX runs already: the caller looks whether its devices are enough
        return
    jax.config.update("jax_platforms", "cpu")


MOST_CACHED_BYTES = 4 * GIB  # of XLA's programs; the oldest go


@functools.cache
def _is_there(cache_dir: str) -> bool:
    from ...utils import logging

    try:
        pathlib.Path(cache_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logging.get_logger(__name__).warning(
            f"expected a directory for compiled programs, got {error}: nothing is kept for the next run. Set"
            " DIFFUSERS_TPU_CACHE to one that can be written to, or to off."
        )
        return False
    return True


def keep_compiled_programs(cache_dir: str | None):
    """Keep what XLA compiles in this directory between processes, unless the user already told JAX where.

    A directory that cannot be made is said once, and nothing is kept.
    """
    import jax

    if cache_dir is None or jax.config.jax_compilation_cache_dir is not None:
        return
    if _is_there(cache_dir):
        jax.config.update("jax_compilation_cache_dir", cache_dir)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # schedulers are many small programs
        with contextlib.suppress(OSError):  # not there yet, or not ours to change
            make_room(pathlib.Path(cache_dir), MOST_CACHED_BYTES)


@contextlib.contextmanager
def compiled_anew():
    """Inside, nothing comes from JAX's cache: of an executable that was read from it the CPU's compiler (jaxlib 0.10.2) gives no
    second copy that runs ("Function ... not found")."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it looks at the setting once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def is_active() -> bool:
    """Whether pipelines of this process run on the TPU path (a TPU is here, or `DIFFUSERS_TPU=cpu` simulates one)."""
    return find_target(read_environment()) is not None
