"""Sequences joined in the chips' order (`bridge/joined.py`). Oracle: torch on the host, the same lines on the same numbers."""

import math

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from conftest import relative
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.tpu.bridge import Tensor, environment
from diffusers.tpu.bridge.joined import is_joined
from diffusers.tpu.chips.mesh import make_mesh
from diffusers.tpu.kernels.attention import api
from diffusers.tpu.kernels.settings import Settings, using


pytestmark = pytest.mark.usefixtures("idioms")
B, L, T, N, D = 2, 16, 40, 4, 8
C = N * D
SHAPES = {"text": (B, L, C), "latents": (B, T, C), "weight": (C, C), "norm": (D,)}
SHAPES |= dict.fromkeys(("cos", "sin"), (L + T, D))


def compared(lines, degrees, **more):
    """Whether what lines `say` is in the chips' order, one by one. Their results are torch's."""
    mesh = make_mesh(tuple(jax.devices()[: math.prod(degrees)]), degrees)
    rng, said = np.random.default_rng(), []
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in {**SHAPES, **more}.items()}
    theirs = lines(lambda x: x, **{name: torch.from_numpy(array.copy()) for name, array in arrays.items()})

    def say(x):
        said.append(is_joined(x))
        return x

    @jax.jit
    def ours(arrays):
        tensors = {name: Tensor(array, environment()) for name, array in arrays.items()}
        with using(Settings(mesh=mesh, sequence=True, platform="cpu")), environment():
            return [x.jax() for x in lines(say, **tensors)]

    for wanted, got in zip(theirs, ours(arrays), strict=True):
        assert relative(got, wanted) < 1e-5
    return said


def block(say, text, latents, weight, cos, sin, norm, mask=None):
    """Text before latents in one sequence, as diffusers' blocks of one stream write it."""
    x = say(torch.cat([text, latents], dim=1))
    x = say(F.layer_norm(x, (C,)) * (1 + weight[:1]) + x.pow(2).mean(-1, keepdim=True))
    q, k, v = (say(x) for x in F.linear(x, torch.cat([weight, weight + 1, weight - 1]) / C).chunk(3, dim=-1))
    q, k, v = (x.unflatten(-1, (-1, D)) for x in (q, k, v.clone()))
    q = say(apply_rotary_emb(F.rms_norm(q, (D,), norm), (cos, sin), sequence_dim=1))
    pairs = k.float().reshape(*k.shape[:-1], -1, 2)
    real, imaginary = pairs.unbind(-1)
    turned = torch.stack([-imaginary, real], dim=-1).flatten(3)
    k = say((k * cos[None, :, None] + turned * sin[None, :, None]).type_as(k))
    masked = None if mask is None else (mask > 0)[:, None, None]
    q, k, v = (x.transpose(1, 2) for x in (q, say(k.bfloat16().type_as(q)), v))
    answer = say(F.scaled_dot_product_attention(q, k, v, attn_mask=masked).transpose(1, 2).flatten(2, 3))
    answer = say(torch.cat([answer, F.silu(x)], dim=-1))
    first, second = answer.split_with_sizes([L, T], dim=1)
    return first, second, answer[:, :L] + first, answer[:, L:, :] * 2, answer[:, L + 1 :], answer.cumsum(1), answer


@pytest.mark.parametrize("degrees", [(1, 8, 1), (2, 2, 2)])
@pytest.mark.parametrize("mask", [False, True])
def test_a_block_of_one_stream_keeps_the_chips_order_to_its_end(degrees, mask):
    said = compared(block, degrees, **({"mask": (B, L + T)} if mask else {}))
    assert said == [True] * 10


def test_heads_of_two_streams_keep_it_through_the_dispatcher():
    def lines(say, text, latents, cos, sin, **rest):
        heads = say(torch.cat([text.unflatten(-1, (-1, D)), latents.unflatten(-1, (-1, D))], dim=1))
        answer = dispatch_attention_fn(apply_rotary_emb(heads, (cos, sin), sequence_dim=1), heads, heads)
        some = dispatch_attention_fn(latents.unflatten(-1, (-1, D)), heads, heads)  # of the latents alone
        return say(answer.flatten(2, 3)).split_with_sizes([L, T], dim=1) + (some,)

    assert compared(lines, (1, 4, 2)) == [True, True]


def test_a_mask_that_is_a_product_keeps_its_factors_in_it():
    """As Chroma's. Read back through the order of the chips it would be of tokens x tokens."""

    def lines(say, text, latents, mask, **rest):
        heads = torch.cat([text, latents], dim=1).unflatten(-1, (-1, D)).transpose(1, 2)
        products = mask[:, None, :, None] * mask[:, None, None]
        return (say(F.scaled_dot_product_attention(heads, heads, heads, attn_mask=products)).transpose(1, 2),)

    before = api.explain()
    assert compared(lines, (1, 8, 1), mask=(B, L + T)) == [True]
    assert {how.mask for how, n in api.explain().items() if n > before.get(how, 0)} == {""}


def test_what_is_written_to_has_its_values_and_so_have_its_views():
    def lines(say, text, latents, cos, **rest):
        x = torch.cat([text, latents], dim=1)
        twice, turned = x * 2, say(x.transpose(1, 2))
        heads = turned.unflatten(1, (-1, D)).unbind(1)
        x[:, L:] = latents.flip(1)
        heads[1].add_(1)
        say(twice)
        first, second = twice.split_with_sizes([L, T], dim=1)
        first.mul_(cos[0, 0])
        more = say(twice + 1)
        twice.add_(cos[1, 1])
        second[:, 1] = 3
        turned[..., :L] = text.transpose(1, 2) - x[:, :L].transpose(1, 2)
        return x, twice, turned, *heads, say(x) + 0, first, second, more

    assert compared(lines, (1, 8, 1)) == [True, True, True, False]


def test_one_of_the_sequences_may_be_written_to():
    """As CogVideoX's and CogView4's blocks rotate the latents alone."""

    def lines(say, text, latents, cos, **rest):
        x = torch.cat([text, latents], dim=1) + 1
        x = x.to(x.dtype)
        x[:, L:] = say(x)[:, L:] * cos[:1, :1]
        last = x[:, L:]
        x[:, :L] = last[:, :L]
        last.add_(1)
        return say(x) * 2, last, say(x), torch.cat([x, x], dim=-1), torch.cat([text, latents], dim=1).transpose(1, 2)

    assert compared(lines, (1, 8, 1)) == [True] * 3


def test_where_order_counts_or_chips_do_not_divide_it_is_torchs():
    """Sequences that chips do not divide, channels, causal attention, and a function that reads neighbours."""

    def lines(say, text, latents, weight, **rest):
        uneven = say(torch.cat([text[:, 1:], latents], dim=1))
        channels = say(torch.cat([text, latents[:, :L]], dim=-1))
        heads = torch.cat([text, latents], dim=1).unflatten(-1, (-1, D)).transpose(1, 2)
        causal = say(F.scaled_dot_product_attention(heads, heads, heads, is_causal=True))
        rolled = say(torch.cat([text, latents], dim=1).roll(1, 1))
        mixed = say(torch.cat([text, latents], dim=1).transpose(1, 2) @ torch.cat([text, latents], dim=1))
        return uneven, channels, causal, rolled, mixed

    assert compared(lines, (1, 8, 1)) == [False] * 5
