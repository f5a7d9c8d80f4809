"""A server under load: many clients at once, some of them rude. `python tests/tpu/serve_load.py --kind image`

Starts `diffusers-tpu serve` on a tiny model, one simulated chip, and sends requests of which every tenth is cancelled, malformed or
oversized. Oracle: upstream's pipeline in this process, of the same prompts and seeds. Facts go to examples/tpu/results/serve.json
with `--record`.
"""

import argparse
import base64
import contextlib
import http.client
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np
import psutil
import torch
from PIL import Image

import tiny
from diffusers.tpu.apps.generation.media import contact_sheet


ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "examples/tpu/results/serve.json"
COMMAND = [sys.executable, "-c", "import sys; from diffusers.tpu.apps.cli import main; sys.exit(main())"]
WORDS = "a red circle moving left"
ARGUMENTS = {
    "image": {"height": 16, "width": 16, "num_inference_steps": 2, "max_sequence_length": 8},
    "video": {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2, "max_sequence_length": 16},
}
SIZES = {"image": "16x16", "video": "32x32x5"}
PATHS = {"image": "/v1/images/generations", "video": "/v1/videos"}
DISTINCT = 24  # valid requests that differ
BODY_BYTES, CHARACTERS, QUEUE = 100_000, 500, 40
JSON = {"Content-Type": "application/json"}
PATIENCE = 120  # seconds for one answer

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


def pipeline(kind: str):
    pipe = tiny.flux() if kind == "image" else tiny.wan()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def expected_of(kind: str) -> dict[tuple[str, int], np.ndarray]:
    """By prompt and seed what upstream's pipeline makes."""
    pipe, draw, found = pipeline(kind), random.Random(0), {}
    while len(found) < DISTINCT:
        prompt, seed = " ".join(draw.sample(WORDS.split(), 3)), draw.randrange(1000)
        output = pipe(prompt, generator=torch.Generator().manual_seed(seed), output_type="pil", **ARGUMENTS[kind])
        picture = output.images[0] if kind == "image" else contact_sheet(output.frames[0])
        found[prompt, seed] = np.asarray(picture.convert("RGB"), int)
    return found


