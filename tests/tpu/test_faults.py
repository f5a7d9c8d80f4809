"""Every row of `examples/tpu/FAULTS.md`, injected. Oracles: exit statuses, messages and folders by hand; a run that follows works.

A test is marked with the ids of the rows that it injects; some stand in other files, beside what they share.
"""

import ast
import errno
import json
import logging
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import types
import zlib
from pathlib import Path

import huggingface_hub.constants
import jax
import jax.numpy as jnp
import pytest
import safetensors.torch
import torch
from PIL import Image

import tiny
from conftest import ROOT
from diffusers import WanPipeline
from diffusers.tpu import errors as failures
from diffusers.tpu import planner
from diffusers.tpu.apps.cli import main, session
from diffusers.tpu.apps.generation import media
from diffusers.tpu.chips import devices
from diffusers.tpu.chips.devices import Target, jax_devices, keep_compiled_programs
from diffusers.tpu.compile.programs import Program
from diffusers.tpu.errors import ChipBusy, NoChip, NotWritten, OutOfCoreMemory, OutOfHBM, within_hbm
from diffusers.tpu.planner import kept
from diffusers.tpu.planner.aot import CompiledProgram


fault = pytest.mark.fault
HERE = Path(__file__).parent
CALL = [
    "--prompt",
    "a red circle",
    "--height",
    "16",
    "--width",
    "16",
    "--num-frames",
    "1",
    "--num-inference-steps",
    "2",
]
CALL += ["--device", "simulated", "--mesh", "1,1,1", "--seed", "1"]


def test_every_row_of_the_page_is_injected_by_one_test():
    rows = re.findall(r"^\| (?!id )([a-z0-9-]+) \|", (ROOT / "examples" / "tpu" / "FAULTS.md").read_text(), re.M)
    marked = sorted(name for file in HERE.glob("test_*.py") for name in faults_of(file))
    assert len(rows) == len({*rows}) >= 25
    assert sorted(rows) == marked


