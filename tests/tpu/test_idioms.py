"""Idioms of scripts for CUDA that are torch's alone. Oracle: the same line without the device, and torch's own objects.

Every row of `examples/tpu/IDIOMS.md` is proved by a test marked with its id, in a file `test_idioms*.py`.
"""

import copy
import io
import pickle
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from conftest import assert_same


pytestmark = pytest.mark.usefixtures("idioms")
idiom = pytest.mark.idiom
HERE = Path(__file__).parent
ACCELERATORS = ["cuda", "cuda:0", "tpu", "tpu:0", "xla", "jax", 0]


def test_every_row_of_the_page_has_a_test_and_every_marked_test_a_row():
    pages = "".join(page.read_text() for page in (HERE.parents[1] / "examples" / "tpu").glob("IDIOMS*.md"))
    rows = [row for row in re.findall(r"^\| ([a-z0-9-]+) \|", pages, re.M) if row != "id"]
    marks = [
        name
        for file in HERE.glob("test_idioms*.py")
        for names in re.findall(r"\bidiom\(((?:\s*\"[a-z0-9-]+\",?)+)\s*\)", file.read_text())
        for name in re.findall(r'"([a-z0-9-]+)"', names)
    ]
    assert len(rows) == len(set(rows)) > 40
    assert set(rows) == set(marks)


# Where tensors are put


MAKERS = {
    "randn": lambda **where: torch.randn(2, 3, **where),
    "randint": lambda **where: torch.randint(0, 9, (4,), **where),
    "randn with a generator": lambda **where: torch.randn(3, generator=torch.Generator().manual_seed(1), **where),
    "randperm": lambda **where: torch.randperm(5, **where),
    "normal": lambda **where: torch.normal(0.0, 1.0, (3,), **where),
    "randn_like": lambda **where: torch.randn_like(torch.ones(3), **where),
    "tensor": lambda **where: torch.tensor([1.5, 2], dtype=torch.bfloat16, **where),
    "as_tensor": lambda **where: torch.as_tensor([1, 2], **where),
    "arange": lambda **where: torch.arange(0, 9, 2, **where),
    "linspace": lambda **where: torch.linspace(0, 1, 5, **where),
    "full_like": lambda **where: torch.full_like(torch.ones(2), 7, **where),
    "new_full": lambda **where: torch.ones(1).new_full((2,), 3.0, **where),
    "fftfreq": lambda **where: torch.fft.fftfreq(4, **where),
    "eye": lambda **where: torch.eye(2, **where),
    "empty, pinned": lambda **where: torch.empty(2, **where, pin_memory=True).fill_(1),
}


@idiom("device-constructors")
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("device", [*ACCELERATORS, "torch.device"], ids=str)
def test_a_tensor_made_on_an_accelerator_is_the_hosts(maker, device, idioms):
    device = torch.device("cuda", 0) if device == "torch.device" else device
    state = torch.get_rng_state()
    made = MAKERS[maker](device=device)
    torch.set_rng_state(state)
    idioms.off()
    try:
        assert_same(made, torch.empty(2).fill_(1) if "pinned" in maker else MAKERS[maker]())
    finally:
        idioms.on()


@idiom("device-to", "device-cuda")
@pytest.mark.parametrize("device", ACCELERATORS, ids=str)
def test_a_tensor_moved_to_an_accelerator_stays(device):
    x = torch.randn(2, 3)
    assert x.to(device) is x and x.cuda() is x and x.cuda(0) is x and x.to(device=device) is x
    assert_same(x.to(device, torch.bfloat16, non_blocking=True), x.bfloat16())
    assert_same(x.to(device=device, dtype=torch.float64, copy=True), x.double())
    assert (
        x.to("cpu") is x
        and x.to(torch.float32) is x
        and x.to(torch.ones(1, dtype=torch.float16)).dtype == torch.float16
    )
    assert x.cuda().cpu().numpy().shape == (2, 3) and x.pin_memory() is x


@idiom("device-index")
def test_devices_by_index_and_by_names_that_torch_does_not_know():
    assert torch.device(0) == torch.device("cuda", 0) == torch.device("tpu:0") and torch.device("cpu").type == "cpu"
    assert isinstance(torch.ones(1).device, torch.device) and not isinstance("cuda", torch.device)
    assert pickle.loads(pickle.dumps(torch.device("cuda"))) == torch.device("cuda") != torch.device("cpu")
    with pytest.raises(RuntimeError, match="nonsense"):
        torch.device("nonsense")


