"""Oracle: the mask itself, whole, as a bias in float64; a mask's parts spread out again must be that, to the last bit. For random
masks (`mask_fuzz`), torch and numpy eagerly."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax import lax

from conftest import QUICKLY, slow
from diffusers.tpu import bridge
from diffusers.tpu.kernels.attention.masks import BELOW, Mask, classify, with_length
from mask_fuzz import LOWEST, as_bias, check, differ, spread


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
FORMS = (
    lambda m: m,
    jnp.asarray,
    lambda m: np.where(m, 0, -np.inf).astype(np.float32),
    lambda m: jnp.where(m, 0, jnp.finfo(jnp.bfloat16).min).astype(jnp.bfloat16),
)


def assert_parts_are(found, mask, shape):
    np.testing.assert_array_equal(spread(found, shape), np.broadcast_to(as_bias(mask), shape))


@pytest.mark.parametrize("t, s", [(7, 7), (9, 6), (5, 11)])
@pytest.mark.parametrize("name", KNOWN)
def test_known_values(name, t, s):
    make, kind = KNOWN[name]
    mask = make(2, 3, t, s)
    for form in FORMS:
        found = classify(form(mask), 2, 3, t, s)
        assert kind_of(found) == kind
        assert_parts_are(found, mask, (2, 3, t, s))


def test_known_biases():
    bias = np.random.default_rng().standard_normal((2, 1, 5, 6)).astype(np.float32)
    rows = np.repeat(bias[:, :, :1], 5, axis=2)
    rows[..., 2] = LOWEST
    for mask, kind in ((bias, "bias"), (rows, "keys"), (rows[:, :, :1], "keys")):
        found = classify(mask, 2, 3, 5, 6)
        assert found.kind == kind
        assert_parts_are(found, mask, (2, 3, 5, 6))
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
    "product and more": (
        lambda m: m.cumsum(1)[:, None, :, None] * m.cumsum(1).astype(float)[:, None, None] + m[:, None, None],
        "bias",
    ),
    "product of biases": (
        lambda m: m.cumsum(1).astype(float)[:, None, :, None] * -m.cumsum(1)[:, None, None],
        "product",
    ),
    "product, expanded": (
        lambda m: jnp.broadcast_to(
            m.astype(float).cumsum(1)[:, None] * m.astype(float).cumsum(1)[..., None], (N, B, T, T)
        ).swapaxes(0, 1),
        "product",
    ),
    "weak bias": (lambda m: jnp.where(outer(m), 0, -1e4), "bias"),
}


def test_traced_masks_by_their_lineage():
    """All in one program."""
    m = draw(B, T)

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def run(m):
        masks = {name: build(m) for name, (build, _) in TRACED.items()}
        return {name: classify(mask, B, N, T, T) for name, mask in masks.items()}, masks

    found, masks = run(m)
    for name, (_, kind) in TRACED.items():
        assert kind_of(found[name]) == kind, name
        assert not differ(spread(found[name], (B, N, T, T)), np.broadcast_to(as_bias(masks[name]), (B, N, T, T))), name


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


@pytest.mark.parametrize("seconds, least", [(5, 100), slow(0, 5000)])
def test_random_masks_are_what_they_are_eagerly(seconds, least):
    """As many as five seconds of a processor allow, some 300, or 5000; `mask_fuzz` says how."""
    seed, found, stop = int(np.random.default_rng().integers(1 << 40)), [], time.process_time() + seconds
    while time.process_time() < stop or len(found) < least:
        seed += 1
        answers = check(seed)
        assert not any(wrong for _, wrong in answers), f"check({seed})"
        found += [kind for kind, _ in answers]
    assert {"none", "keys", "outer", "dense", "bias"} < set(found)


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


def test_masks_as_upstream_writes_them():
    """All in one program."""
    m = draw(2, 9)

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def run(m):
        with bridge.environment(), bridge.quiet_integers():
            masks = {name: build(bridge.to_torch(m)).jax() for name, (build, _) in TORCH.items()}
            return {name: classify(mask, 2, 3, 9, 9) for name, mask in masks.items()}

    for name, found in run(m).items():
        build, kind = TORCH[name]
        assert kind_of(found) == kind, name
        assert_parts_are(found, bridge.as_numpy(build(torch.from_numpy(m))), (2, 3, 9, 9))


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
    run = jax.jit(with_length, static_argnums=2) if kv_len == "traced" else with_length
    for mask in masks:
        found = run(mask, length, 7)
        expected = np.where(np.arange(7) < length, spread(mask, (2, 3, 7, 7)), -np.inf)
        np.testing.assert_array_equal(spread(found, (2, 3, 7, 7)), expected)
        assert kv_len != 7 or found is mask


def test_bad_masks_are_refused():
    for mask, keywords, error, words in (
        (np.ones((3, 4), bool), {}, ValueError, r"\[1, 2, 4, 5\], got \[3, 4\]"),
        (np.ones((1, 1, 1, 4, 5), bool), {}, ValueError, "broadcasts to"),
        (np.ones((4, 5), np.int32), {}, TypeError, "bool or floating attention mask, got int32"),
    ):
        with pytest.raises(error, match=words):
            classify(mask, 1, 2, 4, 5, **keywords)