def faults_of(file: Path):
    """The ids that the tests of a file are marked with."""
    if "fault" not in file.read_text():
        return
    for function in ast.walk(ast.parse(file.read_text())):
        for node in ast.walk(ast.Module(getattr(function, "decorator_list", []), [])):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "fault":
                yield from (argument.value for argument in node.args)


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
    """An empty folder, where commands run on simulated chips; JAX runs already."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def fails(capsys, words: list, *expected: str, status: int = 2):
    """The command ends with this status, says all of that in its last line, and leaves nothing."""
    capsys.readouterr()
    before = files()
    assert main([*map(str, words)]) == status
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("diffusers-tpu: ") and all(text in said for text in expected), said
    assert files() == before


def files() -> list[Path]:
    return sorted(path for path in Path.cwd().rglob("*") if path.name != "out")  # a folder, made for what is to come


# What was asked for


@fault("mesh-flag", "mesh-environment")
@pytest.mark.parametrize("by", ["flag", "environment"])
def test_a_mesh_that_does_not_fit_is_refused_before_anything_is_loaded(saved, here, capsys, monkeypatch, by):
    monkeypatch.setattr(session, "load", lambda *args: pytest.fail("it is loaded"))
    words = ["generate", saved, *CALL]
    if by == "flag":
        words[words.index("1,1,1")] = "3,3,3"
    else:
        words = [word for word in words if word not in ("--mesh", "1,1,1")]
        monkeypatch.setenv("DIFFUSERS_TPU_MESH", "3,3,3")
    fails(capsys, words, "at most the 8 chips here, got 3,3,3 = 27")
    if by == "environment":  # a script's
        monkeypatch.setattr(WanPipeline, "load_config", lambda *args, **kwargs: pytest.fail("it is loaded"))
        with pytest.raises(ValueError, match="at most the 8 chips"):
            WanPipeline.from_pretrained(saved)


@fault("bad-dtype", "bad-image", "unknown-argument", "output-is-a-folder", "output-unwritable")
@pytest.mark.parametrize(
    "words, expected",
    [
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--image", "no.png"], "expected --image to be a picture"),
        (["--sharpness", "3"], "takes no --sharpness; it takes"),
        (["--output", "."], "--output"),
        (["--output", "/proc/none/x.mp4"], "expected to write into /proc/none"),
    ],
    ids=["dtype", "image", "argument", "folder", "unwritable"],
)
def test_what_cannot_be_asked_is_one_line(saved, here, capsys, words, expected, monkeypatch):
    monkeypatch.setattr(session, "load", lambda *args: pytest.fail("it is loaded"))
    fails(capsys, ["generate", saved, *CALL, *words], expected)


@fault("unknown-class")
def test_a_pipeline_that_nobody_knows(model, here, capsys):
    index = json.loads((model / "model_index.json").read_text())
    (model / "model_index.json").write_text(json.dumps({**index, "_class_name": "WanderPipeline"}))
    fails(capsys, ["generate", model, *CALL], "to name a pipeline of diffusers, got 'WanderPipeline'")


@fault("hub-offline", "download-interrupted")
def test_a_hub_id_that_is_not_there_or_not_whole(saved, here, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    fails(capsys, ["generate", "someone/model", *CALL], "someone/model")
    repository = tmp_path / "hub" / "models--someone--model"
    snapshot = repository / "snapshots" / ("0" * 40)
    shutil.copytree(saved, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "blobs").mkdir()
    weights = snapshot / "transformer" / "diffusion_pytorch_model.safetensors"
    (repository / "blobs" / "abc.incomplete").write_bytes(weights.read_bytes()[:1000])
    weights.unlink()
    fails(capsys, ["generate", "someone/model", *CALL], "diffusion_pytorch_model")


# What is damaged


def cut(file: Path):
    os.truncate(file, file.stat().st_size - 100)


def flip(file: Path):
    content = bytearray(file.read_bytes())
    content[20] ^= 0xFF
    file.write_bytes(content)


def rewrite(file: Path, change):
    tensors = safetensors.torch.load_file(file)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    change(tensors)
    safetensors.torch.save_file(tensors, file, {"format": "pt"})


def lose(file: Path):
    rewrite(
        file, lambda tensors: tensors.pop(next(name for name in tensors if "blocks.1." in name or "block.0." in name))
    )


def reshape(file: Path):
    def change(tensors):
        name = next(
            name
            for name, tensor in tensors.items()
            if tensor.ndim == 2 and ("blocks.1." in name or "block.0." in name)
        )
        tensors[name] = torch.zeros(3, 5)

    rewrite(file, change)


DAMAGES = {"cut": cut, "flipped": flip, "key": lose, "shape": reshape, "missing": Path.unlink}


@fault("weights-cut", "weights-flipped", "weights-key", "weights-shape", "weights-missing")
@pytest.mark.parametrize("folder", ["transformer", "text_encoder"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_weights_are_named_and_nothing_runs(model, here, capsys, folder, damage):
    (file,) = (model / folder).glob("*.safetensors")
    DAMAGES[damage](file)
    words = {"cut": "", "flipped": "", "key": "none for", "shape": "shape", "missing": "no file named"}
    fails(capsys, ["generate", model, *CALL], words[damage])


@fault("weights-shard")
def test_a_shard_that_is_not_there(model, here, capsys):
    pipe = WanPipeline.from_pretrained(model)
    shutil.rmtree(model / "transformer")
    pipe.transformer.save_pretrained(model / "transformer", max_shard_size="100KB")
    shards = sorted((model / "transformer").glob("*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    fails(capsys, ["generate", model, *CALL], shards[1].name)


# Caches


class Compiler:
    """Stands for the TPU compiler: counts what it is asked."""

    flags = asked_flags = ""
    topology = types.SimpleNamespace(name="v6e-1")
    asked = 0

    def compile(self, lowered, options):
        self.asked += 1
        return CompiledProgram("text", {}, {"program": 1}, 1.0)


LOWERED = types.SimpleNamespace(as_text=lambda debug_info: "a program")
MESH = types.SimpleNamespace(devices=types.SimpleNamespace(flat=[types.SimpleNamespace(id=0)]))


@pytest.fixture(params=["programs", "plans"])
def asked(request, tmp_path, monkeypatch):
    """A function that asks the planner's compiler for one program, or its process for one plan: the answer, and how often that was asked so far."""
    monkeypatch.setenv("DIFFUSERS_TPU_CACHE", str(tmp_path / "cache"))
    compiler, children = Compiler(), []
    monkeypatch.setattr(planner, "run_in_child", lambda *asked, **how: children.append(asked) or {"steps": "text"})
    if request.param == "programs":
        return lambda: (kept.compiled(compiler, LOWERED, MESH).text, compiler.asked)
    return lambda: (planner.Question(planner.PLANS, {"model": "wan-1.3b"}).answer()["steps"], len(children))


