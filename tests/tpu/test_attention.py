"""Oracle: softmax(scale q k^T + mask) v and its log-sum-exp in float64 numpy, the mask whole. Kernels run in interpret mode."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attention_masks
import tiny
from attention_masks import assert_right, attention_formula, make_mask, spoilt
from bench import calibration, exp2
from conftest import QUICKLY, relative
from diffusers import WanPipeline, tpu
from diffusers.tpu.common import notices
from diffusers.tpu.kernels.attention import api
from diffusers.tpu.kernels.attention.masks import Mask
from diffusers.tpu.kernels.attention.reference import reference_attention
from diffusers.tpu.kernels.settings import Settings, using
from test_attention_masks import KNOWN, LOWEST


# Otherwise taken apart than traced ones.
BY_VALUES = ["true", "keys, expanded", "outer", "causal", "window", "causal, padded"]
KERNEL = Settings(kernel="kernel", blocks=(128, 256, 128), interpret=True)


def draw(t, s, heads=4, kv_heads=4, dim=64, dtype=jnp.float32):
    return [jnp.asarray(x, dtype) for x in attention_masks.draw(heads, kv_heads, t, s, dim)]


def run(settings, *operands, **arguments):
    """The answer of one jitted call, a fourth operand its mask."""

    def call(q, k, v, mask=arguments.pop("mask", None)):
        with using(settings):
            return api.attention(q, k, v, mask=mask, **arguments)

    return jax.jit(call, compiler_options=QUICKLY)(*operands)


def formula(q, k, v, mask=None, scale=None):
    """With a mask as upstream gives it."""
    mask = None if mask is None else Mask(dense=np.broadcast_to(mask, (*q.shape[:3], k.shape[2])))
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    return attention_formula(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, mask)[0]


def given(kind, t, s):
    """A mask as upstream gives it."""
    if kind in KNOWN:
        return KNOWN[kind][0](2, 4, t, s)
    bias = np.random.default_rng().standard_normal((1, 4, 1 if kind == "key bias" else t, s)).astype(np.float32)
    bias[:, :, : t // 2, s // 2 :] = LOWEST
    return None if kind == "none" else bias


@pytest.mark.parametrize("kind", [*BY_VALUES, "none", "keys", "key bias", "dense", "bias"])
def test_masks_as_given_by_the_kernel(kind):
    """Traced, and with values that are known, both in one program."""
    t, s = np.random.default_rng().integers(1, 600, 2)
    q, k, v = draw(t, s, kv_heads=2)
    known = given(kind, t, s)

    def call(q, k, v, mask):
        with using(KERNEL):
            ours = functools.partial(api.attention, q, k, v, enable_gqa=True, scale=0.1)
            return ours(mask=mask), ours(mask=known) if kind in BY_VALUES else None

    oracle = formula(q, k, v, known, 0.1)
    for ours in jax.jit(call, compiler_options=QUICKLY)(q, k, v, known):
        assert ours is None or relative(ours, oracle) < 3e-6, (t, s)  # measured: 5e-7


@pytest.mark.parametrize(
    "degrees, dtype, dim", [(None, jnp.bfloat16, 128), (None, jnp.float32, 72), ((2, 4, 1), jnp.bfloat16, 128)]
)
def test_a_bias_that_is_a_product_is_a_part_of_the_scores(degrees, dtype, dim, make_mesh):
    """As Chroma's, of one factor by query and one by key; no worse than attention without it. Entries fill rows of lanes."""
    t = int(np.random.default_rng().integers(5, 400))
    q, k, v = draw(t, t, dim=dim, dtype=dtype)
    factors = [jnp.asarray(3 * np.random.default_rng().standard_normal((2, 1, t)), dtype) for _ in range(2)]
    factors[0] = jnp.abs(factors[0]).at[..., 0].set(0)
    # One that takes its key away where the other one is not zero.
    factors[1] = factors[1].at[..., 2].set(jnp.finfo(dtype).min / 16)
    settings = dataclasses.replace(KERNEL, mesh=degrees and make_mesh(*degrees))

    def call(q, k, v, queries, keys):
        with using(settings):
            return api.attention(q, k, v, mask=queries[..., None] * keys[:, :, None])

    ours = jax.jit(call, compiler_options=QUICKLY)(q, k, v, *factors)
    queries, keys = (np.asarray(factor, np.float64) for factor in factors)
    plain = relative(run(settings, q, k, v), formula(q, k, v))
    assert relative(ours, formula(q, k, v, queries[..., None] * keys[:, :, None])) < 1.5 * plain
    assert any(how.k[2:] == (t, dim // 128 * 128 + 128) and how.mask == "" and n for how, n in api.explain().items())


def test_causality_and_the_window_of_the_settings():
    q, k, v = draw(300, 300)
    x, y = draw(300, 290)[1:]
    ahead = np.arange(300) - np.arange(300)[:, None]
    settings = dataclasses.replace(KERNEL, window=(70, 5))
    for causal, right in ((False, 5), (True, 0)):
        mask = (ahead <= right) & (ahead >= -70)
        assert relative(run(settings, q, k, v, is_causal=causal), formula(q, k, v, mask)) < 3e-6
    assert relative(run(settings, q, x, y), formula(q, x, y)) < 3e-6  # keys of another length have no window
    with using(dataclasses.replace(settings, pad_tokens=11)):
        padded = api.among_latents(*map(jnp.asarray, (q, k, v)))[:, :, :289]
    mask = ((ahead <= 5) & (ahead >= -70))[:289, :289]
    assert relative(padded, formula(*(part[:, :, :289] for part in (q, k, v)), mask)) < 3e-6


def test_the_value_of_one_key_is_the_result():
    """A trace that is differentiated reads the query too, as torch's: its gradient is zeros, not None."""
    q, k, v = draw(300, 1, heads=4, kv_heads=2)
    for differentiable in (False, True):
        with using(dataclasses.replace(KERNEL, differentiable=differentiable)):
            jaxpr = jax.make_jaxpr(functools.partial(api.attention, enable_gqa=True))(q, k, v).jaxpr
        assert any(x is jaxpr.invars[0] for eqn in jaxpr.eqns for x in eqn.invars) == differentiable
    assert relative(run(KERNEL, q, k, v, enable_gqa=True), formula(q, k, v)) == 0
    assert relative(run(KERNEL, q, k, v, enable_gqa=True, mask=np.ones((2, 1, 1, 1), bool)), formula(q, k, v)) < 3e-6


@pytest.mark.parametrize("kernel", ["kernel", "splash"])
def test_a_kernel_is_split_by_heads_where_nobody_lays_out(kernel, make_mesh):
    """Eight heads, or as many chips as divide six; the kernel in interpret mode, as on a TPU inside shard_map."""
    settings = Settings(mesh=make_mesh(2, 4, 1), sequence=False, kernel=kernel, interpret=True)
    heads, masked = np.random.default_rng().permutation([8, 6]), np.random.default_rng().permutation([True, False])
    for n, padded in zip(heads, masked):
        q, k, v = draw(40, 600, n, n)
        mask = np.arange(600) < np.array([600, 377]).reshape(2, 1, 1, 1) if padded else None
        assert relative(run(settings, q, k, v, mask=mask), formula(q, k, v, mask)) < 3e-6, (n, padded)
    way = api.Dispatch((2, n, 40, 64), (2, n, 600, 64), "float32", "keys" if padded else "", kernel, "by heads")
    assert api.explain()[way] > 0


@pytest.mark.parametrize("degrees", [None, (2, 4, 1)])
def test_the_kernel_that_others_measured_runs_where_ours_would(degrees, make_mesh):
    """As `bench.calibration` compiles it: by name "online", on any mesh of the measured scripts. Keys fill its blocks."""
    settings = Settings(mesh=degrees and make_mesh(*degrees), kernel="online", blocks=(128, 256, 128), interpret=True)
    operands = draw(512, 512 if degrees else 256, heads=8, kv_heads=8)
    with mock.patch.object(exp2, "exp2_attention", wraps=exp2.exp2_attention) as theirs, calibration.as_theirs():
        assert relative(run(settings, *operands), formula(*operands)) < 3e-6
    assert theirs.called


@pytest.mark.parametrize(
    "kernel, call, words",
    [
        ("splash", {"mask": np.tri(5, 6, 1, dtype=bool)}, "'splash' does not take a window"),
        ("splash", {"mask": np.zeros((5, 6), np.float32) + np.arange(6)}, "'splash' does not take a bias"),
        ("splash", {"mask": np.random.default_rng().standard_normal((4, 5, 6))}, "differs between queries or heads"),
        ("splash", {"kv_heads": 2}, "'splash' does not take 4 query heads over 2 key heads"),
        ("kernel", {"dtype": jnp.float16}, "'kernel' does not take float16"),
        ("online", {"dtype": jnp.float16}, "'online' does not take float16"),
    ],
)
def test_a_kernel_by_name_takes_the_call_or_says_why_not(kernel, call, words):
    sizes = {**call}
    mask = sizes.pop("mask", None)
    with using(Settings(kernel=kernel, platform="tpu", generation="v6e")):
        with pytest.raises(NotImplementedError, match=words):
            api.attention(*draw(5, 6, **sizes), mask=mask, enable_gqa=True)


def test_the_reference_is_said_once_where_a_kernel_was_expected(warned):
    words, q, k, v = "kernel does not take float16", *draw(4, 5, dtype=jnp.float16)
    notices._said.clear()
    with using(Settings(platform="tpu", generation="v6e")):
        for _ in range(2):
            ours = api.attention(q, k, v)
    assert len(warned) == 1 and words in warned[0]
    assert relative(ours, formula(q, k, v)) < 1e-3
    assert any(w.q == q.shape and w.kernel == "reference" and words in w.reason for w in api.explain())


SHAPE = (1, 2, 5, 8)


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"k": (1, 3, 5, 8), "v": (1, 3, 5, 8)}, ValueError, "2 query and 3 key heads"),
        ({"k": (1, 1, 5, 8), "v": (1, 1, 5, 8)}, ValueError, "1 key heads, enable_gqa=False"),
        ({"v": (1, 2, 6, 8)}, ValueError, r"expected q .* got \(1, 2, 4, 8\), \(1, 2, 5, 8\), \(1, 2, 6, 8\)"),
        ({"q": (1, 2, 4, 9)}, ValueError, r"got \(1, 2, 4, 9\), \(1, 2, 5, 8\)"),
        ({"k_dtype": jnp.bfloat16}, TypeError, "q float32, k bfloat16"),
        ({"q": (2, 4, 8)}, ValueError, "four axes"),
    ],
)
def test_bad_calls_are_refused(change, error, words):
    q, k, v = (jnp.zeros(change.get(name, shape)) for name, shape in (("q", (1, 2, 4, 8)), ("k", SHAPE), ("v", SHAPE)))
    for kernel in ("reference", "kernel"):
        with using(Settings(kernel=kernel)), pytest.raises(error, match=words):
            api.attention(q, k.astype(change.get("k_dtype", k.dtype)), v)


