"""Idioms of scripts for CUDA that are torch's alone. Oracle: the same line without the device, with the same seed, and torch's own objects.

Every row of `examples/tpu/IDIOMS.md` is proved by a test marked with its id, in any of the test files (test_faults.py looks).
"""

import contextlib
import copy
import io
import pickle
import threading

import jax
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, TensorDataset

from conftest import assert_same
from diffusers.image_processor import VaeImageProcessor
from diffusers.tpu import bridge


pytestmark = pytest.mark.usefixtures("idioms")
idiom = pytest.mark.idiom
ACCELERATORS = ["cuda", "cuda:0", "tpu", "tpu:0", "xla", "jax", 0]


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
@pytest.mark.parametrize("device", [*ACCELERATORS, "torch.device"], ids=str)
def test_a_tensor_made_on_an_accelerator_is_the_hosts(device, idioms):
    device = torch.device("cuda", 0) if device == "torch.device" else device
    state = torch.get_rng_state()
    made = {name: maker(device=device) for name, maker in MAKERS.items()}
    torch.set_rng_state(state)
    idioms.off()
    try:
        for name, maker in MAKERS.items():
            assert_same(made[name], torch.empty(2).fill_(1) if "pinned" in name else maker())
    finally:
        idioms.on()


@idiom("device-to", "device-cuda", "generator")
@pytest.mark.parametrize("device", ACCELERATORS, ids=str)
def test_a_tensor_moved_to_an_accelerator_stays(device):
    x = torch.randn(2, 3)
    assert x.to(device) is x and x.cuda() is x and x.cuda(0) is x and x.to(device=device) is x
    assert_same(x.to(device, torch.bfloat16, non_blocking=True), x.bfloat16())
    assert_same(x.to(device=device, dtype=torch.float64, copy=True), x.double())
    assert x.to("cpu") is x and x.to(torch.float32) is x
    assert x.to(torch.ones(1, dtype=torch.float16)).dtype == torch.float16
    assert x.cuda().cpu().numpy().shape == (2, 3) and x.pin_memory() is x
    for where in (device, "cpu"):
        ours, theirs = torch.Generator(where).manual_seed(7), torch._C.Generator().manual_seed(7)
        assert isinstance(ours, torch.Generator) and isinstance(theirs, torch.Generator) and type(ours) is type(theirs)
        assert_same(torch.randn(3, generator=ours, device="cuda"), torch.randn(3, generator=theirs))
    assert isinstance(None, torch.Generator | None)


@idiom("device-index", "device-default", "device-with", "device-asked")
def test_devices_by_index_and_by_names_that_torch_does_not_know():
    assert torch.device(0) == torch.device("cuda", 0) == torch.device("tpu:0") and torch.device("cpu").type == "cpu"
    assert isinstance(torch.ones(1).device, torch.device) and not isinstance("cuda", torch.device)
    assert pickle.loads(pickle.dumps(torch.device("cuda"))) == torch.device("cuda") != torch.device("cpu")
    with pytest.raises(RuntimeError, match="nonsense"):
        torch.device("nonsense")
    torch.set_default_device("cuda")
    x = torch.zeros(2)
    torch.set_default_device(None)
    with torch.device("cuda"):
        layer = torch.nn.Linear(2, 2)
    assert x.device.type == layer.weight.device.type == "cpu"
    assert not torch.ones(1, device="cuda").is_cuda and torch.nn.Linear(1, 1).cuda().weight.device.type == "cpu"


@idiom("device-module", "device-thread", "legacy-types", "dataloader")
def test_a_module_of_the_users_its_threads_and_batches():
    linear = torch.nn.Linear(3, 2)
    module = torch.nn.Sequential(linear, torch.nn.ReLU()).to("tpu").to(0, torch.float64).cuda().to(device="cuda")
    x = torch.randn(4, 3, dtype=torch.float64, device="cuda")
    assert_same(module(x), torch.relu(x @ linear.weight.T + linear.bias))
    module(x).sum().backward()
    assert linear.weight.grad is not None
    made = []
    thread = threading.Thread(target=lambda: made.append(torch.ones(2, device="cuda").to("cuda") + 1))
    thread.start()
    thread.join()
    assert_same(made[0], torch.full((2,), 2.0))
    assert_same(torch.cuda.FloatTensor([1, 2]), torch.tensor([1.0, 2.0]))
    assert torch.ones(1).type("torch.cuda.HalfTensor").dtype == torch.float16
    batches = DataLoader(TensorDataset(torch.arange(4.0)), batch_size=2, pin_memory=True)
    assert_same(torch.cat([x.to("cuda", non_blocking=True) for (x,) in batches]), torch.arange(4.0))


