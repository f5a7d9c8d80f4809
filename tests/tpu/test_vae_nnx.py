"""VAEs in Flax NNX. Oracle: upstream's, same weights, in the same process, and its files as it writes them."""

import copy
import functools
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

import diffusers
import tiny
from bench import vae_row
from bench.benches import nnx_vae, torch_vae
from conftest import relative
from diffusers.models.autoencoders.autoencoder_kl_wan_flax import FlaxAutoencoderKLWan
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.autoencoders.vae_nnx_flax import DiagonalGaussian, _program
from diffusers.models.autoencoders.vae_nnx_weights_flax import torch_name
from diffusers.tpu.pipelines.plans import flax_class
from diffusers.tpu.planner.published import ALIASES, MODELS
from test_vae import assert_equal, both, draw, last, new, of, rows


PUBLISHED = {"wan2.1": "wan2.1-t2v-14b", "wan2.2": "wan2.2-ti2v-5b", "hunyuanvideo1.5": "hunyuanvideo-1.5-720p-t2v"}
PUBLISHED["cogvideox"] = "cogvideox-2b"
TINY = ("wan2.2 small", "hunyuanvideo1.5 small", "cogvideox")
WEIGHTS = "diffusion_pytorch_model.safetensors"


pytestmark = pytest.mark.usefixtures("chips")


def test_slices_equal_upstream_and_are_one_program(attach):
    theirs, ours = both("wan2.1 nnx", attach, (1, 1, 1))
    for vae in (ours, theirs):
        vae.enable_slicing()
    latents, video = draw("wan2.1", 3, 4, 2, 2, (3, 5))  # frames behind the last four
    before = _program._cache_size()
    for _ in range(2):
        assert_equal(ours, theirs, latents, video)
        assert _program._cache_size() - before == 2  # one for decoding, one for encoding


@pytest.mark.parametrize("family", PUBLISHED)
def test_the_published_models_weights_and_where_they_lie(family):
    """None is left, and no rule that names them is without use."""
    path, config = MODELS[ALIASES[PUBLISHED[family]]].components["vae"]
    name = path.removeprefix("diffusers.")
    with torch.device("meta"):
        theirs = getattr(diffusers, name)(**config).state_dict()
    ours = flax_class(name).abstract(config, dtype=jnp.bfloat16, mesh=(2, 4, 1))
    paths = [(path, v.get_value()) for path, v in nnx.to_flat_state(nnx.state(ours))]
    assert {torch_name(path, ours.names): w.size for path, w in paths} == {n: t.numel() for n, t in theirs.items()}
    for rule in ours.names:
        others = [other for other in ours.names if other != rule]
        assert any(torch_name(path, others) not in theirs for path, _ in paths), rule
    here = sum(np.prod(w.sharding.shard_shape(w.shape)) for _, w in paths)
    assert here < 1.03 * sum(w.size for _, w in paths) / 8


def test_the_distribution_is_upstreams():
    parameters = torch.randn(1, 8, 2, 3, 3) * 20
    ours, theirs = DiagonalGaussian(jnp.asarray(last(parameters))), DiagonalGaussianDistribution(parameters)
    for name in ("mean", "logvar", "std"):
        assert relative(getattr(ours, name), last(getattr(theirs, name))) < 1e-6
    noise = jax.random.normal(key := jax.random.key(3), (1, 2, 3, 3, 4))
    assert relative(ours.sample(key), last(theirs.mode()) + last(theirs.std) * np.asarray(noise)) < 1e-6
    assert np.array_equal(ours.mode(), last(theirs.mode()))


# Files


def weights_of(vae) -> dict[str, np.ndarray]:
    return {torch_name(path, vae.names): np.asarray(v.get_value()) for path, v in nnx.to_flat_state(nnx.state(vae))}


@pytest.mark.parametrize("family", TINY)
def test_reads_upstreams_files(family, tmp_path):
    """A folder, shards, a variant, and the hub's cache."""
    theirs, flax = new(family), flax_class(*of(family, "class"))
    snapshot = tmp_path / "hub/models--someone--wan/snapshots/0123"
    (tmp_path / "hub/models--someone--wan/refs").mkdir(parents=True)
    (tmp_path / "hub/models--someone--wan/refs/main").write_text("0123")
    theirs.save_pretrained(tmp_path / "vae")
    theirs.save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    shutil.copytree(tmp_path / "sharded", snapshot / "sharded")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    expected, tensors = weights_of(flax.from_torch(theirs)), theirs.state_dict()
    assert expected.keys() == tensors.keys()
    for name, weight in expected.items():
        weight = np.moveaxis(weight, (-1, -2), (0, 1)) if weight.ndim == 5 else weight
        assert np.array_equal(weight.ravel(), tensors[name].numpy().ravel())
    public = {key: value for key, value in theirs.config.items() if not key.startswith("_")}
    for ours in (
        flax.from_pretrained(str(tmp_path), subfolder="vae"),
        flax.from_pretrained(tmp_path / "sharded"),
        flax.from_pretrained("someone/wan", subfolder="sharded", cache_dir=tmp_path / "hub", local_files_only=True),
    ):
        found = weights_of(ours)
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
        assert ours.mesh.size == 8 and dict(ours.config) == json.loads(json.dumps(public))
    theirs.bfloat16().save_pretrained(tmp_path / "half", variant="bf16")
    half = flax.from_pretrained(tmp_path / "half", variant="bf16", dtype=jnp.bfloat16)
    for name, value in weights_of(half).items():
        assert np.array_equal(value, expected[name].astype(jnp.bfloat16))