@pytest.fixture
def warned() -> list:
    sentences = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: sentences.append(record.getMessage())
    loggers = [logging.getLogger(name) for name in ("diffusers", "jax")]
    for logger in loggers:
        logger.addHandler(handler)
    yield sentences
    for logger in loggers:
        logger.removeHandler(handler)


@fault("planner-entry-corrupt")
@pytest.mark.parametrize("content", [b"", b"nonsense", zlib.compress(b"[1]"), zlib.compress(b'{"made": 1')])
def test_a_corrupt_answer_is_removed_and_asked_again(asked, tmp_path, warned, content):
    assert asked() == asked() == ("text", 1)
    (entry,) = (tmp_path / "cache").glob("*/*")
    entry.write_bytes(content)
    assert asked() == ("text", 2) and str(entry) in warned[0] and "removed" in warned[0]
    assert asked() == ("text", 2) and len(warned) == 1


@fault("planner-configuration-changed")
@pytest.mark.parametrize("pipeline", ["", "@WanImageToVideoPipeline"])
@pytest.mark.parametrize("model", ["of/the-hub", "folder"])
def test_a_plan_is_of_what_the_configuration_holds(model, pipeline, tmp_path, monkeypatch):
    monkeypatch.setenv("DIFFUSERS_TPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(planner, "run_in_child", lambda *asked, **how: {"of": config.read_text()})
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "folder" / "transformer" / "config.json"
    config.parent.mkdir(parents=True)
    monkeypatch.setattr(
        planner, "snapshot_download", lambda name, **how: {"of/the-hub": str(tmp_path / "folder")}[name]
    )
    for content in ("2 layers", "40 layers", "2 layers"):
        config.write_text(content)
        assert planner.Question(planner.PLANS, {"model": model + pipeline}).answer() == {"of": content}


@fault("cache-of-another-version")
def test_an_answer_of_another_version_is_another_entry(asked, tmp_path, monkeypatch):
    assert asked() == ("text", 1)
    with monkeypatch.context() as patch:
        patch.setattr(kept.importlib.metadata, "version", lambda name: "0.0.1")
        assert asked() == ("text", 2)
    assert asked() == ("text", 2) and len([*(tmp_path / "cache").glob("*/*")]) == 2


@fault("cache-read-only", "cache-full")
@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC], ids=errno.errorcode.get)
def test_a_cache_that_takes_nothing_is_said_and_the_answer_is_there(asked, tmp_path, monkeypatch, warned, number):
    def refuse(self, data):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", refuse)
        assert asked() == ("text", 1)
    assert os.strerror(number) in warned[0] and "DIFFUSERS_TPU_CACHE" in warned[0]
    assert [*(tmp_path / "cache").glob("*/*")] == []
    assert asked() == asked() == ("text", 2) and len(warned) == 1


@fault("cache-is-a-file")
def test_a_cache_that_is_a_file_is_said_and_not_used(asked, tmp_path, monkeypatch, warned):
    (tmp_path / "cache").write_text("a file")
    assert asked() == ("text", 1) and "cache" in warned[0]
    assert asked() == ("text", 2) and len(warned) == 1
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        keep_compiled_programs(str(tmp_path / "cache"))
        assert jax.config.jax_compilation_cache_dir is None and "DIFFUSERS_TPU_CACHE" in warned[-1]
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert (tmp_path / "cache").read_text() == "a file"


