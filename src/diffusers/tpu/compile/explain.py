"""The mode (`modes`) of every module of a model, from its runners, each with its reasons: lines of upstream's code."""

import re
from collections import Counter
from collections.abc import Iterable

from ..bridge import Guard
from .host import HostModel
from .module import CompiledModule


def rungs(runner: CompiledModule | HostModel, name: str = "") -> list[dict]:
    """{"module", "rung", "reasons"} of every module that was called; "" is the model itself.

    A rung is compiled, decided (compiled with guards), parts (split), eager or host.
    """
    found = []

    def add(rung: str, reasons: Iterable[str]):
        found.append({"module": name, "rung": rung, "reasons": [*dict.fromkeys(reasons)]})

    if isinstance(runner, HostModel):
        add("host", ["TPUConfig.host"])
    elif (split := runner.split) is not None and split.host is not None:
        add("host", [split.reason, split.host])
    elif split is not None:
        add("parts", [split.reason, *split.missing])
        for path, submodule in split.runners.items():
            found += rungs(submodule, f"{name}.{path}".lstrip("."))
    else:
        lines = [str(guard.line) for guard in runner.known.values() if isinstance(guard, Guard)]
        if runner.programs:
            add("decided" if lines else "compiled", lines)
        if runner.modes.eager:
            add("eager", runner.modes.eager.values())
        if runner.modes.host:
            add("host", runner.modes.host)
    return found


def lines_of(name: str, found: list[dict]) -> list[str]:
    """Lines of text for a model of this name; equal blocks share one."""
    modules = (".".join(filter(None, (name, re.sub(r"(?<=\.)\d+(?=\.|$)", "*", one["module"])))) for one in found)
    counts = Counter((module, one["rung"], tuple(one["reasons"])) for module, one in zip(modules, found))
    lines = []
    for (module, rung, reasons), count in counts.items():
        lines.append(f"{module}: {rung}" + (f" ({count} alike)" if count > 1 else ""))
        lines += [f"    {reason}" for reason in reasons]
    return lines or [f"{name}: not called yet"]
