"""Idioms of scripts for CUDA that are torch's alone. Oracle: the same line without the device, and torch's own objects.

Every row of `examples/tpu/IDIOMS.md` is proved by a test marked with its id, in any of the test files (test_faults.py looks).
"""

import copy
import io
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, TensorDataset

from conftest import assert_same


pytestmark = pytest.mark.usefixtures("idioms")
idiom = pytest.mark.idiom
HERE = Path(__file__).parent
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


BESIDE_US = """
import sys
import diffusers
assert not {"jax", "torchax", "torch_xla"} & {*sys.modules}
from diffusers.pipelines.wan import pipeline_wan
import accelerate, torch, transformers
assert not pipeline_wan.XLA_AVAILABLE and not accelerate.utils.is_torch_xla_available()
assert not transformers.utils.is_torch_xla_available() and "torch_xla" not in sys.modules
try:
    torch.ops.aten.prod.dim_Dimname
except AttributeError:
    import torchax
    try:
        torch.ops.aten.prod.dim_Dimname
    except AttributeError:
        print("as it was")
torch.cuda.synchronize()
assert torch.cuda.memory_allocated() == 0  # JAX is imported: asked for its arrays, it would start with one chip
from diffusers.tpu.chips.devices import find_target, jax_devices
from diffusers.tpu.config import read_environment
assert len(jax_devices(find_target(read_environment()))) == 8
"""


@idiom("torch-xla", "torchax-import")
def test_torch_xla_is_left_out_and_torchax_can_be_imported(tmp_path):
    """A stub that cannot be imported stands for torch_xla, in a process that asks for nothing but the path."""
    (tmp_path / "torch_xla").mkdir()
    (tmp_path / "torch_xla" / "__init__.py").write_text("raise RuntimeError('torch_xla is imported')")
    (tmp_path / "torch_xla-2.8.0.dist-info").mkdir()
    (tmp_path / "torch_xla-2.8.0.dist-info" / "METADATA").write_text("Name: torch_xla\nVersion: 2.8.0\n")
    environment = {**os.environ, "DIFFUSERS_TPU": "cpu", "DIFFUSERS_TPU_DEVICES": "8", "PYTHONPATH": str(tmp_path)}
    environment.pop("USE_TORCH_XLA", None)
    command = [sys.executable, "-c", BESIDE_US]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "as it was", done.stderr[-2000:]
    assert done.stderr.count("torch_xla: on the TPU path") == 1
