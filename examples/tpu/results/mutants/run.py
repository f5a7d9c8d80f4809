"""Plants the faults of `faults.toml` one by one in a temporary copy of the tree and records which test fails for each.

    python examples/tpu/results/mutants/run.py                  every fault without a record
    python examples/tpu/results/mutants/run.py ring- vae-       those with these prefixes, also if recorded

The expected tests run first, in a fork of this process, which has imported torch, transformers and JAX; if they pass, the whole fast set
runs. The record is examples/tpu/results/mutants.json: the failing test of each fault.
"""

import argparse
import hashlib
import importlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import astuple, dataclass
from pathlib import Path


ROOT = Path(__file__).resolve().parents[4]
RECORD = ROOT / "examples/tpu/results/mutants.json"
LONGEST = 900  # seconds of one run of the expected tests
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "out", ".pytest_cache", ".ruff_cache", "*.egg-info")
FAST_SET = ["-m", "not slow", "-x", "-q", "-p", "no:cacheprovider", "--tb=short"]
IMPORTS = (
    "numpy pytest torch torch.utils.flop_counter transformers.models.umt5 transformers.models.qwen2_5_vl tokenizers"
)
IMPORTS += " safetensors.torch accelerate PIL.Image jax jax.numpy jax.experimental.pallas.tpu flax.nnx"


@dataclass(frozen=True)
class Mutant:
    """A row of `faults.toml`, by its name in the record."""

    name: str
    file: str
    old: str
    new: str
    fault: str
    tests: tuple[str, ...]
    survives: str = ""

    def planted(self, text: str) -> str:
        """Returns the file's text with the fault. Raises ValueError where the text to change does not occur exactly once."""
        if text.count(self.old) != 1:
            raise ValueError(
                f"expected the text of mutant {self.name} once in {self.file}, found it {text.count(self.old)} times:"
                f" bring examples/tpu/results/mutants/faults.toml up to date with the file. Text: {self.old!r}"
            )
        return text.replace(self.old, self.new)


def every() -> list[Mutant]:
    rows = tomllib.loads(Path(__file__).with_name("faults.toml").read_text())
    return [Mutant(name, **{**row, "tests": tuple(row["tests"])}) for name, row in rows.items()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="beginnings of names; none: all that have no record")
    given = parser.parse_args()
    mutants, record = every(), json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for mutant in mutants:
        mutant.planted((ROOT / mutant.file).read_text())  # or the table is out of date
    wanted = [m for m in mutants if is_wanted(m, given.names, record)]
    print(f"{len(mutants)} faults, {len(wanted)} to plant", flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in IMPORTS.split():
        importlib.import_module(name)
    for mutant in wanted:
        found = record[mutant.name] = tried(mutant)
        write({m.name: record[m.name] for m in mutants if m.name in record})
        print(f"{found['seconds']:7.1f} s  {mutant.name}: {found['caught_by'] or 'SURVIVED'}", flush=True)
    known = [m for m in mutants if m.name in record]
    unexplained = [m.name for m in known if not record[m.name]["caught_by"] and not m.survives]
    if unexplained:
        sys.exit(f"expected a test that sees each fault, or its reason; without: {', '.join(unexplained)}")


def is_wanted(mutant: Mutant, names: list[str], record: dict) -> bool:
    if names:
        return mutant.name.startswith(tuple(names))
    return record.get(mutant.name, {}).get("digest") != digest(mutant)


def digest(mutant: Mutant) -> str:
    return hashlib.sha256(repr(astuple(mutant)[:6]).encode()).hexdigest()[:16]


def tried(mutant: Mutant) -> dict:
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=LEFT_OUT, symlinks=True)
        file = tree / mutant.file
        file.write_text(mutant.planted(file.read_text()))
        caught_by = seen_by_expected(tree, mutant)
        whole = caught_by is None
        if whole:
            caught_by = seen_by_any(tree)
    seconds = round(time.monotonic() - start, 1)
    return {"digest": digest(mutant), "caught_by": caught_by, "whole_set": whole, "seconds": seconds}


def seen_by_expected(tree: Path, mutant: Mutant) -> str | None:
    """Returns the first of the expected tests that fails, or None."""
    context = multiprocessing.get_context("fork")
    answers, log = context.SimpleQueue(), tree.parent / "log"
    child = context.Process(target=run_expected, args=(tree, mutant, answers, log))
    child.start()
    child.join(LONGEST)
    if child.is_alive():
        child.kill()
        return f"no end within {LONGEST} s of {mutant.tests[0]}"
    if answers.empty():
        return f"the process of {mutant.tests[0]} died"
    status, failed = answers.get()
    if status in (4, 5):
        sys.exit(f"expected tests named {mutant.tests}, for {mutant.name}; {failed}:\n{log.read_text()[-2000:]}")
    return failed if status else None


def run_expected(tree: Path, mutant: Mutant, answers, log: Path):
    import pytest

    output = os.open(log, os.O_CREAT | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(tree)
    os.environ.update(PYTHONPATH=str(tree / "src"), HF_HUB_OFFLINE="1")
    sys.path[0] = str(tree / "tests/tpu")
    sys.path.insert(0, str(tree / "src"))
    first = FirstFailure()
    tests = [f"tests/tpu/{test}" for test in mutant.tests]
    status = int(pytest.main([*FAST_SET, "--basetemp", str(tree.parent / "tmp"), *tests], plugins=[first]))
    where = getattr(sys.modules.get("diffusers"), "__file__", "")
    if not where.startswith(str(tree)):
        status, first.name = 4, f"expected diffusers of {tree}, got {where}"
    answers.put((status, first.name or "collection"))


class FirstFailure:
    """A pytest plugin that keeps the id of the first test that fails."""

    name = None

    def pytest_runtest_logreport(self, report):
        if report.failed and self.name is None:
            self.name = report.nodeid.removeprefix("tests/tpu/")


def seen_by_any(tree: Path) -> str | None:
    command = [sys.executable, "-m", "pytest", *FAST_SET, "-n", "2", "--dist", "worksteal", "tests/tpu"]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    failed = [line.split()[1] for line in result.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if result.returncode and not failed:
        sys.exit(f"expected pytest to end, got:\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    return failed[0].removeprefix("tests/tpu/") if failed else None


def write(record: dict):
    draft = RECORD.with_name(f".{RECORD.name}")
    draft.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(draft, RECORD)


if __name__ == "__main__":
    main()
