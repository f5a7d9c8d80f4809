"""Wan's VAE in Flax NNX. Oracle: upstream's, same weights, in the same process, and its files as it writes them."""

import copy
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.torch import load_file, save_file

import tiny
from conftest import relative
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan_flax import FlaxAutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan_nnx_flax import DiagonalGaussian, _program
from diffusers.models.autoencoders.autoencoder_kl_wan_nnx_layers_flax import torch_name
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.tpu.planner import vae_row
from diffusers.tpu.planner.benches import nnx_decode, torch_decode
from test_wan_vae import GENERATIONS, SMALL, decoded, encoded


FULL = {
    "2.1": {},
    "2.2": {
        "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True, "in_channels": 12,
        "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16, "latents_mean": [0.0] * 48,
        "latents_std": [1.0] * 48,
    },
}  # fmt: skip
BAD_SIZE = {"height": 30, "width": 64, "num_frames": 5}
SMALLER = {"dim_mult": [1, 1], "temperal_downsample": [True]}  # for programs of several shapes
PIXELS = (3, 5)  # beyond whole latents, which Wan 2.1 takes
WEIGHTS = "diffusion_pytorch_model.safetensors"


pytestmark = pytest.mark.usefixtures("chips")


def upstreams(generation: str, **config) -> AutoencoderKLWan:
    torch.manual_seed(int(np.random.default_rng().integers(1 << 31)))
    return tiny.with_uneven_norms(AutoencoderKLWan(**{**SMALL, **GENERATIONS[generation], **config}).eval())


def last(x: torch.Tensor) -> np.ndarray:
    """Channels last."""
    return x.float().movedim(1, -1).numpy()


def draw(vae: AutoencoderKLWan, batch: int, frames: int, height: int, width: int, pixels=PIXELS):
    """(latents, a video of their size and, where the model takes any, somewhat more)."""
    ratio = vae.spatial_compression_ratio
    more = (0, 0) if vae.config.is_residual else pixels
    size = [length * ratio + extra for length, extra in zip((height, width), more)]
    return torch.randn(batch, 4, frames, height, width), torch.randn(batch, 3, 4 * frames - 3, *size)


def assert_equal(ours, theirs, latents, video):
    assert relative(ours.decode(last(latents)), last(decoded(theirs, latents))) < 1e-5  # measured: at most 1.5e-6
    assert relative(ours.encode(last(video)).parameters, last(encoded(theirs, video))) < 1e-5  # 6e-7


@pytest.mark.parametrize(
    "generation, mesh, batch, frames, height, width",
    [
        ("2.1", (1, 3, 1), 1, 1, 3, 5),  # an image; a width that three chips do not divide
        ("2.1", (2, 4, 1), 2, 2, 1, 9),  # the batch over dp
        ("2.1", (1, 8, 1), 1, 3, 3, 5),  # chips without a column of their own
        ("2.1", (1, 1, 1), 1, 5, 3, 2),
        ("2.2", (1, 1, 1), 2, 1, 3, 2),
        ("2.2", (1, 3, 1), 2, 2, 1, 5),
        ("2.2", (2, 4, 1), 1, 3, 1, 7),  # all eight chips over the width
        ("2.2", (1, 8, 1), 1, 5, 1, 3),
    ],
)
def test_equals_upstream(generation, mesh, batch, frames, height, width):
    theirs = upstreams(generation)
    ours = FlaxAutoencoderKLWan.from_torch(theirs, mesh=mesh)
    assert_equal(ours, theirs, *draw(theirs, batch, frames, height, width))


@pytest.mark.parametrize(
    "generation, ratio, mesh, frames, width", [("2.1", 2, (2, 4, 1), 3, 2), ("2.2", 4, (1, 3, 1), 1, 5)]
)
def test_tiles_equal_upstream(generation, ratio, mesh, frames, width):
    """Tiles of 4 by 4 latents every 3, the last ones smaller."""
    theirs = upstreams(generation, **SMALLER, scale_factor_spatial=ratio)
    ours = FlaxAutoencoderKLWan.from_torch(theirs, mesh=mesh)
    for vae in (ours, theirs):
        vae.enable_tiling(4 * ratio, 4 * ratio, 3 * ratio, 3 * ratio)
    assert_equal(ours, theirs, *draw(theirs, 1, frames, 5, width, pixels=(1, 1)))


