"""Oracle: softmax(scale q k^T) v in float64 numpy of latents and text behind each other, as upstream concatenates them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import QUICKLY, attention_formula, relative
from diffusers.tpu.chips.mesh import make_mesh
from diffusers.tpu.kernels.attention import exchange
from diffusers.tpu.kernels.attention.api import joint
from diffusers.tpu.kernels.attention.kernel import tpu_attention
from diffusers.tpu.kernels.attention.masks import Mask
from diffusers.tpu.kernels.attention.parallel import Text, joint_attention
from diffusers.tpu.kernels.attention.reference import reference_attention
from diffusers.tpu.kernels.settings import Settings, using


TOLERANCE = 1e-6  # measured: 3e-7


def local(q, k, v, *, bounds=None, **arguments):
    """The reference, and not known to be: nothing is left to the compiler."""
    return reference_attention(q, k, v, **arguments)


def draw(batch, heads, kv_heads, tokens, words, dim, padded):
    """(latents' and text's q, k, v), and which tokens of the text are no padding: one sample has none at all."""
    rng = np.random.default_rng()
    sizes = [(heads, dim), (kv_heads, dim), (kv_heads, dim)]
    streams = [[rng.standard_normal((batch, n, t, d)).astype(np.float32) for n, d in sizes] for t in (tokens, words)]
    seen = rng.random((batch, words)) < 0.6
    seen[0] = False
    seen[-1, -1] = True
    return *streams, seen if padded else None


def exact(latents, text, seen, scale):
    batch, _, tokens, _ = latents[0].shape
    both = [np.concatenate(pair, 2) for pair in zip(latents, text)]
    mask = None
    if seen is not None:
        all_seen = np.concatenate([np.ones((batch, tokens), bool), seen], 1)
        mask = Mask(keys=all_seen[:, None, None], queries=all_seen[:, None, :, None])
    out, _ = attention_formula(*both, scale, mask)
    return out[:, :, :tokens], out[:, :, tokens:]


def errors(latents, text, seen, mesh, local=local, **arguments):
    run = jax.jit(
        lambda latents, text: joint_attention(*latents, text, scale=0.3, mesh=mesh, local=local, **arguments),
        compiler_options=QUICKLY,
    )
    ours = run(latents, Text(*text, None if seen is None else jnp.asarray(seen)))
    return [relative(one, other) for one, other in zip(ours, exact(latents, text, seen, 0.3))]


@pytest.mark.parametrize(
    "degrees, ring, padded",
    [
        (None, None, True),
        ((2, 4, 1), None, True),
        ((1, 8, 1), None, False),
        ((1, 4, 2), 2, True),
        ((8, 1, 1), None, False),
    ],
)
def test_any_mesh_gives_what_the_concatenation_gives(chips, degrees, ring, padded):
    """Latents that no axis divides, fewer heads of keys than of queries, samples with their own length of text."""
    rng = np.random.default_rng()
    tokens, words = int(rng.integers(8, 60)), int(rng.integers(1, 20))
    heads, kv_heads = ((16, 8), (8, 8), (8, 4))[rng.integers(3)]
    operands = draw(int(rng.integers(1, 4)), heads, kv_heads, tokens, words, 8, padded)
    mesh = degrees and make_mesh(chips, degrees)
    assert max(errors(*operands, mesh, ring=ring)) < TOLERANCE, (tokens, words, heads, kv_heads)


@pytest.mark.parametrize("tokens, words, padded", [(128, 5, True), (133, 130, False), (131, 7, True)])
def test_by_our_kernels(chips, monkeypatch, tokens, words, padded):
    """Text behind whole tiles and behind what is left of each chip's; bounds over both streams, far keys in one of them."""
    monkeypatch.setattr(exchange, "BLOCK_BYTES", 128 * 128 * 4)
    latents, text, seen = draw(2, 4, 4, 4 * tokens, words, 128, padded)
    for stream in (latents, text):
        stream[0] /= 16
    far = (latents, text)[words % 2]
    far[1] *= 1 + 100 * np.random.default_rng().random((2, 4, far[1].shape[2], 1)) ** 8
    far[2] *= np.float32(1e32)  # not all heads are bounded where its values are so large: sums would not be finite
    kernel = functools.partial(tpu_attention, interpret=True)
    found = errors(latents, text, seen, make_mesh(chips, (2, 4, 1)), kernel, interpret=True)
    assert max(found) < 2e-6  # measured


def test_a_window_is_refused():
    streams = [[jnp.ones((1, 2, tokens, 8))] * 3 for tokens in (6, 3)]
    with using(Settings(window=(2, 2))), pytest.raises(NotImplementedError, match="no attention_window"):
        joint(*streams[0], Text(*streams[1]))
