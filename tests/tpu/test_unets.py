"""UNets and ControlNets, split over the width of their maps. Oracle: upstream's in the same process, same weights and inputs."""

import copy

import pytest
import torch

import tiny
from conftest import relative, slow
from diffusers import (
    ControlNetUnionModel,
    UNet3DConditionModel,
    UNetMotionModel,
    UNetSpatioTemporalConditionModel,
    tpu,
)
from diffusers.models.attention import BasicTransformerBlock
from diffusers.tpu.common import notices
from diffusers.tpu.pipelines.attach import runs


def given(batch: int, height: int, width: int) -> dict:
    sample, text = torch.randn(batch, 4, height, width), torch.randn(batch, 5, 32)
    return {"sample": sample, "timestep": torch.tensor(7), "encoder_hidden_states": text}


def answers(model, **given) -> list[torch.Tensor]:
    with torch.no_grad():
        outputs = model(**given, return_dict=False)
    return [x for output in outputs for x in ([output] if isinstance(output, torch.Tensor) else output)]


def installed(model, mesh):
    notices._said.clear()
    return tpu.install(copy.deepcopy(model), tpu.TPUConfig(mesh=mesh))


@pytest.mark.parametrize("mesh, batch, height, width", [slow((2, 4, 1), 2, 12, 16), ((2, 2, 2), 2, 10, 20)])
def test_a_unet_with_the_residuals_of_a_controlnet(chips, warned, mesh, batch, height, width):
    """Also where the chips do not divide the width, and with a feed-forward in chunks, as large as the batch of all chips."""
    call, picture = given(batch, height, width), torch.rand(batch, 3, 8 * height, 8 * width)
    unet, net = tiny.unet(), tiny.with_last_layers(tiny.controlnet())
    for part in unet.modules():
        if isinstance(part, BasicTransformerBlock):
            part.set_chunk_feed_forward(batch, dim=0)
    theirs = answers(net, **call, controlnet_cond=picture, conditioning_scale=0.7)
    found = answers(ours := installed(net, mesh), **call, controlnet_cond=picture, conditioning_scale=0.7)
    residuals = {"down_block_additional_residuals": theirs[:-1], "mid_block_additional_residual": theirs[-1]}
    residuals["encoder_attention_mask"] = torch.arange(5)[None] < torch.randint(1, 5, (batch, 1))  # of words
    theirs += answers(unet, **call, **residuals)
    found += answers(both := installed(unet, mesh), **call, **residuals)
    assert max(map(relative, found, theirs)) < 1e-5  # 1e-6
    for model in (ours, both):
        (program,) = runs(model).programs.values()
        text = program.compiled.as_text()
        assert "collective-permute" in text and f"[{-(-batch // mesh[0])}" in text
    assert not [sentence for sentence in warned if "every chip" in sentence]


@pytest.mark.parametrize("trained", [False, slow(True)])
def test_a_controlnet_that_reads_its_scale(chips, trained):
    """Others have it as an input of their programs."""
    names = "in_channels num_trans_channel num_trans_head num_proj_channel num_control_type norm_num_groups layers_per_block addition_time_embed_dim"
    sizes = dict(zip(names.split(), (4, 8, 2, 8, 2, 4, 1, 8)), cross_attention_dim=32, attention_head_dim=8)
    blocks = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "block_out_channels": (8, 16)}
    theirs = tiny.with_last_layers(ControlNetUnionModel(**sizes, **blocks)).train(trained)
    call, pictures = given(1, 8, 8), [torch.rand(1, 3, 64, 64)]
    call |= {"control_type": torch.tensor([[1.0, 0.0]]), "control_type_idx": [0], "return_dict": False}
    ours = installed(theirs, (1, 1, 1))
    for scale in (0.7, 0.3):
        found = [model(**call, controlnet_cond=pictures, conditioning_scale=scale)[1] for model in (ours, theirs)]
        assert relative(*(x.detach() for x in found)) < 1e-5
    assert not tpu.report(ours)["eager"] and runs(ours).programs


@pytest.mark.idiom("layerwise-casting")
def test_weights_that_are_stored_in_eight_bits(chips):
    """Also of an upsampler's convolution, which a kernel computes from the small map."""
    models, call = [theirs := tiny.unet(), installed(theirs, (1, 1, 1))], given(1, 8, 8)
    for model in models:
        model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    assert relative(*(answers(model, **call)[0] for model in models)) < 1e-5
    assert not tpu.report(models[1])["eager"]


