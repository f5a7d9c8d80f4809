"""Stages one after another, each a child process with a limit of its own: a hang or a crash is a row, and the next stage runs."""

import contextlib
import json
import os
import platform
import queue
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
# Until a stage's modules are imported: from a cold disk that may take a minute, and is not what is checked.
START_SECONDS = 120.0
LAST_LINES = 12


def header(target: Target) -> dict:
    """Of a report: what it is of."""
    return {
        "simulated": bool(target.simulated),
        "chip": target.generation,
        "sources": sources(),
        "python": platform.python_version(),
        "day": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def request_of(stage: str, target: Target, cache: str) -> dict:
    """What a stage's process is told: the stage's own settings, over them those of a TPU or of simulated chips."""
    table, kind = STAGES[stage], "simulated" if target.simulated else "tpu"
    both = {name: value for name, value in table.items() if name not in ("tpu", "simulated")}
    return {**both, **table[kind], "stage": stage, "simulated": bool(target.simulated), "cache": cache}


def run_stages(report: Report, target: Target, stages: list[str], ended: Callable[[str, float], None]):
    """Runs stages in order, rows into the report; `ended(stage, seconds)` after each."""
    with tempfile.TemporaryDirectory(prefix="diffusers-tpu-check-", ignore_cleanup_errors=True) as cache:
        for stage in stages:
            start, number, request = time.perf_counter(), NAMES.index(stage), request_of(stage, target, cache)
            for row in rows_of(request, cache):
                report.add(number, row)
            seconds = time.perf_counter() - start
            report.stages.append({"stage": number, "name": stage, "seconds": seconds, "limit": request["seconds"]})
            ended(stage, seconds)


def rows_of(request: dict, folder: str) -> Iterator[dict]:
    """The rows of one stage's process as they come, and one of the stage itself where it did not end well."""
    with open(Path(folder, f"{request['stage']}.log"), "w+", errors="replace") as log:
        child = _start(request, folder, log)
        said: queue.Queue = queue.Queue()
        threading.Thread(target=_listen, args=(child.stdout, said), daemon=True).start()
        started, late, ends = False, False, time.monotonic() + START_SECONDS
        try:
            while True:
                try:
                    kind, value = said.get(timeout=max(0.0, ends - time.monotonic()))
                except queue.Empty:
                    late = True
                    break
                if kind == "row":
                    yield value
                elif kind == "started":
                    started, ends = True, time.monotonic() + request["seconds"]
                else:
                    break
            if not late:
                late = _ends_late(child, ends)
        finally:
            kill(child)
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()][-LAST_LINES:]
    limit, note = request["seconds"] if started else START_SECONDS, " | ".join(lines)
    row = {"name": "stage", "limit": limit, "unit": "s", "note": note}
    if late:
        yield {**row, "status": "timed out", "note": f"{'' if started else 'while it was imported: '}{note}"}
    elif child.returncode:
        code = child.returncode
        died = f"killed by {signal.Signals(-code).name}" if code < 0 else f"status {code}"
        yield {**row, "status": "failed", "measured": died, "limit": None, "unit": ""}


def _start(request: dict, folder: str, log) -> subprocess.Popen:
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # what this process can import, the child can
        "DIFFUSERS_TPU_CACHE": str(Path(folder, "cache")),
    }
    command, pipe = [sys.executable, "-P", str(Path(__file__).with_name("child.py"))], subprocess.PIPE
    child = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=log, env=variables, start_new_session=True, text=True
    )
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(json.dumps(request) + "\n")
        child.stdin.flush()  # and stays open: its end tells the child that we are gone
    return child


def _listen(stream, said: queue.Queue):
    with contextlib.suppress(ValueError):  # the last line of a child that was killed may be half of one
        for line in stream:
            said.put(json.loads(line))
    said.put(("end", None))


def _ends_late(child: subprocess.Popen, ends: float) -> bool:
    try:
        child.wait(max(1.0, ends - time.monotonic()))
        return False
    except subprocess.TimeoutExpired:
        return True
