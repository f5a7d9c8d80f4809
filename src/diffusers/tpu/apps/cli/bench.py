"""`diffusers-tpu bench`: rows of a benchmark, each compiled for a TPU that is not here."""

import sys

from rich.console import Console
from rich.table import Table

from ...kernels.attention.blocks import TUNED
from ...planner.aot import ChildError, NoCompiler
from ...planner.benches import select, tune, tuned_table
from .choices import BENCH_FILTERS
from .errors import BadInput, one_line
from .output import whole_file, write_json


def run(options, rest: list[str]) -> int:
    """Run the command; exit status 1 if a row could not be had (it then says why)."""
    if rest:
        raise BadInput(f"expected filters such as --chip v6e, got {' '.join(rest)}")
    filters = {name: value for name in BENCH_FILTERS if (value := getattr(options, name)) is not None}
    try:
        cases = select(options.kind, filters)
    except ValueError as error:
        raise BadInput(one_line(error)) from error
    if options.tune:
        cases = [case for case in cases if case.row.get("path") == "bound"]
        if not cases:
            raise BadInput(f"expected --tune with attention and no --path but bound, got {options.kind}")
    rows = []
    quiet = Console(stderr=True)
    for number, case in enumerate(cases, 1):
        what = ", ".join(map(str, case.row.values()))
        with quiet.status(f"{number} of {len(cases)}: {what}"):
            rows.append({**case.row, **_ask(case, options.tune)})
    if options.tune:
        with whole_file(str(TUNED), ".json") as draft:
            draft.write_text(tuned_table([row for row in rows if "failed" not in row]))
    write_json(options.json, rows)
    if options.json != "-":
        Console().print(_table(rows))
    return 1 if any("failed" in row for row in rows) else 0


def _ask(case, tuned: bool) -> dict:
    try:
        return tune(case, lambda text: None) if tuned else case.ask(lambda text: None)
    except NoCompiler as error:
        raise BadInput(one_line(error)) from error
    except (ValueError, ChildError) as error:
        print(f"diffusers-tpu: {case.row}: {error}", file=sys.stderr)
        return {"failed": one_line(error)}


def _table(rows: list[dict]) -> Table:
    names = list(
        dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, (dict, list)))
    )
    table = Table(*names)
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in names))
    return table


def _cell(value) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
