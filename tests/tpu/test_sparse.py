"""Oracle: softmax in float64 over the keys that `Nearest.seen_by` names, whose table is checked by its own definition; of models, one chip."""

import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from attention_masks import attention_formula
from conftest import relative, slow
from denoisers import built, inputs
from diffusers import tpu
from diffusers.tpu.kernels.attention.kernel import tpu_attention
from diffusers.tpu.kernels.attention.masks import Mask
from diffusers.tpu.kernels.attention.reference import reference_attention
from diffusers.tpu.kernels.attention.sparse import SOFTENED, nearest


KERNELS = {"kernel": functools.partial(tpu_attention, interpret=True), "reference": reference_attention}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "latents, tokens, padding, behind",
    [((4, 16, 16), 4 * 16 * 16, 0, 0), ((7, 22, 34), 7 * 11 * 17, 5, 20), ((5, 22, 52), 5 * 11 * 26, 3, 0), ((4, 16, 24), 2 * 16 * 24, 0, 300)],
)  # fmt: skip
def test_a_query_sees_the_tiles_that_are_nearest(kernel, latents, tokens, padding, behind):
    """One token of a patch of one or two latents, one or two frames; what stands behind the video is whole, its padding nowhere."""
    length, stop = tokens + padding + behind, tokens + padding
    near = nearest(latents, 0.6, tokens, stop)
    own = np.r_[:tokens, stop:length]
    shown = np.ones(length, bool)
    shown[tokens:stop] = shown[length - 3 * bool(behind) :] = False
    keys = jnp.asarray(shown)[None, None, None] if padding or behind else None
    rng = np.random.default_rng()
    q, k, v = (rng.standard_normal((1, 2, length, 64), np.float32) for _ in range(3))
    k[:, :, tokens:stop], v[:, :, tokens:stop] = np.inf, np.nan
    mask = Mask(keys=keys, whole=tokens, nearest=near)
    found = KERNELS[kernel](*map(jnp.asarray, (q, k, v)), scale=0.125, mask=mask)
    seen = np.asarray(near.seen_by(jnp.arange(length)[:, None], jnp.arange(length)))[own][:, own] & shown[own]
    wanted, _ = attention_formula(*(x[:, :, own] for x in (q, k, v)), 0.125, Mask(dense=seen[None, None]))
    assert relative(np.asarray(found)[:, :, own], wanted) < 1e-6
    assert seen[tokens:].all(0)[:tokens].all() and (seen[:tokens, :tokens].mean() < 0.75)


