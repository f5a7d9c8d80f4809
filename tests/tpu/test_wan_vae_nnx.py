"""Wan's VAE in Flax NNX. Oracle: upstream's, same weights, in the same process."""

import numpy as np
import pytest
import torch

from conftest import relative
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan_flax import FlaxAutoencoderKLWan
from diffusers.tpu.video.nnx.autoencoder import _program
from test_vae_nnx import last, new
from test_wan_vae import GENERATIONS, SMALL, decoded, encoded


SMALLER = {"dim_mult": [1, 1], "temperal_downsample": [True]}  # for programs of several shapes
PIXELS = (3, 5)  # beyond whole latents, which Wan 2.1 takes


pytestmark = pytest.mark.usefixtures("chips")


def upstreams(generation: str, **config) -> AutoencoderKLWan:
    return new(AutoencoderKLWan, **{**SMALL, **GENERATIONS[generation], **config})


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
