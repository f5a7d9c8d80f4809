"""Rows of `examples/tpu/FAULTS.md` that a command shows, injected. Oracles: exit statuses, messages and folders by hand.

A test is marked with the ids of the rows that it injects; others stand in test_faults_host.py, or beside what they share.
"""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import huggingface_hub.constants
import jax
import pytest
import safetensors.torch
import torch
from PIL import Image

import test_faults_host
import tiny
from conftest import ROOT
from diffusers import WanPipeline
from diffusers.tpu.apps.cli import main, session
from diffusers.tpu.apps.generation import media
from diffusers.tpu.compile.programs import Program
from diffusers.tpu.errors import NotWritten, OutOfHBM


fault = pytest.mark.fault
HERE = Path(__file__).parent
warned = test_faults_host.warned
CALL = "--prompt red --height 16 --width 16 --num-frames 1 --num-inference-steps 2 --seed 1".split()
ON_CHIPS = "--device simulated --mesh 1,1,1".split()


def test_every_row_of_the_page_is_injected_by_one_test():
    rows = re.findall(r"^\| (?!id )([a-z0-9-]+) \|", (ROOT / "examples" / "tpu" / "FAULTS.md").read_text(), re.M)
    marked = sorted(name for file in HERE.glob("test_*.py") for name in faults_of(file))
    assert len(rows) == len({*rows}) >= 25
    assert sorted(rows) == marked


def faults_of(file: Path):
    """The ids that the tests of a file are marked with."""
    for marks in re.findall(r"^@(?:pytest\.mark\.)?fault\(([^)]*)\)", file.read_text(), re.M):
        yield from re.findall(r'"([a-z0-9-]+)"', marks)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.wan().save_pretrained(folder)
    return folder


@pytest.fixture
def model(saved, tmp_path) -> Path:
    """A copy of the model to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.fixture
def here(chips, tmp_path, monkeypatch) -> Path:
    """An empty folder, where commands run on simulated chips."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def fails(capsys, words: list, *expected: str, status: int = 2, model: Path | str = ""):
    """`generate` with these words ends with this status, says all of that in its last line, and leaves nothing."""
    words = [*CALL, *([] if "--mesh" in words else ON_CHIPS), *words]
    capsys.readouterr()
    before = [path for path in sorted(Path.cwd().rglob("*")) if path.name != "out"]
    assert main(["generate", str(model), *words]) == status
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("diffusers-tpu: ") and all(text in said for text in expected), said
    left = [path for path in sorted(Path.cwd().rglob("*")) if path.name != "out"]  # a folder, made for what is to come
    assert left == before


@fault("mesh-flag", "bad-dtype", "bad-image", "unknown-argument", "output-is-a-folder", "output-unwritable")
@pytest.mark.parametrize(
    "words, expected",
    [
        ("--device simulated --mesh 3,3,3", "at most the 8 chips here, got 3,3,3 = 27"),
        ("--dtype int8", "invalid choice: 'int8'"),
        ("--image no.png", "expected --image to be a picture"),
        ("--sharpness 3", "takes no --sharpness; it takes"),
        ("--output .", "--output"),
        ("--output /proc/none/x.mp4", "expected to write into /proc/none"),
    ],
)
def test_what_cannot_be_asked_is_one_line(saved, here, capsys, words, expected, monkeypatch):
    monkeypatch.setattr(session, "load", lambda *args: pytest.fail("it is loaded"))
    fails(capsys, words.split(), expected, model=saved)


@fault("mesh-environment")
def test_a_mesh_that_does_not_fit_is_refused_before_a_script_loads_anything(saved, here, monkeypatch):
    monkeypatch.setenv("DIFFUSERS_TPU_MESH", "3,3,3")
    monkeypatch.setattr(WanPipeline, "load_config", lambda *args, **kwargs: pytest.fail("it is loaded"))
    with pytest.raises(ValueError, match="at most the 8 chips here, got 3,3,3 = 27"):
        WanPipeline.from_pretrained(saved)


@fault("unknown-class")
def test_a_pipeline_that_nobody_knows(model, here, capsys):
    index = json.loads((model / "model_index.json").read_text())
    (model / "model_index.json").write_text(json.dumps({**index, "_class_name": "WanderPipeline"}))
    fails(capsys, [], "to name a pipeline of diffusers, got 'WanderPipeline'", model=model)


