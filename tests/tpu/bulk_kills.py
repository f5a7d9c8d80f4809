"""Many prompts over two processes that are killed at random: what stands in the directory at the end. `python tests/tpu/bulk_kills.py`

Two commands `generate --prompts` share one directory, or one command has two actors of Ray's (`--ray`). SIGKILL comes when a number
of outputs drawn at random is there; a command that was killed is started again. Facts go to examples/tpu/results/bulk.json with
`--record`.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
from PIL import Image

import tiny
from diffusers.tpu.apps.bulk import prompts as prompt_files
from diffusers.tpu.apps.bulk.directory import Directory


ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "examples/tpu/results/bulk.json"
COMMAND = [sys.executable, "-c", "import sys; from diffusers.tpu.apps.cli import main; sys.exit(main())"]
ARGUMENTS = {"height": 16, "width": 16, "num_inference_steps": 4, "max_sequence_length": 8}
WORDS = "a red circle moving left"
COUNT, KILLS = 200, 3
PATIENCE = 540  # seconds


def start(model: Path, prompts: Path, out: Path, log, ray: bool) -> subprocess.Popen:
    words = ["generate", str(model), "--prompts", str(prompts), "--output", str(out), "--seed", "1"]
    words += [w for name, value in ARGUMENTS.items() for w in (f"--{name.replace('_', '-')}", str(value))]
    environment = {**os.environ, "DIFFUSERS_TPU": "cpu", "DIFFUSERS_TPU_DEVICES": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"DIFFUSERS_TPU_CACHE": str(out.parent / "compiled"), "RAY_worker_niceness": "0"}
    words += ["--ray", "2"] if ray else []
    return subprocess.Popen([*COMMAND, *words], env=environment, stdout=log, stderr=subprocess.STDOUT)


def actors_of(command: subprocess.Popen) -> list[psutil.Process]:
    """Ray's actors that have begun to work, below a command."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(command.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [process] * bool(re.search("ray::.*Actor", " ".join(process.cmdline()[:1])))
    return found


def run(folder: Path, ray: bool) -> dict:
    """Facts about the directory when all commands have ended."""
    draw = random.Random(1)
    out, prompts, model = folder / "out", folder / "prompts.jsonl", folder / "model"
    lines = ({"prompt": " ".join(draw.sample(WORDS.split(), 3)), "id": f"p{n:03d}"} for n in range(COUNT))
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    at = sorted(draw.sample(range(COUNT // 20, COUNT * 9 // 10), KILLS))
    begun, first, remade, killed = time.monotonic(), {}, set(), 0
    with open(folder / "log.txt", "w") as log:
        commands = [start(model, prompts, out, log, ray) for _ in range(1 if ray else 2)]
        try:
            while any(command.poll() is None for command in commands):
                assert time.monotonic() - begun < PATIENCE, (folder / "log.txt").read_text()[-4000:]
                time.sleep(0.02)
                for path in (out / ".records").glob("p*.json"):
                    facts = path.stat().st_ino, path.stat().st_mtime_ns
                    if first.setdefault(path.name, facts) != facts:
                        remade.add(path.name)
                if at and len(first) >= at[0]:
                    victims = actors_of(commands[0]) if ray else [c for c in commands if c.poll() is None]
                    if victims:
                        os.kill(draw.choice(victims).pid, signal.SIGKILL)
                        at.pop(0)
                        killed += 1
                for n, command in enumerate(commands):
                    if not ray and command.poll() == -signal.SIGKILL:
                        commands[n] = start(model, prompts, out, log, ray)
        finally:
            for command in commands:
                if command.poll() is None:
                    command.kill()
                command.wait()
    return {
        "by": "two actors of Ray Data" if ray else "two processes",
        "prompts": COUNT,
        "killed": killed,
        "exit_statuses": [command.returncode for command in commands],
        "records_written_again": len(remade),
        "seconds": round(time.monotonic() - begun, 1),
        **what_stands(out, prompts),
    }


def what_stands(out: Path, prompts: Path) -> dict:
    """Counts of a directory: outputs, drafts left, lines of the manifest, torn or wrong pictures (against the pipeline by hand)."""
    listed = prompt_files.read(prompts, 1, ARGUMENTS)
    pictures = sorted(path.name for path in out.glob("*.png") if not path.name.startswith("."))
    drafts = [p.name for p in out.rglob(".*.*.*") if p.is_file() and p.name != ".prompts.lock"]
    manifest = [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]
    pipe, wrong = tiny.flux(), 0
    for prompt in listed:
        expected = pipe(prompt.prompt, generator=tiny.fresh(prompt.seed), **prompt.arguments).images[0]
        with Image.open(out / f"{prompt.id}.png") as found:
            found.load()
            wrong += int(np.abs(np.asarray(found, int) - np.asarray(expected, int)).max() > 1)
    assert Directory(out).failed(listed) == []
    return {
        "outputs": len(pictures),
        "outputs_of_prompts": len({*pictures} & {f"{prompt.id}.png" for prompt in listed}),
        "manifest": len({line["id"] for line in manifest}),
        "drafts_left": len(drafts),
        "wrong_or_torn": wrong,
    }


def holds(facts: dict) -> bool:
    whole = all(facts[name] == COUNT for name in ("outputs", "outputs_of_prompts", "manifest"))
    none = not any(facts[name] for name in ("drafts_left", "wrong_or_torn", "records_written_again"))
    return whole and none and facts["killed"] == KILLS and not any(facts["exit_statuses"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ray", action="store_true", help="by two actors of Ray Data")
    parser.add_argument("--record", action="store_true", help=f"write to {RESULT.relative_to(ROOT)}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tiny.flux().save_pretrained(Path(folder) / "model")
        facts = run(Path(folder), options.ray)
    print(json.dumps(facts, indent=2))
    if options.record:
        there = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        RESULT.write_text(json.dumps({**there, "ray" if options.ray else "processes": facts}, indent=2) + "\n")
    return 0 if holds(facts) else 1


if __name__ == "__main__":
    sys.exit(main())
