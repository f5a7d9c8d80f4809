"""VAEs of images, split over the width. Oracle: upstream's, same weights, in the same process."""

import copy
import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tiny
from conftest import relative
from diffusers import AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage
from diffusers.models.attention_processor import AttnProcessor
from test_hunyuan_video15_vae import attached, decoded, encoded


SIZES = {
    "block_out_channels": (8, 8, 16), "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3, "latent_channels": 4, "norm_num_groups": 4, "sample_size": 32,
}  # fmt: skip
WITHOUT_QUANT = {"use_quant_conv": False, "use_post_quant_conv": False}  # as SD3's and Flux's
FINE_ATTENTION = {
    "down_block_types": ("AttnDownEncoderBlock2D",) * 3, "up_block_types": ("AttnUpDecoderBlock2D",) * 3
}  # fmt: skip
SMALL = {
    "block_out_channels": (8, 8), "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
    "layers_per_block": 1,
}  # fmt: skip
RATIO = 4


def both(cls=AutoencoderKL, **config):
    """(upstream's, the same to be run on the mesh)."""
    torch.manual_seed(int(np.random.default_rng().integers(1 << 31)))
    theirs = tiny.with_uneven_norms(cls(**{**SIZES, **config}).eval())
    return theirs, copy.deepcopy(theirs)


def draw(batch, height, width):
    """(latents, an image of their size and a few rows and columns more, which encoding leaves out)."""
    return torch.randn(batch, 4, height, width) + 1, torch.randn(batch, 3, RATIO * height + 1, RATIO * width + 3) + 1


@pytest.mark.parametrize(
    "degrees, batch, height, width, cls, config",
    [
        ((1, 1, 1), 3, 3, 5, AutoencoderKL, WITHOUT_QUANT),
        ((2, 4, 1), 1, 5, 9, AutoencoderKL, {}),  # a width that the eight chips do not divide
        ((2, 2, 1), 2, 3, 5, AutoencoderKL, FINE_ATTENTION),  # the batch over dp
        ((1, 8, 1), 1, 2, 5, AutoencoderKL, {"mid_block_add_attention": False}),  # chips without a column of their own
        ((2, 3, 1), 3, 3, 7, AutoencoderKLFlux2, {}),  # a batch that dp does not divide
    ],
)
def test_equals_upstream(chips, degrees, batch, height, width, cls, config):
    theirs, ours = both(cls, **config)
    attached(ours, chips, degrees)
    latents, image = draw(batch, height, width)
    assert relative(decoded(ours, latents), decoded(theirs, latents)) < 1e-5
    assert relative(encoded(ours, image), encoded(theirs, image)) < 1e-5


@pytest.mark.parametrize("degrees", [(1, 1, 1), (2, 4, 1)])
def test_tiles_and_slices_equal_upstream(chips, degrees):
    """Upstream's tiles, the last ones smaller; columns and rows that fade; a batch one after another."""
    theirs, ours = both(sample_size=20)  # whose tiles do not meet in the image: upstream's result is larger
    attached(ours, chips, degrees)
    latents, image = torch.randn(3, 4, 7, 9), torch.randn(1, 3, 29, 43)
    for vae in (theirs, ours):
        vae.enable_tiling()
        vae.enable_slicing()
    assert relative(decoded(ours, latents), decoded(theirs, latents)) < 1e-5
    assert relative(encoded(ours, image), encoded(theirs, image)) < 1e-5


class OwnProcessor(AttnProcessor):
    """Some user's, of which nobody knows what it computes."""


@pytest.mark.parametrize("processor", [AttnProcessor, OwnProcessor])
def test_other_attention_processors(chips, processor):
    theirs, ours = both()
    attached(ours, chips, (1, 4, 1))
    for vae in (theirs, ours):
        vae.set_attn_processor(processor())
    latents, _ = draw(1, 3, 7)
    assert relative(decoded(ours, latents), decoded(theirs, latents)) < 1e-5


