"""`diffusers-tpu profile`: what a traced run took, module by module and operation by operation, beside a plan's seconds."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ...planner.profile import beside, measured
from .errors import BadInput, one_line
from .output import write_json


SHOWN = 20


def run(options, rest: list[str]) -> int:
    """The command; returns its exit status."""
    if rest:
        raise BadInput(f"expected a folder and options, got {' '.join(rest)}")
    try:
        found = measured(Path(options.folder))
        if options.plan:
            found = beside(found, _plan(options.plan))
    except (ValueError, OSError) as error:
        raise BadInput(one_line(error)) from error
    write_json(options.json, found)
    if options.json == "-":
        return 0
    console = Console()
    for kind, names in (("modules", ("component", "module")), ("operations", ("operation",))):
        console.print(_table(found[kind], kind, names, options.plan))
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


def _table(rows: list[dict], title: str, names: tuple[str, ...], with_plan) -> Table:
    kinds = ("measured", "planned", "ratio") if with_plan else ("measured",)
    table = Table(*names, *kinds, title=f"{title}, seconds a step", title_justify="left")
    for row in sorted(rows, key=lambda row: -(row["measured"] or 0.0))[:SHOWN]:
        table.add_row(
            *(row[name] for name in names), *("" if row[kind] is None else f"{row[kind]:.4g}" for kind in kinds)
        )
    return table
