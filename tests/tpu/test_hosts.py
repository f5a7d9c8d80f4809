"""Several processes. Oracle: one process with as many simulated chips on an equal mesh, to the last bit; counts of bytes; what is
killed, by its name."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import host_runs
from diffusers import DiffusionPipeline
from diffusers.tpu import TPUConfig, install
from diffusers.tpu.chips.hosts import run


MODEL = Path(__file__).resolve().parents[2] / "examples/tpu/models/wan-shapes"
LIMIT = 30.0  # seconds within which the death of one ends the others
SILENT = run.HEARTBEAT + LIMIT  # the same of one that says nothing


def start(count: int, chips: int, command: list[str], folder: Path, cache: str) -> list[subprocess.Popen]:
    """The processes of a run on loopback; their output is in FOLDER/NUMBER.txt."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    common = {"DIFFUSERS_TPU": "cpu", "DIFFUSERS_TPU_DEVICES": str(chips), "DIFFUSERS_TPU_CACHE": cache}
    common |= {"XLA_FLAGS": " ".join(flags), "NPROC": os.environ["NPROC"]}  # threads, as the process of the tests has
    if count > 1:
        common |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(count)}
    started = []
    for number in range(count):
        given = {**os.environ, **common, **({"JAX_PROCESS_ID": str(number)} if count > 1 else {})}
        with open(folder / f"{number}.txt", "w") as output:
            started.append(subprocess.Popen([sys.executable, *command], env=given, stdout=output, stderr=output))
    return started


def steps(folder: Path, *names: str) -> list[str]:
    return [host_runs.__file__, str(MODEL), str(folder), *names]


