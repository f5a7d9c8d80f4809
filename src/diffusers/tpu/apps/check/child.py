"""A stage's process: runs one stage and writes its rows to the parent as they come. Of the standard library alone, as stage 0 is.

On standard input one request in JSON, and a line when it is its turn; a line of JSON on what was standard output for the start, and for each row.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import sys
import threading
import traceback
from pathlib import Path


PACKAGE = "diffusers.tpu.apps.check"
WITHOUT_JAX = "host"


class Rows:
    """The rows of one stage, each written at once."""

    def __init__(self, channel):
        self.channel = channel

    def say(self, kind: str, value=None):
        self.channel.write(json.dumps([kind, value], default=str) + "\n")
        self.channel.flush()

    def add(self, name: str, measured=None, status="ok", *, expected=None, limit=None, unit: str = "", note: str = ""):
        """`status`: ok, differs, failed, timed out or not applicable; or a bool, whether it is ok."""
        status = {True: "ok", False: "differs"}.get(status, status)
        row = {"name": name, "status": status, "measured": measured, "expected": expected, "limit": limit}
        self.say("row", {**row, "unit": unit, "note": note})

    def equal(self, name: str, measured, expected, **rest):
        self.add(name, measured, measured == expected, expected=expected, **rest)

    def error(self, name: str, measured: float, limit: float, **rest):
        """A relative error, ok up to the limit; NaN is not."""
        self.add(name, measured, bool(measured <= limit), limit=limit, **{"unit": "relative error", **rest})

    def beside_plan(self, name: str, measured: float, planned, limit: float | None, *, why, rate=False, **rest):
        """A figure beside the plan's; `limit`: how many times it may be worse, None: anything is ok.

        `planned`: None where there is none, and `why`; `rate`: more is better.
        """
        expected = planned if isinstance(planned, (int, float)) else None
        within = limit is None or (
            expected is not None and (measured * limit >= expected if rate else measured <= limit * expected)
        )
        note = rest.pop("note", "limit: measured over planned") if expected is not None else f"not planned: {why}"
        self.add(name, measured, within, expected=expected, limit=limit, note=note, **rest)

    def skip(self, name: str, note: str, **rest):
        self.add(name, None, "not applicable", note=note, **rest)

    @contextlib.contextmanager
    def trying(self, name: str):
        """What is raised inside becomes a row, and the stage goes on."""
        try:
            yield
        except Exception as error:
            self.add(name, None, "failed", note=f"{type(error).__name__}: {' '.join(str(error).split())}"[:2000])


def load(stage: str):
    """A stage's module; stage 0 by its file, as importing the package would import torch."""
    if stage != WITHOUT_JAX:
        return importlib.import_module(f"{PACKAGE}.{stage}")
    spec = importlib.util.spec_from_file_location(f"check_{stage}", Path(__file__).with_name(f"{stage}.py"))
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def _watch_parent(turn: threading.Event):
    """A line of it says that it is our turn; it keeps our standard input open while it lives."""
    if sys.stdin.readline():
        turn.set()
        sys.stdin.read()
    os._exit(1)


def main():
    rows = Rows(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)  # whatever prints from here on must not mix with the rows
    request = json.loads(sys.stdin.readline())
    turn = threading.Event()
    threading.Thread(target=_watch_parent, args=(turn,), daemon=True).start()
    status = 1
    try:
        module = load(request["stage"])
        turn.wait()
        rows.say("started")
        module.run(rows, request)
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)  # threads, of the runtime and of what is planned, are not waited for


if __name__ == "__main__":
    main()
