"""HunyuanVideo 1.0, Framepack and SkyReels' HunyuanVideo. Oracle: upstream's in the same process, same weights and generator."""

import copy

import numpy as np
import pytest
import torch

import tiny
import tiny_videos
from conftest import relative
from diffusers import HunyuanVideoTransformer3DModel, tpu
from diffusers.tpu.config import TPUConfig


WORDS, WIDTH = 11, tiny_videos.WIDTH


def inputs(model, latents, batch=2):
    """Of one call: texts of different lengths, a map that no axis of these meshes divides."""
    words = torch.arange(WORDS) < torch.randint(1, WORDS, (batch, 1))
    given = {
        "hidden_states": torch.randn(batch, model.config.in_channels, *latents),
        "timestep": torch.randint(1, 1000, (batch,)),
        "encoder_hidden_states": torch.randn(batch, WORDS, WIDTH),
        "encoder_attention_mask": words.long(),
        "pooled_projections": torch.randn(batch, WIDTH),
        "guidance": torch.tensor([6000.0] * batch),
        "return_dict": False,
    }
    if hasattr(model, "clean_x_embedder"):
        height, width = latents[1:]
        given["image_embeds"] = torch.randn(batch, 5, 16)
        given["indices_latents"] = torch.arange(latents[0]) + 19
        for name, frames in (("clean", 2), ("history_2x", 2), ("history_4x", 4)):
            given[f"latents_{name}"] = torch.randn(batch, 4, frames, height, width)
            given[f"indices_latents_{name}"] = torch.arange(frames)
    return given


def built(kind):
    if kind == "framepack":
        return tiny.with_uneven_norms(tiny_videos.framepack())
    changes = {"image_condition_type": kind, "guidance_embeds": True, "in_channels": 9 if kind == "latent_concat" else 4}
    return tiny.with_uneven_norms(HunyuanVideoTransformer3DModel(**tiny_videos.HUNYUAN | changes).eval())


@pytest.mark.parametrize(
    "kind, mesh, batch",
    [
        (None, (2, 2, 2), 2),
        ("latent_concat", (1, 8, 1), 1),
        ("token_replace", (2, 4, 1), 2),
        ("framepack", (1, 4, 1), 1),
        ("framepack", (1, 1, 1), 2),
    ],
)
@torch.no_grad()
def test_the_transformer_equals_upstreams(chips, kind, mesh, batch):
    theirs = built(kind)
    ours = tpu.install(copy.deepcopy(theirs), TPUConfig(mesh=mesh))
    given = inputs(theirs, (3, 10, 6) if kind != "framepack" else (3, 16, 8), batch)
    if kind == "framepack" and batch == 1:
        given["encoder_attention_mask"] = (torch.arange(WORDS) < 4).long()[None]
    (expected,), (found,) = theirs(**given), ours(**given)
    assert relative(np.asarray(found.cpu() if isinstance(found, torch.Tensor) else found), expected) < 1e-5
    assert not tpu.report(ours)["eager"]
