"""`diffusers-tpu bench`: rows of a benchmark, each compiled for a TPU that is not here."""

import importlib
import sys
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from ...kernels.attention.blocks import TUNED
from ...planner import BENCH
from ...planner.aot import ChildError, NoCompiler
from .choices import BENCH_FILTERS
from .errors import BadInput, one_line
from .output import whole_file, write_json


def run(options, rest: list[str]) -> int:
    """Run the command; exit status 1 if a row could not be had (it then says why)."""
    if rest:
        raise BadInput(f"expected filters such as --chip v6e, got {' '.join(rest)}")
    benches = _of_checkout()
    filters = {name: value for name in BENCH_FILTERS if (value := getattr(options, name)) is not None}
    try:
        cases = benches.select(options.kind, filters)
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
            rows.append({**case.row, **_ask(case, benches.tune if options.tune else None)})
    if options.tune:
        with whole_file(str(TUNED), ".json") as draft:
            draft.write_text(benches.tuned_table([row for row in rows if "failed" not in row]))
    write_json(options.json, rows)
    if options.json != "-":
        Console().print(_table(rows))
    return 1 if any("failed" in row for row in rows) else 0


def _of_checkout():
    """The module of the benchmarks. Raises BadInput where this is no checkout."""
    if not BENCH.is_dir():
        raise BadInput(
            "expected a checkout of the repository: benchmarks are part of it (examples/tpu/bench), not of the wheel"
        )
    if str(BENCH.parent) not in sys.path:
        sys.path.append(str(BENCH.parent))
    return importlib.import_module("bench.benches")


def _ask(case, tune: Callable | None) -> dict:
    try:
        return tune(case, lambda text: None) if tune else case.ask(lambda text: None)
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
