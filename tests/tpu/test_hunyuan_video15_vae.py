"""HunyuanVideo-1.5's VAE as a scan over frames, split over the width. Oracle: upstream's, same weights, in the same process."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tiny
from conftest import relative
from diffusers import AutoencoderKLHunyuanVideo15
from diffusers.tpu.chips.mesh import make_mesh
from diffusers.tpu.compile.module import CompiledModule
from diffusers.tpu.config import TPUConfig
from diffusers.tpu.pipelines.plans import module_plan
from diffusers.tpu.video.chunks import scan_chunks


SIZES = {
    "latent_channels": 4, "block_out_channels": (8, 8, 16, 16, 16), "layers_per_block": 1, "spatial_compression_ratio": 16,
    "temporal_compression_ratio": 4,
}  # fmt: skip


def both():
    """(upstream's, the same to be run on the mesh)."""
    torch.manual_seed(int(np.random.default_rng().integers(1 << 31)))
    theirs = tiny.with_uneven_norms(AutoencoderKLHunyuanVideo15(**SIZES).eval())
    return theirs, copy.deepcopy(theirs)


def attached(vae, chips, degrees) -> CompiledModule:
    runner = CompiledModule(vae, module_plan(vae), make_mesh(chips[: int(np.prod(degrees))], degrees), TPUConfig())
    runner.attach()
    return runner


@torch.no_grad()
def decoded(vae, latents):
    return vae.decode(latents).sample


@torch.no_grad()
def encoded(vae, video):
    return vae.encode(video).latent_dist.parameters


@pytest.mark.parametrize(
    "degrees, frames, height, width",
    [
        ((1, 1, 1), 9, 3, 5),
        ((2, 4, 1), 5, 2, 9),  # a width that the chips do not divide
        ((1, 8, 1), 17, 2, 5),  # chips without a column of their own
        ((1, 2, 1), 1, 3, 6),  # an image
        ((1, 4, 2), 33, 1, 8),
    ],
)
def test_equals_upstream(chips, degrees, frames, height, width):
    theirs, ours = both()
    attached(ours, chips, degrees)
    latents, video = (
        torch.randn(1, 4, 1 + frames // 4, height, width),
        torch.randn(1, 3, frames, 16 * height, 16 * width),
    )
    assert relative(decoded(ours, latents), decoded(theirs, latents)) < 1e-5
    assert relative(encoded(ours, video), encoded(theirs, video)) < 1e-5


@pytest.mark.parametrize("degrees", [(1, 1, 1), (2, 4, 1)])
def test_in_tiles(chips, degrees):
    """Upstream's tiles, the last ones smaller; columns and rows that fade."""
    theirs, ours = both()
    attached(ours, chips, degrees)
    for vae in (theirs, ours):
        vae.enable_tiling(64, 64, 4, 4, 0.25)
    latents, video = torch.randn(1, 4, 2, 5, 9), torch.randn(1, 3, 5, 80, 144)
    assert relative(decoded(ours, latents), decoded(theirs, latents)) < 1e-5
    assert relative(encoded(ours, video), encoded(theirs, video)) < 1e-5


def test_a_cache_that_grows_is_an_error_that_names_it():
    def step(chunk, cache, number):
        seen = chunk if cache[1] is None else jnp.concatenate([cache[1], chunk], 1)
        return seen.mean() + chunk, [chunk, seen]

    words = r"expected a cache whose shapes stay.*: entry \[1\] of \(1, 8, 3\) and then \(1, 10, 3\)\. What"
    with pytest.raises(NotImplementedError, match=words):
        jax.eval_shape(lambda x: scan_chunks(step, x, 2, [None, None]), jnp.zeros((1, 5, 3)))
