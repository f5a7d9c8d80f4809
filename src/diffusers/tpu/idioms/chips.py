"""What scripts ask of their GPU, answered for all chips of the TPU together: its name, its memory, whether it is done.

JAX is asked where it runs already, or where the answer needs the chips.
"""

import os
import sys

from ..chips.devices import find_target, jax_devices
from ..chips.figures import CHIPS, GIB, generation_of
from ..config import read_environment


def name() -> str:
    """As `torch.cuda.get_device_name`: "TPU v6e"."""
    return str(find_target(read_environment()))


def devices() -> tuple:
    """JAX's devices; starts JAX."""
    return jax_devices(find_target(read_environment()))


def wait():
    """Until everything that was sent to the chips is computed."""
    if not _jax_runs():
        return
    import jax

    jax.effects_barrier()
    jax.block_until_ready([array for array in jax.live_arrays() if not array.is_deleted()])


def bytes_in_all() -> int:
    """Memory of all chips together; of simulated ones, the host's."""
    stats = _own_stats()
    limits = [s["bytes_limit"] for s in stats if "bytes_limit" in s]
    if limits:
        return sum(limits) * len(devices()) // len(stats)
    chip = CHIPS.get(generation_of(devices()[0]))
    if chip is not None:
        return chip.hbm_bytes * len(devices())
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def bytes_in_use() -> int:
    """Memory of all chips together that arrays take; 0 before JAX runs."""
    return _counted("bytes_in_use", _bytes_of_live_arrays)


class Peak:
    """The most that was in use since `reset`, as far as the runtime tells: simulated chips only know the present."""

    def __init__(self):
        self.before = self.highest = 0

    def bytes(self) -> int:
        peak = _counted("peak_bytes_in_use", bytes_in_use)
        self.highest = max(self.highest, bytes_in_use(), peak if peak > self.before else 0)
        return self.highest

    def reset(self):
        self.before = _counted("peak_bytes_in_use", lambda: 0)
        self.highest = 0


def _counted(statistic: str, otherwise) -> int:
    if not _jax_runs():
        return 0
    stats = _own_stats()
    found = [s[statistic] for s in stats if statistic in s]
    return sum(found) * len(devices()) // len(stats) if found else otherwise()


def _jax_runs() -> bool:
    """Whether JAX has its devices: asked for its arrays it would take them, before the other processes and simulated chips are there."""
    if "jax" not in sys.modules:
        return False
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def _own_stats() -> list[dict]:
    """What this process's chips say; those of other processes are as full as they are."""
    import jax

    return [device.memory_stats() or {} for device in devices() if device.process_index == jax.process_index()]


def _bytes_of_live_arrays() -> int:
    import jax
    import numpy as np

    total = 0
    for array in jax.live_arrays():
        if not array.is_deleted():
            part = np.prod(array.sharding.shard_shape(array.shape), dtype=np.int64)
            total += int(part) * array.dtype.itemsize * len(array.sharding.device_set)
    return total


def gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"
