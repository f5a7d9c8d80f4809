"""Oracles: float64 for norms and rotation, and upstream's own words in one process for where they are used."""

import copy
import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from conftest import relative, wide
from diffusers.models import attention_dispatch_flax
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen
from diffusers.tpu.bridge import norms
from diffusers.tpu.chips.mesh import make_mesh
from diffusers.tpu.kernels import rotary
from diffusers.tpu.kernels.norm import Norm
from diffusers.tpu.kernels.norm import normed as by_norm
from diffusers.tpu.kernels.rotary import normed_and_rotated
from diffusers.tpu.kernels.settings import Settings
from test_linear import arrays, draw, traced


def normed(x, size: int, weight, bias=None, centred: bool = False) -> np.ndarray:
    """RMS norm, or layer norm where `centred`, of each `size` channels of x [B, T, C], in float64."""
    rows = wide(x).reshape(*x.shape[:2], -1, size)
    rows = rows - rows.mean(-1, keepdims=True) if centred else rows
    norm = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-6) * wide(weight)
    return (norm if bias is None else norm + wide(bias)).reshape(x.shape)


def turned(x: np.ndarray, angle: np.ndarray, apart: bool = False) -> np.ndarray:
    """Pairs of channels (of halves where `apart`) of each head of x [B, T, C], turned by angle [1 or B, T, D / 2]."""
    pairs = x.reshape(*x.shape[:2], -1, *((2, angle.shape[-1]) if apart else (angle.shape[-1], 2)))
    first, second = np.moveaxis(pairs, -2 if apart else -1, 0)
    found = (first + 1j * second) * np.exp(1j * angle)[:, :, None]
    return np.stack([found.real, found.imag], -2 if apart else -1).reshape(x.shape)


