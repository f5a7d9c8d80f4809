"""Oracle: torch's convolution in float64, of the same bfloat16 numbers, rounded once."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from conftest import relative
from diffusers.tpu.bridge import layers
from diffusers.tpu.chips.figures import CHIPS
from diffusers.tpu.chips.mesh import make_mesh
from diffusers.tpu.kernels import convolution as convolution_kernel
from diffusers.tpu.kernels import depthwise
from diffusers.tpu.kernels.convolution import LANES, MOST_WORK, Blocks, choose, convolution, tpu_convolution
from diffusers.tpu.kernels.settings import Settings
from test_linear import arrays, follows, noted, traced


KERNEL = Settings(layers="kernel")


def draw(*shape):
    return torch.randn(shape).bfloat16()


def rounding(exact) -> float:
    return relative(exact.bfloat16(), exact)


@pytest.mark.parametrize(
    "taps, edge, repeated, positions, blocks, bias",
    [
        ((3, 1, 3), 1, False, 32, None, True), ((3, 3, 3), 1, True, 16, Blocks(2, 3, 128, 1), False),
        ((5, 2, 5), 2, False, None, Blocks(8, 1, 128, 4), True), ((1, 3, 1), 0, False, None, Blocks(8, 2, 128, 8), True),
        ((3, 3, 3), 0, False, None, None, False), ((3, 3, 3), 1, True, None, Blocks(4, 1, 96, 2), True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("wide", [False, True])
def test_any_map(taps, edge, repeated, positions, blocks, bias, wide):
    """Any sizes, whole registers of positions and any, lines, frames and features that blocks do not divide, lines shorter than a window."""
    rng = np.random.default_rng()
    bounds = ((1, 3), (1, 12), (1, 5), (taps[2] - 2 * edge, 40), (1, 4), (2, 8))
    batch, lines, frames, drawn, channels, features = (int(rng.integers(*pair)) for pair in bounds)
    lines, frames, positions, channels, features = (
        lines + taps[0] - 1, frames + taps[1] - 1, positions or drawn, 64 * channels, 32 * features
    )  # fmt: skip
    features = features if blocks or rng.integers(3) else 3  # whose taps fit one register
    x, w, b = draw(batch, channels, lines, frames, positions), draw(features, channels, *taps), draw(features)
    zeros = tuple(tuple(int(n) for n in rng.integers(0, 3, 2)) for _ in range(2))
    around = F.pad(x.double(), (edge, edge, 0, 0, 0, 0), mode="replicate" if repeated else "constant")
    around = F.pad(around, (0, 0, *zeros[1], *zeros[0]))
    exact = F.conv3d(around, w.double(), b.double() if bias else None)
    blocks = blocks or choose((*exact.shape[2:4], positions), channels, features, taps)
    residual = torch.randn(exact.shape, dtype=torch.float32 if wide else torch.bfloat16)
    given = arrays(x.permute(0, 2, 3, 4, 1), w.permute(2, 3, 4, 0, 1), b, residual.permute(0, 2, 3, 4, 1))
    how = {"blocks": blocks, "edge": edge, "zeros": zeros, "repeated": repeated, "wide": wide, "interpret": True}

    @jax.jit
    def both(x, w, b, residual):
        given = x, w, b if bias else None
        return tpu_convolution(*given, **how), tpu_convolution(*given, residual, **how)

    for ours, oracle in zip(both(*given), (exact, (exact if wide else exact.bfloat16()) + residual)):
        assert ours.dtype == (jnp.float32 if wide else jnp.bfloat16)
        assert relative(np.asarray(ours, np.float64).transpose(0, 4, 1, 2, 3), oracle) < (
            1e-5 if wide else 1.05 * rounding(exact)
        ), (x.shape, w.shape, blocks)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("blocks, features", [(None, 3), (Blocks(2, 1, 96, 1), 96), (Blocks(4, 2, 128, 2), 160)])
def test_a_map_whose_positions_become_four(blocks, features, wide):
    """Any sizes; more features than one register has, of which blocks leave some; the lines beside a shard are its neighbours'."""
    rng = np.random.default_rng()
    batch, lines, frames, positions = (int(n) for n in rng.integers((1, 1, 1, 2), (3, 10, 4, 40)))
    x, w, b = draw(batch, 64, lines + 2, frames, positions), draw(features, 64, 3, 3), draw(features)
    four = x.double().repeat_interleave(2, 2)[:, :, 1:-1].repeat_interleave(2, 4).transpose(2, 3)
    exact = F.conv2d(F.pad(four, (1, 1)).transpose(1, 2).flatten(0, 1), w.double(), b.double())
    exact = exact.unflatten(0, (batch, frames)).permute(0, 3, 1, 4, 2)
    taps = 3, 1, 3
    blocks = blocks or choose((lines, frames, positions), 64, features, taps, doubled=True)
    how = {"blocks": blocks, "edge": 1, "doubled": True, "wide": wide, "interpret": True}
    given = arrays(x.permute(0, 2, 3, 4, 1), w.permute(2, 3, 0, 1)[:, None], b)
    ours = jax.jit(lambda *given: tpu_convolution(*given, **how))(*given)
    assert relative(ours, exact) < (1e-5 if wide else 1.05 * rounding(exact)), (x.shape, w.shape, blocks)


