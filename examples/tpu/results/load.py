"""Load tests of the server and the bulk command.

    python examples/tpu/results/load.py image             or video, processes, ray; --record keeps the facts

image, video: many clients send requests to `diffusers-tpu serve` with a tiny model on one simulated chip; every tenth request is cancelled,
malformed or oversized. processes, ray: two commands `generate --prompts` share one directory, or one command has two Ray actors. A process
is killed by SIGKILL when a random number of outputs exists, and a killed command is started again. The oracle is upstream's pipeline in
this process, with the same prompts and seeds.
"""

import argparse
import base64
import contextlib
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import requests
from PIL import Image
from requests.adapters import HTTPAdapter, Retry


ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "tests/tpu"))

import tiny  # noqa: E402
from diffusers.tpu.apps.bulk import prompts as prompt_files  # noqa: E402
from diffusers.tpu.apps.bulk.directory import Directory  # noqa: E402
from diffusers.tpu.apps.generation.media import contact_sheet  # noqa: E402


COMMAND = [sys.executable, "-c", "import sys; from diffusers.tpu.apps.cli import main; sys.exit(main())"]
ARGUMENTS = {
    "image": {"height": 16, "width": 16, "num_inference_steps": 2, "max_sequence_length": 8},
    "video": {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2, "max_sequence_length": 16},
    "prompts": {"height": 16, "width": 16, "num_inference_steps": 4, "max_sequence_length": 8},
}
SIZES = {"image": "16x16", "video": "32x32x5"}
PATHS = {"image": "/v1/images/generations", "video": "/v1/videos"}
DISTINCT = 24  # valid requests that differ
BODY_BYTES, CHARACTERS, QUEUE = 100_000, 500, 40
ANSWER, WORK = 120, 540  # seconds for one answer, and for all prompts

# What is sent in place of a valid body, and the status that it gets.
BAD = [
    (b'{"prompt": "a red', 400),
    (b'["a red circle"]', 400),
    (b"{}", 400),
    (b'{"prompt": 17}', 400),
    (b'{"prompt": "a", "size": "64x64"}', 400),
    (b'{"prompt": "a", "sharpness": 2}', 400),
    (b'{"prompt": "' + b"a" * (CHARACTERS + 1) + b'"}', 400),
    (b'{"prompt": "' + b"a" * BODY_BYTES + b'"}', 413),
    (bytes(range(256)), 400),
]


