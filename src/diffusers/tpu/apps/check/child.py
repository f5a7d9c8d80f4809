"""A stage's process: runs one stage and writes each row to the parent immediately. It uses the standard library only, as stage 0.

Standard input: the request, a line of JSON, and a line when the stage may start. Output: a line of JSON at its start and per row.
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
    """The rows of one stage, each written immediately."""

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
        """Adds a figure with the plan's. `limit`: how many times it may be worse; None: any figure is ok.

        `planned`: None if there is no plan, for the reason `why`; `rate`: more is better.
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
        """Turns an exception in the body into a failed row, so that the stage continues."""
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
    """Sets `turn` at the parent's next line. Ends this process when standard input closes, as the parent has ended then."""
    if sys.stdin.readline():
        turn.set()
        sys.stdin.read()
    os._exit(1)


def main():
    rows = Rows(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)  # prints go to standard error from here on, not between the rows
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
    os._exit(status)  # does not join threads of the runtime and of planning


if __name__ == "__main__":
    main()
