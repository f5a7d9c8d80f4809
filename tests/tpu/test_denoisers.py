"""Denoisers with a plan of their own. Oracle: upstream's in the same process, same weights and inputs."""

import copy

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map_only

from conftest import relative
from denoisers import WIDTH, built, inputs
from diffusers import tpu
from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection
from diffusers.models.transformers.transformer_flux import (
    FluxAttention,
    FluxAttnProcessor,
    FluxIPAdapterAttnProcessor,
)
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoRotaryPosEmbed
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15RotaryPosEmbed
from diffusers.models.transformers.transformer_hunyuan_video_flax import tables_by_axis
from diffusers.tpu.config import TPUConfig
from diffusers.tpu.kernels.attention.api import explain


def assert_equal(theirs, given, mesh):
    ours = tpu.install(copy.deepcopy(theirs), TPUConfig(mesh=mesh))
    (found,), (expected,) = ours(**copy.deepcopy(given)), theirs(**copy.deepcopy(given))
    assert relative(np.asarray(found.cpu() if isinstance(found, torch.Tensor) else found), expected) < 1e-5  # 5e-7
    assert not tpu.report(ours)["eager"]


@pytest.mark.parametrize(
    "kind, mesh, batch, heads",
    [
        ("flux", (2, 2, 2), 2, 4),
        ("sd3.5", (1, 8, 1), 1, 3),  # heads that chips do not divide
        ("qwen", (1, 8, 1), 1, 3),
        ("qwen edit", (2, 4, 1), 1, 4),
        ("qwen layered", (1, 1, 1), 2, 2),
        ("cogvideox 2b", (1, 8, 1), 1, 30),  # the published heads, which the chips do not divide
        ("cogvideox 5b image", (2, 2, 2), 2, 4),
        ("cogvideox 1.5 image", (1, 4, 2), 2, 6),
        ("hunyuan", (2, 2, 2), 2, 2),
        ("hunyuan image", (2, 4, 1), 2, 2),
        ("framepack", (1, 4, 1), 1, 2),
        ("framepack", (1, 1, 1), 2, 2),
    ],
)
@torch.no_grad()
def test_the_transformer_equals_upstreams(chips, own_store, kind, mesh, batch, heads):
    theirs, before = built(kind, heads), explain()
    assert_equal(theirs, inputs(kind, theirs, batch), mesh)
    ways = [way for way, times in explain().items() if times > before.get(way, 0)]
    assert ways
    if kind.startswith(("flux", "qwen")):
        assert all(way.mask.startswith("joint") for way in ways)  # none of one sequence of both


def with_ip_adapter(model, given):
    """In blocks of two streams alone, as upstream's loader has it."""
    torch.manual_seed(1)
    model.encoder_hid_proj = MultiIPAdapterImageProjection([ImageProjection(8, WIDTH, num_image_text_embeds=4)])
    own = {
        name: one if "single" in name else FluxIPAdapterAttnProcessor(model.inner_dim, WIDTH)
        for name, one in model.attn_processors.items()
    }
    model.set_attn_processor(own)
    return given | {"joint_attention_kwargs": {"ip_adapter_image_embeds": [torch.randn(1, 1, 8)]}}


def with_control(model, given):
    """Residuals of a ControlNet after each block."""
    samples = [torch.randn(1, given["hidden_states"].shape[1], model.inner_dim) for _ in range(3)]
    return given | {"controlnet_block_samples": samples[:2], "controlnet_single_block_samples": samples[2:]}


class Doubled(FluxAttnProcessor):
    """A processor of the user's, which knows upstream's one sequence."""

    def __call__(self, attn, hidden_states, *args, **kwargs):
        return super().__call__(attn, 2 * hidden_states, *args, **kwargs)


def with_processors(model, given):
    for part in model.modules():
        if isinstance(part, FluxAttention):
            part.fuse_projections()
    model.single_transformer_blocks[1].attn.set_processor(Doubled())
    return given


def with_hooks(model, given):
    """Hooks that double what parts of blocks are given: upstream's one sequence, and norms that are called."""
    paths = "single_transformer_blocks.0.attn single_transformer_blocks.1.norm transformer_blocks.1.attn.norm_q"
    for path in [*paths.split(), "single_transformer_blocks.2.attn.to_k"]:
        model.get_submodule(path).register_forward_pre_hook(
            lambda _, args, kwargs: tree_map_only(torch.Tensor, lambda x: 2 * x + x[:1, :1], (args, kwargs)),
            with_kwargs=True,
        )
    return given


@pytest.mark.parametrize("changes", [(with_ip_adapter, with_control), (with_processors,), (with_hooks,)])
@torch.no_grad()
def test_what_users_of_flux_change_is_kept(chips, changes):
    theirs = built("flux", 4)
    given = inputs("flux", theirs, 1, images=1)
    for change in changes:
        given = change(theirs, given)
    assert_equal(theirs, given, (2, 4, 1))


@pytest.mark.parametrize(
    "embed", [HunyuanVideoRotaryPosEmbed(2, 1, (16, 56, 56)), HunyuanVideo15RotaryPosEmbed(1, 2, (4, 6, 6))]
)
def test_rotation_by_axis_is_upstreams_bit_for_bit(embed):
    latents = torch.empty(2, 4, *(2 * int(n) for n in np.random.default_rng().integers(1, 9, 3)))
    for ours, theirs in zip(tables_by_axis(embed, latents), embed(latents)):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flux", "qwen", "sd3.5"])
@torch.no_grad()
def test_bfloat16_within_upstreams_error(chips, kind):
    exact = built(kind, 8)
    half = copy.deepcopy(exact).to(torch.bfloat16)
    ours = tpu.install(copy.deepcopy(half), TPUConfig(mesh=(2, 2, 2)))

    def cast(given, dtype):
        return {
            name: x.to(torch.bfloat16).to(dtype) if torch.is_tensor(x) and x.is_floating_point() and "ids" not in name else x
            for name, x in given.items()
        }  # fmt: skip

    answers = []
    for _ in range(4):
        given = inputs(kind, exact, 2)
        runs = (exact, torch.float32), (half, torch.bfloat16), (ours, torch.bfloat16)
        answers.append([model(**cast(given, dtype))[0].float().cpu() for model, dtype in runs])
    oracle, theirs, found = (torch.stack(x).numpy() for x in zip(*answers))
    assert relative(found, oracle) < 1.25 * relative(theirs, oracle)