@pytest.mark.parametrize("kernel, degrees", [(True, None), (True, (2, 4, 1)), (True, (2, 1, 3)), (False, (2, 4, 1))])
@pytest.mark.parametrize(
    "dim, per_head, centred, apart, of_each",
    [
        (128, False, False, False, False),  # Wan
        (128, True, False, True, False),  # by halves
        (64, True, True, False, True),  # CogVideoX
        (32, True, False, False, False),
        (96, True, False, False, True),  # Lumina 2: heads that end where no row of lanes does
        (384, False, True, False, False),  # LTX, a layer norm
        (384, False, False, False, True),  # LTX-2, tables of each sample
    ],
)
def test_norm_and_rotation(chips, degrees, kernel, dim, per_head, centred, apart, of_each):
    """Where chips of `tp` have parts of channels, heads or parts of wide tables are there."""
    tokens, heads = int(np.random.default_rng().integers(1, 600)), 384 // dim
    size = dim if per_head else heads * dim
    x, weight = draw(2, tokens, heads * dim) + 1, draw(size, dtype=jnp.float32)
    bias = draw(size, dtype=jnp.float32) if centred else None
    angle = np.random.default_rng().uniform(-100, 100, (1 + of_each, tokens, dim // 2))
    both = np.concatenate([angle, angle], 2) if apart else np.repeat(angle, 2, axis=2)
    both = both if of_each else both[0]
    cos, sin = (jnp.asarray(f(both), jnp.float32) for f in (np.cos, np.sin))
    settings = Settings(layers="kernel" if kernel else "xla", mesh=degrees and make_mesh(chips, degrees))

    def run(x, weight, bias, *tables):
        return normed_and_rotated(x, Norm(weight, 1e-6, bias, centred), tables, settings, apart)

    def rounded(values):
        return wide(jnp.asarray(values, jnp.bfloat16))

    taken = kernel and (degrees != (2, 1, 3) or per_head and dim != 96 or not centred and dim == 384)
    assert ("rotary_kernel" in str(jax.make_jaxpr(run)(x, weight, bias, cos, sin))) == taken
    norm = normed(x, size, weight, bias, centred)
    exact = turned(norm, angle, apart)
    twice = rounded(turned(rounded(norm), angle, apart))  # as upstream does: not by how many tokens are drawn
    assert relative(jax.jit(run)(x, weight, bias, cos, sin), exact) < 1.02 * relative(twice, exact)


@pytest.mark.parametrize("batch, tokens", [(24, 25), (5, 16), (3, 25), (2, 700)])
def test_short_samples_are_normed_together(batch, tokens):
    """Where vectors are the same for all, rows of several samples are in one block, in either order."""
    settings, x = Settings(layers="kernel"), draw(batch, tokens, 384) + 1
    weight, bias, shift = draw(384, dtype=jnp.float32), draw(384, dtype=jnp.float32), draw(1, 1, 384)
    for steps, added in (((), 0), ((("plus", shift),), wide(shift))):
        run = functools.partial(
            by_norm, norm=Norm(weight, 1e-6, bias, True), settings=settings, steps=steps, wide=True
        )
        blocks = re.search(r"grid=\((\d+), \d+\)", str(jax.make_jaxpr(run)(x)))
        assert int(blocks[1]) == (batch if tokens == 700 or batch == 3 else 1)
        exact = normed(x, 384, weight, bias, True) + added
        assert relative(jax.jit(run)(x), exact) < 1.02 * relative(wide(jnp.asarray(exact, jnp.bfloat16)), exact)


def by_matrices(x, norm, tables):
    """Each pair's own four numbers."""
    # Not in every release that we move to.
    from diffusers.models.transformers.transformer_kandinsky6 import apply_rotary

    return apply_rotary(norm(x.float()).type_as(x), torch.stack([*tables], -1).reshape(1, x.shape[1], 1, -1, 2, 2))


def by_complex_numbers(x, norm, tables, of_each=True):
    angle = tables[0][:, ::2]
    turns = torch.polar(torch.ones_like(angle), angle)
    if of_each:
        return apply_rotary_emb(norm(x), turns.expand(len(x), -1, -1), use_real=False)
    return apply_rotary_emb_qwen(norm(x), turns, use_real=False)


# Upstream's ways to say it, of heads normed and tables [2, T, D].
ROTATIONS = {
    "neighbours": lambda x, norm, tables: apply_rotary_emb(norm(x), tables, sequence_dim=1),
    "halves": lambda x, norm, tables: apply_rotary_emb(norm(x), tables, use_real_unbind_dim=-2, sequence_dim=1),
    "matrices": by_matrices,
    "few words and latents": lambda x, norm, tables: ROTATIONS["text and latents"](x, norm, tables),
    "text and latents": lambda x, norm, tables: apply_rotary_emb(
        torch.cat([norm(x[:, :64] * 2), norm(x[:, 64:])], 1), tables, sequence_dim=1
    ),
    "complex": by_complex_numbers,
    "complex, alike": functools.partial(by_complex_numbers, of_each=False),
}


@pytest.mark.parametrize(
    "degrees, rotation, kind",
    [
        (None, "neighbours", torch.nn.RMSNorm),
        ((1, 2, 2), "neighbours", RMSNorm),
        ((2, 2, 1), "halves", torch.nn.RMSNorm),
        ((2, 2, 1), "matrices", torch.nn.RMSNorm),
        ((2, 2, 1), "complex", RMSNorm),
        (None, "complex, alike", torch.nn.RMSNorm),
        (None, "few words and latents", torch.nn.RMSNorm),
        ((2, 2, 1), "text and latents", RMSNorm),
    ],
)
def test_upstreams_rotation_after_its_norm_is_the_norms_kernel(chips, degrees, rotation, kind, monkeypatch):
    asked, fast = [], rotary.by_kernel

    def noting(x, norm, tables, *how, **more):
        if few and x.shape[1] == 64:
            return None
        result = fast(x, norm, tables, *how, **more)
        asked.extend([result] if tables else [])  # the norm alone is dead code
        return result

    few = rotation == "few words and latents"
    monkeypatch.setattr(rotary, "by_kernel", noting)
    norm = kind(128, eps=1e-6).bfloat16()
    norm.weight.data.uniform_(0.5, 2)
    x, tables = torch.randn(2, 150, 4, 128).bfloat16(), torch.rand(2, 150, 128)
    settings = Settings(layers="kernel", mesh=degrees and make_mesh(chips, degrees))

    def both(weight, x, *tables):
        own = functools.partial(torch.func.functional_call, norm, {"weight": weight})
        return run(x, own, tables), run(x, lambda x: own(x) + 0, tables)  # the second is not the norm's own

    run = ROTATIONS[rotation]
    ours, _ = traced(settings, both)(*arrays(norm.weight, x, *tables))
    exact = run(x.double(), copy.deepcopy(norm).double(), tables.double()).detach()
    assert len(asked) == (2 if rotation == "text and latents" else 1) and all(result is not None for result in asked)
    assert relative(ours, exact) < 1.02 * relative(run(x, norm, tables).detach(), exact)


class InFloat32(torch.nn.LayerNorm):
    """As AuraFlow's."""

    def forward(self, x):
        return super().forward(x.float()).type_as(x)


@pytest.mark.parametrize("degrees, heads_first", [(None, False), (None, True), ((2, 4, 1), True)])
@pytest.mark.parametrize(
    "kind, affine", [(torch.nn.RMSNorm, True), (RMSNorm, True), (RMSNorm, False), (InFloat32, False)]
)
@torch.no_grad()
def test_heads_that_are_not_rotated_are_normed_by_the_kernel(chips, degrees, heads_first, kind, affine):
    """Also where upstream has heads before tokens; diffusers' RMS norm rounds before its weight."""
    rng = np.random.default_rng()
    tokens, dim = int(rng.integers(5, 300)), int(rng.choice([64, 128, 256]))
    norm = kind(dim, 1e-6, elementwise_affine=affine).bfloat16()
    for weight in norm.parameters():
        weight.data.uniform_(0.5, 2)
    x = torch.randn(2, tokens, 4, dim).bfloat16() * 2 + 1
    x = x.transpose(1, 2) if heads_first else x
    settings = Settings(layers="kernel", mesh=degrees and make_mesh(chips, degrees))

    run = traced(settings, lambda x, *own: torch.func.functional_call(norm, dict(zip(["weight"], own)), x))
    given, exact = arrays(x, *norm.parameters()), copy.deepcopy(norm).float()(x.float())
    assert "rotary_kernel" in str(jax.make_jaxpr(run)(*given))
    assert relative(run(*given), exact) < 1.02 * relative(norm(x), exact)


def test_the_default_epsilon_is_that_of_float32():
    norm, x = torch.nn.RMSNorm(64).bfloat16(), 0.1 * torch.randn(2, 40, 128).bfloat16()
    run = traced(
        Settings(), lambda x, w: attention_dispatch_flax.normed_and_rotated(x, SimpleNamespace(weight=w, eps=None))
    )
    exact = copy.deepcopy(norm).float()(x.float().unflatten(-1, (2, 64))).detach().flatten(2)
    assert relative(run(*arrays(x, norm.weight)), exact) < 4e-3


# Upstream's words for a norm over all channels and what follows it, whether it is of float32, and for how many steps the kernel is asked.
NORMED = {
    "alone": (lambda x, norm, s, t: norm(x), False, [0]),
    "wan": (lambda x, norm, s, t: (norm(x.float()) * (1 + s) + t).type_as(x), True, [2]),
    "cross-attention": (lambda x, norm, s, t: norm(x.float()).type_as(x), True, [0]),
    "dit": (lambda x, norm, s, t: norm(x) * (1 + s.bfloat16()) + t.bfloat16(), False, [0, 1, 2]),
    "all samples": (lambda x, norm, s, t: norm(x) * (1 + s[:1].bfloat16()) + t[0, 0].bfloat16(), False, [0, 1, 2]),
    "written to": (lambda x, norm, s, t: (norm(x.float()).mul_(2) * (1 + s) + t).type_as(x), True, []),
    "by token": (lambda x, norm, s, t: norm(x) * (1 + x) + t.bfloat16(), False, [0]),
    "frames": (
        lambda x, norm, s, t: (
            (norm(x).unflatten(1, (-1, 2)).flatten(0, 1) * s.bfloat16().repeat(x.shape[1] // 2, 1, 1)).reshape(x.shape)
            * (1 + t[:1].bfloat16())
        ),
        False,
        [0],
    ),
}


@pytest.mark.parametrize(
    "kind, words, degrees",
    [
        *((torch.nn.LayerNorm, words, None) for words in NORMED),
        *((kind, words, None) for kind in (torch.nn.RMSNorm, RMSNorm) for words in ("dit", "wan")),
        *((torch.nn.LayerNorm, words, (2, 4, 1)) for words in ("wan", "all samples")),
    ],
)
@torch.no_grad()
def test_what_follows_a_norm_is_the_norms(chips, monkeypatch, degrees, words, kind):
    """Upstream's operations in float32; rows that fill no block and that the chips do not divide. diffusers' RMS norm is not one
    operation, and rounds before its weight."""
    rng, (follow, in_float32, steps), asked, fast = np.random.default_rng(), NORMED[words], [], norms.fast_norm

    def noting(x, norm, settings, steps, wide):
        result = fast(x, norm, settings, steps, wide)
        asked.append(None if result is None else len(steps))
        return result

    monkeypatch.setattr(norms, "fast_norm", noting)
    tokens, channels, affine = 2 * int(rng.integers(1, 150)), int(rng.choice([320, 384])), bool(rng.integers(2))
    norm = kind(channels, 1e-6, affine)
    for weight in norm.parameters():
        weight.data.uniform_(0.5, 2)
    norm = norm if in_float32 else norm.bfloat16()
    x = torch.randn(2, tokens, channels).bfloat16() * 2 + 1
    s, t = torch.randint(-60, 60, (2, 2, 1, channels)) / 64  # also 1 + s is a bfloat16: the kernel alone rounds
    settings = Settings(layers="kernel", mesh=degrees and make_mesh(chips, degrees))
    names, weights = zip(*norm.named_parameters()) if affine else ((), ())

    def run(x, s, t, *weights):
        own = functools.partial(torch.func.functional_call, norm, dict(zip(names, weights)))
        return follow(x, own, s, t)

    ours = traced(settings, run)(*arrays(x, s, t, *weights))
    theirs, exact = follow(x, norm, s, t), follow(x.float(), copy.deepcopy(norm).float(), s, t)
    if kind is RMSNorm:
        steps = [] if in_float32 else [0, *(1 + n for n in steps)] if affine else steps
    assert asked == steps and ours.dtype == jnp.bfloat16
    assert relative(ours, exact) < 1.05 * relative(theirs, exact)