def test_a_plan_that_cannot_be_kept_is_said_before_it_is_asked(tmp_path, monkeypatch, warned):
    monkeypatch.setenv("DIFFUSERS_TPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(planner, "run_in_child", lambda *asked, **how: {"said": [*warned]})
    (tmp_path / "cache").write_text("a file")
    (sentence,) = planner.Question(planner.PLANS, {"model": "wan-1.3b"}).answer()["said"]
    assert "DIFFUSERS_TPU_CACHE" in sentence and warned == [sentence]


@fault("program-entry-corrupt")
def test_a_corrupt_entry_of_jaxs_cache_is_compiled_again(chips, tmp_path):
    from jax.experimental.compilation_cache import compilation_cache

    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    try:
        jax.config.update(names[1], 0.0)
        jax.config.update(names[0], str(tmp_path))
        compilation_cache.reset_cache()

        def compute():
            return jax.jit(lambda x: jnp.sin(x) * 17 + 3)(jnp.ones(5)).tolist()

        expected = compute()
        entries = [path for path in tmp_path.iterdir() if path.name.endswith("-cache")]
        assert entries
        for entry in entries:
            entry.write_bytes(b"nonsense")
        jax.clear_caches()
        with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
            assert compute() == expected
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


# While it runs


@pytest.mark.slow
@fault("nan", "nan-debugged")
def test_nan_is_not_written_and_its_first_submodule_is_named(model, here, capsys, warned):
    (file,) = (model / "transformer").glob("*.safetensors")
    rewrite(file, lambda tensors: tensors["blocks.1.ffn.net.2.weight"].fill_(float("nan")))
    words = ["generate", model, *CALL]
    fails(capsys, words, "NaN or an infinity from vae: nothing is written", "--debug-nans", status=1)
    assert any("WanPipeline" in sentence and "NaN" in sentence for sentence in warned)  # what a script sees
    fails(capsys, [*words, "--debug-nans"], "WanTransformer3DModel.forward", "is blocks.1.ffn.net.2.", status=1)


COMPILING = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 40.00G of 31.25G hbm. Exceeded hbm capacity by 8.75G."
LOADING = (
    "RESOURCE_EXHAUSTED: Error loading program 'jit_program': Attempting to reserve 12.29G at the bottom of memory. That was not"
    " possible. There are 10.90G free, 0B reserved, and 10.90G reservable.; (0x0x0_HBM0)"
)
ALLOCATING = (
    "RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 1.50G. That was not possible. There are 512.00M"
    " free.; (0x0x0_HBM0)"
)


@fault("out-of-hbm-compiling", "out-of-hbm-running")
@pytest.mark.parametrize(
    "moment, text, sizes",
    [
        ("compile", COMPILING, "40 GiB asked for, 31.2 GiB there"),
        ("run", LOADING, "12.3 GiB asked for, 10.9 GiB there"),
        ("result", ALLOCATING, "1.5 GiB asked for, 0.5 GiB there"),
    ],
)
def test_no_room_on_a_chip_comes_with_the_question_to_the_planner(
    saved, here, capsys, monkeypatch, moment, text, sizes
):
    """When the program is compiled, when it is run, and when what it was to give is waited for: dispatch is asynchronous."""

    def refuse(*args, **kwargs):
        raise jax.errors.JaxRuntimeError(text)

    def compiled(self, *args, **kwargs):
        late = types.SimpleNamespace(block_until_ready=refuse)
        self.compiled = refuse if moment == "run" else lambda *args: [[late]]

    monkeypatch.setattr(Program, "compile", refuse if moment == "compile" else compiled)
    asks = f"diffusers-tpu plan {saved} --topology"
    fails(capsys, ["generate", saved, *CALL], sizes, asks, "--mesh auto", status=1)
    assert not issubclass(OutOfHBM, ValueError)


@fault("out-of-core-memory")
@pytest.mark.parametrize(
    "memory, text",
    [  # of libtpu 0.0.42.1
        (
            "VMEM",
            "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:\nRan out of memory in memory space vmem while allocating on stack"
            " for %call. Scoped allocation with size 32.00M and limit 16.00M exceeded scoped vmem limit by 16.00M.",
        ),
        (
            "VMEM",
            "RESOURCE_EXHAUSTED: Allocation (size=268435456) would exceed memory (size=134217728) :: #allocation2 [shape ="
            " 'f32[65536,1024]{1,0:T(8,128)}', space=vmem, size = 0x10000000, scoped, tag = 'scratch operand'] :: kernel",
        ),
        (
            "SMEM",
            "RESOURCE_EXHAUSTED: Allocation (size=4194304) would exceed memory (size=1048576) :: #allocation2 [shape ="
            " 'f32[1048576]{0:T(128)}', space=smem, size = 0x400000, scoped, tag = 'scratch operand'] :: kernel",
        ),
    ],
)
def test_a_core_without_room_for_a_kernel_is_no_matter_of_hbm(memory, text):
    with pytest.raises(OutOfCoreMemory, match=f"a core's {memory} to run X, got none: .*attention_blocks") as told:
        with within_hbm(lambda: "to run X", lambda: pytest.fail("the planner is asked")):
            raise jax.errors.JaxRuntimeError(text)
    assert "more chips or HBM do not help" in str(told.value) and "\n" not in str(told.value)


@fault("slow-first-run")
def test_a_first_run_that_stands_is_said_while_it_does(warned, monkeypatch):
    monkeypatch.setattr(failures, "WORTH_A_WORD", 0.02)
    waits = types.SimpleNamespace(block_until_ready=lambda: time.sleep(0.5))
    program = Program("Wan", "forward", (), 1, None, {}, None, None, 0.0, compiled=lambda *args: [[waits]])
    values = types.SimpleNamespace(weights={}, numbers={}, inputs=[])
    program.run([types.SimpleNamespace(values=values)])
    assert [sentence.partition(":")[0] for sentence in warned] == [
        "the first run of Wan.forward is not done after 0 s"
    ] * 2
    program.run([types.SimpleNamespace(values=values)])  # nobody waits
    assert len(warned) == 2  # after 0.02 s and 0.2 s


STARTING = "Unable to initialize backend 'tpu': "
BUSY = (
    STARTING + "UNKNOWN: TPU initialization failed: open({0}): Device or resource busy: Couldn't open iommu group {0}"
)


def refusing_chips(monkeypatch, text: str, nodes: tuple[str, ...] = ("/dev/vfio/0",)):
    def refuse(platform):
        raise RuntimeError(text)

    monkeypatch.setattr(jax, "devices", refuse)
    monkeypatch.setattr(devices, "device_nodes", lambda: [*nodes])
    return jax_devices.__wrapped__(Target("tpu", "v6e"))


@fault("chip-in-use")
@pytest.mark.parametrize(
    "text, words",
    [
        (
            "ABORTED: The TPU is already in use by process with pid 22. Not attempting to load libtpu.so",
            "process 22 has it",
        ),
        ("ABORTED: The TPU is already in use by another process probably owned by another user.", "libtpu_lockfile"),
        (BUSY.format("/dev/vfio/0"), "sudo lsof"),
    ],
)
def test_a_chip_that_another_process_has(monkeypatch, text, words):
    with pytest.raises(ChipBusy, match=words):
        refusing_chips(monkeypatch, STARTING + text)


@fault("chip-in-use-by")
def test_the_process_that_has_a_chips_file_open_is_named(monkeypatch, tmp_path):
    node = tmp_path / "0"
    node.write_text("")
    with open(node), subprocess.Popen(["sleep", "60"], stdin=open(node)) as other:
        try:
            with pytest.raises(ChipBusy, match=rf"process {other.pid} \(sleep\) has it"):
                refusing_chips(monkeypatch, BUSY.format(node), (str(node),))
        finally:
            other.kill()


@fault("chip-denied", "no-topology")
@pytest.mark.parametrize(
    "text, words",
    [
        (
            "UNKNOWN: TPU initialization failed: open(/dev/vfio/0): Permission denied: Couldn't open",
            "right to open /dev/vfio/0",
        ),
        (
            "UNKNOWN: TPU initialization failed: open(/dev/accel0): Operation not permitted",
            "container needs them as devices",
        ),
        ("INTERNAL: Failed to get global TPU topology.", "each of them; .*here: TPU_WORKER_HOSTNAMES=a,b"),
    ],
)
def test_a_chip_that_this_process_cannot_have(monkeypatch, text, words):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    with pytest.raises(NoChip, match=words):
        refusing_chips(monkeypatch, STARTING + text)
    with pytest.raises(RuntimeError, match="something else") as told:
        refusing_chips(monkeypatch, STARTING + "something else")
    assert type(told.value) is RuntimeError


def frames() -> list[Image.Image]:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 255, (8, 64, 64, 3), dtype=torch.uint8, generator=generator)
    return [Image.fromarray(frame.numpy()) for frame in noise]


