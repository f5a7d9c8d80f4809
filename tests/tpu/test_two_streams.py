"""Image transformers of two streams. Oracle: upstream's in the same process, same weights and generator."""

import copy

import numpy as np
import pytest
import torch

import tiny
from conftest import relative
from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel, SD3Transformer2DModel, tpu
from diffusers.tpu.config import TPUConfig


WORDS, WIDTH = 11, 32
GRID = (5, 7)  # tokens that no axis of these meshes divides


def flux(heads, guidance=True):
    return FluxTransformer2DModel(
        in_channels=4, num_layers=2, num_single_layers=3, attention_head_dim=16, num_attention_heads=heads,
        joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH, axes_dims_rope=(4, 6, 6), guidance_embeds=guidance,
    )  # fmt: skip


def ids(images):
    """Places [images H W, 3] of so many images one behind the other, as Kontext's."""
    height, width = GRID
    return torch.tensor([[n, y, x] for n in range(images) for y in range(height) for x in range(width)]).float()


def flux_inputs(model, batch, images=2):
    places = ids(images)
    given = {
        "hidden_states": torch.randn(batch, len(places), 4),
        "encoder_hidden_states": torch.randn(batch, WORDS, WIDTH),
        "pooled_projections": torch.randn(batch, WIDTH),
        "timestep": torch.rand(batch),
        "img_ids": places,
        "txt_ids": torch.randn(WORDS, 3),  # upstream's pipelines have zeros
    }
    return given | ({"guidance": torch.full((batch,), 3.5)} if model.config.guidance_embeds else {})


def qwen(heads, **changes):
    return QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=3, attention_head_dim=16, num_attention_heads=heads,
        joint_attention_dim=WIDTH, axes_dims_rope=(4, 6, 6), **changes,
    )  # fmt: skip


def qwen_inputs(model, batch):
    """Texts of different lengths; an image beside the latents."""
    shapes = [(1, *GRID), (1, 3, 4)]
    return {
        "hidden_states": torch.randn(batch, GRID[0] * GRID[1] + 12, 16),
        "encoder_hidden_states": torch.randn(batch, WORDS, WIDTH),
        "encoder_hidden_states_mask": (torch.arange(WORDS) < torch.randint(1, WORDS, (batch, 1))).long(),
        "timestep": torch.rand(batch),
        "img_shapes": [shapes] * batch,
    }


def qwen_edit_inputs(model, batch):
    return qwen_inputs(model, batch) | {"encoder_hidden_states_mask": None}


def qwen_layered(heads):
    return qwen(heads, use_layer3d_rope=True, use_additional_t_cond=True)


def qwen_layered_inputs(model, batch):
    return qwen_inputs(model, batch) | {"additional_t_cond": torch.zeros(batch, dtype=torch.long)}


def sd3(heads, **changes):
    return SD3Transformer2DModel(
        sample_size=14, in_channels=4, out_channels=4, num_layers=4, attention_head_dim=16, num_attention_heads=heads,
        joint_attention_dim=WIDTH, caption_projection_dim=16 * heads, pooled_projection_dim=WIDTH, pos_embed_max_size=9,
        **changes,
    )  # fmt: skip


def sd35(heads):
    return sd3(heads, dual_attention_layers=(0, 1), qk_norm="rms_norm")


def sd3_inputs(model, batch):
    return {
        "hidden_states": torch.randn(batch, 4, *(2 * n for n in GRID)),
        "encoder_hidden_states": torch.randn(batch, WORDS, WIDTH),
        "pooled_projections": torch.randn(batch, WIDTH),
        "timestep": torch.rand(batch) * 1000,
    }


MODELS = {
    "sd3": (sd3, sd3_inputs),
    "sd3.5": (sd35, sd3_inputs),
    "flux": (flux, flux_inputs),
    "qwen": (qwen, qwen_inputs),
    "qwen edit": (lambda heads: qwen(heads, zero_cond_t=True), qwen_edit_inputs),
    "qwen layered": (qwen_layered, qwen_layered_inputs),
}


def built(kind, heads):
    torch.manual_seed(0)
    return tiny.with_uneven_norms(MODELS[kind][0](heads).eval())


@pytest.mark.parametrize(
    "kind, mesh, batch, heads",
    [
        ("flux", (1, 8, 1), 1, 3),  # heads that chips do not divide
        ("flux", (2, 2, 2), 2, 4),
        ("flux", (2, 4, 1), 2, 4),
        ("flux", (1, 1, 1), 1, 2),
        ("sd3", (2, 4, 1), 2, 4),
        ("sd3.5", (1, 8, 1), 1, 3),
        ("sd3.5", (2, 2, 2), 2, 4),
        ("qwen", (1, 8, 1), 1, 3),
        ("qwen", (2, 2, 2), 2, 4),
        ("qwen edit", (2, 4, 1), 1, 4),
        ("qwen layered", (2, 4, 1), 2, 4),
    ],
)
@torch.no_grad()
def test_the_transformer_equals_upstreams(chips, kind, mesh, batch, heads):
    theirs = built(kind, heads)
    ours = tpu.install(copy.deepcopy(theirs), TPUConfig(mesh=mesh))
    given = {**MODELS[kind][1](theirs, batch), "return_dict": False}
    (expected,), (found,) = theirs(**given), ours(**given)
    assert relative(np.asarray(found.cpu()), expected) < 1e-5
    assert not tpu.report(ours)["eager"]
