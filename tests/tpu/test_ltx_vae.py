"""LTX-Video's VAE split over the width. Oracle: upstream's, same weights, in the same process."""

import copy

import numpy as np
import pytest
import torch

import tiny
from conftest import relative
from diffusers import AutoencoderKLLTXVideo
from test_hunyuan_video15_vae import attached, encoded


FIRST = {
    "latent_channels": 4, "block_out_channels": (4, 8, 8, 8), "decoder_block_out_channels": (4, 8, 8, 8),
    "layers_per_block": (2, 1, 1, 1, 1), "decoder_layers_per_block": (1, 1, 1, 2, 1),
}  # fmt: skip
CONDITIONED = {  # as 0.9.5's: by timesteps, resampled beside a shortcut
    "latent_channels": 4, "block_out_channels": (4, 8, 8, 16, 16), "down_block_types": ("LTXVideo095DownBlock3D",) * 4,
    "decoder_block_out_channels": (8, 16, 32), "layers_per_block": (1, 2, 1, 1, 1),
    "decoder_layers_per_block": (2, 1, 1, 1), "spatio_temporal_scaling": (True,) * 4,
    "decoder_spatio_temporal_scaling": (True,) * 3, "decoder_inject_noise": (False,) * 4,
    "downsample_type": ("spatial", "temporal", "spatiotemporal", "spatiotemporal"), "upsample_residual": (True,) * 3,
    "upsample_factor": (2,) * 3, "timestep_conditioning": True, "spatial_compression_ratio": 32,
    "temporal_compression_ratio": 8,
}  # fmt: skip
NOISY = {**FIRST, "decoder_inject_noise": (False, True, False, False, False)}
RATIO = 32


def both(config):
    """(upstream's, the same to be run on the mesh)."""
    torch.manual_seed(int(np.random.default_rng().integers(1 << 31)))
    theirs = tiny.with_uneven_norms(AutoencoderKLLTXVideo(**config).eval())
    for parameter in theirs.parameters():
        if not parameter.any():  # how much noise there is
            torch.nn.init.uniform_(parameter)
    return theirs, copy.deepcopy(theirs)


@torch.no_grad()
def decoded(vae, latents, seed: int = 0):
    torch.manual_seed(seed)
    timesteps = torch.linspace(0.05, 0.6, len(latents)) if vae.config.timestep_conditioning else None
    return vae.decode(latents, timesteps).sample


def compare(theirs, ours, latents, video):
    assert relative(decoded(ours, latents), decoded(theirs, latents)) < 1e-5  # some 1e-6
    assert relative(encoded(ours, video), encoded(theirs, video)) < 1e-5


@pytest.mark.parametrize(
    "degrees, batch, frames, height, width, config",
    [
        ((1, 1, 1), 1, 17, 1, 3, FIRST),
        ((2, 2, 1), 1, 9, 2, 3, FIRST),  # a width that the chips do not divide, chips without a column of their own
        ((2, 2, 1), 2, 1, 1, 3, FIRST),  # images, split over dp
        ((1, 1, 1), 2, 9, 1, 2, CONDITIONED),
        ((2, 2, 1), 2, 9, 1, 3, CONDITIONED),  # each with its timestep
    ],
)
def test_equals_upstream(chips, degrees, batch, frames, height, width, config):
    theirs, ours = both(config)
    runner = attached(ours, chips, degrees)
    video = torch.randn(batch, 3, frames, RATIO * height, RATIO * width)
    compare(theirs, ours, torch.randn(batch, 4, 1 + frames // 8, height, width), video)
    assert not runner.eager


@pytest.mark.parametrize("degrees, config", [((1, 1, 1), FIRST), ((2, 2, 1), CONDITIONED)])
def test_in_tiles(chips, degrees, config):
    """Upstream's tiles, the last ones smaller; columns, rows and frames that fade."""
    theirs, ours = both(config)
    attached(ours, chips, degrees)
    for vae in (theirs, ours):
        vae.enable_tiling(64, 96, 16, 32, 64, 8)
        vae.use_framewise_decoding = degrees == (1, 1, 1)
    compare(theirs, ours, torch.randn(1, 4, 4, 3, 4), torch.randn(1, 3, 9, 96, 128))


def test_what_no_slab_holds_is_upstreams(chips):
    """Noise that a decoder draws, and a video whose width ends between latents."""
    theirs, ours = both(NOISY)
    attached(ours, chips, (1, 2, 1))
    compare(theirs, ours, torch.randn(1, 4, 2, 1, 3), torch.randn(1, 3, 1, RATIO, RATIO + 16))
