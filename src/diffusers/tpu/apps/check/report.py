"""Reports: a header, the stages that ran and their rows, without host names, paths or tokens; and the comparison of two.

A row: `stage`, `name`, `status` (of `STATUSES`), `measured`, `expected`, `limit`, `unit`, `note`.
"""

import json
import math
import os
import re
import socket
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from ...common.files import write_whole


FORMAT = 1
STATUSES = ("ok", "differs", "failed", "timed out", "not applicable")
COLUMNS = ("stage", "name", "status", "measured", "expected", "limit", "unit", "note")
LETTERS = 4000  # of one text

PATH = re.compile(r"(?<![\w.:/~-])(?:~|[A-Za-z]:)?/(?:[\w.+@=-]+/)+([\w.+@=-]*)")
ADDRESS = re.compile(r"\b[1-9]\d{0,2}(?:\.\d{1,3}){3}\b(?::\d+)?")
NAME_OF_HOST = re.compile(r"\b[\w-]+(?:\.[\w-]+)*\.(?:internal|local|localdomain|com|net|org|io|dev)\b")
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|_KEY$")


def clean(value):
    """The value with paths, host names, addresses and secret variables in its texts replaced."""
    if isinstance(value, dict):
        return {clean(str(key)): clean(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no NaN
    if not isinstance(value, str):
        return value
    secrets = {text for name, text in os.environ.items() if SECRET.search(name.upper()) and len(text) >= 8}
    for secret in sorted(secrets, key=len, reverse=True):
        value = value.replace(secret, "SECRET")
    value = PATH.sub(lambda found: f"PATH {found[1]}" if found[1].endswith((".py", ".so")) else "PATH", value)
    if host := socket.gethostname():
        value = re.sub(rf"(?<![\w-]){re.escape(host)}(?![\w-])", "HOST", value)
    value = ADDRESS.sub("ADDRESS", NAME_OF_HOST.sub("HOST", value))
    return value if len(value) <= LETTERS else f"{value[:LETTERS]} ..."


@dataclass
class Report:
    """The content of a report: `header` (of `running.header`), an entry per stage, and rows, cleaned when they are added."""

    header: dict
    stages: list[dict] = field(default_factory=list)
    rows: list[dict] = field(default_factory=list)

    def add(self, stage: int, row: dict):
        found = {**dict.fromkeys(COLUMNS), "unit": "", "note": "", **row, "stage": stage}
        self.rows.append({name: clean(found[name]) for name in COLUMNS})

    @property
    def counts(self) -> Counter[str]:
        return Counter(row["status"] for row in self.rows)

    def as_json(self) -> dict:
        counts = {status: self.counts[status] for status in STATUSES}
        return {"format": FORMAT, **self.header, "counts": counts, "stages": self.stages, "rows": self.rows}

    def write(self, path: Path):
        write_whole(path, json.dumps(self.as_json(), indent=1, allow_nan=False) + "\n")

    def last_line(self, path: str) -> str:
        count = self.counts
        said = f"{count['ok']} ok, {count['differs']} differ, {count['failed']} failed"
        said += "".join(f", {count[status]} {status}" for status in STATUSES[3:] if count[status])
        return f"check: {said}; report: {path}; please attach it to an issue"


def read(path: str) -> dict:
    """The report in a file. Raises ValueError for a file that is no report."""
    try:
        found = json.loads(Path(path).read_text())
        if found["format"] != FORMAT or not isinstance(found["rows"], list):
            raise ValueError(f"format {found['format']}")
        missing = {"chip", "simulated", "day"} - found.keys()
        missing |= {name for row in found["rows"] for name in {*COLUMNS} - row.keys()}
        if missing or {type(row["stage"]) for row in found["rows"]} - {int}:
            raise ValueError(f"one without {', '.join(sorted(missing)) or 'numbers of stages'}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"expected a report that diffusers-tpu check wrote (format {FORMAT}), got {path}: {error}"
        ) from error
    return found


def beside(first: dict, second: dict) -> list[dict]:
    """Rows of two reports by stage and name, in order: `first`, `second`, their `ratio` if both are numbers, both statuses."""
    tables = [{(row["stage"], row["name"]): row for row in one["rows"]} for one in (first, second)]
    found = []
    for key in sorted({**tables[0], **tables[1]}, key=lambda key: key[0]):
        a, b = (table.get(key, {}) for table in tables)
        values = [row.get("measured") for row in (a, b)]
        numbers = all(type(value) in (int, float) for value in values) and values[0]
        row = {"stage": key[0], "name": key[1], "first": values[0], "second": values[1]}
        row["ratio"] = values[1] / values[0] if numbers else None
        found.append({**row, "unit": (a or b)["unit"], "statuses": [a.get("status"), b.get("status")]})
    return found