@idiom("device-load")
def test_a_file_of_tensors_is_loaded(tmp_path):
    file, x = io.BytesIO(), torch.randn(3)
    torch.save({"x": x, "device": torch.device("cuda:0")}, file)
    for where in ("cuda", torch.device("cuda"), None, {"cuda:0": "cuda:1"}, lambda storage, _: storage.cuda(0)):
        file.seek(0)
        assert_same(torch.load(file, map_location=where)["x"], x)
    save_file({"x": x}, tmp_path / "x.safetensors")
    for device in ("cuda", "cuda:0", 0):
        assert_same(load_file(tmp_path / "x.safetensors", device=device)["x"], x)


# The switch


PLACES = [
    torch, torch.Tensor, torch.cuda, torch.cuda.memory, torch.cuda.random, torch.accelerator, torch.nn.Module, torch.fft
]  # fmt: skip


def test_off_puts_back_what_on_replaced(idioms):
    idioms.off()
    plain = [dict(vars(place)) for place in PLACES]
    idioms.on()
    replaced = [name for place, old in zip(PLACES, plain) for name in old if vars(place)[name] is not old[name]]
    functions = torch._C._VariableFunctions  # what stands for a function is found in tables of functions
    table = {functions.randn: 1, torch._C.TensorBase.to: 2}
    assert table[torch.randn] == 1 and table[torch.Tensor.to] == 2 and functions.zeros in {torch.zeros}
    assert pickle.loads(pickle.dumps(torch.randn)) is torch.randn is copy.deepcopy(torch.randn)
    assert pickle.loads(pickle.dumps(torch.Tensor.to)) is torch.Tensor.to
    idioms.off()
    assert len(replaced) > 80
    for place, old in zip(PLACES, plain):
        assert {name: value for name, value in vars(place).items() if old.get(name, value) is not value} == {}
    idioms.on()


# Device tensors in the hands of a script


@pytest.fixture(scope="module")
def env(idioms):
    return bridge.environment()


KINDS = ["tensor", "view", "bfloat16", "deferred"]


@pytest.fixture(params=KINDS)
def pair(request, env):
    """A device tensor [2, 3] and a host tensor of the same values."""
    host = torch.randn(2, 3)
    host = host.bfloat16() if request.param == "bfloat16" else host
    with env:
        device = env.moved(torch.stack([host, host + 1]))[0] if request.param == "view" else env.moved(host)
    if request.param == "deferred":
        array = device.jax()
        device = bridge.Deferred(jax.ShapeDtypeStruct(array.shape, array.dtype), lambda: device.settle(array))
    assert bridge.on_device(device)
    return device, host


def same(ours, theirs):
    ours, theirs = (x.cpu() if isinstance(x, torch.Tensor) else x for x in (ours, theirs))
    if isinstance(theirs, torch.Tensor):
        assert_same(ours.clone(), theirs.clone())
    elif isinstance(theirs, np.ndarray):
        np.testing.assert_array_equal(ours, theirs)
    else:
        assert ours == theirs


USES = {
    "format": lambda x: f"{x.sum():.2f} {x[0, 0]:+.3e}",
    "float": lambda x: float(x[1, 2]),
    "int": lambda x: int(x[1, 2] * 100),
    "item": lambda x: x.flatten()[3].item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.cpu().float().numpy(),
    "asarray": lambda x: np.asarray(x.float()),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu", torch.float64),
    "cuda": lambda x: x.cuda().to("cuda").cpu(),
    "compare": lambda x: bool((x > 0).any()) or bool(torch.allclose(x, x)),
    "iterate": lambda x: [row.tolist() for row in x] + [len(x)],
    "detach": lambda x: x.detach().clone().data.cpu(),
    "deepcopy": lambda x: copy.deepcopy({"x": x})["x"].cpu(),
    "shape": lambda x: (x.shape, x.dtype, x.numel(), x.dim(), x.is_floating_point(), x.requires_grad),
}