def start(words: list, devices: int = 1, **options) -> subprocess.Popen:
    """Starts the command `diffusers-tpu` on simulated chips."""
    environment = {**os.environ, "DIFFUSERS_TPU": "cpu", "DIFFUSERS_TPU_DEVICES": str(devices), "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), **options.pop("more", {})}
    return subprocess.Popen([*COMMAND, *map(str, words)], env=environment, text=True, **options)


def stop(process: subprocess.Popen):
    if process.poll() is None:
        process.kill()
    process.wait()


def flags(arguments: dict) -> list:
    return [word for name, value in arguments.items() for word in (f"--{name.replace('_', '-')}", value)]


def pipeline(kind: str):
    return tiny.wan() if kind == "video" else tiny.flux()


def drawn_prompt(draw: random.Random) -> str:
    return " ".join(draw.sample(tiny.WORDS.split(), 3))


def by_hand(pipe, kind: str, prompt: str, seed: int) -> np.ndarray:
    """Returns upstream's image, or the contact sheet of its video, as an array."""
    made = pipe(prompt, generator=tiny.fresh(seed), output_type="pil", **ARGUMENTS[kind])
    return np.asarray((contact_sheet(made.frames[0]) if kind == "video" else made.images[0]).convert("RGB"), int)


def read(png) -> np.ndarray:
    return np.asarray(Image.open(png).convert("RGB"), int)


# Clients of a server


def expected_of(kind: str) -> dict[tuple[str, int], np.ndarray]:
    """Returns upstream's results by prompt and seed."""
    pipe, draw, found = pipeline(kind), random.Random(0), {}
    while len(found) < DISTINCT:
        asked = drawn_prompt(draw), draw.randrange(1000)
        found[asked] = by_hand(pipe, kind, *asked)
    return found


@contextlib.contextmanager
def served(kind: str, folder: Path):
    """A context with the server's process and address. At its end the server must exit with status 0 after SIGTERM."""
    pipeline(kind).save_pretrained(folder / "model")
    given = {"sizes": SIZES[kind], "port": 0, "max_batch": 4, "kept_jobs": 50}
    given |= {"queue": QUEUE, "body_bytes": BODY_BYTES, "prompt_characters": CHARACTERS}
    given |= {name: ARGUMENTS[kind][name] for name in ("num_inference_steps", "max_sequence_length")}
    words = ["serve", folder / "model", "--no-page", *flags(given)]
    with open(folder / "log.txt", "w") as log:
        process = start(words, stdout=subprocess.PIPE, stderr=log)
        try:
            line = process.stdout.readline()
            assert line.startswith("serving "), (folder / "log.txt").read_text()[-4000:]
            yield process, f"http://127.0.0.1:{line.rpartition(':')[2].strip()}"
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, (folder / "log.txt").read_text()[-4000:]
        finally:
            stop(process)
            process.stdout.close()


class Client:
    """One client, which sends its share of the requests and counts their outcomes."""

    def __init__(self, kind: str, address: str, expected: dict, seed: int):
        self.kind, self.address, self.expected = kind, address + PATHS[kind], expected
        self.session = requests.Session()
        # asked again on a new connection where the server has closed the one that was idle
        self.session.mount(
            "http://", HTTPAdapter(max_retries=Retry(1, allowed_methods=None, respect_retry_after_header=False))
        )
        self.draw, self.counts, self.wrong, self.done = random.Random(seed), Counter(), [], 0

    def run(self, numbers: range):
        for number in numbers:
            kinds = [*BAD, None, None]  # None: cancelled
            bad = kinds[number // 10 % len(kinds)]
            try:
                self._valid() if number % 10 else self._bad(*bad) if bad else self._cancelled()
            except Exception as error:
                self.wrong.append(f"request {number}: {type(error).__name__}: {error}")
            self.done += 1
        self.session.close()

    def _asked(self, method: str, path: str = "", **given) -> requests.Response:
        return self.session.request(method, self.address + path, timeout=ANSWER, **given)

    def _created(self, **body) -> dict:
        """Returns the response to a valid request, which is sent again while the queue is full."""
        while (answer := self._asked("POST", json=body)).status_code == 429:
            self.counts["told to come again"] += 1
            assert "expected room" in answer.text
            time.sleep(float(answer.headers["Retry-After"]) * self.draw.uniform(0.5, 1.5))
        assert answer.status_code == 200, answer.text
        return answer.json()

    def _valid(self):
        (prompt, seed), picture = self.draw.choice([*self.expected.items()])
        made = self._created(prompt=prompt, seed=seed)
        png = base64.b64decode(made["data"][0]["b64_json"]) if self.kind == "image" else self._video(made["id"])
        difference = np.abs(read(io.BytesIO(png)) - picture).max()
        assert difference <= 1, f"{prompt!r}, seed {seed}: off by {difference}"
        self.counts["valid"] += 1

    def _video(self, name: str) -> bytes:
        """Polls a video until it is complete; returns its contact sheet."""
        while (video := self._asked("GET", f"/{name}").json())["status"] in ("queued", "in_progress"):
            time.sleep(self.draw.uniform(0.2, 0.6))
        assert video["status"] == "completed", video
        content = self._asked("GET", f"/{name}/content")
        assert content.status_code == 200 and content.content[4:8] == b"ftyp"
        sheet = self._asked("GET", f"/{name}/content?variant=spritesheet")
        assert sheet.status_code == 200
        self._asked("DELETE", f"/{name}")
        return sheet.content

    def _bad(self, body: bytes, expected: int):
        answer = self._asked("POST", data=body, headers={"Content-Type": "application/json"})
        error = answer.json()["error"]["message"]
        assert answer.status_code == expected and "expected" in error and "got" in error, (body[:50], answer.text)
        self.counts[f"refused with {expected}"] += 1

    def _cancelled(self):
        """Closes the connection of an image's request early, or deletes a video's job before it is complete."""
        body, seconds = {"prompt": "a red circle", "num_inference_steps": 200}, self.draw.uniform(0, 0.3)
        if self.kind == "image":
            with contextlib.suppress(requests.Timeout):
                requests.post(self.address, json=body, timeout=(ANSWER, 0.001 + seconds))
        else:
            name = self._created(**body)["id"]
            time.sleep(seconds)
            answer = self._asked("DELETE", f"/{name}")
            assert answer.status_code == 200 and answer.json()["status"] == "cancelled", answer.text
        self.counts["cancelled"] += 1


def serve(kind: str, folder: Path, count: int = 1000, clients: int = 50) -> dict:
    """Returns facts about one server under `count` requests of all clients; `holds` says whether they are as expected."""
    expected = expected_of(kind)
    with served(kind, folder) as (process, address), ThreadPoolExecutor(clients) as pool:
        server, samples, begun = psutil.Process(process.pid), [], time.monotonic()
        everyone = [Client(kind, address, expected, seed) for seed in range(clients)]
        running = [pool.submit(one.run, range(n, count, clients)) for n, one in enumerate(everyone)]
        while not all(one.done() for one in running):
            time.sleep(0.2)
            samples.append((sum(one.done for one in everyone), server.memory_info().rss, server.num_threads()))
        seconds = time.monotonic() - begun
        left = len([*Path(tempfile.gettempdir()).glob(f"diffusers-tpu-serve-{process.pid}-*/*")])
    _, memory, threads = zip(*[sample for sample in samples if sample[0] >= count // 4])
    outcomes = dict(sorted(sum((one.counts for one in everyone), Counter()).items()))
    facts = {
        "clients": clients, "requests": count, "outcomes": outcomes,
        "wrong": [words for one in everyone for words in one.wrong][:10], "seconds": round(seconds, 1),
        "memory_warm_mib": round(memory[0] / 2**20, 1), "memory_end_mib": round(memory[-1] / 2**20, 1),
        "memory_growth": round(max(memory) / memory[0] - 1, 4), "threads_most": max(threads), "files_left": left,
        "exit_status": process.returncode,
    }  # fmt: skip
    ended = sum(number for name, number in outcomes.items() if name != "told to come again")
    right = not facts["wrong"] and facts["memory_growth"] <= 0.05 and facts["exit_status"] == 0 and ended == count
    return {**facts, "holds": right}


# Commands that share a directory


def actors_of(command: subprocess.Popen) -> list[psutil.Process]:
    """Returns the processes of a command's Ray actors."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(command.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [process] if re.search("ray::.*Actor", " ".join(process.cmdline()[:1])) else []
    return found


def bulk(kind: str, folder: Path, count: int = 200, kills: int = 3) -> dict:
    """Returns facts about the directory after all commands have ended; `holds` says whether they are as expected."""
    draw, ray, pipe = random.Random(1), kind == "ray", pipeline("prompts")
    pipe.save_pretrained(folder / "model")
    out, prompts = folder / "out", folder / "prompts.jsonl"
    lines = ({"prompt": drawn_prompt(draw), "id": f"p{n:03d}"} for n in range(count))
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["generate", folder / "model", "--prompts", prompts, "--output", out, "--seed", 1]
    words += [*flags(ARGUMENTS["prompts"]), *(["--ray", 2] if ray else [])]
    more = {"DIFFUSERS_TPU_CACHE": str(folder / "compiled"), "RAY_worker_niceness": "0"}
    at = sorted(draw.sample(range(count // 20, count * 9 // 10), kills))
    begun, first, remade = time.monotonic(), {}, set()
    with open(folder / "log.txt", "w") as log, contextlib.ExitStack() as started:

        def started_anew() -> subprocess.Popen:
            command = start(words, stdout=log, stderr=subprocess.STDOUT, more=more)
            started.callback(stop, command)
            return command

        commands = [started_anew() for _ in range(1 if ray else 2)]
        while any(command.poll() is None for command in commands):
            assert time.monotonic() - begun < WORK, (folder / "log.txt").read_text()[-4000:]
            time.sleep(0.02)
            for path in (out / ".records").glob("p*.json"):
                facts = path.stat().st_ino, path.stat().st_mtime_ns
                if first.setdefault(path.name, facts) != facts:
                    remade.add(path.name)
            victims = actors_of(commands[0]) if ray else [c for c in commands if c.poll() is None]
            if at and len(first) >= at[0] and victims:
                os.kill(draw.choice(victims).pid, signal.SIGKILL)
                at.pop(0)
            if not ray:
                commands = [started_anew() if c.poll() == -signal.SIGKILL else c for c in commands]
    seconds = round(time.monotonic() - begun, 1)
    listed = prompt_files.read(prompts, 1, ARGUMENTS["prompts"])
    pictures = {path.name for path in out.glob("*.png") if not path.name.startswith(".")}
    apart = [np.abs(read(out / f"{p.id}.png") - by_hand(pipe, "prompts", p.prompt, p.seed)).max() for p in listed]
    assert Directory(out).failed(listed) == []
    whole = {
        "outputs": len(pictures), "outputs_of_prompts": len(pictures & {f"{prompt.id}.png" for prompt in listed}),
        "manifest": len({json.loads(line)["id"] for line in (out / "manifest.jsonl").read_text().splitlines()}),
    }  # fmt: skip
    none = {
        "records_written_again": len(remade), "wrong_or_torn": sum(one > 1 for one in map(int, apart)),
        "drafts_left": len([p for p in out.rglob(".*.*.*") if p.is_file() and p.name != ".prompts.lock"]),
    }  # fmt: skip
    statuses = [command.returncode for command in commands]
    right = {*whole.values()} == {count} and not any(none.values()) and not at and not any(statuses)
    return {
        "by": "two actors of Ray Data" if ray else "two processes", "prompts": count, "killed": kills - len(at),
        "exit_statuses": statuses, "seconds": seconds, **whole, **none, "holds": right,
    }  # fmt: skip


KINDS = {"image": serve, "video": serve, "processes": bulk, "ray": bulk}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--count", type=int, help="of requests (1000) or prompts (200)")
    parser.add_argument("--record", action="store_true", help="in a file of examples/tpu/results/")
    options = parser.parse_args()
    run = KINDS[options.kind]
    with tempfile.TemporaryDirectory() as folder:
        facts = run(options.kind, Path(folder), **({"count": options.count} if options.count else {}))
    print(json.dumps(facts, indent=2))
    right = facts.pop("holds")
    if options.record:
        record = ROOT / f"examples/tpu/results/{run.__name__}.json"
        there = json.loads(record.read_text()) if record.exists() else {}
        record.write_text(json.dumps({**there, options.kind: facts}, indent=2) + "\n")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
