"""Is there a TPU, which generation, or are chips simulated on the CPU?

Detection reads the PCI bus, so that asking costs nothing and imports nothing. Device ids: JAX 0.10.2,
`jax/_src/hardware_utils.py`.
"""

import functools
import pathlib
from dataclasses import dataclass

from .config import Environment


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
class Target:
    """What JAX will run on: `platform` "tpu" or "cpu"; `generation` of a real TPU; `simulated` chips on the CPU."""

    platform: str
    generation: str | None = None
    simulated: int = 0


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
    generation = _generation_on_this_host()
    return Target("tpu", generation) if generation else None


@functools.cache
def jax_devices(target: Target) -> tuple:
    """JAX's devices for this target; the first call starts JAX.

    Raises RuntimeError where JAX was already started with other devices, or finds no TPU.
    """
    import jax

    if target.platform == "cpu":
        _ask_for_simulated_chips(jax, target.simulated)
    devices = jax.devices(target.platform)
    if target.platform == "cpu" and len(devices) < target.simulated:
        raise RuntimeError(
            f"expected {target.simulated} simulated chips, got {len(devices)}: JAX was started before diffusers could"
            " ask for them. Run the pipeline before other JAX code, or set"
            f" XLA_FLAGS=--xla_force_host_platform_device_count={target.simulated}."
        )
    return tuple(devices[: target.simulated or None])


def _ask_for_simulated_chips(jax, count: int):
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # JAX runs already: the caller looks whether its devices are enough
        return
    jax.config.update("jax_platforms", "cpu")


def keep_compiled_programs(cache_dir: str | None):
    """Keep what XLA compiles in this directory between processes, unless the user already told JAX where."""
    import jax

    if cache_dir is not None and jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", cache_dir)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
