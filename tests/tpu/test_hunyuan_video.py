"""HunyuanVideo 1.0, Framepack and SkyReels' HunyuanVideo. Oracle: upstream's in the same process, same weights and generator."""

import copy

import numpy as np
import PIL.Image
import pytest
import torch

import tiny
from conftest import relative
from diffusers import tpu
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoRotaryPosEmbed
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15RotaryPosEmbed
from diffusers.models.transformers.transformer_hunyuan_video_flax import tables_by_axis
from diffusers.tpu.config import TPUConfig
from video_oracle import assert_video_is_upstreams


WORDS, WIDTH = 11, tiny.WIDTH
CALL = {
    "prompt": "a red circle moving",
    "height": 48,
    "width": 80,
    "num_frames": 9,
    "num_inference_steps": 2,
    "output_type": "np",
}
GUIDED = {"negative_prompt": "bad", "true_cfg_scale": 3.0}
LLAVA = {  # the published template's places, of this tokenizer and four patches
    "template": "<bos> <|image_pad|> describe: {} <|end_header_id|> a <|end_header_id|> b <|end_header_id|> tell",
    "crop_start": 8, "image_emb_start": 3, "image_emb_end": 7, "image_emb_len": 4,
}  # fmt: skip


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
        return tiny.with_uneven_norms(tiny.framepack())
    concatenated = kind == "latent_concat"
    changes = {"in_channels": 9 if concatenated else 4, "guidance_embeds": not concatenated}
    return tiny.with_uneven_norms(tiny.hunyuan_transformer(image_condition_type=kind, **changes))


@pytest.mark.parametrize(
    "kind, mesh, batch",
    [
        (None, (2, 2, 2), 2),
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


@pytest.mark.parametrize(
    "kind, mesh, changes",
    [
        ("hunyuan", (2, 4, 1), {"prompt": ["a red circle", "a circle moving to the left"], **GUIDED, "negative_prompt": ["", "bad"]}),
        ("hunyuan_i2v", (2, 2, 2), {"prompt_template": LLAVA, "image_embed_interleave": 2, **GUIDED}),
        pytest.param("hunyuan_skyreels_i2v", (2, 4, 1), GUIDED, marks=pytest.mark.slow),
        pytest.param("hunyuan_framepack", (1, 4, 1), {"height": 64, "latent_window_size": 1}, marks=pytest.mark.slow),
    ],
    ids=["pair", "image", "skyreels", "framepack"],
)  # fmt: skip
def test_video_equals_upstreams(chips, kind, mesh, changes):
    pipe = getattr(tiny, kind)()
    given = CALL | changes
    if kind != "hunyuan":
        given["image"] = PIL.Image.effect_noise((given["width"], given["height"]), 60).convert("RGB")
    assert_video_is_upstreams(pipe, given, mesh)


@pytest.mark.parametrize(
    "embed", [HunyuanVideoRotaryPosEmbed(2, 1, (16, 56, 56)), HunyuanVideo15RotaryPosEmbed(1, 2, (4, 6, 6))]
)
def test_rotation_by_axis_is_upstreams_bit_for_bit(embed):
    size = (2 * int(n) for n in np.random.default_rng().integers(1, 9, 3))
    latents = torch.empty(2, 4, *size)
    for ours, theirs in zip(tables_by_axis(embed, latents), embed(latents)):
        assert torch.equal(ours, theirs)
