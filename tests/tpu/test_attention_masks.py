"""Oracle: the mask itself, whole, as a bias in float64; a mask's parts spread out again must be that, to the last bit. For random
masks (`mask_fuzz`), torch and numpy eagerly."""

import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax import lax

from conftest import QUICKLY
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15AttnProcessor2_0
from diffusers.tpu import bridge
from diffusers.tpu.bridge import operators
from diffusers.tpu.kernels.attention.masks import BELOW, Mask, classify, with_length
from diffusers.tpu.kernels.attention.reference import reference_attention
from mask_fuzz import as_bias, check, differ, spread


LOWEST = float(np.finfo(np.float32).min)


def kind_of(mask: Mask | None) -> str | None:
    return mask and mask.kind


def draw(*shape) -> np.ndarray:
    """Bool, the first along the last axis False and the last True."""
    values = np.random.default_rng().random(shape) < 0.6
    values[..., 0], values[..., -1] = False, True
    return values


def ahead(t, s):
    return np.arange(s) - np.arange(t)[:, None]


def without_second(keys):
    keys[..., 1:4] = False, True, True
    return keys


KNOWN = {
    "true": (lambda b, n, t, s: np.ones((t, s), bool), None),
    "keys": (lambda b, n, t, s: draw(b, 1, 1, s), "keys"),
    "keys, expanded": (lambda b, n, t, s: draw(b, n, 1, s) & np.ones((t, 1), bool), "keys"),
    "queries": (lambda b, n, t, s: draw(t)[:, None], "outer"),
    "queries, expanded": (lambda b, n, t, s: draw(b, 1, t)[..., None] & np.ones(s, bool), "outer"),
    "outer": (lambda b, n, t, s: draw(b, 1, t)[..., None] & draw(b, 1, 1, s), "outer"),
    "outer, nothing": (lambda b, n, t, s: np.zeros((t, s), bool), "keys"),
    "causal": (lambda b, n, t, s: ahead(t, s) <= 0, "causal"),
    "window": (lambda b, n, t, s: (ahead(t, s) <= 3) & (ahead(t, s) >= -2), "window"),
    "strictly above": (lambda b, n, t, s: ahead(t, s) >= 1, "window"),
    "causal, padded": (lambda b, n, t, s: (ahead(t, s) <= 0) & without_second(draw(b, 1, 1, s)), "keys+causal"),
    "dense": (lambda b, n, t, s: (ahead(t, s) % 3 != 0) & (draw(b, n, t, s) | (ahead(t, s) % 3 == 1)), "dense"),
    "a hole": (lambda b, n, t, s: ahead(t, s) != 1, "dense"),
}
FORMS = {
    "bool": lambda m: m,
    "jax": jnp.asarray,
    "-inf": lambda m: np.where(m, 0, -np.inf).astype(np.float32),
    "bfloat16": lambda m: jnp.where(m, 0, jnp.finfo(jnp.bfloat16).min).astype(jnp.bfloat16),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("t, s", [(7, 7), (9, 6), (5, 11)])
def test_known_values(name, form, t, s):
    make, kind = KNOWN[name]
    mask = make(2, 3, t, s)
    found = classify(FORMS[form](mask), 2, 3, t, s)
    assert kind_of(found) == kind
    np.testing.assert_array_equal(spread(found, (2, 3, t, s)), np.broadcast_to(as_bias(mask), (2, 3, t, s)))


def test_known_biases():
    bias = np.random.default_rng().standard_normal((2, 1, 5, 6)).astype(np.float32)
    rows = np.repeat(bias[:, :, :1], 5, axis=2)
    rows[..., 2] = LOWEST
    for mask, kind in ((bias, "bias"), (rows, "keys"), (rows[:, :, :1], "keys")):
        found = classify(mask, 2, 3, 5, 6)
        assert found.kind == kind
        np.testing.assert_array_equal(spread(found, (2, 3, 5, 6)), np.broadcast_to(as_bias(mask), (2, 3, 5, 6)))
    columns = np.repeat(bias[..., :1], 6, axis=3)  # shifts whole rows: the softmax does not see it
    assert classify(columns, 2, 3, 5, 6) is classify(columns[..., :1], 2, 3, 5, 6) is None
    columns[0, 0, 3] = -np.inf
    np.testing.assert_array_equal(classify(columns, 2, 3, 5, 6).queries, columns[..., :1] > BELOW)


B, N, T = 2, 3, 9


def outer(m):
    tiled = jnp.tile(m.reshape(B, 1, 1, T), (1, 1, T, 1))
    return (tiled & jnp.swapaxes(tiled, 2, 3)).astype(bool)


def lower(dtype=bool):
    return jnp.tril(jnp.ones((T, T), dtype))


def differences():
    index = jnp.arange(T)
    return index[:, None] - index[None]


TRACED = {
    "outer": (outer, "outer"),
    "product": (lambda m: m[:, None, :, None] * m[:, None, None], "outer"),
    "product of floats": (lambda m: m.astype(float)[:, None, :, None] * m.astype(float)[:, None, None] > 0, "outer"),
    "not or": (lambda m: ~(~m[:, None, :, None] | ~m[:, None, None]), "outer"),
    "outer bias": (lambda m: jnp.where(outer(m), 0.0, -jnp.inf), "outer"),
    "filled": (lambda m: jnp.where(~outer(m), LOWEST, jnp.zeros((B, 1, T, T))), "outer"),
    "one minus": (lambda m: (1 - outer(m).astype(jnp.bfloat16)) * jnp.finfo(jnp.bfloat16).min, "outer"),
    "copied through a jit": (lambda m: jax.jit(lambda x: jnp.copy(outer(x))[:, :, :, :])(m), "outer"),
    "keys": (lambda m: m[:, None, None], "keys"),
    "keys expanded": (lambda m: jnp.broadcast_to(m[:, None, None], (B, N, T, T)), "keys"),
    "keys padded": (lambda m: jnp.pad(jnp.repeat(m[:, None, None, 2:], 1, 2), [(0, 0)] * 3 + [(2, 0)]), "keys"),
    "key bias": (lambda m: jnp.broadcast_to((1 - m[:, None, None].astype(float)) * -1e4, (B, 1, T, T)), "keys"),
    "axes turned": (lambda m: jnp.broadcast_to(m.T[..., None], (T, B, T)).transpose(1, 2, 0)[:, None], "keys"),
    "queries": (lambda m: jnp.broadcast_to(m[:, None, :, None], (B, N, T, T)), "outer"),
    "nothing, in two pieces": (lambda m: jnp.concatenate([jnp.zeros((B, 1, n, T), bool) for n in (4, 5)], 2), "keys"),
    "all, in two pieces": (lambda m: jnp.concatenate([jnp.ones((B, 1, n, T), bool) for n in (4, 5)], 2), None),
    "bias by query": (lambda m: jnp.broadcast_to((m * LOWEST - 3)[:, None, :, None], (B, N, T, T)), "outer"),
    "causal": (lambda m: lower(), "causal"),
    "causal bias": (lambda m: jnp.where(lower(), 0, -jnp.inf), "causal"),
    "causal of floats": (lambda m: lower(float) > 0.5, "causal"),
    "causal with padding": (lambda m: lower() & m[:, None, None], "keys+causal"),
    "window": (lambda m: (differences() <= 3) & (differences() > -2), "window"),
    "one row": (lambda m: outer(m)[:, :, 2:3], "keys"),
    "sliced indices": (lambda m: jnp.arange(20)[5:14, None] >= jnp.arange(T), "dense"),
    "true": (lambda m: jnp.ones((T, T), bool), None),
    "false": (lambda m: jnp.zeros((T, T)) - jnp.inf, "keys"),
    "a column back in": (lambda m: outer(m).at[..., 0].set(True), "dense"),
    "either": (lambda m: m[:, None, :, None] | m[:, None, None], "dense"),
    "apart": (lambda m: m[:, None, :, None] ^ m[:, None, None], "dense"),
    "weak bias": (lambda m: jnp.where(outer(m), 0, -1e4), "bias"),
}


@pytest.fixture(scope="module")
def traced() -> tuple:
    """A padding, what is found of each of `TRACED` in one program, and what they are."""
    m = draw(B, T)
    run = jax.jit(
        lambda m: {name: classify(build(m), B, N, T, T) for name, (build, _) in TRACED.items()},
        compiler_options=QUICKLY,
    )
    return run(m), jax.jit(
        lambda m: {name: build(m) for name, (build, _) in TRACED.items()}, compiler_options=QUICKLY
    )(m)


@pytest.mark.parametrize("name", TRACED)
def test_traced_masks_by_their_lineage(name, traced):
    found, masks = (every[name] for every in traced)
    assert kind_of(found) == TRACED[name][1]
    assert not differ(spread(found, (B, N, T, T)), np.broadcast_to(as_bias(masks), (B, N, T, T)))


def test_lineage_reaches_into_the_trace_around_a_scan_and_no_further_than_its_arguments():
    kinds = []

    def look(mask):
        kinds.append(kind_of(classify(mask, B, N, T, T)))
        return 0

    @jax.jit
    def run(m):
        whole = outer(m)
        lax.scan(lambda c, _: (c + look(outer(m)) + look(whole) + look(~(~whole)), None), 0, length=2)
        jax.jit(look)(whole)

    run(draw(B, T))
    assert kinds == ["outer", "outer", "outer", "dense"]


def test_random_masks_are_what_they_are_eagerly():
    """As many as five seconds of a processor allow, some 300; `mask_fuzz` says how."""
    seed, found, stop = int(np.random.default_rng().integers(1 << 40)), [], time.process_time() + 5
    while time.process_time() < stop or len(found) < 100:
        seed += 1
        answers = check(seed)
        assert not any(wrong for _, wrong in answers), f"check({seed})"
        found += [kind for kind, _ in answers]
    assert {"none", "keys", "outer", "dense", "bias"} < set(found)


@pytest.mark.slow
def test_five_thousand_random_masks(root):
    """The command, in a process of its own, where a warning is an error."""
    command = [sys.executable, "-W", "error", str(root / "tests/tpu/mask_fuzz.py"), "--masks", "5000"]
    seed = str(np.random.default_rng().integers(1 << 20))
    done = subprocess.run([*command, "--seed", seed], capture_output=True, text=True)
    assert done.returncode == 0 and "5000 masks, 0 differences" in done.stdout, (
        seed,
        done.stdout,
        done.stderr[-2000:],
    )


def hunyuan15(m):
    m1 = m.view(2, 1, 1, -1).repeat(1, 1, m.shape[1], 1)
    return (m1 & m1.transpose(2, 3)).bool()


TORCH = {
    "HunyuanVideo-1.5": (hunyuan15, "outer"),
    "HunyuanVideo": (lambda m: torch.ones_like(m).masked_fill(~m, False).unsqueeze(1).unsqueeze(1), "keys"),
    "Chroma": (lambda m: m[:, None, None, :] * m[:, None, :, None], "outer"),
    "expanded for another backend": (lambda m: m.unsqueeze(1).expand(2, 9, 9).unsqueeze(1).contiguous(), "keys"),
    "where": (lambda m: torch.where(hunyuan15(m), 0.0, float("-inf")), "outer"),
    "filled": (lambda m: torch.zeros(2, 1, 9, 9, device=m.device).masked_fill(~hunyuan15(m), LOWEST), "outer"),
    "text encoder": (lambda m: (1.0 - m[:, None, None].to(torch.float32)) * LOWEST, "keys"),
    "UNet": (lambda m: ((1 - m.to(torch.bfloat16)) * -10000.0).unsqueeze(1).unsqueeze(1), "keys"),
    "tril": (lambda m: torch.tril(torch.ones(9, 9, device=m.device)).bool(), "causal"),
    "image before text": (lambda m: F.pad(m[:, 2:].long(), (2, 0), value=1)[:, None, None].bool(), "keys"),
}


@pytest.fixture(scope="module")
def as_upstream() -> tuple:
    """A padding, and what is found of each of `TORCH` in one program."""

    def run(m):
        with bridge.environment(), bridge.quiet_integers():
            masks = {name: build(bridge.to_torch(m)).jax() for name, (build, _) in TORCH.items()}
            return {name: classify(mask, 2, 3, 9, 9) for name, mask in masks.items()}

    m = draw(2, 9)
    return m, jax.jit(run, compiler_options=QUICKLY)(m)


@pytest.mark.parametrize("name", TORCH)
def test_masks_as_upstream_writes_them(name, as_upstream):
    (build, kind), (m, every) = TORCH[name], as_upstream
    found, expected = every[name], as_bias(bridge.as_numpy(build(torch.from_numpy(m))))
    assert kind_of(found) == kind
    np.testing.assert_array_equal(spread(found, (2, 3, 9, 9)), np.broadcast_to(expected, (2, 3, 9, 9)))


def test_upstreams_hunyuan15_processor_makes_no_tokens_by_tokens(chips, monkeypatch):
    """At 8192 tokens a byte per pair is 67 MB; compiled, the attention layer takes 6 MB, with the mask made 73 MB."""
    video, text, dim = 8000, 192, 16
    attn = Attention(query_dim=dim, added_kv_proj_dim=dim, heads=1, dim_head=dim, out_dim=dim, context_pre_only=False,
                     bias=True, processor=HunyuanVideo15AttnProcessor2_0(), qk_norm="rms_norm").requires_grad_(False)  # fmt: skip
    kinds = []

    def attention(q, k, v, *, mask, **_):
        parts = as_found(mask, 1, 1, q.shape[2], k.shape[2])
        kinds.append(parts.kind)
        return reference_attention(q, k, v, scale=0.25, mask=parts)

    def run(weights, hidden, context, m):
        with bridge.environment(), bridge.quiet_integers():
            weights = {name: bridge.to_torch(w) for name, w in weights.items()}
            out = torch.func.functional_call(attn, weights, tuple(map(bridge.to_torch, (hidden, context, m))))
            return [x.jax() for x in out]

    monkeypatch.setattr(operators, "attention", attention)
    weights = {name: jnp.asarray(bridge.as_numpy(w)) for name, w in attn.named_parameters()}
    shapes = [jax.ShapeDtypeStruct((1, n, dim), jnp.float32) for n in (video, text)]
    temporary = []
    for as_found in (classify, lambda mask, *_: Mask(dense=mask)):
        compiled = (
            jax.jit(lambda *arrays: run(*arrays))
            .lower(weights, *shapes, jax.ShapeDtypeStruct((1, text), bool))
            .compile()
        )
        temporary.append(compiled.memory_analysis().temp_size_in_bytes)
    assert kinds == ["outer", "dense"]
    assert temporary[0] < 12e6 < (video + text) ** 2 < temporary[1], temporary


def test_bands():
    assert classify(None, 1, 1, 5, 7) is None
    assert classify(None, 1, 1, 5, 7, is_causal=True) == Mask(band=(None, 0))
    assert classify(None, 1, 1, 5, 7, is_causal=True, window=(3, 2)) == Mask(band=(3, 0))
    assert classify(None, 1, 1, 5, 7, window=(4, 6)) is classify(None, 1, 1, 5, 1, is_causal=True) is None
    assert classify(np.tri(5, 7, dtype=bool), 1, 1, 5, 7, window=(3, 2)) == Mask(band=(3, 0))
    assert classify(np.ones((7,), bool), 1, 1, 5, 7, window=(None, 2)) == Mask(band=(None, 2))


@pytest.mark.parametrize("kv_len", [4, "traced", 7])
def test_a_length_takes_keys_away(kv_len):
    masks = [None, Mask(band=(None, 0)), Mask(keys=jnp.asarray(draw(2, 1, 1, 7))), Mask(keys=jnp.ones((1, 3, 1, 7)))]
    length = 4 if kv_len == "traced" else kv_len
    for mask in masks:
        found = (
            jax.jit(with_length, static_argnums=2)(mask, 4, 7) if kv_len == "traced" else with_length(mask, kv_len, 7)
        )
        expected = np.where(np.arange(7) < length, spread(mask, (2, 3, 7, 7)), -np.inf)
        np.testing.assert_array_equal(spread(found, (2, 3, 7, 7)), expected)
        assert kv_len != 7 or found is mask


@pytest.mark.parametrize(
    "mask, keywords, error, words",
    [
        (np.ones((3, 4), bool), {}, ValueError, r"\[1, 2, 4, 5\], got \[3, 4\]"),
        (np.ones((1, 1, 1, 4, 5), bool), {}, ValueError, "broadcasts to"),
        (np.ones((4, 5), np.int32), {}, TypeError, "bool or floating attention mask, got int32"),
        (np.ones((4, 5), bool), {"is_causal": True}, ValueError, "either attn_mask or is_causal"),
    ],
)
def test_bad_masks_are_refused(mask, keywords, error, words):
    with pytest.raises(error, match=words):
        classify(mask, 1, 2, 4, 5, **keywords)
