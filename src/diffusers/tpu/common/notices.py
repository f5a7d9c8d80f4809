"""Warnings that are given once per process, and warnings of slow work."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator


OFFLOADS = "enable_model_cpu_offload enable_sequential_cpu_offload ComponentsManager.enable_auto_cpu_offload".split()
WAIVED = {
    "group_offload": "group offloading: on the TPU path weights are sharded over all chips, and models that have no room on"
    " the chips wait on the host; nothing else is offloaded",
    "parallelism": "parallelism over several processes: on the TPU path one process has all chips, and weights, heads and"
    " sequence are split over them; TPUConfig(mesh=(dp, sp, tp)) says how",
    **{name: f"{name}: on the TPU path models that have no room on the chips wait on the host" for name in OFFLOADS},
    "xformers": "xformers: on the TPU path attention is the TPU kernel, which is memory-efficient",
}
MOST_SAID = 4096
_said: dict[str, object] = {}


def warn(sentence: str):
    """Logs this sentence as a warning."""
    from ...utils import logging  # here: the idioms are activated before the rest of diffusers is imported

    logging.get_logger(__name__).warning(sentence)


def warn_once(key: str, sentence: str | None = None):
    """Warns once per process and key: with this sentence, or the one of `WAIVED` for the key, or the key itself."""
    mine = object()
    if _said.setdefault(key, mine) is mine:  # only one of several threads warns
        if len(_said) > MOST_SAID:  # keys that name sizes; the oldest may be warned of again
            _said.pop(next(iter(_said)), None)
        warn(sentence or WAIVED.get(key, key))


@contextlib.contextmanager
def warn_while(sentence: Callable[[float], str], first: float, growth: float = 0) -> Iterator[None]:
    """Warns, from a separate thread, if what runs inside is not done after `first` seconds. Warns again after further `growth`
    times the time so far, or every `first` seconds if that is 0. `sentence`: from the seconds since the start."""
    done, start = threading.Event(), time.monotonic()

    def watch():
        wait = first
        while not done.wait(wait):
            since = time.monotonic() - start
            warn(sentence(since))
            wait = growth * since or first

    threading.Thread(target=watch, name="diffusers-tpu warns of waiting", daemon=True).start()
    try:
        yield
    finally:
        done.set()
