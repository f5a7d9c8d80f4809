"""CogVideoX's VAE as a scan over batches of frames, split over the width. Oracle: upstream's, same weights, in the same process."""

import copy

import numpy as np
import pytest
import torch

import tiny
from conftest import relative
from diffusers import AutoencoderKLCogVideoX
from test_hunyuan_video15_vae import attached, decoded, encoded


SIZES = {
    "block_out_channels": (8, 8, 16), "down_block_types": ("CogVideoXDownBlock3D",) * 3,
    "up_block_types": ("CogVideoXUpBlock3D",) * 3, "latent_channels": 4, "layers_per_block": 2, "norm_num_groups": 4,
    "temporal_compression_ratio": 4, "sample_height": 32, "sample_width": 40,
}  # fmt: skip
RATIO = 4


def both(**config):
    """(upstream's, the same to be run on the mesh)."""
    torch.manual_seed(int(np.random.default_rng().integers(1 << 31)))
    theirs = tiny.with_uneven_norms(AutoencoderKLCogVideoX(**{**SIZES, **config}).eval())
    return theirs, copy.deepcopy(theirs)


@pytest.mark.parametrize(
    "degrees, frames, height, width, config",
    [
        ((1, 1, 1), 9, 3, 5, {}),
        ((2, 4, 1), 17, 2, 9, {}),  # a width that the chips do not divide
        ((1, 8, 1), 25, 2, 5, {}),  # chips without a column of their own
        ((1, 2, 1), 1, 3, 6, {}),  # an image
        ((1, 4, 2), 16, 1, 8, {}),  # no frame by itself
        ((1, 3, 1), 9, 2, 4, {"block_out_channels": (8, 16, 24), "norm_num_groups": 8}),
    ],
)
def test_equals_upstream(chips, degrees, frames, height, width, config):
    theirs, ours = both(**config)
    attached(ours, chips, degrees)
    latents = torch.randn(1, 4, -(-frames // 4), height, width) + 1
    video = torch.randn(1, 3, frames, RATIO * height, RATIO * width) + 1
    assert relative(decoded(ours, latents), decoded(theirs, latents)) < 1e-5
    assert relative(encoded(ours, video), encoded(theirs, video)) < 1e-5


@pytest.mark.parametrize("degrees", [(1, 1, 1), (2, 4, 1)])
def test_in_tiles(chips, degrees):
    """Upstream's tiles, the last ones smaller; columns and rows that fade."""
    theirs, ours = both()
    attached(ours, chips, degrees)
    for vae in (theirs, ours):
        vae.enable_tiling(16, 20, 0.25, 0.2)
    latents, video = torch.randn(1, 4, 3, 5, 9), torch.randn(1, 3, 9, 20, 36)
    assert relative(decoded(ours, latents), decoded(theirs, latents)) < 1e-5
    assert relative(encoded(ours, video), encoded(theirs, video)) < 1e-5