def test_slices_equal_upstream_and_are_one_program():
    theirs = upstreams("2.1")
    ours = FlaxAutoencoderKLWan.from_torch(theirs, mesh=(1, 1, 1))
    for vae in (ours, theirs):
        vae.enable_slicing()
    latents, video = draw(theirs, 3, 1, 2, 2)
    video = torch.cat(
        [video, torch.randn(3, 3, 3, *video.shape[-2:])], 2
    )  # frames after the last whole four are left out
    before = _program._cache_size()
    assert_equal(ours, theirs, latents, video)
    assert _program._cache_size() - before == 2  # one for decoding, one for encoding
    other = FlaxAutoencoderKLWan.from_torch(upstreams("2.1"), mesh=(1, 1, 1))
    other.enable_slicing()
    ours.decode(last(latents)), ours.encode(last(video)), other.decode(last(latents))
    assert _program._cache_size() - before == 2


def test_in_bfloat16_within_upstreams_error():
    theirs = upstreams("2.1", dim_mult=[1, 2], temperal_downsample=[True], scale_factor_spatial=2).bfloat16()
    exact = copy.deepcopy(theirs).double()
    ours = FlaxAutoencoderKLWan.from_torch(theirs, dtype=jnp.bfloat16, mesh=(1, 1, 1))
    latents, video = (x.bfloat16() for x in draw(exact, 1, 3, 12, 16))
    ratios = []
    for run, x in ((decoded, latents), (encoded, video)):
        oracle = last(run(exact, x.double()))
        mine = ours.decode(last(x)) if run is decoded else ours.encode(last(x)).parameters
        assert mine.dtype == jnp.bfloat16
        ratios.append(relative(mine.astype(jnp.float32), oracle) / relative(last(run(theirs, x)), oracle))
    assert max(ratios) < 1.25, ratios  # measured: 0.84 to 0.87


def test_one_step_whatever_the_number_of_frames():
    """What is compiled does not grow with the video; chips exchange edge columns and the middle's keys, nothing else."""
    vae = FlaxAutoencoderKLWan.abstract({**SMALL, **GENERATIONS["2.1"]}, mesh=(1, 8, 1))
    short, long = (vae.lower("decode", (1, frames, 4, 16, 4)).as_text() for frames in (3, 9))
    for kind in ("convolution", "collective_permute", "all_gather", "while"):
        assert len(re.findall(rf"stablehlo\.{kind}\b", short)) == len(re.findall(rf"stablehlo\.{kind}\b", long)) > 0
    assert "all_reduce" not in long and "all_to_all" not in long


@pytest.mark.parametrize("generation", FULL)
def test_the_published_models_weights_and_where_they_lie(generation):
    with torch.device("meta"):
        theirs = AutoencoderKLWan(**FULL[generation]).state_dict()
    ours = FlaxAutoencoderKLWan.abstract(FULL[generation], dtype=jnp.bfloat16, mesh=(2, 4, 1))
    weights = {torch_name(path): v.get_value() for path, v in nnx.to_flat_state(nnx.state(ours))}
    assert {name: w.size for name, w in weights.items()} == {name: t.numel() for name, t in theirs.items()}
    whole = sum(w.size for w in weights.values())
    here = sum(np.prod(w.sharding.shard_shape(w.shape)) for w in weights.values())
    assert here < 1.03 * whole / 8


def test_the_distribution_is_upstreams():
    parameters = torch.randn(1, 8, 2, 3, 3) * 20
    ours, theirs = DiagonalGaussian(jnp.asarray(last(parameters))), DiagonalGaussianDistribution(parameters)
    for name in ("mean", "logvar", "std"):
        assert relative(getattr(ours, name), last(getattr(theirs, name))) < 1e-6
    key = jax.random.key(3)
    noise = jax.random.normal(key, (1, 2, 3, 3, 4))
    assert relative(ours.sample(key), last(theirs.mode()) + last(theirs.std) * np.asarray(noise)) < 1e-6
    assert np.array_equal(ours.mode(), last(theirs.mode()))


