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

from conftest import ROOT, slow
from diffusers import WanPipeline, WanTransformer3DModel
from diffusers.tpu.apps.cli import main, session
from diffusers.tpu.apps.generation import media
from diffusers.tpu.common.errors import NotWritten, OutOfHBM
from diffusers.tpu.compile.programs import Program


fault = pytest.mark.fault
HERE = Path(__file__).parent
CALL = "--prompt red --height 16 --width 16 --num-frames 1 --num-inference-steps 2 --seed 1".split()
ON_CHIPS = "--device simulated --mesh 1,1,1".split()


@pytest.mark.parametrize("kind, least", [("fault", 25), ("idiom", 40)])
def test_every_row_of_a_page_has_a_test_and_every_marked_test_a_row(kind, least):
    """Of FAULTS.md one test each; of IDIOMS.md some, in any of the files."""
    page = (ROOT / "examples" / "tpu" / f"{kind.upper()}S.md").read_text()
    rows = [name for row in re.findall(r"^\| ((?!id )[a-z0-9, -]+) \|", page, re.M) for name in row.split(", ")]
    marks = re.compile(rf'\b{kind}\(((?:\s*"[a-z0-9-]+",?)+)\s*\)')
    found = [names for file in HERE.glob("test_*.py") for names in marks.findall(file.read_text())]
    marked = re.findall('"([a-z0-9-]+)"', "".join(found))
    assert len(rows) == len({*rows}) >= least
    assert sorted(rows) == sorted(marked if kind == "fault" else {*marked})


@pytest.fixture
def model(wan_folder, tmp_path) -> Path:
    """A copy of the model to be damaged."""
    return Path(shutil.copytree(wan_folder, tmp_path / "model"))


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
    assert main(["generate", str(model), *words]) == status
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("diffusers-tpu: ") and all(text in said for text in expected), said
    assert [path.name for path in Path.cwd().rglob("*")] in ([], ["out"])  # a folder, made for what is to come


