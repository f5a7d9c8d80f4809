"""Rows of `examples/tpu/FAULTS.md` about caches, memory and chips, injected. Oracles: messages and counts by hand."""

import contextlib
import errno
import os
import subprocess
import time
import types
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from diffusers.tpu import planner
from diffusers.tpu.chips import devices
from diffusers.tpu.chips.devices import Target, jax_devices, keep_compiled_programs
from diffusers.tpu.common import errors as failures
from diffusers.tpu.common.errors import ChipBusy, NoChip, OutOfCoreMemory, within_hbm
from diffusers.tpu.compile.programs import Program
from diffusers.tpu.planner import kept
from diffusers.tpu.planner.aot import CompiledProgram


fault = pytest.mark.fault


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


@contextlib.contextmanager
def set_for_jax(**settings):
    """JAX with these settings, and an empty cache in memory."""
    before = {name: getattr(jax.config, name) for name in settings}

    def take(values: dict):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()

    take(settings)
    try:
        yield
    finally:
        take(before)


@fault("planner-entry-corrupt")
@pytest.mark.parametrize("content", [b"nonsense", zlib.compress(b'{"made": 1')])
def test_a_corrupt_answer_is_removed_and_asked_again(asked, tmp_path, warned, content):
    assert asked() == asked() == ("text", 1)
    (entry,) = (tmp_path / "cache").glob("*/*")
    entry.write_bytes(content)
    assert asked() == ("text", 2) and str(entry) in warned[0] and "removed" in warned[0]
    assert asked() == ("text", 2) and len(warned) == 1