@fault("disk-full")
@pytest.mark.parametrize("suffix", [".mp4", ".png"])
def test_a_full_disk_leaves_nothing_half_written(here, suffix):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    values, are_videos = ([frames()], True) if suffix == ".mp4" else (frames()[:1], False)
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
    assert main(["generate", str(saved), *CALL, "--output", "x.mp4"]) == 0
    table = capsys.readouterr().out
    assert sorted(os.listdir()) == ["x.mp4", "x.png"]
    assert all(float(number) >= 0 for number in re.findall(r"│ *(-?[\d.]+) *│$", table, re.M)) and "total" in table
    lines = [line for path in (ROOT / "src/diffusers/tpu").rglob("*.py") for line in path.read_text().splitlines()]
    assert all("int(time.time())" in line for line in lines if "time.time()" in line)  # dates that the server tells


def test_nothing_ends_by_force_but_the_compilers_child_and_a_run_that_lost_a_process():
    sources = [path for path in (ROOT / "src/diffusers/tpu").rglob("*.py") if "os._exit" in path.read_text()]
    assert sorted(path.name for path in sources) == ["aot.py", "watch.py"]


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
    process = subprocess.Popen(
        [sys.executable, "-c", RUNS],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "DIFFUSERS_TPU_CACHE": compiled_programs},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
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