@fault("mesh-flag", "bad-dtype", "bad-image", "unknown-argument", "output-is-a-folder", "output-unwritable")
@pytest.mark.parametrize(
    "words, expected",
    [
        ("--device simulated --mesh 3,3,3", "at most the 8 chips here, got 3,3,3 = 27"),
        ("--dtype int8", "invalid choice: 'int8'"), ("--image no.png", "expected --image to be a picture"),
        ("--sharpness 3", "takes no --sharpness; it takes"), ("--output .", "--output"),
        ("--output /proc/none/x.mp4", "expected to write into /proc/none"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_one_line(wan_folder, here, capsys, words, expected, monkeypatch):
    monkeypatch.setattr(session, "load", lambda *args: pytest.fail("it is loaded"))
    fails(capsys, words.split(), expected, model=wan_folder)


@fault("mesh-environment")
def test_a_mesh_that_does_not_fit_is_refused_before_a_script_loads_anything(wan_folder, here, monkeypatch):
    monkeypatch.setenv("DIFFUSERS_TPU_MESH", "3,3,3")
    monkeypatch.setattr(WanPipeline, "load_config", lambda *args, **kwargs: pytest.fail("it is loaded"))
    with pytest.raises(ValueError, match="at most the 8 chips here, got 3,3,3 = 27"):
        WanPipeline.from_pretrained(wan_folder)


@fault("unknown-class")
def test_a_pipeline_that_nobody_knows(model, here, capsys):
    index = json.loads((model / "model_index.json").read_text())
    (model / "model_index.json").write_text(json.dumps({**index, "_class_name": "WanderPipeline"}))
    fails(capsys, [], "to name a pipeline of diffusers, got 'WanderPipeline'", model=model)


@fault("hub-offline", "download-interrupted")
def test_a_hub_id_that_is_not_there_or_not_whole(wan_folder, here, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    fails(capsys, [], "someone/model", model="someone/model")
    repository = tmp_path / "hub" / "models--someone--model"
    snapshot = repository / "snapshots" / ("0" * 40)
    shutil.copytree(wan_folder, snapshot)
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


def lose_shard(file: Path):
    transformer = WanTransformer3DModel.from_pretrained(file.parent)
    file.unlink()
    transformer.save_pretrained(file.parent, max_shard_size="100KB")
    sorted(file.parent.glob("*.safetensors"))[1].unlink()


DAMAGES = {
    "cut": (lambda file: os.truncate(file, file.stat().st_size - 100), ""),
    "flipped": (flip, ""),
    "key": (lambda file: rewrite(file, lambda tensors, name: tensors.pop(name)), "none for"),
    "shape": (lambda file: rewrite(file, lambda tensors, name: tensors.update({name: torch.zeros(3, 5)})), "shape"),
    "missing": (Path.unlink, "no file named"),
    "shard": (lose_shard, "-00002-of-"),
}


@fault("weights-cut", "weights-flipped", "weights-key", "weights-shape", "weights-missing", "weights-shard")
@pytest.mark.parametrize(
    "folder, damage",
    [("transformer", damage) for damage in DAMAGES] + [("text_encoder", name) for name in ("flipped", "key", "shape")],
)
def test_damaged_weights_are_named_and_nothing_runs(model, here, capsys, folder, damage):
    (file,) = (model / folder).glob("*.safetensors")
    spoil, words = DAMAGES[damage]
    spoil(file)
    fails(capsys, [], words, model=model)


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
        "40 GiB", "31.2 GiB",
    ),
    "run": (
        "Error loading program 'jit_program': Attempting to reserve 12.29G at the bottom of memory. That was not possible. There are"
        " 10.90G free, 0B reserved, and 10.90G reservable.; (0x0x0_HBM0)", "12.3 GiB", "10.9 GiB",
    ),
    "result": (
        "Error allocating device buffer: Attempting to allocate 1.50G. That was not possible. There are 512.00M free.;"
        " (0x0x0_HBM0)", "1.5 GiB", "0.5 GiB",
    ),
}  # fmt: skip


@fault("out-of-hbm-compiling", "out-of-hbm-running")
@pytest.mark.parametrize("moment", NO_ROOM)
@pytest.mark.usefixtures("here", "own_store")
def test_no_room_on_a_chip_comes_with_the_question_to_the_planner(wan_folder, capsys, monkeypatch, moment):
    """When the program is compiled, when it is run, and when what it was to give is waited for: dispatch is asynchronous."""
    text, asked, there = NO_ROOM[moment]

    def refuse(*args, **kwargs):
        raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {text}")

    def compiled(self, *args, **kwargs):
        late = types.SimpleNamespace(block_until_ready=refuse)
        self.executables[""] = refuse if moment == "run" else lambda *args: [[late]]

    monkeypatch.setattr(Program, "compile", refuse if moment == "compile" else compiled)
    expected = f"{asked} asked for, {there} there", f"diffusers-tpu plan {wan_folder} --topology", "--mesh auto"
    fails(capsys, [], *expected, status=1, model=wan_folder)
    assert not issubclass(OutOfHBM, ValueError)


@fault("disk-full")
@pytest.mark.parametrize("suffix", [".mp4", ".png"])
def test_a_full_disk_leaves_nothing_half_written(here, suffix):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    noise = torch.randint(0, 255, (8, 64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    frames = [Image.fromarray(frame.numpy()) for frame in noise]
    values = [frames] if suffix == ".mp4" else frames[:1]
    (here / "x.png").write_text("an earlier one")
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit[1]))  # ffmpeg's too
    try:
        with pytest.raises(NotWritten, match="nothing is left there. Make room"):
            media.write(values, here / f"x{suffix}", 16)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert os.listdir() == ["x.png"] and (here / "x.png").read_text() == "an earlier one"
    assert len(media.write(values, here / f"x{suffix}", 16)) == len(os.listdir())


@pytest.mark.slow
@fault("clock-jumps")
def test_a_clock_that_goes_backwards_and_a_run_after_all_that(wan_folder, here, capsys, monkeypatch):
    """No duration is taken with the clock of the day; a run in the process that has seen all of the above works, and one more, whose
    programs are on disk: what they took to compile is no part of it."""
    times = iter(range(10**9, 0, -1000))
    monkeypatch.setattr(time, "time", lambda: float(next(times)))
    for output in ("x.mp4", "y.mp4"):
        assert main(["generate", wan_folder, *CALL, *ON_CHIPS, "--output", output]) == 0
        table = capsys.readouterr().out
        assert all(float(number) >= 0 for number in re.findall(r"│ *(-?[\d.]+) *│$", table, re.M)) and "total" in table
    assert sorted(os.listdir()) == ["x.mp4", "x.png", "y.mp4", "y.png"]


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
        *(slow(point, signal.SIGINT, 130) for point in ("load", "compile", "write")),
        ("step", signal.SIGINT, 130), ("step", signal.SIGTERM, -signal.SIGTERM), ("write", signal.SIGTERM, 143),
    ],
)  # fmt: skip
def test_a_run_that_is_stopped_leaves_nothing(runs, wan_folder, tmp_path, point, number, status):
    where = ["--device", "upstream"] if point in ("step", "write") else ON_CHIPS  # those are the same on either path
    words = ["generate", wan_folder, *CALL, *where, "--output", str(tmp_path / "x.mp4")]
    assert ended(runs, words, point, number) == status
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
@fault("kill-9")
def test_a_run_that_is_killed_leaves_a_hidden_draft_and_the_next_one_works(runs, wan_folder, tmp_path):
    words = ["generate", wan_folder, *CALL, "--device", "upstream", "--output", str(tmp_path / "x.mp4")]
    assert ended(runs, words, "write", signal.SIGKILL) == -signal.SIGKILL
    (draft,) = tmp_path.iterdir()
    assert re.fullmatch(r"\.x\.\d+\.mp4", draft.name)
    assert ended(runs, words) == 0
    assert {path.name for path in tmp_path.iterdir()} == {draft.name, "x.mp4", "x.png"}
