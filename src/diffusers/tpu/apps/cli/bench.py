"""`diffusers-tpu bench`: rows of a benchmark, each compiled for a TPU on a machine without one."""

import sys

from rich.console import Console

from ...common.files import write_whole
from ...kernels.attention.blocks import TUNED
from . import TABLE
from .errors import from_checkout, one_line, refusing
from .output import cell, table, write_json


def run(options, rest: list[str]) -> int:
    """Run the command; exit status 1 if a row failed, whose error is printed."""
    benches, attention = map(from_checkout, ("bench.benches", "bench.attention_cases"))
    filters = [name[2:] for name in TABLE["groups"]["filters"]["options"]]
    filters = {name: value for name in filters if (value := getattr(options, name)) is not None}
    with refusing(ValueError):
        cases = benches.select(options.kind, filters)
    if options.tune:
        cases = [case for case in cases if case.row.get("path") == "bound"]
        if not cases:
            raise ValueError(f"expected --tune with attention and no --path but bound, got {options.kind}")
    rows = []
    quiet = Console(stderr=True)
    for number, case in enumerate(cases, 1):
        with quiet.status(f"{number} of {len(cases)}: {', '.join(map(str, case.row.values()))}"):
            rows.append({**case.row, **_ask(case, attention.tune if options.tune else None)})
    if options.tune:
        write_whole(TUNED, attention.tuned_table([row for row in rows if "failed" not in row]))
    write_json(options.json, rows)
    if options.json != "-":
        names = dict.fromkeys(name for row in rows for name, x in row.items() if not isinstance(x, (dict, list)))
        Console().print(table([*names], ([cell(row.get(name)) for name in names] for row in rows), len(names)))
    return 1 if any("failed" in row for row in rows) else 0


def _ask(case, tune) -> dict:
    try:
        return tune(case, lambda text: None) if tune else case.ask(lambda text: None)
    except (ValueError, RuntimeError) as error:  # bad input, no room, or a child that failed
        print(f"diffusers-tpu: {case.row}: {error}", file=sys.stderr)
        return {"failed": one_line(error)}
