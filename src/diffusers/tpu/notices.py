"""Warnings that are given once in a process."""

WAIVED = {
    "group_offload": "group offloading: on the TPU path weights are sharded over all chips, and models that have no room on"
    " the chips wait on the host; nothing else is offloaded",
    "parallelism": "parallelism over several processes: on the TPU path one process has all chips, and weights, heads and"
    " sequence are split over them; TPUConfig(mesh=(dp, sp, tp)) says how",
    "xformers": "xformers: on the TPU path attention is the TPU kernel, which is memory-efficient",
}
MOST_SAID = 4096
_said: dict[str, object] = {}


def warn_once(key: str, sentence: str | None = None):
    """Warn with this sentence, the first time in this process for this key; without one the key is the sentence."""
    mine = object()
    if _said.setdefault(key, mine) is mine:  # of several threads one says it
        if len(_said) > MOST_SAID:  # sentences that name sizes; the oldest may be said again
            _said.pop(next(iter(_said)), None)
        from ..utils import logging  # here: the idioms are on before the rest of diffusers is imported

        logging.get_logger(__name__).warning(sentence or key)


def waived(idiom: str):
    """Say of an idiom in `WAIVED` that it does nothing."""
    warn_once(idiom, WAIVED[idiom])


def forget():
    """Everything may be said again."""
    _said.clear()
