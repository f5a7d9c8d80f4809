"""Oracle: one process with as many simulated chips on an equal mesh, to the last bit; counts of bytes; what is killed, by its name."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec

import host_runs
from diffusers import DiffusionPipeline
from diffusers.tpu import TPUConfig, config, install
from diffusers.tpu.chips import figures, hosts, mesh
from diffusers.tpu.chips.hosts import agreement, run, watch
from diffusers.tpu.chips.sharding import plan_weights
from diffusers.tpu.compile.executables import Executables
from diffusers.tpu.compile.store.keys import Key
from diffusers.tpu.planner import aot, timing
from diffusers.utils import logging


MODEL = Path(__file__).resolve().parents[2] / "examples/tpu/models/wan-shapes"
LIMIT = 30.0  # seconds within which the death of one ends the others
SILENT = run.HEARTBEAT + LIMIT  # the same of one that says nothing


def start(count: int, chips: int, command: list[str], folder: Path, cache: str, **more) -> list[subprocess.Popen]:
    """The processes of a run on loopback; their output is in FOLDER/NUMBER.txt."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    common = {
        "DIFFUSERS_TPU": "cpu",
        "DIFFUSERS_TPU_DEVICES": str(chips),
        "DIFFUSERS_TPU_CACHE": cache,
        "XLA_FLAGS": " ".join(flags),
        "NPROC": "8",  # threads, as the process of the tests has
    }
    if count > 1:
        common |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(count)}
    started = []
    for number in range(count):
        given = {**os.environ, **common, **more, **({"JAX_PROCESS_ID": str(number)} if count > 1 else {})}
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
@pytest.mark.parametrize("count, own", [(2, 4), (4, 2)])
def test_eight_chips_of_several_processes_are_as_eight_of_one(compiled_programs, tmp_path, count, own):
    """dp from process to process, sp too, and tp inside of them: to the last bit."""
    meshes = [f"video:{degrees}" for degrees in ("2,4,1", "1,8,1", "2,2,2", "4,2,1")]
    alone, several = tmp_path / "alone", tmp_path / "several"
    for folder, processes, chips in ((alone, 1, 8), (several, count, own)):
        folder.mkdir()
        started = start(processes, chips, steps(folder, *meshes, "read:1,8,1"), folder, compiled_programs)
        assert ended(started) == [0] * processes, text(folder, 0)[-3000:]
    for made in alone.glob("video-*.npy"):
        for number in range(count):
            theirs = np.load(several / made.name.replace("-0.npy", f"-{number}.npy"))
            np.testing.assert_array_equal(theirs, np.load(made), err_msg=made.name)
    read = [json.loads((several / f"read-{number}.json").read_text()) for number in range(count)]
    assert all(one == own for one, own, _ in read)


@pytest.mark.slow
@pytest.mark.parametrize(
    "count, victim, how, why",
    [
        (2, 0, "SIGKILL", "it was killed"),
        (2, 1, "SIGTERM", "it was killed"),
        (4, 2, "SIGKILL", "it was killed"),
        (2, 0, "raise", "ValueError: no room\n  on the disk"),
        (4, 3, "raise", "ValueError: no room\n  on the disk"),
    ],
)
def test_who_ends_ends_the_others_with_its_name(compiled_programs, tmp_path, count, victim, how, why):
    processes = start(
        count, 4 // count, steps(tmp_path, "latents:2,2,1", f"end:{victim}:{how}"), tmp_path, compiled_programs
    )
    statuses = ended(processes)
    after = time.time()
    assert all(statuses), statuses
    others = [number for number in range(count) if number != victim]
    for number in others:
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
    processes = start(2, 2, steps(tmp_path, step), tmp_path, compiled_programs)
    assert ended(processes)[0] == 1
    assert words in text(tmp_path, 0)


@pytest.mark.slow
def test_the_first_process_writes_and_tells(compiled_programs, tmp_path):
    """`diffusers-tpu generate` without a seed: one file, one table of times; the others say nothing."""
    program = "import sys; from diffusers.tpu.apps.cli import main; sys.exit(main())"
    size = "--height 64 --width 64 --num-frames 9 --num-inference-steps 2 --guidance-scale 2".split()
    command = [
        "-c",
        program,
        "generate",
        str(MODEL),
        "--prompt",
        host_runs.PROMPT,
        *size,
        "--output",
        str(tmp_path / "out.mp4"),
    ]
    processes = start(2, 2, command, tmp_path, compiled_programs)
    assert ended(processes) == [0, 0], text(tmp_path, 0)[-3000:]
    assert "wrote" in text(tmp_path, 0) and "2 processes, each 2 chips" in text(tmp_path, 0)
    said = [line for line in text(tmp_path, 1).splitlines() if line.strip() and not line.startswith("[Gloo]")]
    assert said == [] and sorted(p.name for p in tmp_path.glob("out*")) == ["out.mp4", "out.png"]