# The reference


by_reference = jax.jit(
    lambda q, k, v, mask, **more: reference_attention(
        q, k, v, scale=0.3, mask=mask, with_lse=True, block_q=16, block_kv=32, **more
    ),
    compiler_options=QUICKLY,
)


@pytest.mark.parametrize("kind", attention_masks.KINDS)
def test_the_reference_equals_the_formula(kind):
    """Whatever masked keys hold, and wherever the first row and the first key lie, which a band counts from."""
    rng = np.random.default_rng()
    t, s = rng.permutation([(1, 1), (7, 13), (33, 33), (70, 129), (70, 129)])[0].tolist()
    q, k, v = attention_masks.draw(4, 2, t, s, 24, 10)
    mask = make_mask(rng, kind, 4, t, s)
    for places in ((0, 0), rng.integers(0, 2 * s, 2).tolist()):
        ours = by_reference(q, k, v, mask, first_row=places[0], first_key=places[1])
        assert_right(ours, attention_formula(q, k, v, 0.3, mask, *places), str(places), 1e-6, 4e-6)  # 2.2e-7, 1.1e-6
        again = by_reference(q, *spoilt(q, k, v, mask, *places), mask, first_row=places[0], first_key=places[1])
        jax.tree.map(np.testing.assert_array_equal, again, ours)


