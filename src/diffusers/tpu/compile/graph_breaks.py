"""A module that no program stands for, in parts: its own lines run one by one on the chips, its submodules as programs of their own.

A part for which no program stands either comes apart in turn. What has no submodules is then run line by line.
"""

import contextlib
import contextvars
from collections import Counter
from collections.abc import Callable, Iterator

import torch

from .. import bridge, notices


_answering: contextvars.ContextVar[tuple["GraphBreaks", ...]] = contextvars.ContextVar(
    "diffusers_tpu_answering", default=()
)


class GraphBreaks:
    """The submodules of one module that answer calls of their `forward` by themselves.

    Args:
        make: module -> its runner.
        reason: why the module is in parts.

    Attributes:
        runners: by the part's name in the module.
        missing: operators that its own lines run on the host, as torchax lacks them.
        host: why the module runs on the host, parts and all; None: it does not.
        answered: a call of the module in these parts has come to its end.
    """

    def __init__(self, module: torch.nn.Module, make: Callable, reason: str):
        self.runners = {name: make(part) for name, part in parts_of(module)}
        self.reason = reason
        self.missing: dict[str, None] = {}
        self.host: str | None = None
        self.answered = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.runners)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """While this is open, calls of the parts are their runners'."""
        token = _answering.set((*_answering.get(), self))
        with contextlib.ExitStack() as stack:
            stack.callback(_answering.reset, token)
            for runner in self.runners.values():
                stack.callback(runner.give_back)
                runner.take_over()
            yield

    @property
    def are_answering(self) -> bool:
        """Whether the module's own lines are running: what these call of the module itself is a part of that call."""
        return self in _answering.get()

    def put_on_host(self, name: str, error: Exception):
        """The module runs on the host from here on, as its own lines failed on the chips."""
        self.host = f"{type(error).__name__} ({bridge.line_of(error)}): {error}".splitlines()[0]
        notices.warn_once(
            f"host {name} {self.host}", f"{name} runs on the host: on the chips its own lines end in {self.host}"
        )

    @contextlib.contextmanager
    def noting_missing(self) -> Iterator[None]:
        """Operators that run on the host while this is open are noted."""
        missing = bridge.environment().missing
        before = Counter(missing)
        try:
            yield
        finally:
            of_parts = {what for runner in self.runners.values() if runner.parts for what in runner.parts.missing}
            self.missing |= dict.fromkeys(what for what in missing - before if what not in of_parts)

    def are_of(self, module: torch.nn.Module) -> bool:
        """Whether these are still the module's: none was replaced, by its like either."""
        now = {name: id(part) for name, part in parts_of(module)}
        return now == {name: id(runner.module) for name, runner in self.runners.items()}

    def own(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Of a module's tensors those that are of no part."""
        return {name: t for name, t in tensors.items() if not is_of(name, self.names)}


def is_of(name: str, parts: tuple[str, ...]) -> bool:
    """Whether a tensor of this name is of one of the parts."""
    return any(name.startswith(f"{part}.") for part in parts)


def parts_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Submodules that can be called, outermost ones, each once; a list of modules is no module to call."""
    met = set()
    for name, child in module.named_children():
        inner = parts_of(child) if type(child).forward is torch.nn.Module.forward else [("", child)]
        for path, part in inner:
            if id(part) not in met:
                met.add(id(part))
                yield f"{name}.{path}".rstrip("."), part
