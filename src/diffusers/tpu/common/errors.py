"""Errors that are not the caller's mistake; messages have what was expected, what was found and what to do.

The command line prints a `Failure` in one line, with exit status 1. The caller's mistakes are ValueErrors instead.
"""

import contextlib
import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence

import torch

from .notices import warn_while


UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
WORTH_A_WORD = 60.0  # seconds: the largest models take less for a step
LETTERS = 300  # most characters of a message of the compiler or the runtime


class Failure(RuntimeError):
    """Something outside of the program stops it; the message ends with the way out."""


class ChipBusy(Failure):
    """Another process has the TPU."""


class NoChip(Failure):
    """This host has a TPU that this process cannot use."""


class OutOfHBM(Failure, torch.OutOfMemoryError):
    """A chip has no room for what is compiled, run or placed; a subclass of the error that scripts for a GPU catch."""


class OutOfCoreMemory(Failure):
    """A kernel asks for more VMEM or SMEM than a core has."""


class NotFinite(Failure):
    """A result contains NaN or an infinity."""


class NotWritten(Failure):
    """A file could not be written; nothing of it is left."""


def exhausted(error: BaseException) -> str | None:
    """The memory that the text of a compiler or runtime error calls exhausted: "hbm", "vmem" or "smem"; None: none."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text and "Ran out of memory" not in text:
        return None
    named = re.search(r"(?:memory space |space=|scoped |on )(hbm|vmem|smem)\b", text, re.IGNORECASE)
    return named[1].lower() if named else "hbm"


def hbm_asked(text: str) -> tuple[int | None, int | None]:
    """(bytes requested, bytes available), as far as the compiler's or the runtime's message names them, else None."""
    number = r"([\d.]+)([KMGT]?)"
    for form in (
        rf"Used {number} of {number} hbm",
        rf"\({number}\) exceeds available HBM \({number}\)",
        rf"Attempting to (?:allocate|reserve) {number}\b.*There are {number}B? free",
    ):
        if sizes := re.search(form, text):
            return tuple(int(float(sizes[n]) * UNITS[sizes[n + 1]]) for n in (1, 3))
    return None, None


@contextlib.contextmanager
def within_hbm(doing: Callable[[], str], question: Callable[[], str]) -> Iterator[None]:
    """Raises OutOfHBM if a chip has no room for what runs inside, OutOfCoreMemory if a core has none for a kernel. `doing`: what
    runs, as "to run ..."; `question`: the planner's command that shows what would fit."""
    try:
        yield
    except RuntimeError as error:
        memory = None if isinstance(error, Failure) else exhausted(error)
        if memory is None:
            raise
        said = _short(str(error))
        if memory != "hbm":
            raise OutOfCoreMemory(
                f"expected room in a core's {memory.upper()} {doing()}, got none: {said}. A kernel's blocks are too large for this"
                " generation; more chips or HBM do not help. TPUConfig(attention_blocks=(256, 256, 256)) makes attention's"
                " smaller, TPUConfig(attention='splash', layers='xla') runs without our kernels."
            ) from error
        asked, there = hbm_asked(str(error))
        sizes = "" if asked is None else f" ({asked / 2**30:.3g} GiB asked for, {there / 2**30:.3g} GiB there)"
        raise OutOfHBM(
            f"expected room on a chip {doing()}, got one out of memory. {said}{sizes}. Use more chips, a mesh that"
            " splits more, a smaller size or bfloat16, or leave weights less (TPUConfig.reserve_gib); what would fit says:"
            f" {question()}"
        ) from error


def told_if_slow(doing: Callable[[], str]) -> contextlib.AbstractContextManager:
    """A context that warns if its work is not done after a minute, then after ten times as long, and so on."""
    return warn_while(
        lambda seconds: (
            f"{doing()} is not done after {seconds:.0f} s: no step that `diffusers-tpu plan` knows of takes as long. Chips that"
            " wait for each other do so for good: ctrl-C ends it, and TPUConfig(sparse_cores=False, attention='splash')"
            " shows whether an exchange or a kernel of ours stands"
        ),
        WORTH_A_WORD,
        growth=9,
    )


def holders(nodes: Sequence[str]) -> dict[int, str]:
    """Other processes that have one of these files open, as far as this user may see: pid -> name."""
    found = {}
    for link in glob.glob("/proc/[0-9]*/fd/*"):
        pid = int(link.split("/")[2])
        with contextlib.suppress(OSError):  # it ended, or is another user's
            if pid != os.getpid() and os.readlink(link) in nodes:
                with open(f"/proc/{pid}/comm") as name:
                    found[pid] = name.read().strip()
    return found


_OF_A_SLICE = (
    "TPU_WORKER_HOSTNAMES TPU_WORKER_ID TPU_PROCESS_ADDRESSES TPU_PROCESS_BOUNDS TPU_CHIPS_PER_PROCESS_BOUNDS TPU_VISIBLE_CHIPS"
    " TPU_VISIBLE_DEVICES TPU_ACCELERATOR_TYPE TPU_TOPOLOGY TPU_HOST_BOUNDS TPU_CHIPS_PER_HOST_BOUNDS"
).split()


@contextlib.contextmanager
def chips_are_there(nodes: Sequence[str]) -> Iterator[None]:
    """Raises ChipBusy or NoChip if the runtime says why it cannot use the chips, whose device files are `nodes`."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if re.search("already in use|libtpu_lockfile|Device or resource busy", text):
            pid = re.search(r"pid (\d+)", text)
            theirs = pid[1] if pid else ", ".join(f"{number} ({name})" for number, name in holders(nodes).items())
            whose = f"process {theirs} has it"
            if not theirs:
                whose = (
                    "another process has it, perhaps another user's (`sudo lsof` of /dev/vfio/* and /dev/accel* names it), or one"
                    " that was killed left /tmp/libtpu_lockfile"
                )
            raise ChipBusy(
                f"expected a TPU that no other process uses, got one in use: {whose}. One process drives all chips of a host: wait"
                " for it or end it; remove /tmp/libtpu_lockfile if no process is left. --device simulated needs no TPU."
            ) from error
        if re.search("Permission denied|Operation not permitted", text):
            raise NoChip(
                f"expected the right to open {', '.join(nodes) or 'the TPU'}, got: {_short(text)}. Run as root or as a member of"
                " the group that has these files (`ls -l` names it), and where locked memory is limited, with `ulimit -l"
                " unlimited`; a container needs them as devices, or --privileged."
            ) from error
        if re.search("Failed to get (global TPU|slice) topology", text):
            given = [f"{name}={os.environ[name]}" for name in _OF_A_SLICE if name in os.environ]
            raise NoChip(
                f"expected the runtime to find how the chips of this slice lie, got: {_short(text)}. A slice of several hosts"
                " starts when the same script runs on each of them; variables that name other hosts or chips than there are stop"
                f" it (here: {' '.join(given) or 'none is set'}): unset them, or set them for this host alone."
            ) from error
        raise


def _short(text: str) -> str:
    """The start of a message in one line; the first line of some messages is only a code."""
    return " ".join(text.split())[:LETTERS].rstrip(".")