# Without other processes


@pytest.fixture(autouse=True)
def clusters_are_asked_anew():
    run._of_cluster.cache_clear()
    yield
    run._of_cluster.cache_clear()


@pytest.mark.parametrize(
    "given, words",
    [
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_COORDINATOR_ADDRESS=HOST:PORT"),
        (
            {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2", "JAX_COORDINATOR_ADDRESS": "a:1"},
            "smaller JAX_PROCESS_ID",
        ),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0", "JAX_COORDINATOR_ADDRESS": "a"}, "HOST:PORT"),
        ({"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES to be a number"),
    ],
)
def test_variables_are_checked(monkeypatch, given, words):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        run.find("cpu")


def cluster(count: int, there: bool = True, error: Exception | None = None):
    def present():
        if error is not None:
            raise error
        return there

    return SimpleNamespace(
        __name__="Cluster",
        opt_in_only_method=False,
        is_env_present=present,
        get_process_count=lambda: count,
        get_process_id=lambda: count - 1,
    )


@pytest.mark.parametrize(
    "clusters, given, found",
    [
        ([cluster(1)], {}, None),
        ([cluster(4, there=False), cluster(8)], {}, config.Processes(None, 8, 7)),
        ([cluster(8)], {"JAX_NUM_PROCESSES": "1"}, None),
        ([cluster(8, error=ConnectionError("no answer"))], {}, None),
        ([], {}, None),
    ],
)
def test_clusters_are_asked_on_a_tpu_only(monkeypatch, clusters, given, found):
    from jax._src.clusters import ClusterEnv

    monkeypatch.setattr(ClusterEnv, "_cluster_types", clusters)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert run.find("tpu") == found
    assert run.find("cpu") is None


def gke(monkeypatch, **given):
    """A TPU host as GKE describes it, by variables alone."""
    from jax._src.clusters import ClusterEnv, cloud_tpu_cluster

    monkeypatch.setattr(ClusterEnv, "_cluster_types", [cloud_tpu_cluster.GkeTpuCluster])
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "1")
    monkeypatch.setenv("MEGASCALE_SLICE_ID", "0")
    for name, value in given.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "given, found",
    [
        ({"TPU_WORKER_HOSTNAMES": "a"}, None),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}, config.Processes(None, 2, 1)),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "JAX_PROCESS_ID": "1"}, config.Processes(None, 2, 1)),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "JAX_NUM_PROCESSES": "1"}, None),
    ],
)
def test_hosts_that_gke_names(monkeypatch, given, found):
    gke(monkeypatch, **given)
    assert run.find("tpu") == found


def test_a_host_without_a_number_is_told_which_variable_it_lacks(monkeypatch):
    gke(monkeypatch, TPU_WORKER_HOSTNAMES="a,b")
    with pytest.raises(ValueError, match="which of the 2 processes .* GkeTpuCluster .* Set TPU_WORKER_ID"):
        run.find("tpu")


def test_a_cluster_that_does_not_answer_is_asked_once_and_not_for_long(monkeypatch, caplog):
    from jax._src.clusters import ClusterEnv

    asked = []
    silent = cluster(8)
    silent.is_env_present = lambda: asked.append(time.sleep(20)) or True
    monkeypatch.setattr(ClusterEnv, "_cluster_types", [silent])
    monkeypatch.setattr(run, "ASKING", 0.1)
    monkeypatch.setattr(logging.get_logger("diffusers"), "propagate", True)
    start = time.monotonic()
    with caplog.at_level("WARNING"):
        assert run.is_main("tpu") and run.is_main("tpu") and run.find("tpu") is None
    assert time.monotonic() - start < 5
    assert {record.getMessage()[:60] for record in caplog.records} == {
        "this host is taken for the only one of the run: Cluster cann"
    }
    assert "no answer within" in caplog.text


