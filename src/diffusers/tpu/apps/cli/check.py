"""`diffusers-tpu check`: the self-check of a TPU, its report, and the comparison of two reports."""

from pathlib import Path

from rich.console import Console

from ...chips.devices import find_target, why_off
from ...common.config import read_environment
from ..check import report as reports
from ..check.running import NAMES, header, run_stages
from .output import cell, check_writable, say, table, write_json


REPORT = "diffusers-tpu-check.json"


def run(options, rest: list[str]) -> int:
    """Run the stages; exit status 1 if a row failed or a stage timed out."""
    if options.compare:
        return _compare(options)
    environment = read_environment()
    if (target := find_target(environment)) is None:
        raise ValueError(
            f"expected a TPU to check, found none: {why_off(environment)}. DIFFUSERS_TPU=cpu diffusers-tpu check runs the same stages on"
            " simulated chips, to try the command"
        )
    check_writable(options.json or REPORT, ".json")
    path = Path(options.json or REPORT)
    report = reports.Report(header(target))

    def ended(stage: str, seconds: float):
        rows = [row for row in report.rows if row["stage"] == NAMES.index(stage)]
        counts = ", ".join(
            f"{n} {status}" for status in reports.STATUSES if (n := sum(row["status"] == status for row in rows))
        )
        say(f"{NAMES.index(stage)} {stage}: {counts or 'no rows'} ({seconds:.0f} s)", stderr=options.json == "-")
        for row in rows:
            if row["status"] not in ("ok", "not applicable"):
                say(f"    {row['status']}: {row['name']}: {_said(row)}", stderr=options.json == "-")
        if options.json != "-":
            report.write(path)

    run_stages(report, target, [name for name in NAMES if name in (options.stage or NAMES)], ended)
    if options.json == "-":
        write_json("-", report.as_json())
    say(report.last_line(str(path)), stderr=options.json == "-")
    return 1 if report.counts["failed"] + report.counts["timed out"] else 0


def _said(row: dict) -> str:
    parts = [f"{name} {cell(row[name])}" for name in ("measured", "expected", "limit") if row[name] is not None]
    return f"{', '.join(parts)} {row['unit']} {row['note']}"[:500].strip()


def _compare(options) -> int:
    both = [reports.read(path) for path in options.compare]
    rows = reports.beside(*both)
    write_json(options.json, rows)
    if options.json == "-":
        return 0
    names = ("stage", "row", "first", "second", "ratio", "unit", "status")
    shown = []
    for row in rows:
        values = [cell(row[name])[:40] for name in ("first", "second", "ratio")]
        changed = " -> ".join(dict.fromkeys(str(status or "absent") for status in row["statuses"]))
        shown.append((row["stage"], row["name"], *values, row["unit"], changed))
    kinds = (f"{one['chip'] or 'TPU'}{', simulated' if one['simulated'] else ''}, {one['day']}" for one in both)
    Console().print(table(names, shown, 2, title=" beside ".join(kinds)))
    return 0