@fault("planner-configuration-changed")
@pytest.mark.parametrize("model", ["of/the-hub", "folder@WanImageToVideoPipeline"])
def test_a_plan_is_of_what_the_configuration_holds(model, tmp_path, monkeypatch):
    monkeypatch.setenv("DIFFUSERS_TPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(planner, "run_in_child", lambda *asked, **how: {"of": config.read_text()})
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "folder" / "transformer" / "config.json"
    config.parent.mkdir(parents=True)
    monkeypatch.setattr(planner, "snapshot_download", lambda name, **how: {"of/the-hub": str(config.parents[1])}[name])
    for content in ("2 layers", "40 layers", "2 layers"):
        config.write_text(content)
        assert planner.Question(planner.PLANS, {"model": model}).answer() == {"of": content}


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
    with set_for_jax(jax_compilation_cache_dir=None):
        keep_compiled_programs(str(tmp_path / "cache"))
        assert jax.config.jax_compilation_cache_dir is None and "DIFFUSERS_TPU_CACHE" in warned[-1]
    assert (tmp_path / "cache").read_text() == "a file"


def test_a_plan_that_cannot_be_kept_is_said_before_it_is_asked(tmp_path, monkeypatch, warned):
    monkeypatch.setenv("DIFFUSERS_TPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(planner, "run_in_child", lambda *asked, **how: {"said": [*warned]})
    (tmp_path / "cache").write_text("a file")
    (sentence,) = planner.Question(planner.PLANS, {"model": "wan-1.3b"}).answer()["said"]
    assert "DIFFUSERS_TPU_CACHE" in sentence and warned == [sentence]


@fault("program-entry-corrupt")
def test_a_corrupt_entry_of_jaxs_cache_is_compiled_again(chips, tmp_path):
    def compute():
        return jax.jit(lambda x: jnp.sin(x) * 17 + 3)(jnp.ones(5)).tolist()

    kept = {"jax_compilation_cache_dir": str(tmp_path), "jax_persistent_cache_min_compile_time_secs": 0.0}
    with set_for_jax(**kept):
        expected = compute()
        entries = [path for path in tmp_path.iterdir() if path.name.endswith("-cache")]
        assert entries
        for entry in entries:
            entry.write_bytes(b"nonsense")
        jax.clear_caches()
        with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
            assert compute() == expected


CORE = {  # of libtpu 0.0.42.1
    "VMEM": "E1001: CompileTimeScopedVmemOom:\nRan out of memory in memory space vmem while allocating on stack for %call. Scoped"
    " allocation with size 32.00M and limit 16.00M exceeded scoped vmem limit by 16.00M.",
    "SMEM": "Allocation (size=4194304) would exceed memory (size=1048576) :: #allocation2 [shape = 'f32[1048576]{0:T(128)}',"
    " space=smem, size = 0x400000, scoped, tag = 'scratch operand'] :: kernel",
}


@fault("out-of-core-memory")
@pytest.mark.parametrize("memory", CORE)
def test_a_core_without_room_for_a_kernel_is_no_matter_of_hbm(memory):
    with pytest.raises(OutOfCoreMemory, match=f"a core's {memory} to run X, got none: .*attention_blocks") as told:
        with within_hbm(lambda: "to run X", lambda: pytest.fail("the planner is asked")):
            raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {CORE[memory]}")
    assert "more chips or HBM do not help" in str(told.value) and "\n" not in str(told.value)


@fault("slow-first-run")
def test_a_first_run_that_stands_is_said_while_it_does(warned, monkeypatch):
    monkeypatch.setattr(failures, "WORTH_A_WORD", 0.02)
    waits = types.SimpleNamespace(block_until_ready=lambda: time.sleep(0.5))
    program = Program("Wan", "forward", (), 1, None, {}, None, None, 0.0, executables={"": lambda *args: [[waits]]})
    values = types.SimpleNamespace(weights={}, numbers={}, inputs=[])
    program.run([types.SimpleNamespace(values=values)], [[]])
    program.run([types.SimpleNamespace(values=values)], [[]])  # nobody waits
    said = "the first run of Wan.forward is not done after 0 s"
    assert [sentence.partition(":")[0] for sentence in warned] == [said] * 2  # after 0.02 s and 0.2 s


def refusing_chips(monkeypatch, text: str, node: str = "/dev/vfio/0"):
    def refuse(platform):
        raise RuntimeError(f"Unable to initialize backend 'tpu': {text}")

    monkeypatch.setattr(jax, "devices", refuse)
    monkeypatch.setattr(devices, "device_nodes", lambda: [node])
    return jax_devices.__wrapped__(Target("tpu", "v6e"))


FAILED = "UNKNOWN: TPU initialization failed: open({0}): "
BUSY = FAILED + "Device or resource busy: Couldn't open iommu group {0}"
CHIPS = [
    (ChipBusy, "ABORTED: The TPU is already in use by process with pid 22. Not attempting to load libtpu.so", "process 22 has it"),
    (ChipBusy, "ABORTED: The TPU is already in use by another process probably owned by another user.", "libtpu_lockfile"),
    (ChipBusy, BUSY.format("/dev/vfio/0"), "sudo lsof"),
    (NoChip, FAILED.format("/dev/vfio/0") + "Permission denied: Couldn't open", "right to open /dev/vfio/0"),
    (NoChip, FAILED.format("/dev/accel0") + "Operation not permitted", "container needs them as devices"),
    (NoChip, "INTERNAL: Failed to get global TPU topology.", "each of them; .*here: TPU_WORKER_HOSTNAMES=a,b"),
    (RuntimeError, "something else", "something else"),
]  # fmt: skip


@fault("chip-in-use", "chip-denied", "no-topology")
@pytest.mark.parametrize("error, text, words", CHIPS)
def test_a_chip_that_this_process_cannot_have(monkeypatch, error, text, words):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    with pytest.raises(error, match=words) as told:
        refusing_chips(monkeypatch, text)
    assert type(told.value) is error


@fault("chip-in-use-by")
def test_the_process_that_has_a_chips_file_open_is_named(monkeypatch, tmp_path):
    node = tmp_path / "0"
    node.write_text("")
    with open(node), subprocess.Popen(["sleep", "60"], stdin=open(node)) as other:
        try:
            with pytest.raises(ChipBusy, match=rf"process {other.pid} \(sleep\) has it"):
                refusing_chips(monkeypatch, BUSY.format(node), str(node))
        finally:
            other.kill()