def test_who_waits_for_the_others_says_so_and_a_pause_ends_nobody(monkeypatch, caplog):
    """JAX is a stub that joins late; the connection that is probed is one of ours."""
    given = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: given.update(kwargs) or time.sleep(0.3))
    monkeypatch.setattr(run, "WORTH_A_WORD", 0.1)
    monkeypatch.setattr(logging.get_logger("diffusers"), "propagate", True)
    with caplog.at_level("WARNING"):
        run._initialize("tpu", config.Processes(None, 4, 2))
    assert "process 2 waits for the 3 other processes of this run" in caplog.text
    assert given["heartbeat_timeout_seconds"] > run.PAUSE
    one, other = connected()
    with one, other:
        probed = watch._probed(one)
        idle, between, count = (probed.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in watch.PROBES)
        assert idle + between * count > run.PAUSE


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


@pytest.mark.slow
def test_a_process_that_stands_still_for_a_minute_ends_nobody(compiled_programs, tmp_path):
    """As a host does that is moved for maintenance."""
    made = steps(tmp_path, "latents:2,2,1", f"pause:1:{run.PAUSE + 5}", "latents:2,2,1")
    assert ended(start(2, 2, made, tmp_path, compiled_programs)) == [0, 0], text(tmp_path, 0)[-3000:]


def test_alone_nothing_is_asked():
    assert hosts.joined() is None and hosts.process_count() == 1 and hosts.of_first("x") == "x"
    hosts.agree("a call", {"x": "1"})
    hosts.failed("nobody hears")


class Store:
    """JAX's client as far as exchanges use it, between processes that are not there: what they say is `others`."""

    def __init__(self, others: dict[int, str]):
        self.others, self.set = others, {}

    def key_value_set(self, key, value):
        self.set[key] = value

    def key_value_delete(self, key):
        pass

    def blocking_key_value_get(self, key, milliseconds):
        return self.others[int(key.rpartition("/")[2])]


@pytest.mark.parametrize(
    "theirs, words",
    [
        (["a program", {"program": "1", "options": ""}], None),
        (["a program", {"program": "2", "options": ""}], "got another program in process 2 than in process 0"),
        (["a program", {"program": "1"}], "got another options in process 2"),
        (["a call", {"program": "1", "options": ""}], "got a program in process 0 and a call in process 2"),
    ],
)
def test_what_differs_is_named(monkeypatch, theirs, words):
    mine = ["a program", {"program": "1", "options": ""}]
    for name in ("_client", "_number", "_count", "_exchanges"):
        monkeypatch.setattr(agreement, name, getattr(agreement, name))
    agreement.start(Store({1: json.dumps(mine), 2: json.dumps(theirs)}), 0, 3)
    if words is None:
        agreement.agree(*mine)
    else:
        with pytest.raises(RuntimeError, match=words):
            agreement.agree(*mine)


@pytest.mark.parametrize("theirs, found", [("a mark", "a mark"), ("NoneType", None), ("tuple", None)])
def test_what_one_process_lacks_all_compile(monkeypatch, theirs, found):
    where = "what is kept of Linear.forward for ()"
    for name in ("_client", "_number", "_count", "_exchanges"):
        monkeypatch.setattr(agreement, name, getattr(agreement, name))
    agreement.start(Store({1: json.dumps([where, {"": theirs}])}), 0, 2)
    executables = Executables(SimpleNamespace(module=torch.nn.Linear(1, 1), config=TPUConfig()))
    monkeypatch.setattr(executables, "_expected", lambda key: "a mark")
    call = SimpleNamespace(entry="forward", shapes=())
    assert executables.recall(Key("Linear", {}, {}), call, 1) == found
    assert executables.recall(None, call, 1) is None


def test_digests_tell_values_apart():
    seeded, drawn = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    assert agreement.digest([seeded]) == agreement.digest([drawn])
    torch.randn(1, generator=drawn)
    values = [
        seeded,
        drawn,
        torch.zeros(2),
        torch.zeros(2, dtype=torch.bfloat16),
        np.zeros(2),
        np.ones(2),
        1,
        True,
        "1",
        None,
    ]
    assert len({agreement.digest(value) for value in values}) == len(values)


