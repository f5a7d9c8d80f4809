"""Denoisers with a plan of their own. Oracle: upstream's in the same process, same weights and inputs."""

import copy
import re

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map, tree_map_only

from conftest import relative, slow
from denoisers import WIDTH, built, inputs
from diffusers import tpu
from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection
from diffusers.models.transformers import transformer_flux
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxAttnProcessor, FluxIPAdapterAttnProcessor
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoRotaryPosEmbed
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15RotaryPosEmbed
from diffusers.models.transformers.transformer_hunyuan_video_flax import tables_by_axis
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0
from diffusers.tpu.chips.mesh import AXES
from diffusers.tpu.chips.sharding import axes_of
from diffusers.tpu.common.config import TPUConfig
from diffusers.tpu.kernels.attention.api import explain


def assert_equal(theirs, given, mesh):
    ours = tpu.install(copy.deepcopy(theirs), TPUConfig(mesh=mesh))
    (found,), (expected,) = ours(**copy.deepcopy(given)), theirs(**copy.deepcopy(given))
    assert relative(np.asarray(found.cpu() if isinstance(found, torch.Tensor) else found), expected) < 1e-5  # 5e-7
    assert not tpu.report(ours)["eager"]
    return ours


@pytest.mark.parametrize(
    "kind, mesh, batch, heads",
    [
        ("flux", (2, 2, 2), 2, 4),
        ("flux joined", (2, 2, 2), 2, 4),  # words that the chips of sp divide
        ("sd3.5", (1, 8, 1), 1, 3),  # heads that chips do not divide
        ("qwen", (1, 8, 1), 1, 3),
        ("qwen edit", (2, 4, 1), 1, 4),
        slow("qwen layered", (1, 1, 1), 2, 2),
        ("cogvideox 2b", (1, 8, 1), 1, 30),  # the published heads, which the chips do not divide
        slow("cogvideox 5b image", (2, 2, 2), 2, 4),
        ("cogvideox 1.5 image", (1, 4, 2), 2, 6),
        ("hunyuan", (2, 2, 2), 2, 2),
        slow("hunyuan image", (2, 4, 1), 2, 2),
        slow("framepack", (1, 4, 1), 1, 2),
        ("framepack", (1, 1, 1), 2, 2),
        ("sana", (1, 2, 2), 2, 2),  # convolutions in blocks
        ("hunyuan dit", (2, 2, 2), 2, 2),  # blocks that it does not declare, half of them given earlier ones' outputs
        ("kandinsky 5", (1, 2, 2), 1, 2),  # a last layer's scale and shift, which no chip has whole
        ("hidream", (1, 2, 2), 2, 4),  # texts of their own for each block, joined and cut between blocks
    ],
)
@torch.no_grad()
def test_the_transformer_equals_upstreams(chips, own_store, kind, mesh, batch, heads):
    theirs, before = built(kind, heads), explain()
    ours = assert_equal(theirs, inputs(kind, batch), mesh)
    ways = [way for way, times in explain().items() if times > before.get(way, 0)]
    assert ways
    if kind == "hunyuan dit":
        blocks = {name.partition(".attn1.")[0] for name in ours._tpu_runner._placed.avals if ".attn1." in name}
        assert blocks == {"blocks.[0:4]", "blocks.[4:6]"} and any(way.chips == "ring 2 x ulysses 1" for way in ways)
    if kind.startswith(("flux", "qwen")):
        of_one = [way for way in ways if not way.mask.startswith("joint")]
        assert len(of_one) == (kind == "flux joined")  # one sequence of both
    if kind in ("flux", "sd3.5"):  # layers that meet no tokens are computed where they are stored, by all chips
        placed, ones = ours._tpu_runner._placed, {name for name, size in zip(AXES, mesh) if size == 1}
        layers = [key for key in placed.avals if re.search(r"norm1(_context)?\.linear\.weight$", key)]
        split = {key: {*axes_of(placed.specs[key][0])} for key in layers}
        assert split and all(axes | ones == {*AXES} for axes in split.values()), split
        assert {*layers} <= {*placed.settled}


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


def with_backend(model, given):
    model.set_attention_backend("native")
    return given


@pytest.mark.parametrize(
    "changes, replaced",
    [
        ((with_ip_adapter, with_control), ()), slow((with_processors,), ()), ((with_hooks, with_backend), ()),
        ((), (FluxAttnProcessor, "__call__")), ((), (transformer_flux, "dispatch_attention_fn")),
    ],
)  # fmt: skip
@torch.no_grad()
def test_what_users_of_flux_change_is_kept(chips, monkeypatch, changes, replaced):
    """`replaced`: where a function stands that gives the double, in the place of upstream's."""
    theirs = built("flux", 4)
    given = inputs("flux", images=1)
    if replaced:
        own = getattr(*replaced)
        monkeypatch.setattr(*replaced, lambda *args, **kwargs: tree_map(lambda x: 2 * x, own(*args, **kwargs)))
    for change in changes:
        given = change(theirs, given)
    assert_equal(theirs, given, (2, 4, 1))


class OfWordsUnmasked(QwenDoubleStreamAttnProcessor2_0):
    """A processor of the user's that knows no mask: texts must come as they are, and rotations as upstream's complex numbers."""

    def __call__(
        self,
        attn,
        hidden_states,
        encoder_hidden_states=None,
        encoder_hidden_states_mask=None,
        attention_mask=None,
        image_rotary_emb=None,
    ):
        return super().__call__(attn, 2 * hidden_states, encoder_hidden_states, image_rotary_emb=image_rotary_emb)


def with_a_processor(model):
    model.transformer_blocks[1].attn.set_processor(OfWordsUnmasked())


def with_a_hook(model):
    model.transformer_blocks[0].attn.add_k_proj.register_forward_hook(lambda module, args, output: 2 * output)


@pytest.mark.parametrize("change", [with_a_processor, with_a_hook])
@torch.no_grad()
def test_what_users_of_qwen_change_is_given_what_upstream_gives(chips, change):
    theirs = built("qwen edit", 4)
    change(theirs)
    assert_equal(theirs, inputs("qwen edit"), (1, 2, 1))


@pytest.mark.parametrize(
    "embed", [HunyuanVideoRotaryPosEmbed(2, 1, (16, 56, 56)), HunyuanVideo15RotaryPosEmbed(1, 2, (4, 6, 6))]
)
def test_rotation_by_axis_is_upstreams_bit_for_bit(embed):
    latents = torch.empty(2, 4, *(2 * int(n) for n in np.random.default_rng().integers(1, 9, 3)))
    for ours, theirs in zip(tables_by_axis(embed, latents), embed(latents)):
        assert torch.equal(ours, theirs)
