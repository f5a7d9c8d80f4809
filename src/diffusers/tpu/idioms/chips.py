"""The properties that scripts read from their GPU, for all chips of the TPU together: name, memory, streams and events.

JAX is used where it runs already, or where a value needs the chips.
"""

import contextlib
import math
import os
import sys
import time

import torch

from ..chips.devices import find_target, jax_devices
from ..chips.figures import CHIPS, generation_of
from ..common.config import read_environment


def name() -> str:
    """As `torch.cuda.get_device_name`: "TPU v6e"."""
    return str(find_target(read_environment()))


def devices() -> tuple:
    """JAX's devices; starts JAX."""
    return jax_devices(find_target(read_environment()))


def wait():
    """Block until everything that was dispatched to the chips is computed."""
    if not _jax_runs():
        return
    import jax

    jax.effects_barrier()
    jax.block_until_ready([array for array in jax.live_arrays() if not array.is_deleted()])


def bytes_in_all() -> int:
    """Memory of all chips together; of simulated ones, the host's."""
    if (limits := _in_all("bytes_limit")) is not None:
        return limits
    if (chip := CHIPS.get(generation_of(devices()[0]))) is not None:
        return chip.hbm_bytes * len(devices())
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def bytes_in_use() -> int:
    """Memory of all chips together that arrays take; 0 before JAX runs."""
    return _counted("bytes_in_use", _bytes_of_live_arrays)


class Peak:
    """The most bytes in use since `reset`, as far as the runtime reports them: simulated chips report only current use."""

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
    found = _in_all(statistic) if _jax_runs() else 0
    return otherwise() if found is None else found


def _in_all(statistic: str) -> int | None:
    """A memory statistic for all chips, extrapolated from this process's, as all are equally full; None: they have none."""
    import jax

    own = [device.memory_stats() or {} for device in devices() if device.process_index == jax.process_index()]
    found = [stats[statistic] for stats in own if statistic in stats]
    return sum(found) * len(devices()) // len(own) if found else None


def _jax_runs() -> bool:
    """Whether JAX has initialized its backends. Listing arrays would, before other processes and simulated chips are set up."""
    if "jax" not in sys.modules:
        return False
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def _bytes_of_live_arrays() -> int:
    import jax

    arrays = [array for array in jax.live_arrays() if not array.is_deleted()]
    sizes = [math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize for array in arrays]
    return sum(size * len(array.sharding.device_set) for size, array in zip(sizes, arrays))


# One device that works in order: streams have no effect, an event is the time at which all work before it is done


class _OnTheDevice:
    def query(self) -> bool:
        return True

    def synchronize(self):
        wait()


class Event(_OnTheDevice):
    """As `torch.cuda.Event`. `record` waits for the chips, so that the time between two events is that of the work."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False, external=False):
        self._time: float | None = None

    def record(self, stream=None):
        wait()
        self._time = time.perf_counter()

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds. Raises ValueError where one was not recorded."""
        if self._time is None or end_event._time is None:
            raise ValueError("expected both events to be recorded before calculating elapsed time")
        return 1e3 * (end_event._time - self._time)

    def wait(self, stream=None):
        pass


class Guard(contextlib.AbstractContextManager):
    """As `torch.cuda.device`, `torch.accelerator.device_index`, without effect: there is one device."""

    def __init__(self, *args, **kwargs):
        pass

    def __exit__(self, *exc):
        return None


class Stream(_OnTheDevice, Guard):
    """As `torch.cuda.Stream`; a context as well."""

    cuda_stream = device_index = stream_id = 0
    device_type, device = 1, torch.device("cuda", 0)

    def __eq__(self, other):
        return isinstance(other, Stream)

    def __hash__(self):
        return 0

    def is_capturing(self) -> bool:
        return False

    def wait_stream(self, stream):
        pass

    wait_event = wait_stream

    def record_event(self, event=None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class NoGraph:
    """Replaces `torch.cuda.CUDAGraph` and the functions that record one. Raises NotImplementedError."""

    def __init__(self, *args, **kwargs):
        raise NotImplementedError(
            "expected no CUDA graphs on the TPU path: models are compiled whole there, and a call of one is one program; leave"
            " the capture out and call the model"
        )