@pytest.mark.parametrize(
    "taken, size, taps, given",
    [
        (True, (9, 11), (3, 3), {"padding": 1}),
        (True, (9, 11), (3, 3), {"padding": 0, "padded": (1, 1, 1, 1)}),
        (False, (9, 11), (3, 3), {"padding": 1, "padded": (0, 1, 0, 1)}),
        (True, (9, 11), (3, 3), {"padding": 1, "stride": (2, 3)}),
        (True, (9, 11), (3, 3), {"padding": 1, "channels": 4}),
        (False, (9, 11), (3, 3), {"padding": 0, "padded": (0, 1, 0, 1), "stride": 2}),
        (False, (9, 11), (3, 3), {"padding": 2, "dilation": 2}),
        (False, (9, 11), (3, 3), {"padding": 1, "groups": 2}),
        (True, (5, 3, 10), (3, 1, 1), {"padding": (1, 0, 0)}),
        (True, (4, 5, 7), (3, 3, 3), {"padding": 1, "padded": (0, 0, 0, 0, 2, 0)}),
        (False, (5, 3, 10), (3, 1, 1), {"padding": (1, 0, 0), "stride": (2, 1, 1)}),
    ],
    ids=str,
)
def test_which_of_torchs_convolutions_it_computes(monkeypatch, taken, size, taps, given):
    """The others are the compiler's; all have torch's values."""
    given, runs = dict(given), noted(monkeypatch, convolution_kernel, "tpu_convolution", lambda *_, **how: True)
    channels = given.pop("channels", 128)
    x, w, b = draw(2, channels, *size), draw(64, channels // given.get("groups", 1), *taps), draw(64)
    padded, of_torch = given.pop("padded", None), F.conv2d if len(size) == 2 else F.conv3d

    def convolved(x, w, b):
        return of_torch(x if padded is None else F.pad(x, padded), w, b, **given)

    exact, found = convolved(x.double(), w.double(), b.double()), traced(KERNEL, convolved)(*arrays(x, w, b))
    assert bool(runs) == taken
    assert relative(found, exact) < 1.05 * rounding(exact)


@pytest.mark.parametrize(
    "batch, rows, positions, mesh, taken",
    [(2, 3, 16, None, True), (1, 9, 48, None, True), (2, 2, 32, None, False), (2, 9, 20, None, True),
     (2, 27, 16, (2, 4, 1), True), (1, 24, 21, (2, 2, 2), True), (2, 23, 16, (1, 8, 1), False)],
)  # fmt: skip
@pytest.mark.parametrize("bias", [True, False])
def test_one_of_each_channel_alone(chips, monkeypatch, batch, rows, positions, mesh, taken, bias):
    """By its kernel, but for a map of two rows; positions that are no whole registers, a last block of channels that is not full. Of
    chips that share the map each has some rows, the last ones fewer, unless there are too few."""
    runs = noted(monkeypatch, depthwise, "_by_kernel", lambda *_, **how: True)
    monkeypatch.setattr(depthwise, "BLOCK_BYTES", 1 << 17)
    channels = 128 + 8 * int(np.random.default_rng().integers(100))
    x, w, b = draw(batch, channels, rows, positions), draw(channels, 1, 3, 3), draw(channels)
    settings = Settings(layers="kernel", mesh=mesh and make_mesh(chips, mesh))

    def convolved(x, w, b):
        return F.conv2d(x, w, b if bias else None, padding=1, groups=channels)

    exact, found = convolved(x.double(), w.double(), b.double()), traced(settings, convolved)(*arrays(x, w, b))
    assert bool(runs) == taken
    assert relative(found, exact) < 1.05 * rounding(exact)


def test_one_of_each_position_on_all_chips(chips):
    x, w, b = draw(1, 72, 24, 5), draw(40, 72, 1, 1), draw(40)
    run = traced(Settings(mesh=make_mesh(chips, (1, 8, 1))), F.conv2d)
    exact = F.conv2d(x.double(), w.double(), b.double())
    assert relative(run(*arrays(x, w, b)), exact) < 1.05 * rounding(exact)
    assert "convolution" not in run.lower(*arrays(x, w, b)).as_text()  # which the partitioner takes apart


@pytest.mark.parametrize(
    "images, given, taken", [(5, {"padding": 1, "stride": 2}, True), (5, {"stride": 3}, False), (3, {}, False)]
)
def test_chips_share_images(chips, monkeypatch, images, given, taken):
    """Five on eight chips, each of which has whole ones and the kernel."""
    runs = noted(monkeypatch, convolution_kernel, "tpu_convolution", lambda x, *_, **how: len(x))
    settings = Settings(layers="kernel", mesh=make_mesh(chips, (2, 4, 1)))
    x, w, b = draw(images, 64, 9, 12), draw(64, 64, 3, 3), draw(64)
    exact = F.conv2d(x.double(), w.double(), b.double(), **given)
    found = traced(settings, functools.partial(F.conv2d, **given))(*arrays(x, w, b))
    assert runs == ([1] if taken else [])
    assert relative(found, exact) < 1.05 * rounding(exact)


AFTER = {
    "silu": (lambda y, h, g: F.silu(y), ["silu", False, False]),
    "added": (lambda y, h, g: h + y, ["", False, True]),
    "along one axis": (lambda y, h, g: h.flatten(2) + g * y.flatten(2), None),
}


@pytest.mark.parametrize("features, words", [(256, "silu"), (384, "silu"), (256, "added"), (128, "along one axis")])
def test_one_of_each_position_is_a_linear_layer(monkeypatch, features, words):
    """With what follows it. A number for each position is no gate of a layer's, though there be as many as features."""
    follow, second = AFTER[words]
    asked = noted(monkeypatch, layers, "fast_linear", follows)
    monkeypatch.setattr(convolution_kernel, "tpu_convolution", None)
    flat = words == "along one axis"
    size = (8, 16) if flat else (9, 11)
    x, w, b = draw(2, 320, *size), draw(features, 320, 1, 1), draw(features)
    h, g = draw(2, features, *size), draw(2, 1, math.prod(size))

    def run(x, w, b, h, g):
        y = F.conv1d(x.flatten(2), w.flatten(2), b) if flat else F.conv2d(x, w, b)
        return follow(y, h, g)

    given = x, w, b, h, g
    exact, theirs, found = run(*(t.double() for t in given)), run(*given), traced(KERNEL, run)(*arrays(*given))
    assert asked == [["", False, False], *([] if second is None else [second])]
    assert relative(found, exact) < 1.05 * relative(theirs, exact)


def test_weights_of_one_layer_of_a_stack():
    x, w, b = arrays(draw(1, 3, 1, 9, 64), draw(2, 3, 1, 3, 96, 64), draw(96))
    run = jax.jit(lambda x, w, b, n, one: convolution(x, one, b, KERNEL, edge=1, layers=(w, n)))
    for n in (0, 1):
        assert (run(x, w, b, n, w[1 - n]) == convolution(x, w[n], b, KERNEL, edge=1)).all()


def test_what_is_not_taken(chips):
    x, w = (jnp.zeros(shape, jnp.bfloat16) for shape in ((1, 8, 3, 8, 64), (3, 3, 3, 64, 64)))
    assert convolution(x, w, None, KERNEL, edge=1).shape == (1, 6, 1, 8, 64)
    refused = [
        (x.astype(jnp.float32), w.astype(jnp.float32), KERNEL),
        (x[..., :4], w[..., :4], KERNEL),
        (x, jnp.zeros((3, 3, 3, 130, 64), jnp.bfloat16), KERNEL),
        (x, w[:, :, :2], KERNEL),  # lines that get longer
        (x[:, :, :2], w, KERNEL),
        (x, w, Settings()),
        (x, w, Settings(layers="kernel", mesh=make_mesh(chips, (2, 4, 1)))),
    ]
    assert [convolution(x, w, None, settings, edge=1) for x, w, settings in refused] == [None] * 7
    large = jnp.zeros((1, 8, 3, 1 << 13, 4), jnp.bfloat16)
    taken = [convolution(x, w[..., :4], None, KERNEL, edge=1, fill=True) is not None for x in (x[..., :4], large)]
    assert taken == [True, False]


@pytest.mark.parametrize("generation", CHIPS)
def test_blocks_fit(generation):
    """Of Stable Diffusion XL's maps at 1024 x 1024, of videos' and of one that no VMEM holds whole."""
    maps = [(128, 960, 320), (64, 1920, 640), (32, 2560, 1280), (32, 1280, 1280), (1024, 256, 256)]
    sizes = [((size, 1, size), channels, features, (3, 1, 3)) for size, channels, features in maps]
    sizes += [((176, 8, 768), 128, 128, (3, 3, 3)), ((22, 1, 96), 1024, 1024, (3, 3, 3))]
    for size, channels, features, taps in sizes:
        blocks = choose(size, channels, features, taps, generation)
        assert blocks.lines % blocks.piece == 0 and (blocks.features % LANES == 0 or blocks.features == features)
        assert math.prod(taps) * channels * blocks.features <= MOST_WORK or blocks.features == LANES
    assert choose((128, 1, 128), 1 << 20, 128, (3, 1, 3), generation) is None
    assert [convolution_kernel._lanes(features, 3, 256) for features in (3, 96, 320, 640)] == [3, 128, 320, 640]
