"""Where two forms of a component part. Oracle: faults that are planted, whose place is known; a harvest by hand."""

import copy
import functools

import pytest
import torch

import tiny
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.transformers import transformer_wan, transformer_wan_flax
from diffusers.tpu import bridge, fidelity
from diffusers.tpu.fidelity import Form
from diffusers.tpu.fidelity.modules import compared, graded


pytestmark = pytest.mark.usefixtures("chips")


@functools.cache
def recorded(name: str, component: str, entry: str = "forward"):
    """(the component of a tiny pipeline, a call of it, what upstream's gives, submodule by submodule)."""
    pipe = fidelity.load(tiny.BUILDERS[name](), torch.float32)
    arguments = {key: value for key, value in tiny.arguments(name, 1).items() if key != "generator"}
    calls, _ = fidelity.record(pipe, arguments, 5)
    call = next(call for call in calls if (call.module, call.entry) == (component, entry))
    module = fidelity.modules(pipe)[component]
    return module, call, fidelity.run_form(module, Form("upstream"), call)


# Faults: what is changed of ours, given a copy of the module and pytest's monkeypatch


def dropped_bias(name):
    def plant(module, patch):
        module.get_submodule(name).bias.data.zero_()

    return plant


def transposed_kernel(name, axes=(0, 1)):
    def plant(module, patch):
        weight = module.get_submodule(name).weight
        weight.data = weight.data.transpose(*axes).contiguous()

    return plant


def norm_over_tokens(cls):
    def forward(norm, x):
        return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)

    return lambda module, patch: patch.setattr(cls, "forward", forward)


def swapped_pairs(module, patch):
    """Entries half a head apart are rotated in place of neighbours, or the other way round."""
    ours = bridge.normed_and_rotated
    patch.setattr(bridge, "normed_and_rotated", lambda x, norm, *t, apart=False: ours(x, norm, *t, apart=not apart))


def masked_key(owner):
    """The last key is left out."""

    def plant(module, patch):
        theirs = owner.dispatch_attention_fn
        patch.setattr(
            owner,
            "dispatch_attention_fn",
            lambda q, k, v, *args, **more: theirs(q, k[:, :-1], v[:, :-1], *args, **more),
        )

    return plant


def masked_text(module, patch):
    """The first token of the text is left out of a softmax over two streams."""
    ours = bridge.joint_attention

    def joint(latents, text, seen, backend=None):
        seen = torch.ones(text[1].shape[:2], dtype=torch.bool, device=text[1].device) if seen is None else seen.bool()
        return ours(latents, text, seen & (torch.arange(seen.shape[1], device=seen.device) > 0), backend)

    patch.setattr(bridge, "joint_attention", joint)


WAN, HUNYUAN, COG = ("wan", "transformer"), ("hunyuan15", "transformer"), ("cogvideox", "transformer")
TEXT, VAE = ("wan", "text_encoder"), ("wan", "vae", "decode")
LAYER = "encoder.block.1.layer.1.DenseReluDense.wo"
FAULTS = [
    (WAN, "scanned", swapped_pairs, "blocks.0.attn1"),
    (WAN, "scanned", dropped_bias("blocks.1.ffn.net.2"), "blocks.1.ffn.net.2"),
    (WAN, "scanned", norm_over_tokens(FP32LayerNorm), "blocks.0.norm1"),
    (WAN, "scanned", transposed_kernel("blocks.2.attn1.to_out.0"), "blocks.2.attn1.to_out.0"),
    (WAN, "scanned", masked_key(transformer_wan), "blocks.0.attn2"),
    (WAN, "scanned", masked_key(transformer_wan_flax), "blocks.0.attn1"),
    (WAN, "torchax", dropped_bias("blocks.1.attn2.to_q"), "blocks.1.attn2.to_q"),
    (HUNYUAN, "scanned", swapped_pairs, "transformer_blocks.0.attn"),
    (HUNYUAN, "scanned", dropped_bias("transformer_blocks.1.attn.add_k_proj"), "transformer_blocks.1.attn.add_k_proj"),
    (HUNYUAN, "scanned", norm_over_tokens(torch.nn.LayerNorm), "context_embedder.token_refiner.refiner_blocks.0.norm1"),
    (HUNYUAN, "scanned", transposed_kernel("transformer_blocks.2.attn.to_v"), "transformer_blocks.2.attn.to_v"),
    (HUNYUAN, "scanned", masked_text, "transformer_blocks.0.attn"),
    (COG, "scanned", swapped_pairs, "transformer_blocks.0.attn1"),
    (COG, "scanned", dropped_bias("transformer_blocks.1.norm2.linear"), "transformer_blocks.1.norm2.linear"),
    (COG, "scanned", transposed_kernel("transformer_blocks.1.attn1.to_q"), "transformer_blocks.1.attn1.to_q"),
    (COG, "scanned", masked_text, "transformer_blocks.0.attn1"),
    (TEXT, "scanned", transposed_kernel("encoder.block.1.layer.0.SelfAttention.q"), "encoder.block.1.layer.0.SelfAttention.q"),
    (VAE, "scanned", dropped_bias("decoder.mid_block.resnets.1.conv2"), "decoder.mid_block.resnets.1.conv2"),
    (VAE, "scanned", transposed_kernel("decoder.up_blocks.0.resnets.0.conv1", (-1, -2)), "decoder.up_blocks.0.resnets.0.conv1"),
    (VAE, "nnx", transposed_kernel("decoder.up_blocks.1.resnets.0.conv1", (-1, -2)), "decoder.up_blocks.1.resnets.0.conv1"),
    (VAE, "nnx", dropped_bias("decoder.mid_block.attentions.0.to_qkv"), "decoder.mid_block.attentions.0.to_qkv"),
]  # fmt: skip


@pytest.mark.parametrize("which, kind, plant, name", FAULTS, ids=[f"{w[0]}-{w[1]}-{k}-{n}" for w, k, _, n in FAULTS])
def test_the_submodule_with_a_planted_fault_is_named_first(which, kind, plant, name, monkeypatch):
    module, call, oracle = recorded(*which)
    ours = copy.deepcopy(module)
    plant(ours, monkeypatch)
    found = fidelity.run_form(ours, Form(kind), call)
    comparison = compared(oracle, found, None, call, kind, "upstream")
    assert comparison.first == name and not comparison.ok
    assert graded(next(row for row in comparison.rows if row.name == name).error.relative) in (
        "attention",
        "severe",
        "warning",
    )
