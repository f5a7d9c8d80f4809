"""`diffusers-tpu profile`: what a traced run took, module by module and operation by operation, beside a plan's seconds."""

import json
from pathlib import Path

from rich.console import Console

from ...planner.profile import beside, measured
from .errors import refusing
from .output import table, write_json


SHOWN = 20


def run(options, rest: list[str]) -> int:
    """The command; returns its exit status."""
    with refusing(ValueError, OSError):
        found = measured(Path(options.folder))
        if options.plan:
            found = beside(found, _plan(options.plan))
    write_json(options.json, found)
    if options.json == "-":
        return 0
    console = Console()
    seconds = ("measured", "planned", "ratio") if options.plan else ("measured",)
    for kind, names in (("modules", ("component", "module")), ("operations", ("operation",))):
        longest = sorted(found[kind], key=lambda row: -(row["measured"] or 0.0))[:SHOWN]
        rows = (
            [row[name] for name in names] + ["" if row[s] is None else f"{row[s]:.4g}" for s in seconds]
            for row in longest
        )
        columns = (*names, *seconds)
        console.print(table(columns, rows, len(columns), title=f"{kind}, seconds a step"))
    said = f"{found['seconds_per_step']:.4g} s a step of a chip; {found['steps']} steps, {found['chips']} chips: {found['device']}"
    if options.plan:
        said += f"; planned {found['planned_seconds_per_step']:.4g} s, measured is {found['ratio']:.3g} of that"
    console.print(said, soft_wrap=True)
    return 0


def _plan(path: str) -> dict:
    found = json.loads(Path(path).read_text())
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if not isinstance(found, dict) or not {"parts", "steps", "seconds_per_step"} <= found.keys():
        raise ValueError(
            f"expected --plan of one plan, as diffusers-tpu plan --json FILE writes for one slice, got {path}"
        )
    return found