@fault("hub-offline", "download-interrupted")
def test_a_hub_id_that_is_not_there_or_not_whole(saved, here, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    fails(capsys, [], "someone/model", model="someone/model")
    repository = tmp_path / "hub" / "models--someone--model"
    snapshot = repository / "snapshots" / ("0" * 40)
    shutil.copytree(saved, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    (snapshot / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    fails(capsys, [], "diffusion_pytorch_model", model="someone/model")


# What is damaged


def flip(file: Path):
    content = bytearray(file.read_bytes())
    content[20] ^= 0xFF
    file.write_bytes(content)


def rewrite(file: Path, change):
    """The file after a change of its tensors, given those and the name of a matrix."""
    tensors = {name: tensor.clone() for name, tensor in safetensors.torch.load_file(file).items()}
    inner = (name for name in tensors if "blocks.1." in name or "block.0." in name)
    change(tensors, next(name for name in inner if tensors[name].ndim == 2))
    safetensors.torch.save_file(tensors, file, {"format": "pt"})


DAMAGES = {
    "cut": (lambda file: os.truncate(file, file.stat().st_size - 100), ""),
    "flipped": (flip, ""),
    "key": (lambda file: rewrite(file, lambda tensors, name: tensors.pop(name)), "none for"),
    "shape": (lambda file: rewrite(file, lambda tensors, name: tensors.update({name: torch.zeros(3, 5)})), "shape"),
    "missing": (Path.unlink, "no file named"),
}


@fault("weights-cut", "weights-flipped", "weights-key", "weights-shape", "weights-missing")
@pytest.mark.parametrize(
    "folder, damage",
    [
        *(("transformer", damage) for damage in DAMAGES),
        ("text_encoder", "flipped"),
        ("text_encoder", "key"),
        ("text_encoder", "shape"),
    ],
)
def test_damaged_weights_are_named_and_nothing_runs(model, here, capsys, folder, damage):
    (file,) = (model / folder).glob("*.safetensors")
    spoil, words = DAMAGES[damage]
    spoil(file)
    fails(capsys, [], words, model=model)


@fault("weights-shard")
def test_a_shard_that_is_not_there(model, here, capsys):
    transformer = WanPipeline.from_pretrained(model).transformer
    shutil.rmtree(model / "transformer")
    transformer.save_pretrained(model / "transformer", max_shard_size="100KB")
    shards = sorted((model / "transformer").glob("*.safetensors"))
    shards[1].unlink()
    fails(capsys, [], shards[1].name, model=model)


# While it runs


@pytest.mark.slow
@fault("nan", "nan-debugged")
def test_nan_is_not_written_and_its_first_submodule_is_named(model, here, capsys, warned):
    (file,) = (model / "transformer").glob("*.safetensors")
    rewrite(file, lambda tensors, _: tensors["blocks.1.ffn.net.2.weight"].fill_(float("nan")))
    fails(capsys, [], "NaN or an infinity from vae: nothing is written", "--debug-nans", status=1, model=model)
    assert any("WanPipeline" in sentence and "NaN" in sentence for sentence in warned)  # what a script sees
    first = "WanTransformer3DModel.forward", "is blocks.1.ffn.net.2."
    fails(capsys, ["--debug-nans"], *first, status=1, model=model)


NO_ROOM = {
    "compile": (
        "Ran out of memory in memory space hbm. Used 40.00G of 31.25G hbm. Exceeded hbm capacity by 8.75G.",
        "40 GiB asked for, 31.2 GiB there",
    ),
    "run": (
        "Error loading program 'jit_program': Attempting to reserve 12.29G at the bottom of memory. That was not possible. There are"
        " 10.90G free, 0B reserved, and 10.90G reservable.; (0x0x0_HBM0)",
        "12.3 GiB asked for, 10.9 GiB there",
    ),
    "result": (
        "Error allocating device buffer: Attempting to allocate 1.50G. That was not possible. There are 512.00M free.; (0x0x0_HBM0)",
        "1.5 GiB asked for, 0.5 GiB there",
    ),
}


@fault("out-of-hbm-compiling", "out-of-hbm-running")
@pytest.mark.parametrize("moment", NO_ROOM)
def test_no_room_on_a_chip_comes_with_the_question_to_the_planner(saved, here, capsys, monkeypatch, own_store, moment):
    """When the program is compiled, when it is run, and when what it was to give is waited for: dispatch is asynchronous."""
    text, sizes = NO_ROOM[moment]

    def refuse(*args, **kwargs):
        raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {text}")

    def compiled(self, *args, **kwargs):
        late = types.SimpleNamespace(block_until_ready=refuse)
        self.compiled = refuse if moment == "run" else lambda *args: [[late]]

    monkeypatch.setattr(Program, "compile", refuse if moment == "compile" else compiled)
    fails(capsys, [], sizes, f"diffusers-tpu plan {saved} --topology", "--mesh auto", status=1, model=saved)
    assert not issubclass(OutOfHBM, ValueError)


@fault("disk-full")
@pytest.mark.parametrize("suffix", [".mp4", ".png"])
def test_a_full_disk_leaves_nothing_half_written(here, suffix):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    noise = torch.randint(0, 255, (8, 64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    frames = [Image.fromarray(frame.numpy()) for frame in noise]
    values, are_videos = ([frames], True) if suffix == ".mp4" else (frames[:1], False)
    (here / "x.png").write_text("an earlier one")
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit[1]))  # ffmpeg's too
    try:
        with pytest.raises(NotWritten, match="nothing is left there. Make room"):
            media.write(values, are_videos, here / f"x{suffix}", 16)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert os.listdir() == ["x.png"] and (here / "x.png").read_text() == "an earlier one"
    assert len(media.write(values, are_videos, here / f"x{suffix}", 16)) == len(os.listdir())


@pytest.mark.slow
@fault("clock-jumps")
def test_a_clock_that_goes_backwards_and_a_run_after_all_that(saved, here, capsys, monkeypatch):
    """No duration is taken with the clock of the day; a run in the process that has seen all of the above works."""
    times = iter(range(10**9, 0, -1000))
    monkeypatch.setattr(time, "time", lambda: float(next(times)))
    assert main(["generate", str(saved), *CALL, *ON_CHIPS, "--output", "x.mp4"]) == 0
    table = capsys.readouterr().out
    assert sorted(os.listdir()) == ["x.mp4", "x.png"]
    assert all(float(number) >= 0 for number in re.findall(r"│ *(-?[\d.]+) *│$", table, re.M)) and "total" in table


# Signals. Imports once, then each line that it reads is a run in a process of its own, which stops at a point and says so.
RUNS = """
import functools, json, os, signal, sys, time
from pathlib import Path
from transformers import UMT5EncoderModel
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from diffusers.tpu.compile import programs
from diffusers.tpu.weights import disk
from diffusers.tpu.apps.cli import main
from diffusers.tpu.apps.generation import media
def stop(owner, name, before=lambda *args: None):
    def run(*args, **kwargs):
        before(*args)
        print("THERE", file=sys.stderr, flush=True)
        time.sleep(60)
    setattr(owner, name, run)
POINTS = {
    "load": lambda: stop(disk, "load_file"),
    "compile": lambda: (os.environ.update(DIFFUSERS_TPU_CACHE="off"), stop(programs.Program, "compile")),
    "step": lambda: stop(UniPCMultistepScheduler, "step"),
    "write": lambda: stop(media, "export_to_video", lambda frames, path: Path(path).write_bytes(b"half")),
    "": lambda: None,
}
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell ignores it
answers, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    point, words = json.loads(line)
    child = os.fork()
    if not child:
        POINTS[point]()
        sys.exit(main(words))
    print(child, file=answers, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)
"""


@pytest.fixture(scope="module")
def runs(compiled_programs):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "DIFFUSERS_TPU_CACHE": compiled_programs}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-c", RUNS], env=environment, bufsize=0, **pipes)
    yield process
    process.communicate(timeout=60)


def ended(runs, words: list[str], point: str = "", number: int | None = None) -> int:
    """The exit status of a run that gets this signal at this point."""
    runs.stdin.write(json.dumps([point, words]).encode() + b"\n")
    child, seen, deadline = int(runs.stdout.readline()), b"", time.monotonic() + 120
    while number is not None and b"THERE" not in seen and time.monotonic() < deadline:
        seen += os.read(runs.stderr.fileno(), 4096) or pytest.fail(seen.decode())
    if number is not None:
        os.kill(child, number)
    return int(runs.stdout.readline())


@fault("interrupt-load", "interrupt-compile", "interrupt-step", "interrupt-write", "sigterm-step", "sigterm-write")
@pytest.mark.parametrize(
    "point, number, status",
    [
        pytest.param("load", signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param("compile", signal.SIGINT, 130, marks=pytest.mark.slow),
        ("step", signal.SIGINT, 130),
        pytest.param("write", signal.SIGINT, 130, marks=pytest.mark.slow),
        ("step", signal.SIGTERM, -signal.SIGTERM),
        ("write", signal.SIGTERM, 143),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "name", ""),
)
def test_a_run_that_is_stopped_leaves_nothing(runs, saved, tmp_path, point, number, status):
    where = ["--device", "upstream"] if point in ("step", "write") else ON_CHIPS  # those are the same on either path
    words = ["generate", str(saved), *CALL, *where, "--output", str(tmp_path / "x.mp4")]
    assert ended(runs, words, point, number) == status
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
@fault("kill-9")
def test_a_run_that_is_killed_leaves_a_hidden_draft_and_the_next_one_works(runs, saved, tmp_path):
    words = ["generate", str(saved), *CALL, "--device", "upstream", "--output", str(tmp_path / "x.mp4")]
    assert ended(runs, words, "write", signal.SIGKILL) == -signal.SIGKILL
    (draft,) = tmp_path.iterdir()
    assert re.fullmatch(r"\.x\.\d+\.mp4", draft.name)
    assert ended(runs, words) == 0
    assert {path.name for path in tmp_path.iterdir()} == {draft.name, "x.mp4", "x.png"}
