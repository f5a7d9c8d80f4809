"""`torch.autocast` on the path. Oracles: CUDA's own casts, of torch's tensors without values; upstream's model in float32 and under the
CPU's autocast."""

import copy

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import denoisers
import tiny
from conftest import relative, slow
from diffusers import AutoencoderKL, tpu
from diffusers.tpu import bridge
from diffusers.tpu.common.config import TPUConfig


pytestmark = pytest.mark.usefixtures("idioms")


def without(x, y):
    with torch.autocast(x.device.type, enabled=False):
        return x @ y.to(x.dtype)


PAIRS = [(one, other) for one in (torch.float32, torch.bfloat16) for other in (torch.float32, torch.bfloat16)]
# Of two tensors [4, 4, 4].
CALLS = {
    "linear": lambda x, y: F.linear(x, y.select(0, 0)),
    "@": lambda x, y: x @ y,
    "einsum": lambda x, y: torch.einsum("abc,abd->acd", x, y),
    "conv2d": lambda x, y: F.conv2d(x.unsqueeze(0), y.unsqueeze(-1)),
    "attention": lambda x, y: F.scaled_dot_product_attention(x, y, y),
    "baddbmm": lambda x, y: torch.baddbmm(x, x, y),
    "softmax": lambda x, y: x.softmax(-1),
    "F.softmax": lambda x, y: F.softmax(x, -1),
    "softmax in a dtype": lambda x, y: F.softmax(x, -1, dtype=torch.bfloat16),
    "layer norm": lambda x, y: F.layer_norm(x, (4,), *y.select(0, 0).unbind()[:2]),
    "group norm": lambda x, y: F.group_norm(x, 2),
    "rms norm": lambda x, y: F.rms_norm(x, (4,)),
    "x ** 2": lambda x, y: x**2,
    "2 ** x": lambda x, y: 2**x,
    "1 / x": lambda x, y: 1 / x,
    "exp": lambda x, y: x.exp(),
    "rsqrt": lambda x, y: torch.rsqrt(x),
    "sum": lambda x, y: x.sum(-1),
    "mean": lambda x, y: x.mean(-1),
    "cumsum": lambda x, y: x.cumsum(-1),
    "norm": lambda x, y: x.norm(dim=-1),
    "normalize": lambda x, y: F.normalize(x, dim=-1),
    "mse": lambda x, y: F.mse_loss(x, y),
    "interpolate": lambda x, y: F.interpolate(x.unsqueeze(0), scale_factor=2.0, mode="nearest"),
    "silu": lambda x, y: F.silu(x),
    "gelu": lambda x, y: F.gelu(x, approximate="tanh"),
    "x + y": lambda x, y: x + y,
    "cat": lambda x, y: torch.cat([x, y]),
    "addcmul": lambda x, y: torch.addcmul(x, x, y),
    "without": without,
}


@pytest.fixture(scope="module")
def of_cuda(idioms) -> dict:
    """By a call's name and the dtypes of its tensors: its result's dtype under CUDA's autocast; plain torch, of tensors without values."""
    idioms.off()
    fake, gpu, found = FakeTensorMode(), torch.device("cuda"), {}
    torch.set_autocast_enabled("cuda", True), torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        for name, call in CALLS.items():
            for pair in PAIRS:
                metas = [torch.empty(4, 4, 4, device="meta", dtype=dtype) for dtype in pair]
                with fake:
                    found[name, pair] = call(*(FakeTensor(fake, meta, gpu) for meta in metas)).dtype
    finally:
        torch.set_autocast_enabled("cuda", False), torch.set_autocast_dtype("cuda", torch.float16)
        idioms.on()
    return found


@pytest.mark.parametrize("name", CALLS)
def test_operators_give_the_dtypes_that_cudas_autocast_gives(of_cuda, name):
    for pair in PAIRS:
        with bridge.environment(), torch.autocast("cuda", torch.bfloat16):
            found = CALLS[name](*(torch.ones(4, 4, 4, device="jax", dtype=dtype) for dtype in pair))
        assert found.dtype == of_cuda[name, pair], pair