def ended(processes: list[subprocess.Popen], seconds: float = 1500.0) -> list[int]:
    """Exit statuses. What does not end is killed, and is the test's failure."""
    try:
        until = time.monotonic() + seconds
        return [process.wait(max(0.1, until - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()


def text(folder: Path, number: int) -> str:
    return (folder / f"{number}.txt").read_text()


def assert_named(folder: Path, survivor: int, victim: int, pid: int, why: str):
    """The survivor's last words name the victim, by number, host and pid, and say why."""
    name = rf"process {victim} of \d \({re.escape(socket.gethostname())}, pid {pid}\)"
    assert re.search(f"{name} has ended: {why}", text(folder, survivor)), text(folder, survivor)[-2000:]


def one_process(degrees: tuple[int, int, int]) -> np.ndarray:
    """The latents of this process, on the first of its chips."""
    pipe = DiffusionPipeline.from_pretrained(MODEL, dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    install(pipe, TPUConfig(mesh=degrees))
    given = {**host_runs.CALL, "output_type": "latent"}
    return pipe(host_runs.PROMPT, generator=torch.Generator().manual_seed(6), **given).frames.float().numpy()


@pytest.mark.fault("lost-process")
def test_two_processes_give_what_one_gives_read_their_bytes_and_end_together(chips, compiled_programs, tmp_path):
    """2 x 2 chips, dp from process to process: the same bits, also by programs that were kept; no seed, and both draw alike; one is
    killed, the other names it."""
    made = steps(tmp_path, "read:2,2,1", "latents:2,2,1", "again:2,2,1", "unseeded:2,2,1", "end:1:SIGKILL")
    processes = start(2, 2, made, tmp_path, compiled_programs)
    alone = one_process((2, 2, 1))
    first, second = ended(processes)
    assert (first, second) == (1, -signal.SIGKILL), text(tmp_path, 0)[-3000:]
    assert_named(tmp_path, 0, 1, processes[1].pid, "it was killed")
    for number in (0, 1):
        np.testing.assert_array_equal(np.load(tmp_path / f"latents-2,2,1-{number}.npy"), alone)
        np.testing.assert_array_equal(np.load(tmp_path / f"again-2,2,1-{number}.npy"), alone)
        counts = json.loads((tmp_path / f"again-{number}.json").read_text())
        assert counts == {"traces": 0, "compilations": 0, "programs": 2}
        read, own, all_of_it = json.loads((tmp_path / f"read-{number}.json").read_text())
        assert read == own < 0.7 * all_of_it
    drawn = [np.load(tmp_path / f"unseeded-2,2,1-{number}.npy") for number in (0, 1)]
    np.testing.assert_array_equal(*drawn)
    assert not np.array_equal(drawn[0], alone)


@pytest.mark.slow
def test_eight_chips_of_four_processes_are_as_eight_of_one(compiled_programs, tmp_path):
    """dp from process to process, sp too, and tp inside of them: to the last bit."""
    meshes = [f"video:{degrees}" for degrees in ("2,4,1", "1,8,1", "2,2,2", "4,2,1")]
    alone, several = tmp_path / "alone", tmp_path / "several"
    for folder, processes in ((alone, 1), (several, 4)):
        folder.mkdir()
        made = steps(folder, *meshes, "read:1,8,1")
        started = start(processes, 8 // processes, made, folder, compiled_programs)
        assert ended(started) == [0] * processes, text(folder, 0)[-3000:]
    for number in range(4):
        for made in alone.glob("video-*.npy"):
            theirs = np.load(several / made.name.replace("-0.npy", f"-{number}.npy"))
            np.testing.assert_array_equal(theirs, np.load(made), err_msg=made.name)
        read, own, _ = json.loads((several / f"read-{number}.json").read_text())
        assert read == own


@pytest.mark.slow
@pytest.mark.parametrize(
    "count, victim, how, why",
    [
        (2, 0, "SIGKILL", "it was killed"), (2, 1, "SIGTERM", "it was killed"),
        (4, 3, "raise", "ValueError: no room\n  on the disk"),
    ],
)  # fmt: skip
def test_who_ends_ends_the_others_with_its_name(compiled_programs, tmp_path, count, victim, how, why):
    made = steps(tmp_path, "latents:2,2,1", f"end:{victim}:{how}")
    processes = start(count, 4 // count, made, tmp_path, compiled_programs)
    statuses = ended(processes)
    after = time.time()
    assert all(statuses), statuses
    for number in {*range(count)} - {victim}:
        assert_named(tmp_path, number, victim, processes[victim].pid, why)
        assert after - float(re.search("ends at ([0-9.]+)", text(tmp_path, number)).group(1)) < LIMIT


@pytest.mark.slow
def test_who_stops_answering_ends_the_others(compiled_programs, tmp_path):
    """A stopped process keeps its connections: JAX's runtime misses its heartbeats."""
    processes = start(2, 2, steps(tmp_path, "latents:2,2,1", "end:1:SIGSTOP"), tmp_path, compiled_programs)
    assert processes[0].wait(300) != 0
    after = time.time()
    processes[1].kill()
    assert "stopped sending heartbeats" in text(tmp_path, 0)
    assert after - float(re.search("ends at ([0-9.]+)", text(tmp_path, 0)).group(1)) < SILENT


@pytest.mark.slow
@pytest.mark.parametrize(
    "step, words",
    [
        (
            "other_seed:2,2,1",
            "WanPipeline.__call__ to be the same in all processes, got another generator in process 1",
        ),
        ("end:1:exit", "all processes to come to WanPipeline.__call__, got the end of the script in process 1"),
    ],
)
def test_scripts_that_part_are_told_where(compiled_programs, tmp_path, step, words):
    assert ended(start(2, 2, steps(tmp_path, step), tmp_path, compiled_programs))[0] == 1
    assert words in text(tmp_path, 0)


@pytest.mark.slow
def test_the_first_process_writes_and_tells(compiled_programs, tmp_path):
    """`diffusers-tpu generate` without a seed: one file, one table of times; the others say nothing."""
    program = "import sys; from diffusers.tpu.apps.cli import main; sys.exit(main())"
    size = "--height 64 --width 64 --num-frames 9 --num-inference-steps 2 --guidance-scale 2"
    words = f"generate {MODEL} {size} --output {tmp_path / 'out.mp4'}".split()
    command = ["-c", program, *words, "--prompt", host_runs.PROMPT]
    processes = start(2, 2, command, tmp_path, compiled_programs)
    assert ended(processes) == [0, 0], text(tmp_path, 0)[-3000:]
    assert "wrote" in text(tmp_path, 0) and "2 processes, each 2 chips" in text(tmp_path, 0)
    said = [line for line in text(tmp_path, 1).splitlines() if line.strip() and not line.startswith("[Gloo]")]
    assert said == [] and sorted(p.name for p in tmp_path.glob("out*")) == ["out.mp4", "out.png"]


@pytest.mark.slow
def test_a_process_that_stands_still_for_a_minute_ends_nobody(compiled_programs, tmp_path):
    """As a host does that is moved for maintenance."""
    made = steps(tmp_path, "latents:2,2,1", f"pause:1:{run.PAUSE + 5}", "latents:2,2,1")
    assert ended(start(2, 2, made, tmp_path, compiled_programs)) == [0, 0], text(tmp_path, 0)[-3000:]
