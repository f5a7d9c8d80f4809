"""Faults that are planted in our forms of components, and the submodule that each is in.

A fault is a function of a copy of the module and of pytest's monkeypatch.
"""

import torch
from transformers.models.umt5.modeling_umt5 import UMT5Attention

from diffusers.models.transformers import transformer_wan
from diffusers.tpu import bridge
from diffusers.tpu.video.nnx.layers import RMSNorm


def dropped_bias(name):
    def plant(module, patch):
        module.get_submodule(name).bias.data.zero_()

    return plant


def transposed_kernel(name):
    def plant(module, patch):
        weight = module.get_submodule(name).weight
        weight.data = weight.data.T.contiguous()

    return plant


def norm_over_tokens(module, patch):
    patch.setattr(
        torch.nn.LayerNorm, "forward", lambda norm, x: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)
    )


def swapped_pairs(module, patch):
    """Entries half a head apart are rotated in place of neighbours, or the other way round."""
    ours = bridge.normed_and_rotated
    patch.setattr(bridge, "normed_and_rotated", lambda x, norm, *t, apart=False: ours(x, norm, *t, apart=not apart))


def masked_key(module, patch):
    """The last key is left out."""
    theirs = transformer_wan.dispatch_attention_fn
    without = lambda q, k, v, *args, **more: theirs(q, k[:, :-1], v[:, :-1], *args, **more)  # noqa: E731
    patch.setattr(transformer_wan, "dispatch_attention_fn", without)


def masked_text(module, patch):
    """The first token of the text is left out of a softmax over two streams."""
    ours = bridge.joint_attention

    def joint(latents, text, seen, backend=None):
        seen = torch.ones(text[1].shape[:2], dtype=torch.bool, device=text[1].device) if seen is None else seen.bool()
        return ours(latents, text, seen & (torch.arange(seen.shape[1], device=seen.device) > 0), backend)

    patch.setattr(bridge, "joint_attention", joint)


def masked_word(module, patch):
    """No token attends to the first one."""
    forward = UMT5Attention.forward

    def masked(attention, hidden_states, *args, attention_mask=None, **more):
        keys = torch.arange(hidden_states.shape[1], device=hidden_states.device)
        return forward(attention, hidden_states, *args, attention_mask=attention_mask - 1e9 * (keys == 0), **more)

    patch.setattr(UMT5Attention, "forward", masked)


def norm_over_rows(module, patch):
    patch.setattr(RMSNorm, "__call__", lambda norm, x: (x - x.mean(2, keepdims=True)) / x.std(2, keepdims=True))


WAN, HUNYUAN, COG = ("wan", "transformer"), ("hunyuan15", "transformer"), ("cogvideox", "transformer")
TEXT, VAE = ("wan", "text_encoder"), ("wan", "vae", "decode")
FAULTS = [  # one of each kind and of each component
    (WAN, "scanned", swapped_pairs, "blocks.0.attn1"),
    (WAN, "scanned", masked_key, "blocks.0.attn2"),
    (WAN, "torchax", dropped_bias("blocks.1.attn2.to_q"), "blocks.1.attn2.to_q"),
    (HUNYUAN, "scanned", norm_over_tokens, "context_embedder.token_refiner.refiner_blocks.0.norm1"),
    (HUNYUAN, "scanned", masked_text, "transformer_blocks.0.attn"),
    (COG, "scanned", transposed_kernel("transformer_blocks.1.attn1.to_q"), "transformer_blocks.1.attn1.to_q"),
    (TEXT, "scanned", masked_word, "encoder.block.0.layer.0.SelfAttention"),
    (VAE, "nnx", norm_over_rows, "decoder.mid_block.resnets.0.norm1"),
]  # fmt: skip
