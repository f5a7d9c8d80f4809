"""CogVideoX's VAE in Flax NNX, rung by rung. Oracle: upstream's, same weights, in the same process."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from conftest import relative
from diffusers import AutoencoderKLCogVideoX
from diffusers.models.autoencoders.autoencoder_kl_cogvideox_flax import FlaxAutoencoderKLCogVideoX
from diffusers.models.autoencoders.autoencoder_kl_cogvideox_nnx_flax import Chunk
from diffusers.tpu.video.slabs import over_width
from test_cogvideox_vae import RATIO, SIZES
from test_hunyuan_video15_vae import decoded, encoded
from test_vae_nnx import last, new


PUBLISHED = {
    "block_out_channels": (32, 64, 64, 128),
    "layers_per_block": 3,
}  # the published depth, a quarter of its width


pytestmark = pytest.mark.usefixtures("chips")


def both(mesh, **config):
    """(upstream's, ours of its weights)."""
    theirs = new(AutoencoderKLCogVideoX, **{**SIZES, **config})
    return theirs, FlaxAutoencoderKLCogVideoX.from_torch(theirs, mesh=mesh)


def assert_equal(ours, theirs, latents, video):
    assert relative(ours.decode(last(latents)), last(decoded(theirs, latents))) < 1e-5
    assert relative(ours.encode(last(video)).parameters, last(encoded(theirs, video))) < 1e-5


@pytest.mark.parametrize(
    "mesh, batch, frames, height, width",
    [
        ((1, 3, 1), 1, 1, 3, 5),  # an image; a width that three chips do not divide
        ((2, 4, 1), 2, 9, 2, 9),  # the batch over dp
        ((1, 8, 1), 1, 17, 1, 5),  # chips without a column of their own
        ((1, 2, 1), 1, 16, 1, 3),  # no frame by itself
    ],
)
def test_equals_upstream(mesh, batch, frames, height, width):
    theirs, ours = both(mesh)
    latents = torch.randn(batch, 4, -(-frames // 4), height, width) + 1
    assert_equal(ours, theirs, latents, torch.randn(batch, 3, frames, RATIO * height, RATIO * width) + 1)


@pytest.mark.parametrize("mesh, frames, width", [((2, 4, 1), 9, 7), ((1, 3, 1), 1, 9)])
def test_tiles_equal_upstream(mesh, frames, width):
    """Tiles of 4 by 5 latents, the last ones smaller."""
    theirs, ours = both(mesh)
    for vae in (theirs, ours):
        vae.enable_tiling(16, 20, 0.25, 0.2)
    latents = torch.randn(1, 4, -(-frames // 4), 5, width)
    assert_equal(ours, theirs, latents, torch.randn(1, 3, frames, 20, RATIO * width))


def test_the_ladder(capsys):
    """The guide's rungs, from a convolution to the whole, of the published depth: each printed with its error."""
    names = {kind: (f"CogVideoX{kind.title()}Block3D",) * 4 for kind in ("down", "up")}
    sizes = {**PUBLISHED, "norm_num_groups": 8, "latent_channels": 16}
    theirs, ours = both((1, 2, 1), **sizes, down_block_types=names["down"], up_block_types=names["up"])
    x, narrow, z = torch.randn(1, 32, 3, 6, 8), torch.randn(1, 3, 9, 16, 32), torch.randn(1, 16, 3, 2, 4)
    resnet, mine = theirs.encoder.down_blocks[0].resnets[0], ours.encoder.down_blocks[0].resnets[0]
    norm, own = theirs.decoder.mid_block.resnets[0].norm1, ours.decoder.mid_block.resnets[0].norm1
    wide = torch.randn(1, 128, 3, 2, 4)

    def chunk():
        return Chunk(None, [])

    rungs = {
        "convolution": (x, lambda x: mine.conv1(chunk().looking_back(x)), lambda x: resnet.conv1(x)[0]),
        "group norm": (x, mine.norm1, resnet.norm1),
        "spatial norm": (wide, lambda x: own(x, x[..., :16]), lambda x: norm(x, x[:, :16])[0]),
        "residual block": (x, lambda x: mine(x, chunk(), None), lambda x: resnet(x)[0]),
        "down block": (
            x,
            lambda x: ours.encoder.down_blocks[0](x, chunk()),
            lambda x: theirs.encoder.down_blocks[0](x)[0],
        ),
        "encoder": (narrow, lambda x: ours.encoder(x, chunk()), lambda x: theirs.encoder(x)[0]),
        "decoder": (z, lambda x: ours.decoder(x, chunk()), lambda x: theirs.decoder(x)[0]),
    }
    errors = {}
    for name, (given, run, upstreams) in rungs.items():
        found = nnx.jit(lambda vae, x, run=run: over_width(run, x, axis=3))(ours, jnp.asarray(last(given)))
        with torch.no_grad():
            errors[name] = relative(found, last(upstreams(given)))
    errors["VAE"] = relative(ours.decode(ours.encode(last(narrow)).mode()), last(theirs(narrow).sample.detach()))
    with capsys.disabled():
        print("\n" + "\n".join(f"{name:15} {error:.1e}" for name, error in errors.items()))
    assert max(errors.values()) < 1e-5


def test_sizes_tiles_and_configs_that_cannot_be_are_refused():
    vae = FlaxAutoencoderKLCogVideoX.abstract(SIZES)
    for run, shape, match in (
        (vae.encode, (1, 5, 30, 32, 3), "multiples of 4, got 30 x 32"),
        (vae.decode, (1, 4, 2, 2, 2), r"width, 4\], channels last, got \[1, 4, 2, 2, 2\]"),
    ):
        with pytest.raises(ValueError, match=match):
            run(np.zeros(shape, np.float32))
    for tiles, match in (
        ((18, 20), "multiples of 4 pixels .* got 18 pixels"),
        ((16, 20, 0.3), "got 16 pixels and 0.3"),
    ):
        with pytest.raises(ValueError, match=match):
            vae.enable_tiling(*tiles)
    for change, match in (
        ({"temporal_compression_ratio": 3}, "power of two, at most 4, got 3"),
        ({"norm_num_groups": 5}, "multiples of norm_num_groups 5"),
        ({"use_quant_conv": True}, "use_quant_conv True"),
    ):
        with pytest.raises(ValueError, match=match):
            FlaxAutoencoderKLCogVideoX.abstract({**SIZES, **change})
