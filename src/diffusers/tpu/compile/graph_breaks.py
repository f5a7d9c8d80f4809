"""A module that cannot be traced, split at its submodules: its own lines run eagerly on the chips, its submodules are programs.

A submodule that cannot be traced either is split in turn. One without submodules runs eagerly.
"""

import contextlib
import contextvars
from collections import Counter
from collections.abc import Callable, Iterator

import torch

from .. import bridge, notices
from ..kernels.settings import bound


_running: contextvars.ContextVar[tuple["GraphBreaks", ...]] = contextvars.ContextVar("diffusers_tpu_split", default=())


class GraphBreaks:
    """A split module: `runners` of its submodules, by name, which stand for their `forward` while its own lines run.

    Args:
        make: submodule -> its runner.
        reason: why the module is split.

    Attributes:
        missing: operators that its own lines run on the host, as torchax lacks them.
        host: why the module runs on the host as a whole; None: it does not.
        ran: a call of the split module has returned.
    """

    def __init__(self, module: torch.nn.Module, make: Callable, reason: str):
        self.runners = {name: make(submodule) for name, submodule in submodules(module)}
        self.reason, self.host, self.ran = reason, None, False
        self.missing: dict[str, None] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Calls of the submodules are their runners'. Operators that run on the host are noted."""
        missing = bridge.environment().missing
        before = Counter(missing)
        with bound(_running, (*_running.get(), self)), contextlib.ExitStack() as stack:
            for runner in self.runners.values():
                stack.callback(runner.put_back)
                runner.replace()
            try:
                yield
            finally:
                theirs = {what for runner in self.runners.values() if runner.split for what in runner.split.missing}
                self.missing |= dict.fromkeys(what for what in missing - before if what not in theirs)

    @property
    def is_running(self) -> bool:
        """Whether the module's own lines are running: a method of the module that they call is a part of that call."""
        return self in _running.get()

    def move_to_host(self, name: str, error: Exception):
        """The module runs on the host from here on, as its own lines failed on the chips."""
        self.host = f"{type(error).__name__} ({bridge.line_of(error)}): {error}".splitlines()[0]
        notices.warn_once(
            f"host {name} {self.host}", f"{name} runs on the host: on the chips its own lines end in {self.host}"
        )

    def is_of(self, module: torch.nn.Module) -> bool:
        """Whether none of the module's submodules was replaced, by its like either."""
        now = {name: id(submodule) for name, submodule in submodules(module)}
        return now == {name: id(runner.module) for name, runner in self.runners.items()}


def is_within(name: str, submodules: tuple[str, ...]) -> bool:
    """Whether a tensor of this name is of one of the submodules."""
    return any(name.startswith(f"{submodule}.") for submodule in submodules)


def submodules(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Submodules that can be called, outermost ones, each once; a list of modules is no module to call."""
    met = set()
    for name, child in module.named_children():
        inner = submodules(child) if type(child).forward is torch.nn.Module.forward else [("", child)]
        for path, submodule in inner:
            if id(submodule) not in met:
                met.add(id(submodule))
                yield f"{name}.{path}".rstrip("."), submodule