def test_nothing_of_tokens_by_tokens_is_made():
    tokens = 4096
    seen = jnp.ones((1, 1, 1, tokens), bool)
    q = jax.ShapeDtypeStruct((1, 2, tokens, 16), jnp.bfloat16)
    for mask in (Mask(seen, jnp.swapaxes(seen, 2, 3)), Mask(band=(None, 0))):
        lowered = jax.jit(lambda q, mask: reference_attention(q, q, q, scale=0.25, mask=mask)).lower(q, mask)
        made = lowered.compile().memory_analysis().temp_size_in_bytes
        assert made < tokens * tokens  # a byte per score would be that


# The small model that the project ships, with the kernel interpreted and with the reference


@pytest.mark.slow
@pytest.mark.parametrize("ring", [None, 4])
def test_the_kernel_gives_the_video_of_the_reference(chips, root, ring):
    seed, made, tallies = int(np.random.default_rng().integers(1 << 31)), [], []
    api._dispatched.clear()
    by_kernel = {"attention": "kernel", "attention_ring": ring, "attention_tally": True}
    for config in (by_kernel, {"attention": "reference"}):
        pipe = WanPipeline.from_pretrained(root / "examples/tpu/models/wan-shapes", torch_dtype=torch.float32)
        tpu.install(pipe, tpu.TPUConfig(**config))
        size = {"height": 192, "width": 320, "num_frames": 9, "num_inference_steps": 2, "guidance_scale": 2.0}
        given = {"prompt": "a red circle moving right", "generator": tiny.fresh(seed), "output_type": "latent", **size}
        made.append(torch.as_tensor(pipe(**given).frames))
        tallies.append(tpu.report(pipe)["components"]["transformer"].get("attention_ways"))
        if config["attention"] == "kernel":
            ways = [way for way in api.explain() if way.kernel == "kernel"]
    itself, text = tallies[0].values()
    assert all(sum(shares.values()) == pytest.approx(1) for shares in (itself, text)) and itself["bound"] > 0
    assert {way.mask for way in ways} == {"", "bias"}  # the denoiser and the VAE; the text encoder
    assert any(way.chips == f"ring {ring or 1} x ulysses {4 // (ring or 1)}" for way in ways)
    assert tallies[1] is None  # nobody asked
    assert relative(*made) < 1e-4  # measured: 9e-6 to 1.9e-5; of another mesh 2e-6
