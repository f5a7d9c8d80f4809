"""VAEs as one scan over frames, split over the width: upstream's modules, and those in Flax NNX ("NAME nnx"). Oracle: upstream's, same weights."""

import copy
import functools
import math
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import diffusers
import tiny
from conftest import relative, slow, table
from diffusers.models.attention_processor import AttnProcessor
from diffusers.models.autoencoders.vae import DecoderOutput
from diffusers.models.autoencoders.vae_nnx_flax import VideoAutoencoder
from diffusers.tpu.bridge import convolutions
from diffusers.tpu.kernels.settings import Settings, using
from diffusers.tpu.kernels.video import norm
from diffusers.tpu.kernels.video.chunks import scan_chunks
from diffusers.tpu.pipelines.plans import flax_class, module_plan


# By name: upstream's `class`, `sizes`, `pixels` to a latent, `frames` to one: none for images. `cases`: mesh, batch, frames, height and
# width of latents, changes of sizes, why. `tiles`: mesh, what `enable_tiling` is given, frames, height and width; the last are smaller.
# `refused`, in plain JAX: settings, changes of sizes, tiles, shapes of what is encoded or decoded, tiles of such a shape; what is said.
FAMILIES = table("test_vae")


def of(family: str, *names: str) -> list:
    return [FAMILIES[family.removesuffix(" nnx")][name] for name in names]


def new(family: str, **config) -> torch.nn.Module:
    """Upstream's with random weights."""
    name, sizes = of(family, "class", "sizes")
    torch.manual_seed(int(np.random.default_rng().integers(1 << 31)))
    vae = tiny.with_uneven_norms(getattr(diffusers, name)(**{**sizes, **config}).eval())
    for parameter in vae.parameters():
        if not parameter.any():  # how much noise LTX's decoder draws
            torch.nn.init.uniform_(parameter)
    return vae