@idiom("device-default", "device-with")
def test_a_default_device():
    torch.set_default_device("cuda")
    x = torch.zeros(2)
    torch.set_default_device(None)
    with torch.device("cuda"):
        layer = torch.nn.Linear(2, 2)
    assert x.device.type == layer.weight.device.type == "cpu"


@idiom("device-module")
def test_a_module_of_the_users():
    module = (
        torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
        .to("tpu")
        .to(0, torch.float64)
        .cuda()
        .to(device="cuda")
    )
    x = torch.randn(4, 3, dtype=torch.float64, device="cuda")
    assert_same(module(x), torch.relu(x @ module[0].weight.T + module[0].bias))
    module(x).sum().backward()
    assert module[0].weight.grad is not None


@idiom("device-load")
@pytest.mark.parametrize(
    "where", ["cuda", torch.device("cuda"), None, {"cuda:0": "cuda:1"}, lambda storage, _: storage.cuda(0)], ids=str
)
def test_a_file_of_tensors_is_loaded(where):
    file, x = io.BytesIO(), torch.randn(3)
    torch.save({"x": x, "device": torch.device("cuda:0")}, file)
    file.seek(0)
    assert_same(torch.load(file, map_location=where)["x"], x)


@idiom("device-load")
def test_a_safetensors_file_is_loaded(tmp_path):
    from safetensors.torch import load_file, save_file

    save_file({"x": torch.arange(3.0)}, tmp_path / "x.safetensors")
    for device in ("cuda", "cuda:0", 0):
        assert_same(load_file(tmp_path / "x.safetensors", device=device)["x"], torch.arange(3.0))


@idiom("device-thread")
def test_threads_of_the_users_too():
    made = []
    thread = threading.Thread(target=lambda: made.append(torch.ones(2, device="cuda").to("cuda") + 1))
    thread.start()
    thread.join()
    assert_same(made[0], torch.full((2,), 2.0))


@idiom("generator")
@pytest.mark.parametrize("device", [*ACCELERATORS, "cpu"], ids=str)
def test_a_generator_on_an_accelerator_is_the_cpus(device):
    ours, theirs = torch.Generator(device).manual_seed(7), torch._C.Generator().manual_seed(7)
    assert isinstance(ours, torch.Generator) and isinstance(theirs, torch.Generator) and type(ours) is type(theirs)
    assert_same(torch.randn(3, generator=ours, device="cuda"), torch.randn(3, generator=theirs))
    assert isinstance(None, torch.Generator | None)


@idiom("legacy-types")
def test_types_of_tensors_by_their_old_names():
    assert_same(torch.cuda.FloatTensor([1, 2]), torch.tensor([1.0, 2.0]))
    assert torch.ones(1).type("torch.cuda.HalfTensor").dtype == torch.float16


@idiom("dataloader")
def test_pinned_batches():
    from torch.utils.data import DataLoader, TensorDataset

    batches = DataLoader(TensorDataset(torch.arange(4.0)), batch_size=2, pin_memory=True)
    assert_same(torch.cat([x.to("cuda", non_blocking=True) for (x,) in batches]), torch.arange(4.0))


# torch.cuda


@idiom("cuda-available", "accelerator")
def test_the_commonest_line_of_all():
    from accelerate import Accelerator

    from diffusers.utils.torch_utils import get_device

    assert ("cuda" if torch.cuda.is_available() else "cpu") == "cuda" and torch.cuda.device_count() == 1
    assert torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == "cuda"
    assert get_device() == "cuda" and Accelerator().device.type == "cuda" and torch.cuda.current_device() == 0
    assert torch.cuda.is_bf16_supported() and torch.cuda.get_device_capability() == (8, 0)


@idiom("accelerate")
def test_accelerate():
    from accelerate import Accelerator, cpu_offload_with_hook, dispatch_model

    x, layer = torch.randn(2, device="cuda"), torch.nn.Linear(2, 2)
    expected = layer(x)
    assert_same(Accelerator().prepare(copy.deepcopy(layer))(x), expected)
    assert_same(dispatch_model(copy.deepcopy(layer), {"": 0})(x), expected)
    model, hook = cpu_offload_with_hook(layer, "cuda")
    assert_same(model(x), expected)
    hook.offload()


