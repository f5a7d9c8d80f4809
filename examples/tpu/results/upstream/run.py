"""Runs upstream's own fast tests with the TPU path on and records those that only plain upstream passes in examples/tpu/results/upstream.json.

    python examples/tpu/results/upstream/run.py TESTS                     every file without a result
    python examples/tpu/results/upstream/run.py TESTS 'pipelines/wan/.*'  those whose names match one of these, also if recorded

TESTS: the folder `tests` of a checkout of upstream at the commit in `passes.txt.gz`; it is not part of this repository. That file lists the
tests that plain upstream passes offline, with the stand-ins of `standins.py` for models from the hub.

The path has two simulated chips, default settings and one cache of programs for all files. A process that has imported all packages forks
for each file. A run that was stopped resumes.
"""

import argparse
import gc
import gzip
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest


HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[3]
RECORD = ROOT / "examples/tpu/results/upstream.json"
WORK = ROOT / "out/upstream"
PACKAGES = ("torchsde==0.2.6", "trampoline==0.1.2", "parameterized==0.9.0", "requests_mock==1.12.1")
# Of processor time, of one file and of one test: this machine may have a dozen other things to do.
SECONDS, TEST_SECONDS = 3600, 600
ENVIRONMENT = {
    "DIFFUSERS_TPU": "cpu", "DIFFUSERS_TPU_DEVICES": "2", "DIFFUSERS_TEST_DEVICE": "cuda", "DIFFUSERS_TPU_CACHE": str(WORK / "programs"),
    "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(WORK / "hub"), "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false",
    "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false"
    " --xla_cpu_parallel_codegen_split_count=1",
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tests", type=Path)
    parser.add_argument("patterns", nargs="*", help="of files, from the folder on; none: all that have no result")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_intermixed_args()
    if not (given.tests / "conftest.py").exists():
        parser.error(f"expected the folder 'tests' of a checkout of upstream, with its conftest.py, got {given.tests}")
    passes, record = passing(), json.loads(RECORD.read_text()) if RECORD.exists() else {}
    waiting = [file for file in passes if file not in record]
    if given.patterns:
        waiting = [file for file in passes if any(re.fullmatch(pattern, file) for pattern in given.patterns)]
    prepare()
    import_what_all_need()
    from diffusers.tpu.common.files import write_whole

    with tempfile.TemporaryDirectory() as folder:
        running: dict[int, tuple[str, float]] = {}
        while waiting or running:
            while waiting and len(running) < given.workers:
                file = waiting.pop(0)
                running[started(given.tests.resolve(), file, passes[file], Path(folder))] = file, time.monotonic()
            child, status = os.wait()
            file, start = running.pop(child)
            found = {"seconds": round(time.monotonic() - start)}
            found |= judged(passes[file], results_of(file, Path(folder)), status)
            record[file] = found
            known = {name: record[name] for name in passes if name in record}
            write_whole(RECORD, json.dumps(known, indent=1) + "\n")
            kept = found["passes"] - len(found["lost"])
            print(f"{found['seconds']:6} s  {file}: {kept} of {found['passes']}; lost {[*found['lost']]}", flush=True)


def passing() -> dict[str, list[str]]:
    """Returns the names of tests that plain upstream passes, by file."""
    found: dict[str, list[str]] = {}
    names: list[str] = []
    _, *lines = gzip.decompress((HERE / "passes.txt.gz").read_bytes()).decode().splitlines()
    for line in lines:
        if line.startswith(" "):
            names.append(line[1:])
        else:
            names = found[line] = []
    return found


def prepare():
    """Installs packages that upstream's tests import and makes the stand-ins of the hub's models, if they are missing."""
    if not (WORK / "packages").exists():
        into = ["--no-deps", "--target", WORK / "packages.draft"]
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", *into, *PACKAGES], check=True)
        os.replace(WORK / "packages.draft", WORK / "packages")
    if not (WORK / "hub").exists():
        subprocess.run([sys.executable, HERE / "standins.py", WORK / "hub.draft"], check=True)
        os.replace(WORK / "hub.draft", WORK / "hub")


def import_what_all_need():
    os.environ.update(ENVIRONMENT)
    sys.path[:0] = [str(HERE), str(ROOT / "src")]
    sys.path.append(str(WORK / "packages"))  # last: it stands for nothing that the environment has
    import torch

    import diffusers.pipelines.pipeline_utils
    import diffusers.tpu.pipelines.pipeline  # noqa: F401

    torch.set_num_threads(1)
    if not Path(diffusers.__file__).is_relative_to(ROOT):
        raise RuntimeError(f"expected diffusers of {ROOT}, got {diffusers.__file__}")


def results_of(file: str, folder: Path) -> Path:
    return folder / file.replace("/", ".")


def started(tests: Path, file: str, names: list[str], folder: Path) -> int:
    """Starts a process that tests this file; returns its id."""
    results = results_of(file, folder)
    results.touch()
    child = os.fork()
    if child:
        return child
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 10))
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(silence, stream)
    os.chdir(tests.parent)
    options = f"-q -p no:cacheprovider --tb=no -W ignore --rootdir={tests.parent} --basetemp={results}.files".split()
    os._exit(pytest.main([*options, str(tests / file)], plugins=[Judge(names, results)]))


class Judge:
    """A pytest plugin that runs the tests of these names and writes a line `[name, error]` for each, null if it passed."""

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
        signal.alarm(TEST_SECONDS)
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
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            self.write(item, f"skipped: {reason}")
        elif report.when == "teardown":
            self.write(item, None)

    def write(self, item, end: str | None):
        with open(self.results, "a") as file:
            file.write(json.dumps([name_of(item), end if end is None else " ".join(end.split())[:400]]) + "\n")


def name_of(item) -> str:
    """Returns a test's name within its file."""
    return item.nodeid.partition("::")[2]


def _expired(*_):
    raise TimeoutError(f"expected an end within {TEST_SECONDS} s")


def judged(names: list[str], results: Path, status: int) -> dict:
    """Returns the number of a file's tests that plain upstream passes, and the errors of those that are lost here."""
    found: dict[str, str | None] = {}
    for name, end in map(json.loads, results.read_text().splitlines()):
        found[name] = found.get(name) or end  # what a test ended in first
    missing = f"not run: its process ended with {os.waitstatus_to_exitcode(status)}"
    return {
        "passes": len(names),
        "lost": {n: found.get(n, missing) for n in names if found.get(n, missing) is not None},
    }


if __name__ == "__main__":
    main()
