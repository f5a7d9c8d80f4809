"""Streams, events and guards of `torch.cuda`, for one device whose work is in order: a stream changes nothing, an event is a
time at which everything sent before is done.
"""

import contextlib
import time

import torch

from . import chips


class Event:
    """As `torch.cuda.Event`. `record` waits for the chips, so that the time between two events is that of the work."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False, external=False):
        self._time: float | None = None

    def record(self, stream=None):
        chips.wait()
        self._time = time.perf_counter()

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds. Raises ValueError where one was not recorded."""
        if self._time is None or end_event._time is None:
            raise ValueError("expected both events to be recorded before calculating elapsed time")
        return 1e3 * (end_event._time - self._time)

    def query(self) -> bool:
        return True

    def wait(self, stream=None):
        pass

    def synchronize(self):
        chips.wait()


class Stream(contextlib.AbstractContextManager):
    """As `torch.cuda.Stream`; also the context that `torch.cuda.stream` gives."""

    cuda_stream = device_index = stream_id = 0
    device_type, device = 1, torch.device("cuda", 0)

    def __init__(self, device=None, priority=0, **kwargs):
        pass

    def __exit__(self, *exc):
        return None

    def __eq__(self, other):
        return isinstance(other, Stream)

    def __hash__(self):
        return 0

    def synchronize(self):
        chips.wait()

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, event=None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Guard(contextlib.AbstractContextManager):
    """As `torch.cuda.device`, `torch.accelerator.device_index`: there is one device."""

    def __init__(self, *args, **kwargs):
        pass

    def __exit__(self, *exc):
        return None
