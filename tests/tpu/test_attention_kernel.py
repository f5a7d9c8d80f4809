"""Oracle: softmax(scale q k^T + mask) v and its log-sum-exp in float64 numpy; for bfloat16 also a plain attention in it.

The kernel runs in interpret mode, with blocks so small that there are several, of several pieces of several tiles. A program takes
a second to compile: calls of `SIZES`, which most tests make, share theirs.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_masks
from attention_masks import KINDS, assert_right, attention_formula, attention_weights, make_mask
from conftest import QUICKLY, relative, slow
from diffusers.tpu.kernels.attention import short
from diffusers.tpu.kernels.attention.blocks import Blocks, Tile
from diffusers.tpu.kernels.attention.kernel import LOG2_E, tpu_attention
from diffusers.tpu.kernels.attention.masks import Mask
from diffusers.tpu.kernels.attention.softmax_modes import MODES, ModeCounter


BLOCKS = [
    Blocks(256, 512, 256, Tile(128, 128, 3), Tile(128, 128, 3)),
    Blocks(256, 512, 128, Tile(128, 256, 1), Tile(128, 128, 0)),
    Blocks(512, 256, 256, Tile(256, 128, 2), Tile(128, 256, 2)),
]
ONLINE = ("online",)
SIZES = (4, 2, 300, 700, 64)  # heads of queries and keys, queries, keys, head size


STATIC = ("scale", "blocks", "modes", "smoothing", "tally", "with_lse", "interpret", "generation")
compiled = jax.jit(tpu_attention, static_argnames=STATIC, compiler_options=QUICKLY)


def run(q, k, v, mask=None, *, dtype=jnp.float32, blocks=BLOCKS[0], first_row=0, first_key=0, **more):
    """The kernel's answer in float64: (out, lse) with `with_lse`."""
    more = {"scale": q.shape[-1] ** -0.5, "interpret": True, "blocks": blocks, **more}
    more |= {"first_row": jnp.int32(first_row), "first_key": jnp.int32(first_key)}
    answer = compiled(*(jnp.asarray(x, dtype) for x in (q, k, v)), mask=mask, **more)
    return jax.tree.map(lambda x: np.asarray(x.astype(jnp.float32), np.float64), answer)


def rounded(x):
    return np.array(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32))