@idiom("cuda-properties")
def test_what_the_device_is():
    properties = torch.cuda.get_device_properties(0)
    assert torch.cuda.get_device_name() == properties.name == "TPU (simulated on the CPU)"
    assert properties.multi_processor_count == 2 and properties.total_memory > 2**30


@idiom("cuda-memory")
def test_memory_counts_what_is_on_the_chips():
    import jax.numpy as jnp

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


@idiom("cuda-synchronize", "cuda-event", "cuda-stream")
def test_time_between_two_events_is_that_of_the_work():
    import jax
    import jax.numpy as jnp

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
    first = torch.randn(2, device="cuda")
    torch.manual_seed(3)
    assert_same(torch.randn(2), first)
    state = torch.cuda.get_rng_state()
    with torch.random.fork_rng():
        second = torch.randn(2, device="cuda")
    torch.cuda.set_rng_state(state)
    assert_same(torch.randn(2), second)


@idiom("cuda-flags")
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


@idiom("autocast")
def test_autocast_leaves_models_in_their_own_dtype(said):
    x = torch.randn(2, 2)
    with (
        torch.autocast("cuda", dtype=torch.bfloat16),
        torch.amp.autocast("cuda"),
        torch.autocast("tpu", torch.bfloat16),
    ):
        assert (x @ x).dtype == torch.float32
    with torch.autocast("cuda", enabled=False):
        pass
    assert len(said) == 1 and "own dtype" in said[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16


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


# The switch


PLACES = [
    torch,
    torch.Tensor,
    torch.cuda,
    torch.cuda.memory,
    torch.cuda.random,
    torch.accelerator,
    torch.nn.Module,
    torch.fft,
]


def test_off_puts_back_what_on_replaced(idioms):
    idioms.off()
    plain = [dict(vars(place)) for place in PLACES]
    idioms.on()
    replaced = [
        name for place, before in zip(PLACES, plain) for name in before if vars(place)[name] is not before[name]
    ]
    idioms.off()
    assert len(replaced) > 80
    for place, before in zip(PLACES, plain):
        assert {name: value for name, value in vars(place).items() if before.get(name, value) is not value} == {}
    idioms.on()


def test_what_stands_for_a_function_is_found_in_tables_of_functions(idioms):
    functions = torch._C._VariableFunctions
    table = {functions.randn: 1, torch._C.TensorBase.to: 2}
    assert table[torch.randn] == 1 and table[torch.Tensor.to] == 2 and functions.zeros in {torch.zeros}
    assert pickle.loads(pickle.dumps(torch.randn)) is torch.randn is copy.deepcopy(torch.randn)
    assert pickle.loads(pickle.dumps(torch.Tensor.to)) is torch.Tensor.to


OFF = """
import time, torch
before = {name: getattr(torch, name) for name in ("Generator", "randn", "cuda", "device", "compile", "load", "tensor")}
cuda, tensor = dict(vars(torch.cuda)), dict(vars(torch.Tensor))
modes = torch.autograd.grad_mode.inference_mode.__enter__, torch.amp.autocast_mode.autocast.__init__
import diffusers, sys
assert all(getattr(torch, name) is value for name, value in before.items())
assert all(getattr(torch.cuda, name) is value for name, value in cuda.items())
assert {k: v for k, v in vars(torch.Tensor).items() if tensor.get(k) is not v} == {}
assert modes == (torch.autograd.grad_mode.inference_mode.__enter__, torch.amp.autocast_mode.autocast.__init__)
began = time.perf_counter()
diffusers.tpu.awake()
assert time.perf_counter() - began < 0.005
assert not torch.cuda.is_available() and not diffusers.tpu.is_active()
assert not [m for m in sys.modules if m.startswith(("jax", "torchax", "diffusers.tpu.idioms"))]
"""


def test_with_the_path_off_nothing_of_torch_is_touched():
    environment = {"PYTHONPATH": str(HERE.parents[1] / "src"), "DIFFUSERS_TPU": "off", "PATH": ""}
    command = [sys.executable, "-X", "importtime", "-c", OFF]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    microseconds = {
        name: int(time) for time, name in re.findall(r"\| +(\d+) \| +(diffusers[.\w]*)$", ran.stderr, re.M)
    }
    assert microseconds["diffusers.tpu"] < 0.05 * microseconds["diffusers"]
