"""Runs stages in order, each in a child process with its own time limit. A hang or a crash becomes a row; the next stage runs."""

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

from ...chips.devices import Target
from ...planner import sources
from ...planner.aot import kill
from .report import Report


STAGES = tomllib.loads(Path(__file__).with_name("stages.toml").read_text())
NAMES = tuple(STAGES)
# Limit for importing a stage's modules: from a cold disk that may take a minute, and it is not what is checked.
START_SECONDS = 120.0
LAST_LINES = 12


def header(target: Target) -> dict:
    """The header of a report: its chip, our sources, Python and the day."""
    return {
        "simulated": bool(target.simulated),
        "chip": target.generation,
        "sources": sources(),
        "python": platform.python_version(),
        "day": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def request_of(stage: str, target: Target, cache: str) -> dict:
    """The request to a stage's process: the stage's settings, overridden by those for a TPU or for simulated chips."""
    table, kind = STAGES[stage], "simulated" if target.simulated else "tpu"
    both = {name: value for name, value in table.items() if name not in ("tpu", "simulated")}
    return {**both, **table[kind], "stage": stage, "simulated": bool(target.simulated), "cache": cache}


def run_stages(report: Report, target: Target, stages: list[str], ended: Callable[[str, float], None]):
    """Runs stages in order and adds their rows to the report; calls `ended(stage, seconds)` after each."""
    with tempfile.TemporaryDirectory(prefix="diffusers-tpu-check-", ignore_cleanup_errors=True) as cache:
        following = None
        try:
            for stage, later in zip(stages, [*stages[1:], None]):
                start, child = time.perf_counter(), following or Child(request_of(stage, target, cache), cache)
                # The next stage imports its modules meanwhile, which is half of a short stage's time.
                following = later and Child(request_of(later, target, cache), cache)
                number, limit = NAMES.index(stage), child.request["seconds"]
                for row in child.rows():
                    report.add(number, row)
                seconds = time.perf_counter() - start
                report.stages.append({"stage": number, "name": stage, "seconds": seconds, "limit": limit})
                ended(stage, seconds)
        finally:
            if following:
                following.end()


class Child:
    """The process of one stage. It imports its modules and waits for its turn; until then it does not use the chips."""

    def __init__(self, request: dict, folder: str):
        self.request = request
        self.log = open(Path(folder, f"{request['stage']}.log"), "w+", errors="replace")
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # the child can import what this process can
            "DIFFUSERS_TPU_CACHE": str(Path(folder, "cache")),
        }
        command, pipe = [sys.executable, "-P", str(Path(__file__).with_name("child.py"))], subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self.log, env=variables, start_new_session=True, text=True
        )
        self._tell(json.dumps(request))

    def end(self) -> list[str]:
        """Kill the process; returns the last lines of its log."""
        kill(self.process)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with self.log:
            self.log.seek(0)
            return [line.strip() for line in self.log if line.strip()][-LAST_LINES:]

    def rows(self) -> Iterator[dict]:
        """Start the stage; yields its rows as they come, and a row of the stage itself if it timed out or failed."""
        self._tell("")
        started, late = False, threading.Event()
        timer = self._ends_after(START_SECONDS, late)
        try:
            with contextlib.suppress(ValueError):  # the last line of a killed child may be incomplete
                for kind, value in map(json.loads, self.process.stdout):
                    if kind == "row":
                        yield value
                    else:
                        timer.cancel()
                        started, timer = True, self._ends_after(self.request["seconds"], late)
            self.process.wait()
        finally:
            timer.cancel()
            lines = self.end()
        limit, note = self.request["seconds"] if started else START_SECONDS, " | ".join(lines)
        row = {"name": "stage", "limit": limit, "unit": "s", "note": note}
        if late.is_set():
            yield {**row, "status": "timed out", "note": f"{'' if started else 'while it was imported: '}{note}"}
        elif code := self.process.returncode:
            died = f"killed by {signal.Signals(-code).name}" if code < 0 else f"status {code}"
            yield {**row, "status": "failed", "measured": died, "limit": None, "unit": ""}

    def _ends_after(self, seconds: float, late: threading.Event) -> threading.Timer:
        timer = threading.Timer(seconds, lambda: (late.set(), kill(self.process)))
        timer.start()
        return timer

    def _tell(self, line: str):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()  # stays open: the child exits when this process ends and closes it