def plain(q, k, v, scale, mask=None):
    """Attention in bfloat16 as kernels do it: scores and softmax in float32, the weights rounded, the result not yet."""
    return np.matmul(rounded(attention_weights(q, k, scale, mask)[0]), np.repeat(v, q.shape[1] // v.shape[1], axis=1))


def draw(dtype, *sizes) -> list[np.ndarray]:
    drawn = attention_masks.draw(*sizes)
    return [rounded(x) for x in drawn] if dtype == jnp.bfloat16 else drawn


def cases():
    """Every kind of mask twice, once of them slow; every value of every other column, in an order that is new in each run."""
    rng, lengths = np.random.default_rng(), ("1", "7", "-1", "0", "+1", "+")

    def column(*values):
        every = itertools.islice(itertools.cycle(rng.permutation(values)), 2 * len(KINDS))
        return rng.permutation(list(every)).tolist()

    columns = {
        "kind": [*KINDS, *KINDS], "dim": column(64, 72, 80, 96, 128, 256), "out_dim": column(0, 0, 0, 40),
        "blocks": column(0, 1, 2), "group": column(1, 2, 4), "bfloat16": column(False, True), "q_len": column(*lengths),
        "kv_len": column(*lengths), "online": column(False, False, True), "with_lse": column(False, True),
    }  # fmt: skip
    rows = [dict(zip(columns, row)) for row in zip(*columns.values())]
    marks = [[]] * len(KINDS) + [[pytest.mark.slow]] * len(KINDS)
    return [pytest.param(row, id=row["kind"], marks=mark) for row, mark in zip(rows, marks)]


def length(rng, word: str, block: int) -> int:
    """ "1", "7", a block and so much, or "+": three blocks and a bit."""
    if word in ("1", "7"):
        return int(word)
    return 3 * block + int(rng.integers(1, 200)) if word == "+" else block + int(word)


@pytest.mark.parametrize("case", cases())
def test_every_mask_of_every_shape(case):
    rng = np.random.default_rng()
    blocks = BLOCKS[case["blocks"]]
    t, s = length(rng, case["q_len"], blocks.queries), length(rng, case["kv_len"], blocks.keys)
    heads, dim, dtype = 4, case["dim"], jnp.bfloat16 if case["bfloat16"] else jnp.float32
    q, k, v = draw(dtype, heads, heads // case["group"], t, s, dim, case["out_dim"])
    mask, scale, what = make_mask(rng, case["kind"], heads, t, s), dim**-0.5, f"{case}, {t} queries, {s} keys"
    ways = ONLINE if case["online"] else MODES
    more = {"mask": mask, "dtype": dtype, "blocks": blocks, "modes": ways}
    out, lse = run(q, k, v, with_lse=True, **more) if case["with_lse"] else (run(q, k, v, **more), None)
    oracle, oracle_lse = attention_formula(q, k, v, scale, mask)
    if dtype == jnp.float32:
        return assert_right((out, oracle_lse if lse is None else lse), (oracle, oracle_lse), what)
    empty = np.isneginf(oracle_lse)
    assert np.isfinite(out).all() and not out[empty].any(), what
    weights, values = attention_weights(q, k, scale, mask)[0], np.repeat(np.abs(v), case["group"], axis=1)
    most = np.matmul(weights, values) + (np.abs(oracle) if lse is None else 0)  # rounded: each weight, the result
    most *= 1.02 * 2**-8
    assert (np.abs(out - oracle) <= most).all(), (np.max(np.abs(out - oracle) - most), what)
    if oracle.any() and t > 7:  # a few rows of a few keys round better or worse by chance: 0.6 to 1.6
        theirs = plain(q, k, v, scale, mask)
        ratio = relative(out, oracle) / max(relative(rounded(theirs) if lse is None else theirs, oracle), 2**-9)
        assert ratio < 1.25, (ratio, what)  # measured: at most 1.04
    if lse is not None:
        np.testing.assert_array_equal(np.isneginf(lse), empty, err_msg=what)
        products = np.matmul(np.abs(q), np.repeat(np.abs(k), case["group"], axis=1).swapaxes(2, 3)) * scale
        most = 2**-17 * products.max(-1) + 2e-6  # q times its factor is two bfloat16 numbers: 16 bits and a sign
        off = np.abs(np.where(empty, 0, lse) - np.where(empty, 0, oracle_lse))
        assert (off <= most).all(), (np.max(off - most), what)
        assert t <= 7 or np.sqrt(np.mean(off**2)) < 5e-6, (np.sqrt(np.mean(off**2)), what)  # measured: 2.5e-6


@pytest.mark.parametrize(
    "batch, heads, tokens, dim, dtype",
    [
        (37, 5, 25, 64, jnp.bfloat16),  # of SVD, with tokens before sequences
        (19, 2, 7, 128, jnp.float32),
        (9, 2, 24, 64, jnp.bfloat16),
        (5, 8, 16, 40, jnp.bfloat16),  # of AnimateDiff: heads across registers
        (7, 2, 100, 72, jnp.float32),  # padded
        (3, 1, 1, 64, jnp.float32),
    ],
)
def test_short_sequences_see_themselves_only(batch, heads, tokens, dim, dtype):
    q, k, v = (rounded(np.random.randn(batch, heads, tokens, dim) * 3) for _ in range(3))
    assert short.takes(q, k, v)
    oracle, _ = attention_formula(q, k, v, dim**-0.5, None)
    error = relative(run(q, k, v, blocks=None, dtype=dtype), oracle)
    assert error <= (1e-6 if dtype == jnp.float32 else 1.25 * relative(rounded(plain(q, k, v, dim**-0.5)), oracle))


@pytest.mark.parametrize("dim, generation", [slow(64, "v5e"), (128, "v6e"), slow(96, "v7x"), slow(256, "v6e")])
def test_bfloat16_is_as_exact_as_a_plain_attention_in_it(dim, generation):
    """Scores of a deviation of 1, 4 and 10, by the ways that are exact for it. With q times its factor rounded once more it
    would be 1.2, 1.9 and 2.8. Measured: at most 1.00, 1.04 and 0.79."""
    drawn, k, v = draw(jnp.bfloat16, 2, 1, 200, 700, dim)
    for deviation, ways in ((1, MODES), (4, MODES), (10, ONLINE)):
        q = rounded(drawn * deviation)
        weights, _ = attention_weights(q, k, dim**-0.5)
        values = np.repeat(v, 2, axis=1).astype(np.float64)
        oracle = np.matmul(weights, values)
        theirs = relative(rounded(np.matmul(rounded(weights), values)), oracle)
        for way in ways:
            error = relative(run(q, k, v, dtype=jnp.bfloat16, modes=(way,), generation=generation), oracle)
            assert error < 1.25 * theirs, (way, deviation, error / theirs)


@pytest.mark.parametrize("band", [slow((None, 0)), (70, 300), slow((0, None))])
def test_first_row_and_first_key_say_where_the_band_lies(band):
    """They are arrays, as on a ring. Far apart no row sees a key, or all rows see all of them."""
    q, k, v = draw(jnp.float32, *SIZES)
    for places in [(600, 0), (0, 100), (1000, 700), (5000, 0), (0, 5000)]:
        ours = run(q, k, v, Mask(band=band), first_row=places[0], first_key=places[1], with_lse=True)
        assert_right(ours, attention_formula(q, k, v, 1 / 8, Mask(band=band), *places), str(places))


@pytest.mark.parametrize("ways, dtype", [slow(MODES, jnp.float32), (ONLINE, jnp.float32), (MODES, jnp.bfloat16)])
def test_scores_far_below_that_of_padding(dtype, ways):
    """All scores near -100, where a key of zeros would have 0: one of padding, or of a mask, would be the whole sum."""
    q, k, v = draw(dtype, *SIZES)
    q, k = (rounded(x / 4 + side) for x, side in ((q, -3.5), (k, 3.5)))
    hidden = np.arange(700) >= 610
    for mask in (Mask(keys=jnp.asarray(~hidden)[None, None, None]), None):
        oracle = attention_formula(q, k, v, 1 / 8, mask)
        assert oracle[1].max() < -60
        x, y = (k, v) if mask is None else (np.where(hidden[:, None], np.nan, x) for x in (k, v))
        ours = run(q, x, y, mask, dtype=dtype, modes=ways, with_lse=True)
        if dtype == jnp.float32:
            # measured: 4e-6, 1.2e-5; an ulp of 144 is 1.5e-5
            assert_right(ours, oracle, tolerance=1.5e-5, lse_tolerance=5e-5)
        else:
            assert relative(ours[0], oracle[0]) < 1.25 * relative(plain(q, k, v, 1 / 8, mask), oracle[0])


def test_each_head_and_block_of_queries_goes_its_own_way():
    """Head 1, and the second block of queries of head 2, are huge; the keys of heads 2 and 3 lie far from zero. To the last
    bit it is seen which way was taken, and a tally counts them."""
    q, k, v = draw(jnp.float32, *SIZES)
    k[:, 1] += 20
    q[:, 1] *= 300
    q[:, 2, 256:] *= 300
    each = (MODES, *((way,) for way in MODES))
    chosen, bound, centred, online = (run(q, k, v, modes=ways, with_lse=True)[0] for ways in each)
    huge, far = (np.zeros((2, 4, 300, 1), bool) for _ in range(2))
    huge[:, 1] = huge[:, 2, 256:] = True
    far[:, 2:] = True
    np.testing.assert_array_equal(chosen, np.where(huge, online, np.where(far, centred, bound)))
    for other in (np.where(far, bound, centred), online):
        assert (chosen != other).any(-1)[~huge[..., 0]].mean() > 0.9
    oracle, _ = attention_formula(q, k, v, 1 / 8)
    assert relative(chosen, oracle) < 1e-4  # scores of a thousand have an ulp of 6e-5
    tally = ModeCounter()
    run(q, k, v, modes=MODES, with_lse=True, tally=tally)
    jax.effects_barrier()
    (shares,) = tally.shares().values()
    assert shares == {"bound": 4 / 16, "centred": 6 / 16, "online": 6 / 16}  # 2 x 4 heads x 2 blocks
    for way, where in ((bound, huge | far), (centred, huge)):
        wrong = np.where(where, way, oracle)
        assert not np.isfinite(wrong).all() or relative(wrong, oracle) > 0.1


@pytest.mark.parametrize("way, limit, next_way", [("bound", 100, "centred"), ("centred", 160, "online")])
def test_the_largest_bound_and_the_smallest_weights(way, limit, next_way):
    """One key so far off, at right angles, that the bound is of no use. Of the others one query's scores are all -99.9, whose
    weights lie near 2^-100 by the way "bound"; by "centred" all do."""
    q, k, v = draw(jnp.float32, *SIZES)
    q[..., 0], k[..., 0] = 0, 0
    k /= 10
    k[:, :, 33, 0] = 100
    if way == "bound":
        k[:, :, :, 1] = 99.9
        q[:, :, 7] = np.eye(64)[1] * -1
    centre = k.mean(2, keepdims=True) if way == "centred" else 0
    radius = np.repeat(np.linalg.norm(k - centre, axis=-1).max(2), 2, axis=1)[..., None, None]
    q *= (limit - 0.5) / (np.linalg.norm(q, axis=-1, keepdims=True) * radius * LOG2_E / 8)
    ours = run(q, k, v, with_lse=True, modes=MODES)
    assert_right(ours, attention_formula(q, k, v, 1 / 8), tolerance=1e-5, lse_tolerance=3e-5)  # measured: 2.6e-6, 5e-6
    np.testing.assert_array_equal(ours[0], run(q, k, v, modes=(way,), with_lse=True)[0])
    q[:, :, 100] *= 1.01
    ours, other = (run(q, k, v, modes=ways, with_lse=True)[0][:, :, :256] for ways in (MODES, (next_way,)))
    np.testing.assert_array_equal(ours, other)  # the block of that query


def test_values_so_large_that_sums_of_the_largest_exponentials_would_not_be_finite():
    q, k, v = draw(jnp.float32, *SIZES)
    q, k = 1 + q / 100, 1 + k / 100
    q *= 95 / (np.linalg.norm(q, axis=-1, keepdims=True) * np.linalg.norm(k, axis=-1).max() * LOG2_E / 8)
    v[:, 1] *= 2.0**40
    ours = run(q, k, v, with_lse=True)
    for heads in (slice(0, 2), slice(2, 4)):
        mine, oracle = (tuple(x[:, heads] for x in y) for y in (ours, attention_formula(q, k, v, 1 / 8)))
        assert_right(mine, oracle, tolerance=1e-5, lse_tolerance=3e-5)
    bound, centred = (run(q, k, v, modes=(way,), with_lse=True)[0] for way in MODES[:2])
    np.testing.assert_array_equal(ours[0][:, :2], bound[:, :2])
    np.testing.assert_array_equal(ours[0][:, 2:], centred[:, 2:])
    assert not np.isfinite(bound[:, 2:]).all()


@pytest.mark.parametrize("seen", [slow("causal"), "by head"])
def test_rows_that_see_only_keys_far_below_the_mean(seen):
    """The first five keys lie opposite to all others, as far as the bound allows, and some rows see only those."""
    q, k, v = draw(jnp.float32, *SIZES)
    q, k = q / 1000 + 1, k / 1000
    k[:, :, :5] -= 5 / 8
    radius = np.repeat(np.linalg.norm(k - k.mean(2, keepdims=True), axis=-1).max(2), 2, axis=1)[..., None, None]
    by_head = np.stack([np.arange(700) < 5, np.arange(700) >= 5] * 2)[None, :, None]
    mask = Mask(band=(None, 0)) if seen == "causal" else Mask(keys=jnp.asarray(by_head))
    for bound in (79.5, 159.5):  # either side of what the way "centred" takes where rows see different keys
        q *= bound / (np.linalg.norm(q, axis=-1, keepdims=True) * radius * LOG2_E / 8)
        oracle = attention_formula(q, k, v, 1 / 8, mask)
        for ways in (MODES, MODES[1:]):
            ours = run(q, k, v, mask, with_lse=True, modes=ways)
            # measured: 6e-6, 1.2e-5 at the larger
            assert_right(ours, oracle, f"{bound}, {ways}", tolerance=5e-5, lse_tolerance=1e-4)


@pytest.mark.parametrize("kind", ["equal keys", "a key's bias", "a pair's bias", "the mean of the keys that are seen"])
def test_what_random_draws_do_not_have(kind):
    """Equal keys, whose values' mean is the answer; 300 more for one key, which no bound knows; five small keys that are seen, where
    with the hidden ones in the mean all weights would vanish, 150 below it."""
    q, k, v = draw(jnp.float32, *SIZES)
    mask, limit = None, 1e-6  # 2.2e-7
    if kind == "equal keys":
        k = np.broadcast_to(1000 * k[:, :, :1], k.shape)
    elif kind.endswith("bias"):
        bias = jnp.zeros((2, 1, 300, 700) if "pair" in kind else (1, 4, 1, 700)).at[..., 33].set(300.0)
        mask = Mask(dense=bias) if "pair" in kind else Mask(keys=bias)
    else:
        q, k, limit = 1 + q / 1000, k / 1000, 1e-5
        k[:, :, 5:] += 5 / 695
        q *= 150 / (np.linalg.norm(q, axis=-1, keepdims=True) * LOG2_E)
        mask = Mask(keys=jnp.asarray(np.arange(700) < 5)[None, None, None])
    oracle, _ = attention_formula(q, k, v, 1 / 8, mask)
    for ways in (MODES, ("centred",)) if mask and limit == 1e-5 else (MODES, ONLINE):
        assert relative(run(q, k, v, mask, modes=ways, with_lse=True)[0], oracle) < limit, ways


def test_a_mean_that_lies_beside_all_keys_once_it_is_rounded():
    """Three keys, each an ulp below 65 in a third of its entries: around 65 itself all weights would be zero."""
    down = np.arange(3)[:, None] == np.random.default_rng().integers(0, 3, 64)
    k = rounded(np.broadcast_to(65 - 0.5 * down, (2, 1, 3, 64)))
    q, v = np.full((2, 2, 200, 64), 40.0), rounded(np.random.default_rng().standard_normal(k.shape))
    assert relative(run(q, k, v, dtype=jnp.bfloat16), attention_formula(q, k, v, 1 / 8)[0]) < 4e-3


@pytest.mark.parametrize("kind", [slow("prefix"), "by head", "bias", "dense", "band"])
def test_what_masked_keys_hold_changes_nothing(kind):
    """NaN, infinities, or one another's values: to the last bit."""
    rng, order = np.random.default_rng(), np.arange(700)
    dtype = jnp.bfloat16 if kind == "prefix" else jnp.float32
    q, k, v = draw(dtype, *SIZES)
    # the last of 300 rows sees 300 keys beyond its own
    hidden = order >= 600 if kind in ("prefix", "band") else rng.random(700) < 0.5
    seen = ~hidden & (rng.random((1, 4, 300 if kind == "dense" else 1, 700)) < (1 if kind == "prefix" else 0.8))
    values = jnp.asarray(np.where(seen, 0.5, -np.inf).astype(np.float32) if kind == "bias" else seen)
    mask = Mask(band=(70, 300)) if kind == "band" else Mask(dense=values) if kind == "dense" else Mask(keys=values)
    order[hidden] = rng.permutation(order[hidden])
    expected, _ = run(q, k, v, mask, dtype=dtype, with_lse=True)
    spoilt = [[np.where(hidden[:, None], value, x) for x in (k, v)] for value in (np.nan, np.inf)]
    for keys, values in (*spoilt, (k[:, :, order], v[:, :, order])):
        np.testing.assert_array_equal(run(q, keys, values, mask, dtype=dtype, with_lse=True)[0], expected)


@pytest.mark.parametrize("dtype", [jnp.float32, slow(jnp.bfloat16)])
def test_smoothing_changes_the_way_and_not_the_values(dtype):
    """Keys far from zero: around their mean, or online."""
    q, k, v = draw(dtype, *SIZES)
    k = rounded(k + 20 * np.random.default_rng().choice([-1, 1], 64))
    oracle, _ = attention_formula(q, k, v, 1 / 8)
    with_it, without, online = (
        run(q, k, v, dtype=dtype, with_lse=True, **more)[0] for more in ({}, {"smoothing": False}, {"modes": ONLINE})
    )
    np.testing.assert_array_equal(without, online)
    assert (with_it != online).any()
    theirs = relative(plain(q, k, v, 1 / 8), oracle)
    for ours in (with_it, without):
        # measured: 2.9e-6 (scores of a hundred have an ulp of 8e-6); 1.00
        assert relative(ours, oracle) < (1e-5 if dtype == jnp.float32 else 1.25 * theirs)


def test_bad_calls_are_refused():
    q = jnp.zeros((1, 2, 8, 64), jnp.float16)
    with pytest.raises(TypeError, match="bfloat16 or float32 .* got float16"):
        tpu_attention(q, q, q, scale=1.0)
    q, wanted = jnp.zeros((1, 2, 40000, 128)), (32768, 32768, 512)
    with pytest.raises(ValueError, match=r"fit 116 MiB of VMEM on v6e, got \(32768, 32768, 512\), which take \d+ MiB"):
        tpu_attention(q, q, q, scale=1.0, wanted=wanted, generation="v6e")