def device(number: int, process: int, part: int = 0, platform: str = "cpu"):
    return SimpleNamespace(
        id=number, process_index=process, slice_index=part, platform=platform, device_kind="TPU v6 lite",
        coords=(number % 2, number // 2 % 2, 0), core_on_chip=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    "degrees, one_slice", [((2, 4, 1), [0, 1]), ((4, 2, 1), [0, 0, 1, 1]), ((2, 2, 2), [0, 1]), ((1, 8, 1), None)]
)
def test_dp_then_sp_cross_from_slice_to_slice(degrees, one_slice):
    slice_chips = tuple(device(n % 4, n // 4, n // 4, "tpu") for n in range(8))
    made = mesh._over_slices(slice_chips, degrees, 2)
    parts = np.vectorize(lambda chip: chip.slice_index)(made)
    assert made.shape == degrees and sorted(id(chip) for chip in made.flat) == sorted(map(id, slice_chips))
    if one_slice is None:
        assert parts[0, :, 0].tolist() == [0] * 4 + [1] * 4
    else:
        assert all((parts[row] == expected).all() for row, expected in enumerate(one_slice))


def test_meshes_that_cannot_be_are_refused():
    slice_chips = tuple(device(n, n // 4, n // 4) for n in range(8))
    with pytest.raises(ValueError, match="heads and features do not cross.*dp 2"):
        mesh.make_mesh.__wrapped__(slice_chips, (1, 1, 8))
    with pytest.raises(ValueError, match="as many chips of each of the 2 processes, got 1,1,1"):
        mesh.make_mesh.__wrapped__(slice_chips, (1, 1, 1))
    assert mesh.plan_degrees(16, None, 2, 2) == (2, 8, 1) and mesh.plan_degrees(16, None, 1, 2) == (2, 8, 1)
    assert mesh.plan_degrees(32, None, 2, 4) == (4, 8, 1) and mesh.plan_degrees(24, None, 2, 3) == (6, 4, 1)


def test_part_of_the_chips_is_of_every_process(chips):
    slice_chips = tuple(device(n, n // 4) for n in range(8))
    assert [d.id for d in mesh._of_each_process(slice_chips, 4, (2, 2, 1))] == [0, 1, 4, 5]
    assert mesh.make_mesh(chips, (1, 2, 1)).devices.flat[0] == chips[0]


# Slices of several hosts, and several slices, in plans


def test_several_slices_have_a_name():
    two = figures.find_topology("2xv5litepod-16")
    assert (two.name, two.devices, two.slices, two.shape) == ("2xv5e-16", 32, 2, (4, 4))
    assert figures.find_topology("1xv6e-8") == figures.find_topology("v6e-8")
    for name, words in (("2xv6e-9", "2xv6e-8"), ("0xv6e-8", "expected a topology"), ("2xv5p-8", "slices of v5e v6e")):
        with pytest.raises(ValueError, match=words):
            figures.find_topology(name)


def test_weights_are_stored_whole_in_each_slice():
    shapes = {"blocks.*.to_q.weight": ((1024, 512), 1024 * 512 * 4), "other": ((256, 512), 256 * 512 * 4)}
    rules = ((r"to_q\.weight", PartitionSpec(("dp", "sp"), "tp")),)
    for slices, expected in ((1, PartitionSpec(("dp", "sp"), "tp")), (2, PartitionSpec("sp", "tp"))):
        chips = np.array([device(n, n // 4, n // 4 if slices > 1 else 0) for n in range(8)])
        over = SimpleNamespace(devices=chips.reshape(2, 2, 2), shape={"dp": 2, "sp": 2, "tp": 2}, size=8)
        specs, coverage = plan_weights(shapes, rules, over)
        assert specs["blocks.*.to_q.weight"] == expected
        assert specs["other"] == (PartitionSpec(None, ("dp", "sp")) if slices == 1 else PartitionSpec(None, "sp"))
        assert coverage.bytes_per_chip == (1024 * 512 * 4 // 8 + 256 * 512 * 4 // 4) * slices


def test_what_comes_from_another_slice_takes_the_network():
    """1 MiB over 12.5 GB/s; what is computed meanwhile hides as much of it as it takes."""
    text = (
        "HloModule m, is_scheduled=true\n\nENTRY %main (p: f32[8]) -> f32[8] {\n"
        "  %p = f32[8]{0} parameter(0)\n  %after = token[] after-all()\n"
        "  %recv = (f32[512,512]{1,0}, u32[], token[]) recv(%after), channel_id=2, is_host_transfer=true,"
        ' frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}\n'
        "  %send = (f32[8]{0}, u32[], token[]) send(%p, %after), channel_id=3, is_host_transfer=true,"
        ' frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}\n'
        "  %recv-done = (f32[512,512]{1,0}, token[]) recv-done(%recv), channel_id=2, is_host_transfer=true\n"
        "  %send-done = token[] send-done(%send), channel_id=3, is_host_transfer=true\n"
        "  ROOT %copy = f32[8]{0} copy(%p)\n}\n"
    )
    chip = figures.CHIPS["v6e"]
    compiled = aot.CompiledProgram(text, {}, {}, 0.0)
    timed = timing.time_program(compiled, chip, [(0, 0, 0, 0)] * 2)
    for way in timed.values():
        assert way.seconds["collectives"] == pytest.approx(2**20 / 12.5e9)
