"""Which rung of the ladder every module of a model took, from its runners: each with its reasons, lines of upstream's code.

compiled   one program a call
decided    one program for each answer to what its lines ask of small inputs, before the call
parts      its own lines run on the chips one by one, its submodules took rungs of their own
eager      all of it runs on the chips operation by operation: it draws numbers, keeps something or writes weights
host       it runs on the host
"""

import re
from collections.abc import Iterator

from .host import HostModel
from .module import CompiledModule


def rungs(runner: CompiledModule | HostModel, name: str = "") -> list[dict]:
    """{"module", "rung", "reasons"} of every module that was called; "" is the model itself."""
    if isinstance(runner, HostModel):
        return [_rung(name, "host", ["TPUConfig.host"])]
    return [*_rungs(runner, name)]


def _rungs(runner: CompiledModule, name: str) -> Iterator[dict]:
    parts = runner.parts
    if parts is not None and parts.host is not None:
        yield _rung(name, "host", [parts.reason, parts.host])
        return
    if parts is not None:
        yield _rung(name, "parts", [parts.reason, *parts.missing])
        for path, part in parts.runners.items():
            yield from _rungs(part, f"{name}.{path}".lstrip("."))
        return
    lines = [*dict.fromkeys(str(question.line) for question in runner.guards.questions.values())]
    if runner.programs:
        yield _rung(name, "decided" if lines else "compiled", lines)
    if runner.eager_fallback.reasons:
        yield _rung(name, "eager", [*dict.fromkeys(runner.eager_fallback.reasons.values())])
    if runner.eager_fallback.on_host:
        yield _rung(name, "host", [*runner.eager_fallback.on_host])


def _rung(module: str, rung: str, reasons: list[str]) -> dict:
    return {"module": module, "rung": rung, "reasons": reasons}


def in_words(name: str, found: list[dict]) -> list[str]:
    """Lines of text for a model of this name; equal blocks share one."""
    counts: dict[tuple, int] = {}
    for one in found:
        module = ".".join(filter(None, (name, re.sub(r"(?<=\.)\d+(?=\.|$)", "*", one["module"]))))
        key = module, one["rung"], tuple(one["reasons"])
        counts[key] = counts.get(key, 0) + 1
    lines = []
    for (module, rung, reasons), count in counts.items():
        lines.append(f"{module}: {rung}" + (f" ({count} alike)" if count > 1 else ""))
        lines += [f"    {reason}" for reason in reasons]
    return lines or [f"{name}: not called yet"]