@idiom("tensor-read", "tensor-print", "tensor-save")
def test_a_device_tensor_can_be_read_printed_and_saved(pair, env):
    device, host = pair
    for name, use in USES.items():
        with env:
            inside = use(device)
            inside = inside.cpu() if isinstance(inside, torch.Tensor) else inside
        same(inside, use(host))
        same(use(device), use(host))
    for where in (env, contextlib.nullcontext()):
        with where:
            shown, file = repr(device), io.BytesIO()
            torch.save({"latents": device}, file)
        assert shown == repr(host)[:-1] + ", device='jax:0')"
        file.seek(0)
        assert_same(torch.load(file)["latents"], host)


OPERATIONS = {
    "mean": lambda x, y: x.float().mean((0, 1)),
    "matmul": lambda x, y: x @ y.T,
    "mixed": lambda x, y: torch.cat([x, y]) - torch.stack([y, y]).sum(0).repeat(2, 1),
    "index": lambda x, y: x[:, [0, 2]] + y[..., 1:],
    "select": lambda x, y: torch.where(x > y, x, torch.zeros_like(x)),
    "new": lambda x, y: x.new_ones(2) + torch.ones(2, device=x.device, dtype=x.dtype),
    "like": lambda x, y: y.to(x) + y.type_as(x),
    "norm": lambda x, y: torch.nn.functional.layer_norm(x, (3,)),
}


@idiom("tensor-compute", "tensor-picture")
def test_outside_a_device_tensor_is_a_host_tensor_to_torch(pair, env):
    device, host = pair
    with env:
        pictures = [x.float().sigmoid().expand(1, 3, 2, 3) for x in pair]
    ours, theirs = (VaeImageProcessor().postprocess(x, output_type="pil")[0] for x in pictures)
    assert ours.tobytes() == theirs.tobytes()
    other = torch.randn(2, 3).to(host.dtype)
    for operation in OPERATIONS.values():
        ours = operation(device, other)
        assert type(ours) is torch.Tensor and ours.device.type == "cpu"
        assert_same(ours, operation(host, other))


@idiom("tensor-write")
def test_outside_what_is_written_stays(pair, env):
    device, host = pair
    with env:
        before = device + 0
    for x in (device, host):
        assert x.add_(1) is x
        row = x[1]
        row.mul_(3)
        x[0, 1] = 9
        x[:, 2] *= 2
        torch.clamp(x, max=5, out=x)
    same(device, host)
    with env:
        same((device + before).cpu(), host + before.cpu())
        device.mul_(2)
    same(device.cpu(), host * 2)
    with pytest.raises(AssertionError):
        same(device.cpu(), host)


def _chain(x, g):
    return [
        torch.randn_like(x), torch.rand_like(x), torch.randint_like(x, 0, 100), x.clone().normal_(1, 2, generator=g),
        torch.stack([x[1].normal_(), x[1]]), x.clone().uniform_(-1, 1), torch.bernoulli(x.sigmoid()),
        x.clone().bernoulli_(0.3, generator=g), x.clone().exponential_(), x.clone().random_(0, 50),
        x.clone().log_normal_(), x.clone().cauchy_(), torch.normal(x, 0.5, generator=g), torch.normal(x, x.abs()),
        torch.multinomial(x.abs() + 0.1, 2, generator=g), torch.poisson(x.abs() * 3),
        torch.nn.functional.dropout(x, 0.5, training=True), torch.nn.functional.dropout(x, 0.5, training=False),
        torch.randn(2, device=x.device), torch.randperm(6, device=x.device),
        torch.rand(2, generator=g, device=x.device),
    ]  # fmt: skip


@idiom("draws")
def test_draws_on_device_tensors_are_those_of_the_cpu_generators(env):
    host, drawn = torch.randn(2, 3), []
    for inside in (True, False):
        torch.manual_seed(5)
        g = torch.Generator("cuda").manual_seed(8)
        with env if inside else contextlib.nullcontext():
            before = env.draws
            drawn.append([x.cpu() for x in _chain(env.moved(host) if inside else host, g)])
            assert not inside or env.draws - before >= len(drawn[0]) - 1
        drawn[-1].append(torch.randn(1))
    for ours, theirs in zip(*drawn):
        assert_same(ours.to(theirs.dtype), theirs)


@idiom("threads")
def test_a_thread_beside_a_call_computes_on_the_host(env):
    made = []
    with env:
        thread = threading.Thread(target=lambda: made.append(torch.ones(2, device="cuda") * 2))
        thread.start()
        thread.join()
        assert type(torch.ones(2, device="cuda")) is not torch.Tensor
    assert_same(made[0], torch.full((2,), 2.0))