def test_chips_share_the_work(chips):
    """No chip convolves more than its slab and the columns beside it."""
    _, ours = both()
    latents, image = torch.zeros(1, 4, 4, 16), torch.zeros(1, 3, 16, 64)

    def convolved(degrees, entry, x):
        runner = attached(ours, chips, degrees)
        text = runner.trace(runner.flatten_call(entry, (x,), {})).traced.lower().as_text()
        runner.detach()
        sizes = re.findall(r"stablehlo\.convolution.*?: \(tensor<([0-9x]+)xf32>", text)
        assert ("all_reduce" in text) == ("all_gather" in text) == (degrees != (1, 1, 1))
        return [math.prod(map(int, size.split("x"))) for size in sizes]

    for entry, x in (("decode", latents), ("encode", image)):
        alone, shared = convolved((1, 1, 1), entry, x), convolved((1, 8, 1), entry, x)
        assert sum(shared) < sum(alone) / 4  # measured: 0.17 of both, columns beside slabs included


def qwen():
    sizes = {"base_dim": 6, "dim_mult": [1, 2, 2], "num_res_blocks": 1, "temperal_downsample": [False, True]}
    theirs = tiny.with_uneven_norms(AutoencoderKLQwenImage(z_dim=4, **sizes).eval())
    return theirs, copy.deepcopy(theirs)


@pytest.mark.parametrize("degrees, batch, frames, width", [((2, 4, 1), 1, 1, 9), ((1, 2, 1), 3, 2, 3)])
def test_qwen_images_equals_upstream(chips, degrees, batch, frames, width):
    theirs, ours = qwen()
    attached(ours, chips, degrees)
    latents, video = torch.randn(batch, 4, frames, 3, width), torch.randn(batch, 3, 4 * frames - 3, 12, 4 * width)
    assert relative(decoded(ours, latents), decoded(theirs, latents)) < 1e-5
    assert relative(encoded(ours, video), encoded(theirs, video)) < 1e-5


def test_qwen_images_tiles_equal_upstream(chips):
    theirs, ours = qwen()
    attached(ours, chips, (2, 4, 1))
    latents, image = 9 * torch.randn(1, 4, 1, 5, 3), torch.randn(1, 3, 1, 20, 12)
    for vae in (ours, theirs):
        torch.nn.init.constant_(vae.decoder.conv_out.bias, 0.9)  # values beyond 1, which upstream's tiles keep
        vae.enable_tiling(16, 16, 12, 12)
    assert decoded(theirs, latents).max() > 1
    assert relative(decoded(ours, latents), decoded(theirs, latents)) < 1e-5
    assert relative(encoded(ours, image), encoded(theirs, image)) < 1e-5


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
    "ones": lambda conv: _with_columns(conv, lambda x, n: F.pad(x, (n, n, 0, 0), value=1.0)),
    "circular in x": lambda conv: _with_columns(conv, lambda x, n: F.pad(x, (n, n, 0, 0), mode="circular")),
    "by hand": lambda conv: _with_columns(
        conv, lambda x, n: torch.cat([x[..., x.shape[-1] - n :], x, x[..., :n]], -1)
    ),
    "hook": lambda conv: conv.register_forward_hook(lambda module, args, out: out - out.mean((2, 3), keepdim=True)),
}


@pytest.mark.idiom("seamless")
@pytest.mark.parametrize(
    "change, degrees",
    [
        *(("circular", degrees) for degrees in ((1, 1, 1), (1, 2, 1), (2, 4, 1))),
        *((change, (1, 2, 1)) for change in CHANGES if change != "circular"),
    ],
)
def test_what_needs_the_whole_map_equals_upstream(chips, change, degrees):
    """Seamless textures and hooks, between two calls of the VAE as it was; some by padding, some by code of the script's."""
    theirs, ours = both(**SMALL)
    runner = attached(ours, chips, degrees)
    latents, image = draw(1, 3, 9)
    before = decoded(theirs, latents)
    assert relative(decoded(ours, latents), before) < 1e-5
    for conv in convs(theirs) + convs(ours):
        CHANGES[change](conv)
    assert relative(decoded(theirs, latents), before) > 1e-3
    assert relative(decoded(ours, latents), decoded(theirs, latents)) < 1e-5
    if change == "circular":
        assert relative(encoded(ours, image), encoded(theirs, image)) < 1e-5
    for conv in convs(ours):
        conv._forward_hooks.clear()
        vars(conv).pop("_conv_forward", None)
        conv.padding_mode = "zeros"
    assert relative(decoded(ours, latents), before) < 1e-5
    assert runner.eager_fallback.reasons == {} and runner.parts is None


def convs(vae):
    return [m for m in vae.modules() if isinstance(m, torch.nn.Conv2d)]
