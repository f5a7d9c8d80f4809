"""What goes wrong while a program runs, told in words of its own: what was expected, what came, what to do.

`Failure` is not the caller's mistake (that is a ValueError): the command line tells it in one line, exit status 1.
"""

import contextlib
import re
from collections.abc import Callable, Iterator


UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Failure(RuntimeError):
    """Something outside of the program stops it; the message ends with the way out."""


class ChipBusy(Failure):
    """Another process has the TPU."""


class OutOfHBM(Failure):
    """A chip has no room for what is to be compiled, run or placed."""


class NotFinite(Failure):
    """What was computed has NaN or an infinity in it."""


class NotWritten(Failure):
    """A file could not be written; nothing of it is left."""


def is_out_of_hbm(error: BaseException) -> bool:
    """Whether the compiler or the runtime says so; both in words only."""
    text = str(error)
    return "RESOURCE_EXHAUSTED" in text or "Ran out of memory" in text


def hbm_asked(text: str) -> tuple[int | None, int | None]:
    """Bytes that were asked for and bytes that there are, as far as the compiler's message names them."""
    number = r"([\d.]+)([KMGT]?)"
    sizes = re.search(rf"Used {number} of {number} hbm", text) or re.search(
        rf"\({number}\) exceeds available HBM \({number}\)", text
    )
    if sizes is None:
        return None, None
    return tuple(int(float(sizes[n]) * UNITS[sizes[n + 1]]) for n in (1, 3))


@contextlib.contextmanager
def within_hbm(doing: Callable[[], str], question: Callable[[], str]) -> Iterator[None]:
    """Raises OutOfHBM where what runs here finds no room on a chip.

    Args:
        doing: what that was, "to run ...".
        question: to the planner, whose answer says what would fit.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, Failure) or not is_out_of_hbm(error):
            raise
        asked, there = hbm_asked(str(error))
        sizes = "" if asked is None else f" ({asked / 2**30:.3g} GiB asked for, {there / 2**30:.3g} GiB there)"
        raise OutOfHBM(
            f"expected room on a chip {doing()}, got none{sizes}: {str(error).splitlines()[0]} Use more chips, a mesh that"
            " splits more, a smaller size or bfloat16, or leave weights less (TPUConfig.reserve_gib); what would fit says:"
            f" {question()}"
        ) from error


@contextlib.contextmanager
def chip_is_free() -> Iterator[None]:
    """Raises ChipBusy where JAX finds that another process has the chips."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "already in use" not in text and "libtpu_lockfile" not in text:
            raise
        pid = re.search(r"pid (\d+)", text)
        whose = (
            f"process {pid[1]} has it"
            if pid
            else "another process has it, or one that was killed left /tmp/libtpu_lockfile"
        )
        raise ChipBusy(
            f"expected a TPU that no other process uses, got one in use: {whose}. One process drives all chips of a host: wait"
            " for it or end it; remove /tmp/libtpu_lockfile if no process is left. --device simulated needs no TPU."
        ) from error
