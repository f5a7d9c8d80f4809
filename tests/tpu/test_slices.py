"""Runs of several processes and slices, without other processes. Oracles: what is found, said and counted by hand."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from jax._src.clusters import ClusterEnv, cloud_tpu_cluster
from jax.sharding import PartitionSpec

from diffusers.tpu import TPUConfig
from diffusers.tpu.chips import figures, mesh
from diffusers.tpu.chips.hosts import agreement, run
from diffusers.tpu.chips.sharding import plan_weights
from diffusers.tpu.common import config
from diffusers.tpu.compile.executables import Executables
from diffusers.tpu.compile.store.keys import Key
from diffusers.tpu.planner import aot, timing


@pytest.fixture(autouse=True)
def clusters_are_asked_anew():
    run._of_cluster.cache_clear()
    yield
    run._of_cluster.cache_clear()


VARIABLES = {
    "JAX_NUM_PROCESSES=2": "JAX_COORDINATOR_ADDRESS=HOST:PORT",
    "JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=2 JAX_COORDINATOR_ADDRESS=a:1": "smaller JAX_PROCESS_ID",
    "JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0 JAX_COORDINATOR_ADDRESS=a": "HOST:PORT",
    "JAX_NUM_PROCESSES=two": "JAX_NUM_PROCESSES to be a number",
}


def test_variables_are_checked(monkeypatch):
    for given, words in VARIABLES.items():
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=words):
            for variable in given.split():
                patch.setenv(*variable.split("="))
            run.find("cpu")


def cluster(count: int, present=lambda: True):
    return SimpleNamespace(
        __name__="Cluster", opt_in_only_method=False, is_env_present=present,
        get_process_count=lambda: count, get_process_id=lambda: count - 1,
    )  # fmt: skip


def no_answer():
    raise ConnectionError("no answer")


def gke(monkeypatch, **given):
    """A TPU host as GKE describes it, by variables alone."""
    monkeypatch.setattr(ClusterEnv, "_cluster_types", [cloud_tpu_cluster.GkeTpuCluster])
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    for name, value in {"MEGASCALE_NUM_SLICES": "1", "MEGASCALE_SLICE_ID": "0", **given}.items():
        monkeypatch.setenv(name, value)


CLUSTERS = [  # a list of clusters, or a host of GKE's; what is found
    ([cluster(1)], {}, None),
    ([cluster(4, lambda: False), cluster(8)], {}, config.Processes(None, 8, 7)),
    ([cluster(8)], {"JAX_NUM_PROCESSES": "1"}, None),
    ([cluster(8, no_answer)], {}, None),
    (None, {"TPU_WORKER_HOSTNAMES": "a"}, None),
    (None, {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}, config.Processes(None, 2, 1)),
    (None, {"TPU_WORKER_HOSTNAMES": "a,b", "JAX_PROCESS_ID": "1"}, config.Processes(None, 2, 1)),
]


@pytest.mark.parametrize("clusters, given, found", CLUSTERS)
def test_clusters_are_asked_on_a_tpu_only(monkeypatch, clusters, given, found):
    gke(monkeypatch, **given)
    if clusters is not None:
        monkeypatch.setattr(ClusterEnv, "_cluster_types", clusters)
    assert run.find("tpu") == found
    assert clusters is None or run.find("cpu") is None


def test_a_host_without_a_number_is_told_which_variable_it_lacks(monkeypatch):
    gke(monkeypatch, TPU_WORKER_HOSTNAMES="a,b")
    with pytest.raises(ValueError, match="which of the 2 processes .* GkeTpuCluster .* Set TPU_WORKER_ID"):
        run.find("tpu")


def test_a_cluster_that_does_not_answer_is_asked_once_and_not_for_long(monkeypatch, warned):
    asked = []
    silent = cluster(8, lambda: asked.append(time.sleep(20)) or True)
    monkeypatch.setattr(ClusterEnv, "_cluster_types", [silent])
    monkeypatch.setattr(run, "ASKING", 0.1)
    start = time.monotonic()
    assert run.number("tpu") == run.number("tpu") == 0 and run.find("tpu") is None
    assert time.monotonic() - start < 5
    assert {said[:60] for said in warned} == {"this host is taken for the only one of the run: Cluster cann"}
    assert "no answer within" in warned[0]


def test_who_waits_for_the_others_says_so_and_a_pause_ends_nobody(monkeypatch, warned):
    """JAX is a stub that joins late."""
    given = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: given.update(kwargs) or time.sleep(0.3))
    monkeypatch.setattr(run, "WORTH_A_WORD", 0.1)
    run._initialize("tpu", config.Processes(None, 4, 2))
    assert any("process 2 waits for the 3 other processes of this run" in said for said in warned)
    assert given["heartbeat_timeout_seconds"] > run.PAUSE


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


@pytest.fixture
def exchange(monkeypatch):
    """A function from what the other processes say to the exchange of this one with them."""
    for name in ("_client", "_number", "_count", "_exchanges"):
        monkeypatch.setattr(agreement, name, getattr(agreement, name))
    return lambda *said: agreement.start(Store(dict(enumerate(map(json.dumps, said), 1))), 0, len(said) + 1)


MINE = ["a program", {"program": "1", "options": ""}]


def test_what_differs_is_named(exchange):
    exchange(MINE, MINE)
    agreement.agree(*MINE)
    for theirs, words in (
        (["a program", {"program": "2", "options": ""}], "got another program in process 2 than in process 0"),
        (["a program", {"program": "1"}], "got another options in process 2"),
        (["a call", {"program": "1", "options": ""}], "got a program in process 0 and a call in process 2"),
    ):
        exchange(MINE, theirs)
        with pytest.raises(RuntimeError, match=words):
            agreement.agree(*MINE)


@pytest.mark.parametrize("theirs, found", [("a mark", "a mark"), ("NoneType", None), ("tuple", None)])
def test_what_one_process_lacks_all_compile(monkeypatch, exchange, theirs, found):
    exchange(["what is kept of Linear.forward for ()", {"": theirs}])
    executables = Executables(SimpleNamespace(module=torch.nn.Linear(1, 1), config=TPUConfig()))
    monkeypatch.setattr(executables, "_find", lambda key: "a mark")
    call = SimpleNamespace(entry="forward", shapes=())
    assert executables.recall(Key("Linear", {}, {}), call) == found
    assert executables.recall(None, call) is None


def test_digests_tell_values_apart():
    seeded, drawn = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    assert agreement.digest([seeded]) == agreement.digest([drawn])
    torch.randn(1, generator=drawn)
    tensors = [seeded, drawn, torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16), np.zeros(2), np.ones(2)]
    assert (
        len({agreement.digest(value) for value in (*tensors, 1, True, "1", None, {"scale": 1}, {"other": 1}, [[1]])})
        == 13
    )


def device(number: int, process: int, part: int = 0, platform: str = "cpu"):
    return SimpleNamespace(
        id=number, process_index=process, slice_index=part, platform=platform, device_kind="TPU v6 lite",
        coords=(number % 2, number // 2 % 2, 0), core_on_chip=0,
    )  # fmt: skip


def test_dp_then_sp_cross_from_slice_to_slice():
    slice_chips = tuple(device(n % 4, n // 4, n // 4, "tpu") for n in range(8))
    for degrees in ((2, 4, 1), (4, 2, 1), (2, 2, 2), (1, 8, 1)):
        made = mesh._over_slices(slice_chips, degrees, 2)
        parts = np.vectorize(lambda chip: chip.slice_index)(made)
        assert made.shape == degrees and sorted(id(chip) for chip in made.flat) == sorted(map(id, slice_chips))
        assert parts.ravel().tolist() == [0] * 4 + [1] * 4, degrees  # dp, or sp where that is one, is the outer axis


def test_meshes_that_cannot_be_are_refused():
    slice_chips = tuple(device(n, n // 4, n // 4) for n in range(8))
    with pytest.raises(ValueError, match="heads and features do not cross.*dp 2"):
        mesh.make_mesh.__wrapped__(slice_chips, (1, 1, 8))
    with pytest.raises(ValueError, match="as many chips of each of the 2 processes, got 1,1,1"):
        mesh.make_mesh.__wrapped__(slice_chips, (1, 1, 1))
    assert mesh.plan_degrees(16, None, 2, 2) == (2, 8, 1) and mesh.plan_degrees(16, None, 1, 2) == (2, 8, 1)
    assert mesh.plan_degrees(32, None, 2, 4) == (4, 8, 1) and mesh.plan_degrees(24, None, 2, 3) == (6, 4, 1)
    slice_chips = tuple(device(n, n // 4) for n in range(8))  # part of them is of every process
    assert [d.id for d in mesh._of_each_process(slice_chips, 4, (2, 2, 1))] == [0, 1, 4, 5]


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
        assert specs["other"] == PartitionSpec(None, ("dp", "sp", "tp")[slices - 1 :])
        assert coverage.bytes_per_chip == (1024 * 512 * 4 + 256 * 512 * 4) // 8 * slices


def test_what_comes_from_another_slice_takes_the_network():
    """1 MiB over 12.5 GB/s; what is computed meanwhile hides as much of it as it takes."""
    text = Path(__file__).with_name("programs").joinpath("slices.hlo").read_text()
    chip = figures.CHIPS["v6e"]
    compiled = aot.CompiledProgram(text, {}, {}, 0.0)
    timed = timing.time_program(compiled, chip, [(0, 0, 0, 0)] * 2)
    for way in timed.values():
        assert way.seconds["collectives"] == pytest.approx(2**20 / 12.5e9)