def test_bad_files_are_named(tmp_path):
    new("wan2.2 small").save_pretrained(tmp_path / "vae")
    path, folder = tmp_path / "vae" / WEIGHTS, str(tmp_path)
    good, config = load_file(path), json.loads((tmp_path / "vae/config.json").read_text())

    def refused(match: str, weights: dict | None = None, error=ValueError, subfolder="vae", **more):
        if weights is not None:
            save_file(weights, path)
        with pytest.raises(error, match=match):
            FlaxAutoencoderKLWan.from_pretrained(folder, subfolder=subfolder, **more)

    refused("torch_dtype", error=TypeError, torch_dtype=torch.float32)
    name = "decoder.mid_block.resnets.0.conv1.weight"
    refused(f"missing: {re.escape(name)}", {n: t for n, t in good.items() if n != name})
    refused(r"not known: decoder\.more", {**good, "decoder.more": torch.zeros(3)})
    shape = re.escape(str(list(good[name].shape)))
    refused(rf"another shape: {re.escape(name)} \[3, 3\] instead of {shape}", {**good, name: torch.zeros(3, 3)})
    save_file(good, path)
    path.write_bytes(path.read_bytes()[:-100])
    refused("cannot be read.*fetch it again")
    path.unlink()
    refused(WEIGHTS, error=OSError)
    refused(r"a folder vea in .*, got \['vae'\]", error=OSError, subfolder="vea")
    for change, match in (
        ({"_class_name": "AutoencoderKLLTXVideo"}, "one of AutoencoderKLLTXVideo"),
        ({"depth": 3}, "got also depth"),
    ):
        with pytest.raises(ValueError, match=match):
            FlaxAutoencoderKLWan.abstract({**config, **change})


def test_what_cannot_be_is_refused():
    @functools.cache
    def abstract(family: str, settings: str = "{}", changes: str = "{}"):
        name, sizes = of(family, "class", "sizes")
        return flax_class(name).abstract(sizes | json.loads(changes), **json.loads(settings))

    for family, what, given, match in rows("refused"):
        with pytest.raises(ValueError, match=match):
            vae = copy.copy(abstract(family, **({what: json.dumps(given)} if what in ("settings", "changes") else {})))
            tiles, shape = given if what == "tiled" else (given, given)
            if what in ("tiles", "tiled"):
                vae.enable_tiling(*tiles)
            if what in ("encode", "decode", "tiled"):
                getattr(vae, what.replace("tiled", "encode"))(np.zeros(shape, np.float32))


# The benchmark


@pytest.mark.slow
def test_the_benchmarks_row_is_like_that_of_upstreams_module(tmp_path, monkeypatch):
    """Compiled for a TPU: the same weights on each chip, and about the same work; ours has no convolution kernel."""
    monkeypatch.setenv("DIFFUSERS_TPU_CACHE", "off")
    tiny.wan().save_pretrained(tmp_path)
    size = {"height": 32, "width": 80, "num_frames": 9}
    theirs = torch_vae("v6e-8", str(tmp_path), {**size, "num_inference_steps": 1}, "bfloat16").ask()
    ours = nnx_vae("v6e-8", str(tmp_path), size, "bfloat16").ask()
    assert ours.keys() == theirs.keys() and ours["hbm_gib"].keys() == theirs["hbm_gib"].keys()
    assert ours["hbm_gib"]["weights"] == pytest.approx(theirs["hbm_gib"]["weights"], rel=0.02)
    assert 0.9 < ours["seconds"] / theirs["seconds"] < 1.4  # measured: 1.24


def test_what_the_benchmark_cannot_take_is_refused():
    size = {"height": 30, "width": 64, "num_frames": 5}
    for model, words in (
        ("hunyuanvideo-1.5-720p-t2v", "multiples of 16 and 4k"),
        ("ltx-video", "AutoencoderKLHunyuanVideo15, AutoencoderKLCogVideoX., got AutoencoderKLLTXVideo"),
    ):
        with pytest.raises(ValueError, match=words):
            vae_row.answer({"topology": "v6e-8", "model": model, "dtype": "bfloat16", **size}, print)
