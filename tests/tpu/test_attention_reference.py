"""Oracle: softmax(scale q k^T + bias) v and its log-sum-exp in float64 numpy, the whole matrix at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_masks import KINDS, assert_right, draw, make_mask, spoilt
from conftest import QUICKLY, attention_formula
from diffusers.tpu.kernels.attention.masks import Mask
from diffusers.tpu.kernels.attention.reference import reference_attention


run = jax.jit(
    lambda q, k, v, mask, **more: reference_attention(
        q, k, v, scale=0.3, mask=mask, with_lse=True, block_q=16, block_kv=32, **more
    ),
    compiler_options=QUICKLY,
)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_formula(kind):
    """Whatever masked keys hold, and wherever the first row and the first key lie, which a band counts from."""
    rng = np.random.default_rng()
    t, s = rng.permutation([(1, 1), (7, 13), (33, 33), (70, 129), (70, 129)])[0].tolist()
    q, k, v = draw(4, 2, t, s, 24, 10)
    mask = make_mask(rng, kind, 4, t, s)
    for places in ((0, 0), rng.integers(0, 2 * s, 2).tolist()):
        ours = run(q, k, v, mask, first_row=places[0], first_key=places[1])
        assert_right(ours, attention_formula(q, k, v, 0.3, mask, *places), str(places), 1e-6, 4e-6)  # 2.2e-7, 1.1e-6
        again = run(q, *spoilt(q, k, v, mask, *places), mask, first_row=places[0], first_key=places[1])
        jax.tree.map(np.testing.assert_array_equal, again, ours)


def test_nothing_of_tokens_by_tokens_is_made():
    tokens = 4096
    seen = jnp.ones((1, 1, 1, tokens), bool)
    q = jax.ShapeDtypeStruct((1, 2, tokens, 16), jnp.bfloat16)
    for mask in (Mask(seen, jnp.swapaxes(seen, 2, 3)), Mask(band=(None, 0))):
        lowered = jax.jit(lambda q, mask: reference_attention(q, q, q, scale=0.25, mask=mask)).lower(q, mask)
        made = lowered.compile().memory_analysis().temp_size_in_bytes
        assert made < tokens * tokens  # a byte per score would be that
