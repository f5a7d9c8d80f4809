"""Warnings that are given once in a process, and those of what takes long."""

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
    """Warn with this sentence."""
    from ...utils import logging  # here: the idioms are on before the rest of diffusers is imported

    logging.get_logger(__name__).warning(sentence)


def warn_once(key: str, sentence: str | None = None):
    """Warn with this sentence, or what `WAIVED` says of the key, or the key; the first time in this process for this key."""
    mine = object()
    if _said.setdefault(key, mine) is mine:  # of several threads one says it
        if len(_said) > MOST_SAID:  # sentences that name sizes; the oldest may be said again
            _said.pop(next(iter(_said)), None)
        warn(sentence or WAIVED.get(key, key))


@contextlib.contextmanager
def warn_while(sentence: Callable[[float], str], first: float, growth: float = 0) -> Iterator[None]:
    """Warns, from a thread of its own, of what is not done here after `first` seconds, then after `growth` times as long as it
    took so far, or as many again. `sentence`: of the seconds since the start."""
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
