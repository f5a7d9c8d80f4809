"""The mode of every module of a model (`modes`), from its runners: each with its reasons, lines of upstream's code."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from ..bridge import Guard
from .host import HostModel
from .module import CompiledModule


def rungs(runner: CompiledModule | HostModel, name: str = "") -> list[dict]:
    """{"module", "rung", "reasons"} of every module that was called; "" is the model itself.

    A rung is compiled, decided (compiled with guards), parts (split), eager or host.
    """
    found = _rungs(runner, name)
    return [{"module": module, "rung": rung, "reasons": [*dict.fromkeys(why)]} for module, rung, why in found]


def _rungs(runner: CompiledModule | HostModel, name: str) -> Iterator[tuple[str, str, Iterable[str]]]:
    if isinstance(runner, HostModel):
        yield name, "host", ["TPUConfig.host"]
    elif (split := runner.split) is not None and split.host is not None:
        yield name, "host", [split.reason, split.host]
    elif split is not None:
        yield name, "parts", [split.reason, *split.missing]
        for path, submodule in split.runners.items():
            yield from _rungs(submodule, f"{name}.{path}".lstrip("."))
    else:
        lines = [str(guard.line) for guard in runner.known.values() if isinstance(guard, Guard)]
        if runner.programs:
            yield name, "decided" if lines else "compiled", lines
        if runner.modes.eager:
            yield name, "eager", runner.modes.eager.values()
        if runner.modes.host:
            yield name, "host", runner.modes.host


def lines_of(name: str, found: list[dict]) -> list[str]:
    """Lines of text for a model of this name; equal blocks share one."""
    modules = (".".join(filter(None, (name, re.sub(r"(?<=\.)\d+(?=\.|$)", "*", one["module"])))) for one in found)
    counts = Counter((module, one["rung"], tuple(one["reasons"])) for module, one in zip(modules, found))
    lines = []
    for (module, rung, reasons), count in counts.items():
        lines.append(f"{module}: {rung}" + (f" ({count} alike)" if count > 1 else ""))
        lines += [f"    {reason}" for reason in reasons]
    return lines or [f"{name}: not called yet"]
