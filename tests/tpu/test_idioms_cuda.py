"""`torch.cuda`, `torch.accelerator` and modes of torch on the TPU path. Oracle: what is on the chips; the same line without."""

import copy
import time

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState, cpu_offload_with_hook, dispatch_model
from accelerate.utils import find_executable_batch_size
from torch.profiler import ProfilerActivity

import tiny
from conftest import assert_same
from diffusers import ContextParallelConfig, PixArtTransformer2DModel, TensorParallelConfig, tpu
from diffusers.tpu import bridge
from diffusers.tpu.common.errors import within_hbm
from diffusers.utils.torch_utils import get_device


pytestmark = pytest.mark.usefixtures("idioms")
idiom = pytest.mark.idiom


@idiom("cuda-available", "accelerator", "cuda-properties")
def test_the_commonest_line_of_all():
    assert ("cuda" if torch.cuda.is_available() else "cpu") == "cuda" and torch.cuda.device_count() == 1
    assert torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == "cuda"
    assert get_device() == "cuda" and Accelerator().device.type == "cuda" and torch.cuda.current_device() == 0
    assert torch.cuda.is_bf16_supported() and torch.cuda.get_device_capability() == (8, 0)
    properties = torch.cuda.get_device_properties(0)
    assert torch.cuda.get_device_name() == properties.name == "TPU (simulated on the CPU)"
    assert properties.multi_processor_count == 2 and properties.total_memory > 2**30


@idiom("accelerate")
def test_accelerate():
    x, layer = torch.randn(2, device="cuda"), torch.nn.Linear(2, 2)
    expected = layer(x)
    assert_same(Accelerator().prepare(copy.deepcopy(layer))(x), expected)
    assert_same(dispatch_model(copy.deepcopy(layer), {"": 0})(x), expected)
    model, hook = cpu_offload_with_hook(layer, "cuda")
    assert_same(model(x), expected)
    hook.offload()