@contextlib.contextmanager
def served(kind: str, folder: Path, *more: str):
    """(the server's process, its port) while it serves; it must end with status 0 when it is asked to."""
    pipeline(kind).save_pretrained(folder / "model")
    words = ["serve", str(folder / "model"), "--sizes", SIZES[kind], "--port", "0", "--queue", str(QUEUE)]
    words += ["--body-bytes", str(BODY_BYTES), "--prompt-characters", str(CHARACTERS), "--kept-jobs", "50"]
    words += [
        "--num-inference-steps",
        "2",
        "--max-sequence-length",
        str(ARGUMENTS[kind]["max_sequence_length"]),
        *more,
    ]
    environment = {**os.environ, "DIFFUSERS_TPU": "cpu", "DIFFUSERS_TPU_DEVICES": "1", "OMP_NUM_THREADS": "1"}
    with open(folder / "log.txt", "w") as log:
        process = subprocess.Popen([*COMMAND, *words], env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            line = process.stdout.readline()
            assert line.startswith("serving "), (folder / "log.txt").read_text()[-4000:]
            yield process, int(line.rpartition(":")[2])
            process.send_signal(signal.SIGTERM)
            status = process.wait(60)
            assert status == 0, f"the server ended with {status}: " + (folder / "log.txt").read_text()[-4000:]
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            process.stdout.close()


class Client:
    """One client: sends what it finds in the queue, counts what became of it."""

    def __init__(self, kind: str, port: int, expected: dict, seed: int):
        self.kind, self.path, self.expected = kind, PATHS[kind], expected
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        self.draw, self.counts, self.wrong = random.Random(seed), Counter(), []

    def run(self, work: SimpleQueue, done: Counter):
        with contextlib.suppress(Empty):
            while True:
                number = work.get_nowait()
                try:
                    self._one(number)
                except Exception as error:
                    self.wrong.append(f"request {number}: {type(error).__name__}: {error}")
                    self.connection.close()
                done["requests"] += 1
        self.connection.close()

    def _one(self, number: int):
        kinds = [*BAD, None, None]  # None: cancelled
        bad = kinds[number // 10 % len(kinds)]
        self._valid() if number % 10 else self._bad(*bad) if bad else self._cancelled()

    def _asked(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes, http.client.HTTPMessage]:
        """The answer; asked on a new connection where the server has closed the one that was idle."""
        for last in (False, True):
            try:
                self.connection.request(method, path, body, JSON if body is not None else {})
                answer = self.connection.getresponse()
                return answer.status, answer.read(), answer.headers
            except (BrokenPipeError, ConnectionResetError, http.client.RemoteDisconnected):
                self.connection.close()
                if last:
                    raise

    def _created(self, body: bytes) -> bytes:
        """The answer to a valid request, sent again while the queue is full."""
        while True:
            status, content, headers = self._asked("POST", self.path, body)
            if status != 429:
                assert status == 200, content
                return content
            self.counts["told to come again"] += 1
            assert b"expected room" in content
            time.sleep(float(headers["Retry-After"]) * self.draw.uniform(0.5, 1.5))

    def _valid(self):
        (prompt, seed), picture = self.draw.choice([*self.expected.items()])
        made = json.loads(self._created(json.dumps({"prompt": prompt, "seed": seed}).encode()))
        if self.kind == "image":
            png = base64.b64decode(made["data"][0]["b64_json"])
        else:
            png = self._video(made["id"])
        difference = np.abs(np.asarray(Image.open(io.BytesIO(png)).convert("RGB"), int) - picture).max()
        assert difference <= 1, f"{prompt!r}, seed {seed}: off by {difference}"
        self.counts["valid"] += 1

    def _video(self, name: str) -> bytes:
        """Asked for until it is there; its contact sheet."""
        while True:
            status, content, _ = self._asked("GET", f"{self.path}/{name}")
            state = json.loads(content).get("status")
            if state not in ("queued", "in_progress"):
                break
            time.sleep(self.draw.uniform(0.2, 0.6))
        assert state == "completed", content
        status, video, _ = self._asked("GET", f"{self.path}/{name}/content")
        assert status == 200 and video[4:8] == b"ftyp"
        status, png, _ = self._asked("GET", f"{self.path}/{name}/content?variant=spritesheet")
        assert status == 200
        self._asked("DELETE", f"{self.path}/{name}")
        return png

    def _bad(self, body: bytes, expected: int):
        status, content, _ = self._asked("POST", self.path, body)
        error = json.loads(content)["error"]["message"]
        assert status == expected and "expected" in error and "got" in error, (body[:50], status, content)
        self.counts[f"refused with {status}"] += 1

    def _cancelled(self):
        """An image's client goes away while it waits; a video is deleted before it is there."""
        body = json.dumps({"prompt": "a red circle", "num_inference_steps": 200}).encode()
        if self.kind == "image":
            self.connection.request("POST", self.path, body, JSON)
            time.sleep(self.draw.uniform(0, 0.3))
            self.connection.close()
        else:
            name = json.loads(self._created(body))["id"]
            time.sleep(self.draw.uniform(0, 0.3))
            status, content, _ = self._asked("DELETE", f"{self.path}/{name}")
            assert status == 200 and json.loads(content)["status"] == "cancelled", content
        self.counts["cancelled"] += 1


def run(kind: str, folder: Path, clients: int, requests: int, *more: str) -> dict:
    """Facts about one server and all of its clients."""
    expected = expected_of(kind)
    work, done = SimpleQueue(), Counter()
    for number in range(requests):
        work.put(number)
    with served(kind, folder, *more) as (process, port):
        server, samples = psutil.Process(process.pid), []
        everyone = [Client(kind, port, expected, seed) for seed in range(clients)]
        threads = [threading.Thread(target=client.run, args=(work, done)) for client in everyone]
        begun = time.monotonic()
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.2)
            samples.append((done["requests"], server.memory_info().rss, server.num_fds(), server.num_threads()))
        seconds = time.monotonic() - begun
        left = len(list(Path(tempfile.gettempdir()).glob(f"diffusers-tpu-serve-{process.pid}-*/*")))
    warm = next(sample for sample in samples if sample[0] >= requests // 4)
    later = [sample for sample in samples if sample[0] >= requests // 4]
    return {
        "clients": clients,
        "requests": requests,
        "outcomes": dict(sorted(sum((client.counts for client in everyone), Counter()).items())),
        "wrong": [words for client in everyone for words in client.wrong][:10],
        "seconds": round(seconds, 1),
        "memory_warm_mib": round(warm[1] / 2**20, 1),
        "memory_end_mib": round(samples[-1][1] / 2**20, 1),
        "memory_growth": round(max(sample[1] for sample in later) / warm[1] - 1, 4),
        "threads_most": max(sample[3] for sample in later),
        "files_left": left,
        "exit_status": process.returncode,
    }


def holds(facts: dict) -> bool:
    return (
        not facts["wrong"]
        and facts["memory_growth"] <= 0.05
        and facts["exit_status"] == 0
        and sum(n for name, n in facts["outcomes"].items() if name != "told to come again") == facts["requests"]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kind", choices=("image", "video"), default="image")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--max-batch", type=int, default=4)
    parser.add_argument("--page", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--record", action="store_true", help=f"write to {RESULT.relative_to(ROOT)}")
    options = parser.parse_args()
    more = ["--max-batch", str(options.max_batch), "--page" if options.page else "--no-page"]
    with tempfile.TemporaryDirectory() as folder:
        facts = run(options.kind, Path(folder), options.clients, options.requests, *more)
    print(json.dumps(facts, indent=2))
    if options.record:
        there = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        RESULT.write_text(json.dumps({**there, options.kind: facts}, indent=2) + "\n")
    return 0 if holds(facts) else 1


if __name__ == "__main__":
    sys.exit(main())
