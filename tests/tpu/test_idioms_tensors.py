"""Device tensors in the hands of a script. Oracle: the same lines on host tensors, with the same seed."""

import contextlib
import copy
import io
import threading

import numpy as np
import pytest
import torch

from conftest import assert_same
from diffusers.image_processor import VaeImageProcessor


pytestmark = pytest.mark.usefixtures("idioms")
idiom = pytest.mark.idiom


@pytest.fixture(scope="module")
def env(idioms):
    from diffusers.tpu import bridge

    return bridge.environment()


KINDS = ["tensor", "view", "bfloat16", "deferred"]


@pytest.fixture(params=KINDS)
def pair(request, env):
    """A device tensor [2, 3] and a host tensor of the same values."""
    import jax

    from diffusers.tpu import bridge

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


# Random draws


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


def test_a_trace_says_that_it_drew(env):
    import jax

    from diffusers.tpu import bridge

    for draw, draws in ((torch.randn_like, True), (lambda x: torch.bernoulli(x.sigmoid()), True), (torch.sin, False)):
        before = env.draws
        with env:
            jax.eval_shape(lambda x: draw(bridge.to_torch(x)).jax(), jax.ShapeDtypeStruct((2, 3), "float32"))
        assert (env.draws > before) == draws


@idiom("threads")
def test_a_thread_beside_a_call_computes_on_the_host(env):
    made = []
    with env:
        thread = threading.Thread(target=lambda: made.append(torch.ones(2, device="cuda") * 2))
        thread.start()
        thread.join()
        assert type(torch.ones(2, device="cuda")) is not torch.Tensor
    assert_same(made[0], torch.full((2,), 2.0))