def draw(family: str, batch: int, frames: int, height: int, width: int, pixels=(0, 0)) -> tuple:
    """(latents of so many frames, a video of them and of some more pixels)."""
    ratio, time = of(family, "pixels", "frames")
    of_latents, of_video = ([-(-frames // time)], [frames]) if time else ([], [])
    size = height * ratio + pixels[0], width * ratio + pixels[1]
    return torch.randn(batch, 4, *of_latents, height, width) + 1, torch.randn(batch, 3, *of_video, *size) + 1


def both(family: str, attach, degrees, dtype=torch.float32, **config) -> tuple:
    """(upstream's, ours of the same weights on a mesh of these degrees); `attach`: the fixture."""
    theirs = new(family, **config).to(dtype)
    if family.endswith("nnx"):
        if "hunyuan" in family:
            theirs.enable_slicing()  # upstream's attention takes one video
        kind = {torch.float32: jnp.float32, torch.bfloat16: jnp.bfloat16}[dtype]
        return theirs, flax_class(*of(family, "class")).from_torch(theirs, mesh=tuple(degrees), dtype=kind)
    ours = copy.deepcopy(theirs)
    attach(ours, *degrees, plan=module_plan(ours))
    return theirs, ours


@torch.no_grad()
def decoded(vae, latents):
    if isinstance(vae, VideoAutoencoder):
        return first(vae.decode(last(latents)))
    torch.manual_seed(0)
    timesteps = (torch.linspace(0.05, 0.6, len(latents)),) if vae.config.get("timestep_conditioning") else ()
    return vae.decode(latents, *timesteps).sample


@torch.no_grad()
def encoded(vae, video):
    if isinstance(vae, VideoAutoencoder):
        return first(vae.encode(last(video)).parameters)
    return vae.encode(video).latent_dist.parameters


def lowered(vae, entry: str, shape: tuple[int, ...]) -> str:
    """The program of `entry` for an input of this shape, channels first."""
    if isinstance(vae, VideoAutoencoder):
        return vae.lower(entry, (shape[0], *shape[2:], shape[1])).as_text()
    runner = vae._tpu_runner
    return runner.trace(runner.flatten_call(entry, (torch.zeros(shape),), {})).traced.lower().as_text()


def last(x: torch.Tensor) -> np.ndarray:
    """Channels last, as plain JAX has them."""
    return x.float().movedim(1, -1).numpy()


def first(x) -> torch.Tensor:
    return torch.tensor(np.asarray(x, np.float32)).movedim(-1, 1).to(getattr(torch, x.dtype.name))


SMALL = {
    "block_out_channels": (8, 8), "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
    "layers_per_block": 1,
}  # fmt: skip


def assert_equal(ours, theirs, latents, video):
    assert relative(decoded(ours, latents), decoded(theirs, latents)) < 1e-5  # measured: at most 1.5e-6
    assert relative(encoded(ours, video), encoded(theirs, video)) < 1e-5


def named(case) -> str:
    return "-".join([case[0], "x".join(map(str, case[1])), str(case[3])])


def rows(kind: str) -> list[tuple]:
    """Of every family and form, its name before each row of this kind; those that are slow as such."""
    forms = [(name, form) for form in ("", " nnx") for name in FAMILIES]
    found = [(name + form, *row) for name, form in forms for row in FAMILIES[name].get(kind + form, ())]
    return found if kind.endswith("slow") else [*found, *map(slow, rows(f"{kind} slow"))]


@pytest.mark.parametrize("case", rows("cases"), ids=named)
def test_equals_upstream(attach, case):
    family, degrees, batch, frames, height, width, *config = case
    theirs, ours = both(family, attach, degrees, **(config[0] if config else {}))
    pixels = (3, 5) if family == "wan2.1 nnx" else (0, 0) if frames else (1, 3)  # beyond whole latents
    assert_equal(ours, theirs, *draw(family, batch, frames, height, width, pixels))
    assert family.endswith("nnx") or not ours._tpu_runner.eager


@pytest.mark.parametrize("case", rows("tiles"), ids=operator.itemgetter(0))
def test_tiles_equal_upstream(attach, case):
    """Columns, rows and frames that fade."""
    family, degrees, tiles, frames, height, width = case
    config = {"sample_size": 20} if family == "kl" else {}  # its tiles do not meet: upstream's result is larger
    theirs, ours = both(family, attach, degrees, **config)
    latents, video = draw(family, 1, frames, height, width, (1, 1) if family == "wan2.1 small nnx" else (0, 0))
    for vae in (theirs, ours):
        vae.enable_tiling(*tiles)
        if family == "ltx":
            vae.use_framewise_decoding = True
        if family == "qwenimage":  # values beyond 1, which upstream's tiles keep
            torch.nn.init.constant_(vae.decoder.conv_out.bias, 0.9)
    if family == "qwenimage":
        latents *= 9
        assert decoded(theirs, latents).max() > 1
    assert_equal(ours, theirs, latents, video)


@pytest.mark.parametrize("family, frames, name", [("wan2.1 small", 5, "_decode"), slow("kl", 0, "tiled_decode")])
def test_a_method_of_the_users_own(attach, family, frames, name):
    """In the place of upstream's; it calls the tiled form by position and by name."""
    theirs, ours = both(family, attach, (1, 2, 1), **({"sample_size": 20} if family == "kl" else {}))
    latents, _ = draw(family, 1, frames, 3, 6)

    def mixed(vae, z, return_dict=True):
        tiles = vae.tiled_decode if name == "_decode" else functools.partial(type(vae).tiled_decode, vae)
        sample = tiles(z, False)[0] / 2 - tiles(return_dict=True, z=z).sample.mean()
        return DecoderOutput(sample=sample) if return_dict else (sample,)

    for vae in (theirs, ours):
        vae.enable_tiling(*([8, 8, 6, 6] if name == "_decode" else []))
        setattr(vae, name, functools.partial(mixed, vae))
    assert relative(decoded(ours, latents), decoded(theirs, latents)) < 1e-5


@pytest.mark.parametrize("family, frames", [slow("wan2.1", 8), slow("kl", 0)])
def test_slices_and_frames_beyond_the_last_four(attach, family, frames):
    theirs, ours = both(family, attach, (1, 4, 1))
    for vae in (ours, theirs):
        vae.enable_slicing()
    assert_equal(ours, theirs, *draw(family, 2, frames, 2, 3))


@pytest.mark.slow
def test_what_no_slab_holds_is_upstreams(attach):
    """Noise that a decoder draws, and a video whose width ends between latents."""
    theirs, ours = both("ltx", attach, (1, 2, 1), decoder_inject_noise=(False, True, False, False, False))
    assert_equal(ours, theirs, draw("ltx", 1, 9, 1, 3)[0], draw("ltx", 1, 1, 1, 1, (0, 16))[1])


HALVED = {"spatial_compression_ratio": 2, "temporal_compression_ratio": 2}
HALF = [  # changes of sizes: those by whose widths our kernels compute
    ("wan2.1", (1, 4, 1), (4, 6), None),
    ("wan2.1 small nnx", (1, 1, 1), (12, 16), None),
    *(slow(f"{name} nnx", (1, 1, 1), (12, 16), None) for name in ("hunyuanvideo1.5 small", "cogvideox")),
    ("wan2.1 small", (1, 2, 1), (4, 6), {"base_dim": 64}),
    ("hunyuanvideo1.5 small", (1, 1, 1), (4, 6), {"block_out_channels": (64, 128), **HALVED}),
    slow("cogvideox", (1, 2, 1), (4, 6), {"block_out_channels": (128, 128, 128), "sample_height": 64}),
]


@pytest.mark.parametrize("family, degrees, size, wide", HALF)
def test_in_bfloat16_within_upstreams_error(attach, family, degrees, size, wide):
    """Also by interpreted kernels: what convolutions read, columns of neighbours, earlier frames, doubled maps, shortcuts."""
    attach = functools.partial(attach, layers="kernel") if wide else attach
    theirs, ours = both(family, attach, degrees, torch.bfloat16, **(wide or {}))
    exact, ratios = copy.deepcopy(theirs).double(), []
    for run, x in zip((decoded, encoded), draw(family, 1, 9, *size)):
        x = (x - 1).bfloat16()
        oracle, found = run(exact, x.double()), run(ours, x)
        assert found.dtype == torch.bfloat16
        ratios.append(relative(found, oracle) / relative(run(theirs, x), oracle))
    assert max(ratios) < 1.25, ratios  # measured: 0.73 to 1.10


@pytest.mark.parametrize("precision, limit", [("default", 5e-3), ("high", 1e-5), ("highest", None)])
@pytest.mark.parametrize("channels", [40, 64])
@pytest.mark.parametrize("repeated", [False, True])
def test_float32_by_products_of_bfloat16(precision, limit, channels, repeated):
    """What a TPU is given for a float32 convolution, by our kernel and without; at its most exact as good as sums of float32 are on this machine."""
    shapes = (2, channels, 3, 6, 8), (channels, channels, 2, 3, 3)
    x, w = (np.random.default_rng().standard_normal(shape).astype(np.float32) for shape in shapes)
    around = F.pad(torch.tensor(x).double(), (0, 0, 1, 1, 0, 0), mode="replicate" if repeated else "constant")
    exact = F.conv3d(around, torch.tensor(w).double())

    def error(platform):
        with using(Settings(platform=platform, generation="v6e", convolutions=precision, interpret=True)):
            run = jax.jit(lambda x, w: convolutions._by_columns(x, w, None, [(0, 0), (1, 1)], repeated))
            by_kernel = "pallas_call" in str(jax.make_jaxpr(run)(x, w))
            assert by_kernel == (platform == "tpu" and channels == 64)
            return relative(run(x, w), exact)

    limit = limit or 6 * error("cpu")  # of a sum of six times as many terms
    assert limit / 20 < error("tpu") < limit


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("rows, finer", [(48, 8), (32, 4)])
def test_norm_by_place(rows, finer, silu):
    """By our kernel and without, of a map whose first frame is a block of its own; float64 formula."""
    rng = np.random.default_rng()
    x = jnp.asarray(1 + 2 * rng.standard_normal((2, 5, rows, 2 * finer, 128)), jnp.bfloat16)
    coarse = rng.standard_normal((2, 2, 3, rows // finer, 2, 128)).astype(np.float32)
    weight, bias = rng.standard_normal((2, 128)).astype(np.float32)
    wide = np.asarray(x.astype(jnp.float32), np.float64).reshape(*x.shape[:-1], 32, 4)
    exact = (wide - wide.mean((1, 2, 3, 5), keepdims=True)) / np.sqrt(wide.var((1, 2, 3, 5), keepdims=True) + 1e-6)
    frames = np.concatenate([coarse[:, :, :1], coarse[:, :, 1:].repeat(2, 2)], 2).repeat(finer, 3).repeat(finer, 4)
    exact = (exact.reshape(x.shape) * weight + bias) * frames[0] + frames[1]
    exact = exact / (1 + np.exp(-exact)) if silu else exact

    def error(layers):
        with using(Settings(layers=layers)):
            run = jax.jit(lambda x, *maps: norm.normed_by_place(x, weight, bias, 32, 1e-6, *maps, silu=silu))
            assert ("pallas_call" in str(jax.make_jaxpr(run)(x, *coarse))) == (layers == "kernel")
            return relative(np.asarray(run(x, *coarse).astype(jnp.float32)), exact)

    assert error("kernel") < 1.01 * error("xla") < 1e-2, (error("kernel"), error("xla"))


@pytest.mark.parametrize(
    "family", ["wan2.1 small", *map(slow, ("wan2.2 nnx", "hunyuanvideo1.5 nnx", "cogvideox nnx"))]
)
def test_one_step_whatever_the_number_of_frames(attach, family):
    """What is compiled does not grow with the video; chips exchange edge columns and the middle's keys, or statistics, nothing else."""
    _, ours = both(family, attach, (1, 8, 1))
    short, long = (lowered(ours, "decode", (1, 4, frames, 4, 16)) for frames in (5, 9))
    exchanged, not_exchanged = ("all_reduce", "all_gather")[:: 1 if "cogvideox" in family else -1]
    for kind in ("convolution", "collective_permute", exchanged, "while"):
        assert len(re.findall(rf"stablehlo\.{kind}\b", short)) == len(re.findall(rf"stablehlo\.{kind}\b", long)) > 0
    assert not_exchanged not in long and "all_to_all" not in long


@pytest.mark.parametrize("entry, shape", [("decode", (1, 4, 4, 16)), ("encode", (1, 3, 16, 64))])
def test_chips_share_the_work(attach, entry, shape):
    """No chip convolves more than its shard and the columns beside it."""

    def convolved(degrees):
        text = lowered(both("kl", attach, degrees)[1], entry, shape)
        sizes = re.findall(r"stablehlo\.convolution.*?: \(tensor<([0-9x]+)xf32>", text)
        assert ("all_reduce" in text) == ("all_gather" in text) == (degrees != (1, 1, 1))
        return sum(math.prod(map(int, size.split("x"))) for size in sizes)

    assert convolved((1, 8, 1)) < convolved((1, 1, 1)) / 4  # measured: 0.17, columns beside shards included


def test_a_cache_that_grows_is_an_error_that_names_it():
    def step(chunk, cache, number):
        seen = chunk if cache[1] is None else jnp.concatenate([cache[1], chunk], 1)
        return seen.mean() + chunk, [chunk, seen]

    words = r"expected a cache whose shapes stay.*: entry \[1\] of \(1, 8, 3\) and then \(1, 10, 3\)\. What"
    with pytest.raises(NotImplementedError, match=words):
        jax.eval_shape(lambda x: scan_chunks(step, x, 2, [None, None]), jnp.zeros((1, 5, 3)))


# What users change


class OwnProcessor(AttnProcessor):
    """Some user's, of which nobody knows what it computes."""


@pytest.mark.parametrize("processor", [AttnProcessor, OwnProcessor])
def test_other_attention_processors(attach, processor):
    theirs, ours = both("kl", attach, (1, 4, 1))
    for vae in (theirs, ours):
        vae.set_attn_processor(processor())
    latents, _ = draw("kl", 1, 0, 3, 7)
    assert relative(decoded(ours, latents), decoded(theirs, latents)) < 1e-5


def pads(mode):
    def change(conv):
        conv.padding_mode = mode
        conv._reversed_padding_repeated_twice = [n for n in reversed(conv.padding) for _ in (0, 1)]

    return change


def _with_columns(conv, columns_beside):
    """The idiom of textures that are seamless in x: `_conv_forward` of the instance gives the columns, zeros are above and below."""
    rows, columns = conv.padding

    def forward(x, weight, bias):
        x = F.pad(columns_beside(x, columns), (0, 0, rows, rows))
        return F.conv2d(x, weight, bias, conv.stride, (0, 0), conv.dilation, conv.groups)

    conv._conv_forward = forward


CHANGES = {
    **{mode: pads(mode) for mode in ("circular", "reflect", "replicate")},
    "circular in x": lambda conv: _with_columns(conv, lambda x, n: F.pad(x, (n, n, 0, 0), mode="circular")),
    "by hand": lambda conv: _with_columns(
        conv, lambda x, n: torch.cat([x[..., x.shape[-1] - n :], x, x[..., :n]], -1)
    ),
    "hook": lambda conv: conv.register_forward_hook(lambda module, args, out: out - out.mean((2, 3), keepdim=True)),
}


@pytest.mark.idiom("seamless")
@pytest.mark.parametrize("change", [c if c == "circular" else slow(c) for c in CHANGES])
def test_what_needs_the_whole_map_equals_upstream(attach, change):
    """Seamless textures and hooks, between two calls of the VAE as it was; some by padding, some by code of the script's."""
    theirs, ours = both("kl", attach, (2, 4, 1) if change == "circular" else (1, 2, 1), **SMALL)
    latents, image = draw("kl", 1, 0, 3, 9)
    before = decoded(theirs, latents)
    assert relative(decoded(ours, latents), before) < 1e-5

    convs = [m for vae in (theirs, ours) for m in vae.modules() if isinstance(m, torch.nn.Conv2d)]
    for conv in convs:
        CHANGES[change](conv)
    assert relative(decoded(theirs, latents), before) > 1e-3
    assert_equal(ours, theirs, latents, image)
    for conv in convs:
        conv._forward_hooks.clear()
        vars(conv).pop("_conv_forward", None)
        conv.padding_mode = "zeros"
    assert relative(decoded(ours, latents), before) < 1e-5
    assert ours._tpu_runner.modes.eager == {} and ours._tpu_runner.split is None
