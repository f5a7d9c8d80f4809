"""Finds the TPU, or the chips that are simulated on the CPU; JAX's devices for them, and options of their compiler.

Detection reads the PCI bus: it is cheap and does not import JAX.
"""

import contextlib
import functools
import glob
import logging
import os
import pathlib
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from ..common import notices
from ..common.config import Environment, read_environment
from ..common.errors import chips_are_there
from ..common.files import make_room
from . import hosts
from .figures import GENERATIONS, GIB, SUMS, chip_of_kind, generation_of


GOOGLE_PCI_VENDOR = "0x1ae0"

# The library that JAX's CPU backend uses for sums (jaxlib 0.10.2) keeps float32 where the program rounds a sum to bfloat16 and
# widens it again: an error of 6.8e-4 in an attention whose rotated queries upstream rounds.
WITHOUT_LIBRARY = {"xla_cpu_experimental_ynn_fusion_type": ""}

SPARSE, ALL_TO_ALLS = "sparse_core", "xla_tpu_enable_async_all_to_all"  # options of the TPU's compiler
# Exchanges are queued on the SparseCores, without the core starting each: for programs with an exchange during attention. In
# others, sums between chips would queue behind prefetched weights (FLUX.2 on v6e-8: 84 ms instead of 79).
QUEUE, QUEUED_BY = "xla_tpu_enable_sparse_core_offload_queuing_in_lhs", "exchange_cut_together"
# The SparseCores sum the results of a layer's first rows while the core computes the others.
SUMS_APART, SUMMED_BY = "xla_tpu_sparse_core_all_reduce_offload_max_num_operands", "linear_kernel_of_part"
ONLY_FOR = {QUEUE: QUEUED_BY, SUMS: SUMMED_BY, SUMS_APART: SUMMED_BY}  # option -> kernel of the programs that have it


def compiler_options(device, sparse_cores: bool) -> dict[str, bool | str]:
    """Compiler options of programs for a mesh of devices like this one."""
    if device.platform == "cpu":
        return {**WITHOUT_LIBRARY}
    chip = chip_of_kind(device.device_kind)
    options = {**chip.exchange_options} if chip else {}
    return options if sparse_cores else _on_core(options, options)


def _on_core(options: dict, refused: Iterable[str]) -> dict[str, bool | str]:
    """The options with the `refused` SparseCore ones off; all-to-alls then run asynchronously without SparseCores."""
    off = {name for name in refused if SPARSE in name and options[name] is True}
    return {name: name == ALL_TO_ALLS or (False if name in off else on) for name, on in options.items()}


def compile_lowered(lowered, options: dict[str, bool | str] | None):
    """The executable of a `jax.stages.Lowered`. If the compiler cannot put all-to-alls on the SparseCores, they go without; if it
    still cannot, everything does, with a warning. Options that it does not have are left out, with a warning."""
    import jax

    if any(name in ONLY_FOR for name in options or {}):
        text = lowered.as_text()
        options = {name: on for name, on in options.items() if name not in ONLY_FOR or ONLY_FOR[name] in text}
    try:
        return lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        line = str(error).splitlines()[0]
        sparse = [name for name, on in (options or {}).items() if SPARSE in name and on is True]
        unknown = re.search(r"No such compile option: '([^']+)'", line)
        if unknown and unknown[1] in (options or {}):
            notices.warn_once(f"this compiler has no option {unknown[1]}, programs are compiled without it")
            return compile_lowered(lowered, {name: value for name, value in options.items() if name != unknown[1]})
        if SPARSE not in str(error) or not sparse:
            raise
        if of_all_to_alls := [name for name in sparse if "all_to_all" in name]:
            return compile_lowered(lowered, _on_core(options, of_all_to_alls))
        notices.warn(
            "the compiler cannot put this program's exchanges between chips on the SparseCores, they stay on the core"
            f" (TPUConfig.sparse_cores=False asks for that): {line}"
        )
        return lowered.compile(_on_core(options, sparse))


def flags_of_jax() -> set[str]:
    """Flags that `import jax` adds to LIBTPU_INIT_ARGS on a TPU host, read from the constants of JAX's function that does so."""
    from jax._src.cloud_tpu_init import cloud_tpu_init

    texts = [text for text in cloud_tpu_init.__code__.co_consts[1:] if isinstance(text, str)]  # after its docstring
    return {word for text in texts for word in text.split() if word.startswith("--") and "=" in word}


@dataclass(frozen=True)
class Target:
    """What JAX will run on: `platform` "tpu" or "cpu"; `generation` of a real TPU, None if this host's PCI bus does not
    show it, so that only JAX can tell; `simulated` chips on the CPU."""

    platform: str
    generation: str | None = None
    simulated: int = 0

    def __str__(self) -> str:
        """The result of `torch.cuda.get_device_name`, such as "TPU v6e". Starts JAX if `generation` is None."""
        if self.simulated:
            return "TPU (simulated on the CPU)"
        return f"TPU {self.generation or generation_of(jax_devices(self)[0])}"