@pytest.fixture
def alone():
    """A process that no launcher started; its process group ends with the test."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            patch.delenv(name, raising=False)
        yield patch
        if dist.is_initialized():
            dist.destroy_process_group()


GROUPS = [{"backend": "nccl", "device_id": torch.device("cuda", 0)}, {}, {"backend": "cuda:nccl,cpu:gloo"}]


@idiom("distributed", "device-mesh", "accelerate-processes")
@pytest.mark.parametrize("given", GROUPS, ids=str)
def test_a_process_for_each_gpu_is_one_for_all_chips(alone, said, given):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE") if "device_id" in given else ():  # as torchrun --nproc-per-node 1
        alone.setenv(name, "1")
    dist.init_process_group(**given)
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
    assert "one process has all chips" in said.pop() and not said
    x = torch.ones(3, device="cuda")
    dist.all_reduce(x, group=dist.new_group([0], backend="nccl"))
    assert_same(x, torch.ones(3))
    mesh = dist.init_device_mesh("cuda", (1, 1), mesh_dim_names=("ring", "ulysses"))
    assert mesh["ring"].size() == 1
    with PartialState().split_between_processes(["a", "b"]) as prompts:
        assert prompts == ["a", "b"]
    with pytest.raises(RuntimeError, match=r"mesh of one process on the TPU path, got \(4,\).*TPUConfig\(mesh"):
        dist.init_device_mesh("cuda", (4,))


IN_A_GROUP = {
    "barrier": lambda layer, x: dist.barrier(),
    "barrier of a device": lambda layer, x: dist.barrier(device_ids=[0]),
    "DistributedDataParallel": lambda layer, x: torch.nn.parallel.DistributedDataParallel(layer, [0], 0)(x),
    "of a device": lambda layer, x: torch.nn.parallel.DistributedDataParallel(layer, device_ids=["cuda:0"])(x),
    "DataParallel": lambda layer, x: torch.nn.DataParallel(layer)(x),
    "DataParallel of two": lambda layer, x: torch.nn.DataParallel(layer, device_ids=[0, 1], output_device=1)(x),
}


@idiom("distributed", "data-parallel")
@pytest.mark.parametrize("line", IN_A_GROUP)
def test_what_a_group_does_once_a_model_is_on_the_path(alone, line):
    bridge.environment()  # torchax is there
    dist.init_process_group("nccl")
    layer, x = torch.nn.Linear(2, 2).cuda(), torch.randn(3, 2)
    if (result := IN_A_GROUP[line](layer, x)) is not None:
        assert_same(result, layer(x))
        result.sum().backward()
        assert_same(layer.bias.grad, torch.full((2,), 3.0))


@idiom("torchrun")
def test_one_of_several_processes_is_told_to_start_one(alone, said):
    with pytest.raises(RuntimeError, match="world_size 1 on the TPU path, got 8: .*python script.py"):
        dist.init_process_group("nccl", rank=0, world_size=8)
    for name, value in {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}.items():
        alone.setenv(name, value)
    for started in (lambda: dist.init_process_group("nccl"), lambda: tpu.install(torch.nn.Linear(1, 1))):
        with pytest.raises(RuntimeError, match="one of 8: one process has all chips.*python script.py"):
            started()
    assert not said and not dist.is_initialized()


@idiom("parallelism")
def test_parallelism_over_processes_is_waived(said, tmp_path):
    model = tiny.pixart().transformer
    for degree in (8, 1):  # one process, as scripts are told to start
        model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=degree))
    model.save_pretrained(tmp_path)
    PixArtTransformer2DModel.from_pretrained(tmp_path, parallel_config=TensorParallelConfig(tp_degree=2))
    assert "TPUConfig(mesh=(dp, sp, tp))" in said.pop() and not said and model._parallel_config is None


@idiom("out-of-memory")
@pytest.mark.parametrize("scripts", ["except", "accelerate"])
def test_a_chip_without_room_raises_what_scripts_catch(scripts, new_garbage):
    tried = []

    def work(batch_size):
        tried.append(batch_size)
        with within_hbm(lambda: "to run X", lambda: "diffusers-tpu plan"):
            if batch_size > 2:
                raise RuntimeError("RESOURCE_EXHAUSTED: Attempting to reserve 5.00G. There are 1.00G free")

    if scripts == "accelerate":
        find_executable_batch_size(work, starting_batch_size=3)()
        assert tried == [3, 2]
    else:
        with pytest.raises(torch.cuda.OutOfMemoryError, match=r"a chip to run X.*\(5 GiB asked for, 1 GiB there\)"):
            work(4)


@idiom("cuda-memory")
def test_memory_counts_what_is_on_the_chips():
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    array = jnp.ones((1 << 20,), jnp.float32).block_until_ready()
    assert torch.cuda.memory_allocated() - before == array.nbytes
    free, total = torch.cuda.mem_get_info()
    assert total - free == torch.cuda.memory_reserved() and torch.cuda.max_memory_allocated() >= before + array.nbytes
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == before + array.nbytes
    assert "GiB in use" in torch.cuda.memory_summary()
    del array
    assert torch.cuda.memory_allocated() == before
    torch.cuda.ipc_collect()


SENSORS = ["utilization", "memory_usage", "temperature", "power_draw", "clock_rate"]
ANSWERS = {
    "get_per_process_memory_fraction": 1.0,
    "get_allocator_backend": "native",
    "memory_snapshot": [],
    "host_memory_stats": {},
    "host_memory_stats_as_nested_dict": {},
    "reset_peak_host_memory_stats": None,
    "reset_accumulated_host_memory_stats": None,
    "get_sync_debug_mode": 0,
}


@idiom("cuda-memory", "cuda-sensors")
@pytest.mark.parametrize("name", [*ANSWERS, "memory_stats_as_nested_dict", "record_stream", *SENSORS])
def test_every_question_about_a_gpu_has_an_answer_or_a_way_out(name):
    if name == "record_stream":
        assert torch.ones(2, device="cuda").record_stream(torch.cuda.current_stream()) is None
    elif name == "memory_stats_as_nested_dict":
        for module in (torch.cuda, torch.accelerator):
            flat = {key: n for key, n in module.memory_stats().items() if key.startswith("active")}
            nested = torch.cuda.memory_stats_as_nested_dict()["active_bytes"]["all"]
            assert flat == {f"active_bytes.all.{time}": nested[time] for time in ("current", "peak")}
    elif name in SENSORS:
        with pytest.raises(NotImplementedError, match="leave it out; `tpu-info`"):
            getattr(torch.cuda, name)()
    else:
        assert getattr(torch.cuda, name)() == ANSWERS[name]


@idiom("cuda-profiler")
@pytest.mark.parametrize(
    "profile",
    [
        lambda: torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]),
        lambda: torch.profiler.profile(activities=[ProfilerActivity.CUDA], record_shapes=True),
        lambda: torch.autograd.profiler.profile(use_device="cuda"),
    ],
    ids=["both", "cuda", "autograd"],
)
def test_a_profile_of_the_gpu_is_the_hosts(profile, capfd):
    with profile() as traced:
        torch.ones(2) + 1
    assert "CUDA event" not in capfd.readouterr().err
    assert "aten::add" in traced.key_averages().table(sort_by="cuda_time_total")


@idiom("cuda-synchronize", "cuda-event", "cuda-stream")
def test_time_between_two_events_is_that_of_the_work():
    work = jax.jit(lambda x: jax.lax.fori_loop(0, 40, lambda _, y: jnp.sin(y @ x), x))
    x = jnp.eye(400)
    work(x).block_until_ready()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(0):
        start.record()
        began = time.perf_counter()
        result = work(x)
        end.record(torch.cuda.current_stream())
    assert result.is_ready()
    torch.cuda.synchronize()
    took = 1e3 * (time.perf_counter() - began)
    assert 0.5 * took < start.elapsed_time(end) <= took and end.query()
    with pytest.raises(ValueError, match="recorded"):
        start.elapsed_time(torch.cuda.Event())


@idiom("cuda-seed")
def test_seeds_of_an_accelerator_are_the_cpu_generators():
    torch.cuda.manual_seed_all(3)
    first, state = torch.randn(2, device="cuda"), torch.cuda.get_rng_state()
    with torch.random.fork_rng():
        second = torch.randn(2, device="cuda")
    torch.cuda.set_rng_state(state)
    assert_same(torch.randn(2), second)
    torch.manual_seed(3)
    assert_same(torch.randn(2), first)


@idiom("cuda-flags", "cuda-graph")
def test_settings_that_mean_nothing_here_are_taken():
    for place, name in ((torch.backends.cuda.matmul, "allow_tf32"), (torch.backends.cudnn, "benchmark")):
        before = getattr(place, name)
        setattr(place, name, True)
        assert getattr(place, name)
        setattr(place, name, before)
    torch.cuda.nvtx.range_push("step")
    torch.cuda.nvtx.range_pop()
    torch.cuda.set_device(0)
    torch.cuda.set_per_process_memory_fraction(0.9)
    graph = torch.cuda.graph
    makers = torch.cuda.make_graphed_callables, torch.cuda.graph_pool_handle
    for record in (torch.cuda.CUDAGraph, lambda: graph(None), lambda: makers[0]([], []), makers[1]):
        with pytest.raises(NotImplementedError, match="compiled whole"):
            record()


@idiom("autocast")
def test_autocast_casts_the_hosts_tensors_too(said):
    x = torch.randn(2, 2)
    casts = torch.autocast("cuda", dtype=torch.bfloat16), torch.autocast("tpu", torch.bfloat16)
    for cast in (*casts, torch.amp.autocast("cuda")):
        with cast:
            assert (x @ x).dtype == torch.bfloat16 and torch.is_autocast_enabled()
            with torch.autocast("cuda", enabled=False):
                assert (x @ x).dtype == torch.float32 and not torch.is_autocast_enabled()
            assert (x @ x).dtype == torch.bfloat16
        assert (x @ x).dtype == torch.float32
    assert len(said) == 1 and "bfloat16 takes its place" in said[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16 and not torch.is_autocast_enabled()


@idiom("compile-other")
@pytest.mark.filterwarnings("ignore")
def test_what_is_no_model_is_torchs_to_compile(said):
    def plus(x):
        d = x.device if isinstance(x.device, torch.device) else None
        return x.to("cpu") + torch.ones(2, device=d) + torch.zeros_like(x)

    assert_same(torch.compile(plus, backend="eager", fullgraph=True)(torch.ones(2)), torch.full((2,), 2.0))
    assert torch.compile(backend="eager")(plus) is not plus and not said
    layer = torch.nn.Linear(2, 2)
    assert torch.compile(layer, backend="eager") is not layer
    layer.compile(backend="eager")
    assert_same(layer(torch.ones(2)), torch.nn.functional.linear(torch.ones(2), layer.weight, layer.bias))