@pytest.mark.slow
@fault("interrupt-load", "interrupt-compile", "interrupt-step", "interrupt-write", "sigterm-step", "sigterm-write")
@pytest.mark.parametrize(
    "point, number, status",
    [
        ("load", signal.SIGINT, 130),
        ("compile", signal.SIGINT, 130),
        ("step", signal.SIGINT, 130),
        ("write", signal.SIGINT, 130),
        ("step", signal.SIGTERM, -signal.SIGTERM),
        ("write", signal.SIGTERM, 143),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "name", ""),
)
def test_a_run_that_is_stopped_leaves_nothing(runs, saved, tmp_path, point, number, status):
    words = ["generate", str(saved), *CALL, "--output", str(tmp_path / "x.mp4")]
    if point in ("step", "write"):  # which are the same on either path
        words = [word for word in words if word not in ("--mesh", "1,1,1")]
        words[words.index("simulated")] = "upstream"
    assert ended(runs, words, point, number) == status
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
@fault("kill-9")
def test_a_run_that_is_killed_leaves_a_hidden_draft_and_the_next_one_works(runs, saved, tmp_path):
    words = [
        "generate",
        str(saved),
        *CALL[:-6],
        "--seed",
        "1",
        "--device",
        "upstream",
        "--output",
        str(tmp_path / "x.mp4"),
    ]
    assert ended(runs, words, "write", signal.SIGKILL) == -signal.SIGKILL
    (draft,) = tmp_path.iterdir()
    assert re.fullmatch(r"\.x\.\d+\.mp4", draft.name)
    assert ended(runs, words) == 0
    assert {path.name for path in tmp_path.iterdir()} == {draft.name, "x.mp4", "x.png"}