@functools.cache
def _generation_on_this_host(bus: str = "/sys/bus/pci/devices") -> str | None:
    for vendor in pathlib.Path(bus).glob("*/vendor"):
        with contextlib.suppress(OSError):
            device = vendor.with_name("device").read_text().strip()
            if vendor.read_text().strip() == GOOGLE_PCI_VENDOR and device in GENERATIONS:
                return GENERATIONS[device]
    return None


def find_target(environment: Environment) -> Target | None:
    """The target of this process, or None where plain diffusers runs. Raises RuntimeError for mode "tpu" if TorchTPU is loaded."""
    if environment.mode == "cpu":
        return Target("cpu", simulated=environment.simulated_devices)
    if environment.mode == "off" or (environment.mode == "auto" and environment.leaves_tpu_out):
        return None
    generation = _generation_on_this_host()
    is_there = environment.mode == "tpu" or (generation is not None and device_nodes())
    if is_there and torch_tpu_is_loaded():
        if environment.mode == "tpu":
            raise RuntimeError(f"expected a TPU for DIFFUSERS_TPU=tpu, got one in use: {TORCH_TPU}")
        notices.warn_once(f"the TPU path is off: {TORCH_TPU}")
        return None
    return Target("tpu", generation) if is_there else None


TORCH_TPU = (
    "torch_tpu is loaded and has the chips; TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps `import torch` from loading it"
)


@functools.cache  # as of the import of diffusers, after torch: the path does not turn off in the middle of a run
def torch_tpu_is_loaded() -> bool:
    """Whether TorchTPU was imported, by the script or, where it is installed, by torch."""
    return "torch_tpu" in sys.modules


def device_nodes(root: str = "/dev") -> list[str]:
    """The device files of this host's chips. A container without them sees the chips on the bus, but cannot use them."""
    return sorted(glob.glob(f"{root}/accel[0-9]*") + glob.glob(f"{root}/vfio/[0-9]*"))


def why_off(environment: Environment) -> str:
    """Why there is no target."""
    if environment.mode == "off":
        return "DIFFUSERS_TPU=off"
    if environment.leaves_tpu_out:
        return f"JAX_PLATFORMS={environment.platforms}"
    if (generation := _generation_on_this_host()) is not None:
        if device_nodes():
            return TORCH_TPU
        return f"a TPU {generation} on the bus of this host, but no /dev/vfio/N or /dev/accelN: a container has to be given them"
    return "no TPU on this host"


@functools.cache
def jax_devices(target: Target) -> tuple:
    """JAX's devices for this target, of all processes of the run; the first call starts JAX, and joins the other processes.

    Raises:
        RuntimeError: JAX was already started with other devices, or finds no TPU; ChipBusy, NoChip: this process cannot use it.
        NotImplementedError: an unknown TPU generation.
    """
    import jax

    if target.platform == "cpu":
        with contextlib.suppress(RuntimeError):  # JAX has already started: its devices are checked below
            jax.config.update("jax_num_cpu_devices", target.simulated)
            jax.config.update("jax_platforms", "cpu")
    hosts.join(target.platform)
    if target.platform == "cpu":
        # NPROC sets the threads of XLA's CPU client, which else has one per chip or, if that is more, per processor. An exchange
        # blocks one thread of each of its chips, and chips reach exchanges in different orders, so a chip has several. Eigen splits
        # a sum by the number of threads: with as many in each process as in one that simulates all chips, results are bit-equal.
        os.environ.setdefault("NPROC", str(THREADS * target.simulated * hosts.process_count()))
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


THREADS = 4  # of a simulated chip
MOST_CACHED_BYTES = 4 * GIB  # of XLA's programs; the oldest are deleted


def keep_compiled_programs(cache_dir: str | None):
    """Keeps XLA's programs in this directory for later processes, unless the user has set JAX's own, or it cannot be made."""
    import jax

    if cache_dir is None or jax.config.jax_compilation_cache_dir is not None:
        return
    try:
        pathlib.Path(cache_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        notices.warn_once(
            f"expected a directory for compiled programs, got {error}: nothing is kept for the next run. Set"
            " DIFFUSERS_TPU_CACHE to one that can be written to, or to off."
        )
        return
    jax.config.update("jax_compilation_cache_dir", cache_dir)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # schedulers are many small programs
    with contextlib.suppress(OSError):  # not ours to change
        make_room(pathlib.Path(cache_dir), MOST_CACHED_BYTES)


@contextlib.contextmanager
def compiled_anew():
    """A context without JAX's compilation cache: the CPU's compiler (jaxlib 0.10.2) makes no second working copy of an executable
    that was read from it ("Function ... not found")."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    logging.getLogger("jax._src.compilation_cache").setLevel(logging.WARNING)  # it logs each reset at INFO
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it reads the setting only once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def is_active() -> bool:
    """Whether pipelines of this process run on the TPU path (a TPU is here, or `DIFFUSERS_TPU=cpu` simulates one)."""
    return find_target(read_environment()) is not None
