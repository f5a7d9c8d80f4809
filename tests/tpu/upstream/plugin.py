"""A pytest plugin for one of upstream's files: the tests that plain upstream passes, each with a time limit, and what each ended in."""

import gc
import json
import signal
from pathlib import Path

import pytest


SECONDS = 600  # of one test; this machine may have a dozen other things to do


class Judge:
    """Runs tests of these names alone, and writes `[name, what it ended in]`, null where it passed, a line each into `results`."""

    def __init__(self, names: list[str], results: Path):
        self.names, self.results = frozenset(names), results

    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if name_of(item) in self.names]
        # Upstream collects garbage before and after each test: without what was imported, a hundredth of the time.
        gc.collect()
        gc.freeze()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item):
        signal.signal(signal.SIGALRM, _expired)
        signal.alarm(SECONDS)
        try:
            yield
        finally:
            signal.alarm(0)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = (yield).get_result()
        if report.failed:
            self.write(item, f"{call.excinfo.typename}: {call.excinfo.value}")
        elif report.skipped:
            self.write(
                item, f"skipped: {report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr}"
            )
        elif report.when == "teardown":
            self.write(item, None)

    def write(self, item, end: str | None):
        with open(self.results, "a") as file:
            file.write(json.dumps([name_of(item), end if end is None else " ".join(end.split())[:400]]) + "\n")


def name_of(item) -> str:
    """A test's name in its file."""
    return item.nodeid.partition("::")[2]


def _expired(*_):
    raise TimeoutError(f"expected an end within {SECONDS} s")
