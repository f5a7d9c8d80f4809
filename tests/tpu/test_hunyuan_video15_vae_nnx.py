"""HunyuanVideo-1.5's VAE in Flax NNX. Oracle: upstream's, same weights, in the same process."""

import numpy as np
import pytest
import torch

from conftest import relative
from diffusers import AutoencoderKLHunyuanVideo15
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15_flax import FlaxAutoencoderKLHunyuanVideo15
from test_hunyuan_video15_vae import SIZES, decoded, encoded
from test_vae_nnx import last, new


SMALLER = {"block_out_channels": (8, 8, 16), "spatial_compression_ratio": 4}  # for programs of several shapes


pytestmark = pytest.mark.usefixtures("chips")


def both(mesh, **config):
    """(upstream's, ours of its weights)."""
    theirs = new(AutoencoderKLHunyuanVideo15, **{**SIZES, **config})
    theirs.enable_slicing()  # upstream's attention takes one video
    return theirs, FlaxAutoencoderKLHunyuanVideo15.from_torch(theirs, mesh=mesh)


def assert_equal(ours, theirs, latents, video):
    assert relative(ours.decode(last(latents)), last(decoded(theirs, latents))) < 1e-5  # measured: at most 8.3e-7
    assert relative(ours.encode(last(video)).parameters, last(encoded(theirs, video))) < 1e-5  # 1.3e-6


@pytest.mark.parametrize(
    "mesh, batch, frames, height, width",
    [
        ((1, 3, 1), 1, 1, 3, 5),  # an image; a width that three chips do not divide
        ((2, 4, 1), 2, 5, 2, 9),  # the batch over dp
        ((1, 1, 1), 2, 9, 3, 2),
        ((1, 8, 1), 1, 17, 1, 5),  # chips without a column of their own
        ((1, 2, 1), 1, 33, 1, 3),
    ],
)
def test_equals_upstream(mesh, batch, frames, height, width):
    theirs, ours = both(mesh)
    latents = torch.randn(batch, 4, 1 + frames // 4, height, width)
    assert_equal(ours, theirs, latents, torch.randn(batch, 3, frames, 16 * height, 16 * width))


@pytest.mark.parametrize("mesh, frames, width", [((2, 4, 1), 5, 2), ((1, 3, 1), 1, 5)])
def test_tiles_equal_upstream(mesh, frames, width):
    """Tiles of 4 by 4 latents every 3, the last ones smaller."""
    theirs, ours = both(mesh, **SMALLER)
    for vae in (theirs, ours):
        vae.enable_tiling(16, 16, 4, 4, 0.25)
    latents = torch.randn(1, 4, 1 + frames // 4, 5, width)
    assert_equal(ours, theirs, latents, torch.randn(1, 3, frames, 20, 4 * width))


@pytest.mark.parametrize("down, up", [(True, False), (False, True), (False, False)])
def test_levels_that_keep_their_channels_when_resampled(down, up):
    """Configs of upstream's that no published model has."""
    theirs, ours = both((1, 1, 1), **SMALLER, downsample_match_channel=down, upsample_match_channel=up)
    assert_equal(ours, theirs, torch.randn(1, 4, 2, 1, 2), torch.randn(1, 3, 5, 4, 8))


def test_sizes_and_tiles_that_the_model_cannot_take_are_refused():
    vae = FlaxAutoencoderKLHunyuanVideo15.abstract(SIZES)
    for run, shape, match in (
        (vae.encode, (1, 6, 32, 32, 3), "one frame and a multiple of 4 more, got 6 frames"),
        (vae.encode, (1, 5, 40, 32, 3), "multiples of 16, got 40 x 32"),
        (vae.encode, (1, 3, 5, 32, 32), r"video \[batch, frames, height, width, 3\], channels last"),
        (vae.decode, (1, 4, 2, 2, 2), r"width, 4\], channels last, got \[1, 4, 2, 2, 2\]"),
    ):
        with pytest.raises(ValueError, match=match):
            run(np.zeros(shape, np.float32))
    for tiles, match in (
        ((128, 128), "16 pixels to each of their latents, got 128 pixels and 16 latents"),
        ((64, 64, 4, 4, 0.3), "overlap_factor of whole latents, below all 4 of a tile, got 0.3"),
        ((64, 64, 4, 4, 1.0), "got 1.0: it would leave gaps"),
    ):
        with pytest.raises(ValueError, match=match):
            vae.enable_tiling(*tiles)
    assert not vae.use_tiling and vae.tile_sample_min_height == 256
    for change, match in (
        ({"spatial_compression_ratio": 12}, "powers of two"),
        ({"temporal_compression_ratio": 32}, r"that in time at most that in space, got \(16, 32\)"),
        ({"block_out_channels": (8, 16, 16, 16)}, "at least 5 block_out_channels"),
        ({"block_out_channels": (8, 8, 16, 16, 20)}, "the last a multiple of 8"),
        ({"block_out_channels": (8, 8, 48, 16, 16)}, "divides four times the finer, got 8 and 48"),
    ):
        with pytest.raises(ValueError, match=match):
            FlaxAutoencoderKLHunyuanVideo15.abstract({**SIZES, **change})