def test_tiles_of_a_video_are_compact_and_each_sees_its_own():
    near = nearest((21, 90, 160), 0.7, 75600, 75600)
    assert near.grid == (21, 45, 80) and near.tile == (1024, 2048)
    (a, b), tiles = near.cell, near.tiles
    assert 45 % a == 80 % b == 0 and b % 16 == 0
    place = np.arange(75600).reshape(21, 45 // a, a, 80 // b, b).transpose(1, 3, 0, 2, 4).reshape(-1)
    where = np.stack(np.unravel_index(place, near.grid), 1) / near.grid
    assert len({len(seen) for seen in tiles.seen}) == 1 and len(tiles.seen[0]) == round(0.3 * 37)
    for n in np.random.default_rng().integers(0, len(tiles.seen), 5):
        own = where[n * 1024 : (n + 1) * 1024 : 16]
        assert n // 2 in tiles.seen[n]
        masses = []
        for m in range(36):  # by tokens themselves, not by the middles of some
            other = where[m * 2048 : (m + 1) * 2048 : 16]
            apart = np.abs(own[:, None] - other)
            in_a_frame = np.hypot(apart[..., 1], apart[..., 2])
            masses.append((1 / (apart[..., 0] + SOFTENED) / (in_a_frame + SOFTENED)).sum())
        best = set(np.argsort(masses)[::-1][: len(tiles.seen[n])].tolist())
        assert len(best & {*tiles.seen[n]}) >= len(best) - 3


# Of tests/tpu/denoisers.json: the sizes of a video, its tokens, and whether upstream has words before them, behind them, or apart (None).
VIDEOS = {
    "wan": ((1, 16, 4, 32, 48), (4, 16, 24), None),
    "cogvideox 2b": ((1, 4, 4, 32, 40), (4, 16, 20), "before"),  # [B, F, C, H, W] with as many frames as channels
    "hunyuan 1.5": ((1, 9, 5, 18, 14), (5, 18, 14), "behind"),
}


def upstream_with_mask(monkeypatch, grid, words):
    """Upstream's attention of tokens of a video sees what `nearest` says of them, and all of the words."""
    plain, tokens = torch.nn.functional.scaled_dot_product_attention, math.prod(grid)

    def attention(query, key, value, attn_mask=None, **kwargs):
        length = query.shape[2]
        if length != key.shape[2] or length < tokens:
            return plain(query, key, value, attn_mask, **kwargs)
        near = nearest(grid, 0.5, tokens, tokens)
        seen = near.seen_by(jnp.arange(length)[:, None], jnp.arange(length))
        seen = torch.from_numpy(np.array(seen)).roll((length - tokens,) * 2 if words == "before" else (0, 0), (0, 1))
        return plain(query, key, value, seen if attn_mask is None else seen & attn_mask.bool(), **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)


@pytest.mark.parametrize(
    "kind, mesh", [("wan", (1, 4, 1)), slow("wan", (1, 1, 1)), ("cogvideox 2b", (1, 2, 2)), ("hunyuan 1.5", (1, 2, 1))]
)
@torch.no_grad()
def test_a_denoiser_is_sparse_below_a_timestep(monkeypatch, chips, own_store, kind, mesh):
    """And sees all above it, by the same module: two programs, each of which is found again."""
    sizes, grid, words = VIDEOS[kind]
    theirs, ours = built(kind), built(kind)
    ours.load_state_dict(theirs.state_dict())
    tpu.install(ours, tpu.TPUConfig(mesh=mesh, attention_sparsity=0.5, attention_sparse_below=600))
    given = inputs(kind) | {"hidden_states": torch.randn(sizes)}
    dense, sparse = (given | {"timestep": torch.full((1,), t, dtype=given["timestep"].dtype)} for t in (601, 600))
    wanted = [theirs(**dense)[0], theirs(**sparse)[0]]
    with monkeypatch.context() as patch:
        upstream_with_mask(patch, grid, words)
        wanted.append(theirs(**sparse)[0])
    found = [ours(**given)[0] for given in (dense, sparse, dense, sparse)]
    assert relative(found[0], wanted[0]) < 1e-5 and relative(found[1], wanted[2]) < 1e-5
    assert relative(wanted[1], wanted[2]) > 1e-4
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    assert len(ours._tpu_runner.programs) == 2 and not tpu.report(ours)["eager"]


def test_a_call_that_is_differentiated_sees_all(chips, own_store):
    theirs, ours = built("wan"), built("wan")
    ours.load_state_dict(theirs.state_dict())
    tpu.install(ours, tpu.TPUConfig(mesh=(1, 1, 1), attention_sparsity=0.5))
    given, found = inputs("wan") | {"timestep": torch.tensor([1])}, []
    latents = torch.randn(VIDEOS["wan"][0])
    for model in (ours, theirs):  # in evaluation mode, as for guidance by a gradient
        own = latents.clone().requires_grad_()
        out = model(**given | {"hidden_states": own})[0]
        out.square().sum().backward()
        found.append((out, own.grad))
    assert all(relative(*pair) < 1e-5 for pair in zip(*found))


@torch.no_grad()
def test_what_has_no_video_or_no_whole_sequence_is_refused(chips, own_store):
    flux = tpu.install(built("flux"), tpu.TPUConfig(mesh=(1, 1, 1), attention_sparsity=0.5))
    with pytest.raises(NotImplementedError, match=r"a denoiser of videos.*attention_sparsity=0\.5.*FluxTransformer2D"):
        flux(**inputs("flux"))
    wan = tpu.install(built("wan"), tpu.TPUConfig(mesh=(1, 8, 1), attention_sparsity=0.5))
    with pytest.raises(NotImplementedError, match="a ring of 2"):
        wan(**inputs("wan") | {"timestep": torch.tensor([1])})