@pytest.mark.parametrize("what", ["scale", "scores"])
def test_scores_that_a_script_sees_or_scales(chips, what):
    """Of upstream's processor that computes them, for which another stands that computes none."""
    theirs, call = tiny.unet(), given(1, 8, 8)
    theirs.set_default_attn_processor()
    before = answers(theirs, **call)
    ours = [installed(theirs, (1, 2, 1))]
    assert relative(answers(*ours, **call)[0], before[0]) < 1e-5
    for model in (theirs, *ours):
        attn = model.mid_block.attentions[0].transformer_blocks[0].attn1
        if what == "scale":
            attn.scale *= 3.0
        else:
            own = attn.get_attention_scores
            attn.get_attention_scores = lambda *given, own=own: own(*given) * 0.5
    (expected,), (found,) = answers(theirs, **call), answers(*ours, **call)
    assert relative(before[0], expected) > 1e-4 and relative(found, expected) < 1e-5


def unet_of_frames(name: str) -> torch.nn.Module:
    sizes = {"block_out_channels": (32, 64), "cross_attention_dim": 32, "layers_per_block": 1, "sample_size": 8}
    if name == "AnimateDiff":
        cls, kind = UNetMotionModel, "Motion"
        sizes |= {"num_attention_heads": 2, "motion_num_attention_heads": 2, "norm_num_groups": 8}
    elif name == "ModelScope":
        cls, kind = UNet3DConditionModel, "3D"
        sizes |= {"attention_head_dim": 16, "norm_num_groups": 8}
    else:
        cls, kind = UNetSpatioTemporalConditionModel, "SpatioTemporal"
        sizes |= {"num_attention_heads": (2, 4), "addition_time_embed_dim": 16}
        sizes["projection_class_embeddings_input_dim"] = 48
    down, up = (f"CrossAttnDownBlock{kind}", f"DownBlock{kind}"), (f"UpBlock{kind}", f"CrossAttnUpBlock{kind}")
    return cls(**sizes, down_block_types=down, up_block_types=up).eval()


EVEN, ODD = ((2, 4, 1), 2, 6, 16), ((1, 3, 1), 1, 8, 10)


@pytest.mark.parametrize(
    "name, mesh, batch, height, width",
    [
        *(("AnimateDiff", *EVEN), slow("AnimateDiff", *ODD), slow("SVD", *EVEN), ("SVD", *ODD)),
        *(slow("ModelScope", *EVEN), slow("ModelScope", *ODD)),
    ],
)
def test_a_unet_of_frames(chips, warned, name, mesh, batch, height, width):
    """The frames of a position are on one chip; also where the chips do not divide the width."""
    unet, frames = unet_of_frames(name), 5
    call = given(batch, height, width)
    if name != "SVD":
        call["sample"] = torch.randn(batch, 4, frames, height, width)
    if name == "AnimateDiff":
        call["encoder_hidden_states"] = call["encoder_hidden_states"].repeat_interleave(frames, 0)
    elif name == "SVD":
        call |= {"sample": torch.randn(batch, frames, 8, height, width), "added_time_ids": torch.rand(batch, 3)}
    ours = installed(unet, mesh)
    assert max(map(relative, answers(ours, **call), answers(unet, **call))) < 1e-5
    (program,) = runs(ours).programs.values()
    text = program.compiled.as_text()
    assert "collective-permute" in text and f"[{-(-batch // mesh[0]) * frames}" in text
    assert not [sentence for sentence in warned if "every chip" in sentence]


@pytest.mark.parametrize("what", ["FreeU", "a width"])
def test_what_is_not_known_on_a_shard_runs_whole(chips, warned, what):
    kinds = {"down_block_types": ["DownBlock2D"] * 2, "mid_block_type": None, "up_block_types": ["UpBlock2D"] * 2}
    unet, call = tiny.unet(**kinds), given(2, 8, 8 if what != "a width" else 9)
    if what == "FreeU":
        for block in unet.up_blocks:
            block.s1, block.s2, block.b1, block.b2 = 0.9, 0.2, 1.4, 1.6
    ours = installed(unet, (2, 4, 1))
    assert relative(answers(ours, **call)[0], answers(unet, **call)[0]) < 1e-5
    assert any("every chip computes all of UNet2DConditionModel" in sentence for sentence in warned)
