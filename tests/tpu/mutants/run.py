"""Plants the faults of the table one by one in a throw-away copy of the tree, and says which test sees each of them.

    python tests/tpu/mutants/run.py                  every fault without a record
    python tests/tpu/mutants/run.py ring- vae-       those whose names begin so, whatever is recorded

The expected tests run first; where they see nothing, the whole fast set. The record is examples/tpu/results/mutants.json,
for people mutants.md beside it; a fault whose text or tests have changed since is planted again.

A process that has imported torch, transformers and JAX (not diffusers) forks for each fault: an import less per fault.
"""

import argparse
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import astuple
from pathlib import Path

from table import ROOT, Mutant, every


RECORD = ROOT / "examples/tpu/results/mutants.json"
PAGE = RECORD.with_suffix(".md")
LONGEST = 900  # seconds of one run of the expected tests
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "out", ".pytest_cache", ".ruff_cache", "*.egg-info")
FAST_SET = ["-m", "not slow", "-x", "-q", "-p", "no:cacheprovider", "--tb=short"]
BEFORE_DIFFUSERS = (
    "numpy pytest torch torch.utils.flop_counter transformers tokenizers safetensors.torch accelerate PIL.Image jax"
    " jax.numpy jax.experimental.pallas.tpu flax.nnx"
).split()
FROM_TRANSFORMERS = (
    "ByT5Tokenizer PreTrainedTokenizerFast Qwen2_5_VLTextModel SiglipVisionModel T5EncoderModel UMT5EncoderModel"
    " CLIPVisionModel"
).split()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="beginnings of names; none: all that have no record")
    parser.add_argument("--expected-only", action="store_true", help="do not try the whole fast set on survivors")
    given = parser.parse_args()
    mutants, record = every(), _read()
    for mutant in mutants:
        mutant.planted((ROOT / mutant.file).read_text())  # or the table is out of date
    wanted = [m for m in mutants if _wanted(m, given.names, record)]
    print(f"{len(mutants)} faults, {len(wanted)} to plant", flush=True)
    _import_what_all_need()
    for mutant in wanted:
        record[mutant.name] = _tried(mutant, given.expected_only)
        _write(mutants, record)
        found = record[mutant.name]
        print(f"{found['seconds']:7.1f} s  {mutant.name}: {found['caught_by'] or 'SURVIVED'}", flush=True)
    unexplained = [m.name for m in mutants if not record.get(m.name, {}).get("caught_by") and not m.survives]
    if unexplained:
        sys.exit(f"expected a test that sees each fault, or its reason; without: {', '.join(unexplained)}")


def _wanted(mutant: Mutant, names: list[str], record: dict) -> bool:
    if names:
        return any(mutant.name.startswith(name) for name in names)
    kept = record.get(mutant.name)
    return kept is None or kept["digest"] != _digest(mutant)


def _digest(mutant: Mutant) -> str:
    return hashlib.sha256(repr(astuple(mutant)[:6]).encode()).hexdigest()[:16]


def _tried(mutant: Mutant, expected_only: bool) -> dict:
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=LEFT_OUT, copy_function=_linked, symlinks=True)
        file = tree / mutant.file
        text = mutant.planted(file.read_text())
        file.unlink()  # a link to the original
        file.write_text(text)
        caught_by = _expected(tree, mutant)
        whole = caught_by is None and not expected_only
        if whole:
            caught_by = _whole(tree)
    seconds = round(time.monotonic() - start, 1)
    return {"digest": _digest(mutant), "caught_by": caught_by, "whole_set": whole, "seconds": seconds}


