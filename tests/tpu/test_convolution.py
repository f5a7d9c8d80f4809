"""Oracle: torch's convolution in float64, of the same bfloat16 numbers, rounded once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from conftest import relative
from diffusers.tpu import bridge
from diffusers.tpu.chips.figures import CHIPS
from diffusers.tpu.chips.mesh import make_mesh
from diffusers.tpu.kernels import convolution as convolution_kernel
from diffusers.tpu.kernels.convolution import MOST_WORK, Blocks, choose, tpu_convolution
from diffusers.tpu.kernels.settings import Settings, using


KERNEL = Settings(layers="kernel")


def draw(*shape):
    return torch.randn(shape).bfloat16()


def arrays(*tensors):
    return [jnp.asarray(bridge.as_numpy(tensor)) for tensor in tensors]


def rounding(exact) -> float:
    return relative(exact.bfloat16().double().numpy(), exact.numpy())


@pytest.mark.parametrize(
    "taps, width, blocks, bias",
    [
        (3, 32, None, True), (3, 16, Blocks(2, 128, 1), False), (5, None, Blocks(8, 128, 4), True),
        (1, None, Blocks(8, 128, 8), True),
    ],
)  # fmt: skip
def test_any_map(taps, width, blocks, bias):
    """Any heights, whole registers of columns and any, rows and features that blocks do not divide, maps smaller than their windows."""
    rng = np.random.default_rng()
    bounds = ((1, 3), (3, 14), (1, 40), (1, 3), (1, 4))
    batch, height, drawn, channels, features = (int(rng.integers(*pair)) for pair in bounds)
    width, channels, features = width or drawn, 64 * channels, 64 * features
    x, w, b = draw(batch, channels, height, width), draw(features, channels, taps, taps), draw(features)
    exact = F.conv2d(x.double(), w.double(), b.double() if bias else None, padding=taps // 2)
    blocks = blocks or choose(height, width, channels, features, taps)
    given = arrays(x.permute(0, 2, 3, 1), w.permute(2, 3, 1, 0), b)
    ours = jax.jit(lambda x, w, b: tpu_convolution(x, w, b if bias else None, blocks=blocks, interpret=True))(*given)
    ours = np.asarray(ours.astype(jnp.float32), np.float64).transpose(0, 3, 1, 2)
    assert relative(ours, exact.numpy()) < 1.05 * rounding(exact), (x.shape, w.shape, blocks)


@pytest.mark.parametrize(
    "taken, given",
    [
        (True, {"padding": 1}),
        (True, {"padding": 0, "padded": (1, 1, 1, 1)}),
        (False, {"padding": 1, "padded": (0, 1, 0, 1)}),
        (True, {"padding": 1, "stride": (2, 3)}),
        (False, {"padding": 0, "padded": (0, 1, 0, 1), "stride": 2}),
        (False, {"padding": 2, "dilation": 2}),
        (False, {"padding": 1, "groups": 2}),
    ],
    ids=str,
)
def test_which_of_torchs_convolutions_it_computes(monkeypatch, taken, given):
    """The others are the compiler's; all have torch's values."""
    given, runs, run = dict(given), [], tpu_convolution
    monkeypatch.setattr(convolution_kernel, "tpu_convolution", lambda *a, **k: (runs.append(a), run(*a, **k))[1])
    x, w, b = draw(2, 128, 9, 11), draw(64, 128 // given.get("groups", 1), 3, 3), draw(64)
    padded = given.pop("padded", None)

    def convolved(x, w, b):
        return F.conv2d(x if padded is None else F.pad(x, padded), w, b, **given)

    def ours(*tensors):
        with using(KERNEL), bridge.quiet_integers(), bridge.environment():
            return convolved(*map(bridge.to_torch, tensors)).jax()

    exact, found = convolved(x.double(), w.double(), b.double()), jax.jit(ours)(*arrays(x, w, b))
    assert bool(runs) == taken
    assert relative(np.asarray(found.astype(jnp.float32), np.float64), exact.numpy()) < 1.05 * rounding(exact)


def test_what_is_not_taken(chips):
    x, w = (jnp.zeros(shape, jnp.bfloat16) for shape in ((1, 8, 8, 64), (3, 3, 64, 64)))
    assert convolution_kernel.convolution(x, w, None, KERNEL) is not None
    on_tpu = Settings(platform="tpu", generation="v5e")
    refused = [
        (x.astype(jnp.float32), w.astype(jnp.float32), KERNEL),
        (x[..., :4], w[:, :, :4], KERNEL),
        (x, w[..., :4], KERNEL),
        (x, w[:2, :2], KERNEL),
        (x, w[:1], KERNEL),
        (x, w, Settings()),
        (x, w, Settings(layers="kernel", mesh=make_mesh(chips, (2, 4, 1)))),
        (x, w, on_tpu),  # so few positions
    ]
    assert [convolution_kernel.convolution(x, w, None, settings) for x, w, settings in refused] == [None] * 8


@pytest.mark.parametrize("generation", CHIPS)
def test_blocks_fit(generation):
    """Of Stable Diffusion XL's maps at 1024 x 1024, and of one that no VMEM holds whole."""
    sizes = [(128, 960, 320), (64, 1920, 640), (32, 2560, 1280), (32, 1280, 1280), (1024, 256, 256)]
    for size, channels, features in sizes:
        blocks = choose(size, size, channels, features, 3, generation)
        side = CHIPS[generation].matrix_side
        assert blocks.rows % blocks.piece == 0 and (blocks.features % side == 0 or blocks.features == features)
        assert 9 * channels * blocks.features <= MOST_WORK or blocks.features == side
    assert choose(128, 128, 1 << 20, 128, 3, generation) is None