# Files


@pytest.fixture
def saved(tmp_path) -> tuple[AutoencoderKLWan, str]:
    """(upstream's, the directory of a pipeline that it is saved in)."""
    theirs = upstreams("2.2")
    theirs.save_pretrained(tmp_path / "vae")
    return theirs, str(tmp_path)


def weights_of(vae: FlaxAutoencoderKLWan) -> dict[str, np.ndarray]:
    return {torch_name(path): np.asarray(v.get_value()) for path, v in nnx.to_flat_state(nnx.state(vae))}


def test_reads_upstreams_files(saved, tmp_path):
    theirs, folder = saved
    theirs.save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    expected = weights_of(FlaxAutoencoderKLWan.from_torch(theirs))
    kernel = theirs.decoder.conv_in.weight.detach().permute(2, 3, 4, 1, 0).numpy()
    assert np.array_equal(expected["decoder.conv_in.weight"], kernel)
    for ours in (
        FlaxAutoencoderKLWan.from_pretrained(folder, subfolder="vae"),
        FlaxAutoencoderKLWan.from_pretrained(tmp_path / "vae"),
        FlaxAutoencoderKLWan.from_pretrained(tmp_path / "sharded"),
    ):
        found = weights_of(ours)
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
        assert ours.mesh.size == 8
        public = {key: value for key, value in theirs.config.items() if not key.startswith("_")}
        assert dict(ours.config) == public and ours.config.latents_mean == theirs.config.latents_mean
    theirs.bfloat16().save_pretrained(tmp_path / "half", variant="bf16")
    half = FlaxAutoencoderKLWan.from_pretrained(tmp_path / "half", variant="bf16", dtype=jnp.bfloat16)
    for name, value in weights_of(half).items():
        assert np.array_equal(value, expected[name].astype(jnp.bfloat16))


def test_reads_the_hubs_cache(saved, tmp_path):
    theirs, folder = saved
    theirs.save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    home = tmp_path / "hub" / "models--someone--wan"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0123")
    expected = weights_of(FlaxAutoencoderKLWan.from_torch(theirs))
    for name in ("vae", "sharded"):
        shutil.copytree(tmp_path / name, home / "snapshots" / "0123" / name)
        found = weights_of(
            FlaxAutoencoderKLWan.from_pretrained(
                "someone/wan", subfolder=name, cache_dir=tmp_path / "hub", local_files_only=True
            )
        )
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
    with pytest.raises(TypeError, match="torch_dtype"):
        FlaxAutoencoderKLWan.from_pretrained(folder, subfolder="vae", torch_dtype=torch.float32)


