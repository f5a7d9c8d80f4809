"""CogVideoX, upstream's pipelines as they are. Oracle: the same without the TPU path, same weights and generator."""

import copy

import numpy as np
import PIL.Image
import pytest
import torch

import tiny
from conftest import relative
from diffusers import CogVideoXDDIMScheduler, CogVideoXTransformer3DModel, CogVideoXVideoToVideoPipeline, tpu
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from diffusers.tpu.config import TPUConfig
from video_oracle import assert_video_is_upstreams


WORDS, WIDTH = 10, tiny.WIDTH
FRAMES = {2: (2, 8, 6), None: (3, 10, 6)}  # latents: places that no axis of these meshes divides
KINDS = {  # as 2b, 5b, its image-to-video and 1.5
    "2b": {},
    "5b": {"use_rotary_positional_embeddings": True},
    "5b image": {"use_rotary_positional_embeddings": True, "use_learned_positional_embeddings": True},
    "1.5": {"use_rotary_positional_embeddings": True, "patch_size_t": 2, "patch_bias": False},
    "1.5 image": {
        "use_rotary_positional_embeddings": True,
        "patch_size_t": 2,
        "ofs_embed_dim": 8,
        "patch_bias": False,
    },
}


def built(kind, heads=4):
    latents = FRAMES[KINDS[kind].get("patch_size_t")]
    return tiny.with_uneven_norms(
        CogVideoXTransformer3DModel(
            num_attention_heads=heads, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8,
            text_embed_dim=WIDTH, num_layers=3, sample_frames=4 * latents[0] - 3, sample_height=latents[1],
            sample_width=latents[2], max_text_seq_length=WORDS, **KINDS[kind],
        ).eval()
    )  # fmt: skip


def inputs(model, batch):
    config = model.config
    frames, height, width = FRAMES[config.patch_size_t]
    given = {
        "hidden_states": torch.randn(batch, frames, 4, height, width),
        "encoder_hidden_states": torch.randn(batch, WORDS, WIDTH),
        "timestep": torch.randint(1, 1000, (1,)).expand(batch),
        "return_dict": False,
    }
    if config.ofs_embed_dim:
        given["ofs"] = torch.full((1,), 2.0)
    if config.use_rotary_positional_embeddings:
        grid = height // 2, width // 2
        dim, frames = config.attention_head_dim, frames // (config.patch_size_t or 1)
        given["image_rotary_emb"] = get_3d_rotary_pos_embed(dim, ((0, 0), grid), grid, frames)
    return given


@pytest.mark.parametrize(
    "kind, mesh, batch, heads",
    [
        ("2b", (1, 8, 1), 1, 30),  # the published heads, which the chips do not divide
        ("5b image", (2, 2, 2), 2, 4),
        ("1.5 image", (1, 4, 2), 2, 6),
    ],
)
@torch.no_grad()
def test_the_transformer_equals_upstreams(chips, kind, mesh, batch, heads):
    theirs = built(kind, heads)
    ours = tpu.install(copy.deepcopy(theirs), TPUConfig(mesh=mesh))
    given = inputs(theirs, batch)
    (expected,), (found,) = theirs(**given), ours(**given)
    assert relative(np.asarray(found.cpu()), expected) < 1e-5
    assert not tpu.report(ours)["eager"]


def video(count, size):
    return [PIL.Image.effect_noise(size, 60).convert("RGB") for _ in range(count)]


def pipeline(kind):
    """(pipeline, further arguments)."""
    size = (32, 16)
    if kind == "video":
        pipe = CogVideoXVideoToVideoPipeline(**tiny.cogvideox_5b().components)
        return pipe, {"video": video(9, size), "strength": 0.7}
    pipe = getattr(tiny, f"cogvideox_{kind}")()
    if kind == "control":  # upstream's loop calls it without what DPM needs
        pipe.scheduler = CogVideoXDDIMScheduler.from_config(pipe.scheduler.config)
    if kind == "i2v":
        return pipe, {"image": video(1, (96, 64))[0], "height": 64, "width": 96}  # learned positions are of one size
    return pipe, {"control_video": video(9, size)} if kind == "control" else {}


@pytest.mark.parametrize(
    "kind, mesh, changes",
    [
        ("2b", (2, 4, 1), {"prompt": ["a red circle", "a circle moving left"], "negative_prompt": ["", "bad"]}),
        ("i2v", (1, 1, 1), {}),
        pytest.param("control", (2, 4, 1), {}, marks=pytest.mark.slow),
        ("video", (2, 2, 2), {"use_dynamic_cfg": True}),
    ],
    ids=["pair-of-ddim", "image", "control", "video"],
)
def test_video_equals_upstreams(chips, kind, mesh, changes):
    pipe, further = pipeline(kind)
    given = {"prompt": "a red circle", "height": 16, "width": 32, "num_frames": 9} | further | changes
    given |= {"num_inference_steps": 3, "output_type": "np", "guidance_scale": given.get("guidance_scale", 4.0)}
    if kind in ("control", "video"):
        del given["num_frames"]
    assert_video_is_upstreams(pipe, given, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("kind, draws", [("2b", 4), ("5b", 4), ("i2v", 8)])
def test_bfloat16_within_upstreams_error(chips, kind, draws):
    """Without guidance, which makes one draw's error as good as random."""
    half, further = pipeline(kind)
    half.set_progress_bar_config(disable=True)
    exact = copy.deepcopy(half)
    half.to(torch.bfloat16)
    given = {"prompt": "a red circle", "height": 16, "width": 32, "num_frames": 9} | further
    given |= {"num_inference_steps": 2, "output_type": "np", "guidance_scale": 1.0}

    def videos(pipe):
        generators = (torch.Generator().manual_seed(seed) for seed in range(draws))
        return np.stack([np.asarray(pipe(**given, generator=g).frames, np.float64) for g in generators])

    oracle, theirs = videos(exact), videos(half)
    tpu.install(half, TPUConfig(mesh=(2, 2, 2)))
    assert relative(videos(half), oracle) < 1.25 * relative(theirs, oracle)