def decoder() -> tuple[torch.nn.Module, dict]:
    model = AutoencoderKL(block_out_channels=(8, 8), norm_num_groups=4, up_block_types=("UpDecoderBlock2D",) * 2)
    return model.eval(), {"z": torch.randn(2, 4, 6, 5), "return_dict": False}


def unet() -> tuple[torch.nn.Module, dict]:
    given = {"sample": torch.randn(2, 4, 8, 8), "timestep": torch.tensor(7)}
    return tiny.unet().eval(), {**given, "encoder_hidden_states": torch.randn(2, 5, 32), "return_dict": False}


OTHERS = {"unet": unet, "decoder": decoder}


def called(model, kind: str, given: dict):
    return (model.decode if kind == "decoder" else model)(**copy.deepcopy(given))[0]


@pytest.mark.parametrize(
    "kind, mesh",
    [
        ("flux", (1, 2, 1)),
        slow("flux2", (1, 1, 2)),  # projections in one weight
        ("cogvideox 1.5 image", (1, 1, 1)),
        slow("hunyuan", (1, 2, 1)),
        ("unet", (1, 1, 2)),
        ("decoder", (1, 2, 1)),
    ],
)
def test_models_compute_as_upstreams_do(kind, mesh):
    """Float32 weights. Off upstream's in float32 by what bfloat16 is off; no program of one way is taken for the other."""
    theirs, given = OTHERS[kind]() if kind in OTHERS else (denoisers.built(kind, 4), denoisers.inputs(kind, 2))
    ours = tpu.install(copy.deepcopy(theirs), TPUConfig(mesh=mesh))
    with torch.no_grad():
        exact = called(theirs, kind, given)
        with torch.autocast("cpu", torch.bfloat16):
            off = relative(called(theirs, kind, given), exact)
        assert relative(called(ours, kind, given), exact) < 1e-5
        with torch.autocast("cuda", torch.bfloat16):
            narrow = called(ours, kind, given)
        assert 1e-4 < relative(narrow, exact) < 1.2 * off
        assert relative(called(ours, kind, given), exact) < 1e-5
    assert not tpu.report(ours)["eager"]


@pytest.mark.parametrize("training", [slow(True), False])
def test_gradients_go_back_through_the_casts(training):
    """To float32 weights; after autocast is left, as in every loop."""
    theirs, given = denoisers.built("flux", 4).train(training), denoisers.inputs("flux", 1)
    ours = tpu.install(copy.deepcopy(theirs), TPUConfig(mesh=(1, 2, 1)))

    def gradients(model, device, dtype):
        model.zero_grad()
        with torch.autocast(device, dtype, enabled=dtype is not None):
            (output,) = model(**copy.deepcopy(given))
        output.float().square().mean().backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)
        return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])

    exact = gradients(theirs, "cpu", None)
    off = relative(gradients(theirs, "cpu", torch.bfloat16), exact)
    assert 1e-4 < relative(gradients(ours, "cuda", torch.bfloat16), exact) < 1.2 * off
    assert not tpu.report(ours)["eager"]


@pytest.fixture
def accelerator():
    """In bfloat16, which is the process's from its first one on."""
    AcceleratorState._reset_state(True)
    yield Accelerator(mixed_precision="bf16")
    AcceleratorState._reset_state(True)


def test_accelerates_wrapper_outlives_what_it_wraps(accelerator):
    """A script that prepares a model and then puts it into a pipeline, whose mesh is another, and takes it off again."""
    theirs, given = denoisers.built("flux", 4), denoisers.inputs("flux", 1)
    ours = tpu.install(copy.deepcopy(theirs), TPUConfig(mesh=(1, 2, 1)))
    prepared = accelerator.prepare(ours)
    with torch.no_grad():
        exact = called(theirs, "flux", given)
        with torch.autocast("cpu", torch.bfloat16):
            off = relative(called(theirs, "flux", given), exact)
        for again in (lambda: None, lambda: tpu.install(ours, TPUConfig(mesh=(1, 1, 2))), lambda: tpu.uninstall(ours)):
            again()
            found = called(prepared, "flux", given)
            assert found.dtype == torch.float32 and 1e-4 < relative(found, exact) < 1.2 * off
            assert not hasattr(ours, "_tpu_runner") or not tpu.report(ours)["eager"]