def test_bad_files_are_named(saved, tmp_path):
    _, folder = saved
    path, config_file = tmp_path / "vae" / WEIGHTS, tmp_path / "vae" / "config.json"
    good, config = load_file(path), json.loads(config_file.read_text())

    def refused(weights: dict, match: str, error=ValueError):
        save_file(weights, path)
        with pytest.raises(error, match=match):
            FlaxAutoencoderKLWan.from_pretrained(folder, subfolder="vae")

    name = "decoder.mid_block.resnets.0.conv1.weight"
    refused({n: t for n, t in good.items() if n != name}, f"missing: {re.escape(name)}")
    refused({**good, "decoder.more": torch.zeros(3)}, r"not known: decoder\.more")
    shape = re.escape(str(list(good[name].shape)))
    refused({**good, name: torch.zeros(3, 3)}, rf"another shape: {re.escape(name)} \[3, 3\] instead of {shape}")
    save_file(good, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cannot be read.*fetch it again"):
        FlaxAutoencoderKLWan.from_pretrained(folder, subfolder="vae")
    path.unlink()
    with pytest.raises(OSError, match=WEIGHTS):
        FlaxAutoencoderKLWan.from_pretrained(folder, subfolder="vae")
    with pytest.raises(OSError, match=r"a folder vea in .*, got \['vae'\]"):
        FlaxAutoencoderKLWan.from_pretrained(folder, subfolder="vea")
    for change, match in (
        ({"_class_name": "AutoencoderKLLTXVideo"}, "one of AutoencoderKLLTXVideo"),
        ({"depth": 3}, "got also depth"),
        ({"attn_scales": [1.0]}, "empty attn_scales"),
    ):
        with pytest.raises(ValueError, match=match):
            FlaxAutoencoderKLWan.abstract({**config, **change})


def test_bad_settings_and_inputs_are_refused():
    config = {**SMALL, **GENERATIONS["2.2"]}
    for settings, match in (
        ({"dtype": jnp.float16}, "float32, bfloat16, got float16"),
        ({"mesh": (3, 3, 1)}, "product is at most the 8 chips"),
        ({"mesh": jax.make_mesh((8,), ("x",))}, "axes dp, sp, tp"),
        ({"convolution_precision": "low"}, "convolution_precision"),
    ):
        with pytest.raises(ValueError, match=match):
            FlaxAutoencoderKLWan.abstract(config, **settings)
    vae = FlaxAutoencoderKLWan.abstract(config)
    for run, shape, match in (
        (vae.encode, (1, 3, 5, 32, 32), r"video \[batch, frames, height, width, 3\], channels last"),
        (vae.decode, (1, 2, 2, 2, 16), r"width, 4\], channels last, got \[1, 2, 2, 2, 16\]"),
        (vae.decode, (1, 0, 2, 2, 4), r"got \[1, 0, 2, 2, 4\]"),
        (vae.encode, (1, 5, 40, 32, 3), "multiples of 16, got 40 x 32"),
    ):
        with pytest.raises(ValueError, match=match):
            run(np.zeros(shape, np.float32))


def test_tiles_that_the_model_cannot_take_are_refused():
    for generation, tiles, size, match in (
        ("2.1", (32, 24), (40, 29), r"at least 8 pixels, got tiles of \[32, 32\] and \[16, 5\]"),
        ("2.2", (64, 36), (96, 96), r"multiples of 16 pixels, got tiles of \[128, 128\] and \[24, 24\]"),
    ):
        vae = FlaxAutoencoderKLWan.abstract({**SMALL, **GENERATIONS[generation]}, mesh=(1, 1, 1))
        with pytest.raises(ValueError, match="strides of .* at least, and of a tile at most"):
            vae.enable_tiling(32, 32, 4, 40)
        vae.enable_tiling(tiles[0], tiles[0], tiles[1], tiles[1])
        with pytest.raises(ValueError, match=match):
            vae.encode(np.zeros((1, 1, *size, 3), np.float32))


@pytest.mark.slow
def test_the_benchmarks_row_is_like_that_of_upstreams_module(tmp_path, monkeypatch):
    """Compiled for a TPU: the same weights on each chip, and about the same work."""
    monkeypatch.setenv("DIFFUSERS_TPU_CACHE", "off")
    tiny.wan().save_pretrained(tmp_path)
    size = {"height": 32, "width": 80, "num_frames": 9}
    theirs = torch_decode("v6e-8", str(tmp_path), {**size, "num_inference_steps": 1}, "bfloat16", True)(print)
    ours = nnx_decode("v6e-8", str(tmp_path), size, "bfloat16")(print)
    assert ours.keys() == theirs.keys() and ours["hbm_gib"].keys() == theirs["hbm_gib"].keys()
    assert ours["hbm_gib"]["weights"] == pytest.approx(theirs["hbm_gib"]["weights"], rel=0.02)
    assert ours["seconds"] < 1.1 * theirs["seconds"]  # measured: 0.97


def test_a_size_the_benchmark_cannot_take_is_refused():
    with pytest.raises(ValueError, match="multiples of 8 and 4k"):
        vae_row.answer({"topology": "v6e-8", "model": "wan2.1-t2v-14b", "dtype": "bfloat16", **BAD_SIZE}, print)
    with pytest.raises(ValueError, match="plain JAX .AutoencoderKLWan., got AutoencoderKLLTXVideo"):
        vae_row.answer({"topology": "v6e-8", "model": "ltx-video", "dtype": "bfloat16", **BAD_SIZE}, print)