def _linked(source: str, target: str):
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def _expected(tree: Path, mutant: Mutant) -> str | None:
    """The first of the expected tests that fails, in a fork of this process."""
    answer, log = tree.parent / "answer", tree.parent / "log"
    child = os.fork()
    if not child:
        os.setsid()
        _in_child(tree, mutant, answer, log)
    deadline = time.monotonic() + LONGEST
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"no end within {LONGEST} s of {mutant.tests[0]}"
        time.sleep(0.1)
    if not answer.exists():
        return f"the process of {mutant.tests[0]} died"
    status, failed = json.loads(answer.read_text())
    if status in (4, 5):
        sys.exit(
            f"expected tests named {mutant.tests}, for {mutant.name}; pytest found none:\n{log.read_text()[-2000:]}"
        )
    return failed if status else None


def _in_child(tree: Path, mutant: Mutant, answer: Path, log: Path):
    output = os.open(log, os.O_CREAT | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(tree)
    os.environ.update(PYTHONPATH=str(tree / "src"), HF_HUB_OFFLINE="1")
    sys.path[:0] = [str(tree / "src"), str(tree / "tests/tpu")]
    sys.path.remove(str(Path(__file__).resolve().parent))
    first = _FirstFailure()
    tests = [f"tests/tpu/{test}" for test in mutant.tests]
    import pytest

    status = int(pytest.main([*FAST_SET, "--basetemp", str(tree.parent / "tmp"), *tests], plugins=[first]))
    where = getattr(sys.modules.get("diffusers"), "__file__", "")
    if not where.startswith(str(tree)):
        status, first.name = 4, f"expected diffusers of {tree}, got {where}"
    answer.write_text(json.dumps([status, first.name or "collection"]))
    os._exit(0)


class _FirstFailure:
    """A plugin: the id of the first test that fails."""

    def __init__(self):
        self.name = None

    def pytest_runtest_logreport(self, report):
        if report.failed and self.name is None:
            self.name = report.nodeid.removeprefix("tests/tpu/")


def _whole(tree: Path) -> str | None:
    command = [sys.executable, "-m", "pytest", *FAST_SET, "-n", "2", "--dist", "worksteal", "tests/tpu"]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    failed = [line.split()[1] for line in result.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if result.returncode and not failed:
        sys.exit(f"expected pytest to end, got:\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    return failed[0].removeprefix("tests/tpu/") if failed else None


def _import_what_all_need():
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in BEFORE_DIFFUSERS:
        importlib.import_module(name)
    for name in FROM_TRANSFORMERS:
        getattr(sys.modules["transformers"], name, None)
    from jax._src import xla_bridge

    if "diffusers" in sys.modules or xla_bridge.backends_are_initialized():
        sys.exit("expected imports that bring no diffusers and do not start JAX")


def _read() -> dict:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def _write(mutants: list[Mutant], record: dict):
    kept = {m.name: record[m.name] for m in mutants if m.name in record}
    for path, text in ((RECORD, json.dumps(kept, indent=1) + "\n"), (PAGE, _page(mutants, kept))):
        draft = path.with_name(f".{path.name}")
        draft.write_text(text)
        os.replace(draft, path)


def _page(mutants: list[Mutant], record: dict) -> str:
    done = [m for m in mutants if m.name in record]
    caught = [m for m in done if record[m.name]["caught_by"]]
    rooms = len({m.room for m in done})
    lines = [
        "# Planted faults, and the tests that see them",
        "",
        f"{len(done)} faults in {rooms} rooms, {len(caught)} seen by the fast set (`make mutants`; the faults: `tests/tpu/mutants/`).",
        "",
    ]
    for mutant in done:
        if mutant not in caught:
            lines.append(
                f"- not seen: `{mutant.name}`, {mutant.fault}. {mutant.survives or 'No reason is known: a hole.'}"
            )
    lines += ["", "| room | fault | what it stands for | seen by | seconds |", "|---|---|---|---|---|"]
    for mutant in done:
        found = record[mutant.name]
        seen = f"`{found['caught_by']}`" if found["caught_by"] else "nothing"
        lines.append(f"| {mutant.room} | {mutant.name} | {mutant.fault} | {seen} | {found['seconds']:.0f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
