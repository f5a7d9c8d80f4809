"""Oracle: softmax(scale q k^T + bias) v in float64 numpy of the whole arrays, latents and text behind each other as upstream
concatenates them; collectives and splits counted by hand.

`by_the_compiler` runs in the process of the TPU's compiler.
"""

import functools
import os
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import attention_masks
from attention_masks import attention_formula
from conftest import QUICKLY, relative
from diffusers.tpu.chips import mesh as meshes
from diffusers.tpu.chips.figures import find_topology
from diffusers.tpu.kernels.attention import exchange, pieces
from diffusers.tpu.kernels.attention.api import joint
from diffusers.tpu.kernels.attention.joint import Text, joint_attention
from diffusers.tpu.kernels.attention.kernel import tpu_attention
from diffusers.tpu.kernels.attention.key_bounds import key_bounds, width_of
from diffusers.tpu.kernels.attention.masks import Mask
from diffusers.tpu.kernels.attention.parallel import attention_by_heads, parallel_attention, plan_ring
from diffusers.tpu.kernels.attention.reference import reference_attention
from diffusers.tpu.kernels.settings import Settings, using
from diffusers.tpu.planner import aot


TOLERANCE = 1e-6  # measured: at most 2.1e-7 in 70 draws; with text 3e-7
LEFT_OUT = ("nothing", "tail", "bfloat16 bias", "causal by frame", "window by frame")
KINDS = [kind for kind in attention_masks.KINDS if kind not in LEFT_OUT]


def local(q, k, v, *, bounds=None, turned=False, **arguments):
    """The reference, and not known to be: nothing is left to the compiler."""
    return reference_attention(q, k, v, **arguments)


def draw(batch, heads, kv_heads, q_len, kv_len, dim=8, v_dim=None):
    return attention_masks.draw(heads, kv_heads, q_len, kv_len, dim, v_dim or dim + 3, batch)


def over(mesh, mask, ring=None, local=local, spread=parallel_attention, **arguments):
    """`parallel_attention` of this mesh and mask, jitted for q, k, v: quickly compiled, the values are as good."""
    if ring is not None:
        arguments["ring"] = ring
    return jax.jit(
        lambda q, k, v: spread(q, k, v, mask=mask, scale=0.3, mesh=mesh, local=local, **arguments),
        compiler_options=QUICKLY,
    )


def error(mesh, operands, kind="none", ring=None, **arguments) -> float:
    """With a mask of this kind, and NaN in keys that no query sees."""
    q, k, v = operands
    mask = attention_masks.make_mask(np.random.default_rng(), kind, q.shape[1], q.shape[2], k.shape[2])
    oracle, given = attention_formula(*operands, 0.3, mask)[0], (q, *attention_masks.spoilt(*operands, mask))
    ours = over(mesh, None if kind == "none" else mask, ring, **arguments)(*given)
    return relative(ours, oracle) if oracle.any() else float(jnp.abs(ours).max())


@pytest.mark.parametrize(
    "degrees, heads, kv_heads",
    [((1, 8, 1), 30, 30), ((2, 4, 1), 40, 8), ((1, 4, 2), 30, 30), ((2, 2, 2), 40, 8), ((1, 3, 2), 30, 30)],
)
def test_any_mesh_gives_what_one_chip_gives(make_mesh, degrees, heads, kv_heads):
    rng = np.random.default_rng()
    kind, length = str(rng.choice(KINDS)), int(rng.integers(8, 42))
    operands = draw(3 if kind == "none" else 2, heads, kv_heads, length, length)
    assert error(make_mesh(*degrees), operands, kind) < TOLERANCE, (kind, length)


# The last: rows that fill no tile may lie in another order on the chip, unless their places count.
SPLITS = [(kind, (2, 4, 1)[n % 3], (5, 16, 17, 23)) for n, kind in enumerate(KINDS)]
SPLITS += [(kind, 1, (length,)) for kind in ("none", "causal") for length in (4 * 19, 4 * 19 - 1)]


@pytest.mark.parametrize("kind, ring, lengths", SPLITS)
def test_every_mask_over_every_split(make_mesh, kind, ring, lengths):
    """Of rings in front of Ulysses, or one of them alone."""
    length = int(np.random.default_rng().choice(lengths))
    assert error(make_mesh(2, 4, 1), draw(2, 8, 4, length, length), kind, ring) < TOLERANCE, length


def test_a_ring_takes_no_band_of_frames(make_mesh):
    with pytest.raises(NotImplementedError, match="mask of tokens on a ring of 2, got one of frames"):
        error(make_mesh(1, 4, 1), draw(2, 4, 4, 16, 16), "causal by frame", 2)


@pytest.mark.parametrize("kind", KINDS[::2])
def test_keys_of_another_length_are_whole_everywhere(make_mesh, kind):
    q_len, kv_len = ((21, 5), (9, 40))[np.random.default_rng().integers(2)]
    assert error(make_mesh(1, 4, 2), draw(2, 6, 2, q_len, kv_len), kind) < TOLERANCE, (q_len, kv_len)


@pytest.mark.parametrize("kind", ["none", "prefix", "bias", "outer", "all"])
def test_many_keys_of_few_queries_come_by_heads(make_mesh, kind):
    """Each chip has some heads of all tokens; heads that the chips do not divide, and masks by head, have whole keys."""
    mesh, (q_len, kv_len), heads = make_mesh(2, 2, 2), np.random.default_rng().integers((5, 50), (12, 70)), 8
    operands = draw(2, heads, 4, int(q_len), int(kv_len))
    text = str(jax.make_jaxpr(over(mesh, None).__wrapped__)(*operands))
    assert "all_to_all" in text and "all_to_all" not in str(
        jax.make_jaxpr(over(mesh, None).__wrapped__)(*draw(2, 6, 2, 9, 60))
    )
    assert error(mesh, operands, kind) < TOLERANCE, (q_len, kv_len)


@pytest.mark.parametrize(
    "tokens, kind, kv_heads, padding",
    [
        (128, "causal", 8, 0),
        (133, "causal", 8, 0),
        (133, "none", 4, 0),
        (2 * 128 + 40, "none", 4, 0),
        (133, "none", 8, 3),
        (130, "none", 8, 3),
        (133, "none", 15, 0),
        (133, "none", 28, 1),
    ],
)
def test_kernels_around_the_exchange(make_mesh, monkeypatch, tokens, kind, kv_heads, padding):
    """A chip's tokens are whole tiles, or some are left and their places may not count; blocks are of one tile. The last chip's padding
    comes last if it is no more than is left. As many heads of keys as of queries go in groups; 15 are filled up to 16; 28 of 64 fill
    no registers."""
    monkeypatch.setattr(pieces, "BLOCK_BYTES", 128 * 256 * 4)
    monkeypatch.setattr(exchange, "LEAST_TOKENS", {None: 0})
    length, dim = 4 * tokens - padding, 64 if kv_heads == 28 else 128
    operands = draw(2, max(8, kv_heads), kv_heads, length, length, dim, dim)
    mask = Mask(band=(None, 0)) if kind == "causal" else None
    operands[0] /= 4
    run = over(make_mesh(2, 4, 1), mask, 1, interpret=True)
    text = str(jax.make_jaxpr(run.__wrapped__)(*operands))
    calls = [text.count(f"name=exchange_{name}") for name in ("cut", "join", "part", "paste")]
    by_kernels = [3 + 1, 2 * 3, 2, 1] if kv_heads >= 8 else [3, 3, 1, 1]
    in_order = (tokens, kind) == (133, "causal") or padding > tokens % 128
    assert calls == ([0, 0, 0, 0] if in_order else by_kernels)
    assert relative(run(*operands), attention_formula(*operands, 0.3, mask)[0]) < TOLERANCE


@pytest.mark.parametrize("ring, length, dim", [(1, 37, 8), (2, 37, 8), (4, 40, 8), (1, 4 * 131, 128)])
def test_bounds_taken_before_the_exchange_are_those_of_the_keys_that_come(make_mesh, monkeypatch, ring, length, dim):
    """Of every head, with the padding of the last chip, and on every hop of a ring; those of 128 by a kernel and in groups, odd rows too."""
    monkeypatch.setattr(exchange, "LEAST_TOKENS", {None: 0})

    def checking(q, k, v, *, bounds, mask=None, turned=False, **arguments):
        seen = None if mask is None else jnp.swapaxes(mask.keys, 2, 3)
        pairs = zip(jax.tree.leaves(bounds), jax.tree.leaves(key_bounds(k, v, seen)))
        agree = jnp.stack([jnp.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in pairs]).all()
        out = reference_attention(q, k, v, mask=mask, **arguments)
        return jax.tree.map(lambda x: jnp.where(agree, x, jnp.nan), out)

    kv_heads = 8 if dim == 128 else 4
    operands = draw(2, 8, kv_heads, length, length, dim)
    operands[0] /= 8 * np.sqrt(dim / 8)  # a logit's rounding is an error of the weight, and these keys make large ones
    # Some keys are far from the others.
    operands[1] *= 1 + 30 * np.random.default_rng().random((2, kv_heads, length, 1)) ** 8
    assert error(make_mesh(2, 4, 1), operands, ring=ring, local=checking, interpret=True) < TOLERANCE


@pytest.mark.parametrize("heads, dim", [(4, 8), (5, 64), (3, 128), (16, 40), (16, 88)])
def test_keys_that_are_none_have_no_part_in_the_bounds(heads, dim):
    """By a kernel, unless too many heads make up whole registers."""
    assert (width_of(heads, dim) is None) == (dim == 88)
    _, k, v = draw(2, heads, heads, 600, 600, dim)
    theirs = key_bounds(k[:, :, :531], v[:, :, :531])
    k, v = (jnp.asarray(x).at[:, :, 531:].set(jnp.nan) for x in (k, v))
    ours = key_bounds(k, v, jnp.asarray(531), interpret=True)
    assert jnp.allclose(ours.reach, theirs.reach, rtol=1e-3) and jnp.allclose(ours.radius, theirs.radius, rtol=1e-5)
    assert jnp.allclose(ours.centre, theirs.centre, atol=1e-6)


def test_parts_of_the_keys_are_merged_in_float32(make_mesh):
    operands = [jnp.asarray(x, jnp.bfloat16) for x in draw(1, 1, 1, 64, 64, dim=32)]
    exact = attention_formula(*operands, 0.3, None)[0]
    rounded = np.asarray(jnp.asarray(exact, jnp.bfloat16), np.float32)  # the best a bfloat16 result can be
    ours = over(make_mesh(1, 4, 1), None)(*operands)
    assert ours.dtype == jnp.bfloat16
    assert relative(ours.astype(jnp.float32), exact) < 1.1 * relative(rounded, exact)


@pytest.mark.parametrize(
    "degrees, q_len, kv_len, heads, kv_heads",
    [((2, 4, 1), 3, 40, 8, 4), ((1, 2, 2), 1, 1, 6, 6), ((2, 4, 1), 40, 13, 6, 2)],
)
def test_a_kernel_is_split_by_heads_where_nobody_lays_out(make_mesh, degrees, q_len, kv_len, heads, kv_heads):
    kind = str(np.random.default_rng().choice(["keys by head", "bias", "outer"]))
    for spread in (attention_by_heads, parallel_attention)[: 2 if q_len < degrees[1] else 1]:
        operands = draw(2, heads, kv_heads, q_len, kv_len)
        assert error(make_mesh(*degrees), operands, kind, spread=spread) < TOLERANCE, kind


@pytest.mark.parametrize(
    "sp, heads, kv_heads, ring, split",
    [
        (8, 30, 30, None, (1, 8)),  # two heads of zeros
        (8, 28, 28, None, (2, 4)),
        (8, 30, 10, None, (4, 2)),
        (8, 1, 1, None, (8, 1)),
        (8, 40, 40, None, (1, 8)),
        (8, 40, 4, None, (2, 4)),
        (1, 5, 5, None, (1, 1)),
        (6, 9, 9, None, (2, 3)),
        (8, 40, 40, 4, (4, 2)),
    ],
)
def test_a_split_is_as_much_ulysses_as_heads_allow(sp, heads, kv_heads, ring, split):
    assert plan_ring(sp, heads, kv_heads, ring) == split


@pytest.mark.parametrize(
    "ring, words", [(3, "divides sp 8, got ring 3"), (2, "ulysses 4 .*30 query and 10 key"), (0, "ring 0")]
)
def test_a_ring_that_cannot_be_is_refused(make_mesh, ring, words):
    with pytest.raises(ValueError, match=words):
        over(make_mesh(1, 8, 1), None, ring)(*draw(1, 30, 10, 16, 16))


@pytest.mark.parametrize("heads, exchanges, sends", [(8, 4, 0), (2, 4, 6), (1, 0, 14)])
def test_collectives_of_the_compiled_program(make_mesh, heads, exchanges, sends):
    """Ulysses: q, k, v and back. A ring: k and v on all hops but the last. Keys are gathered nowhere, masked or not."""
    mesh, mask = make_mesh(1, 8, 1), [None, Mask(band=(None, 0)), Mask(keys=np.ones((2, 1, 1, 40), bool))]
    sharding = NamedSharding(mesh, P(None, None, "sp"))
    operands = [jax.device_put(x, sharding) for x in draw(2, heads, heads, 40, 40)]
    text = over(mesh, mask[np.random.default_rng().integers(3)]).lower(*operands).compile().as_text()
    names = ("all-to-all", "collective-permute", "all-gather")
    assert [len(re.findall(rf" {name}(?:-start)?\(", text)) for name in names] == [exchanges, sends, 0]


@pytest.mark.parametrize("band, hops", [((5, 0), 2), ((6, 0), 3), ((3, 4), 3), ((0, 0), 1)])
def test_a_window_ends_the_journey(make_mesh, band, hops):
    """Chunks of 5 keys; a window over whole neighbours needs theirs and no other's."""
    operands = draw(1, 1, 1, 40, 40)
    f = over(make_mesh(1, 8, 1), Mask(band=band))
    assert str(f.trace(*operands).jaxpr).count("ppermute") == 2 * (hops - 1)
    assert relative(f(*operands), attention_formula(*operands, 0.3, Mask(band=band))[0]) < TOLERANCE


@pytest.mark.slow
def test_what_the_tpus_compiler_makes_of_it(monkeypatch):
    """In its schedule every chunk leaves before the products of a hop and arrives after them; the kernels around the exchange fit the
    smallest VMEM, where whole blocks and what is left of chips' tokens take as much as they may."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    made = aot.run_in_child("test_attention_parallel:by_the_compiler", {}, seconds=120)
    assert made == {"sent": [True] * 6, "laid_out": True}


def by_the_compiler(argument, progress) -> dict:
    return {"sent": sent_beside_products(), "laid_out": laid_out("v7x-8")}


def laid_out(topology: str) -> bool:
    """Whether a program of all kernels around the exchange compiles, in float32, with blocks as large as they may be: 13,924 tokens a chip, more than VMEM holds."""
    compiler = aot.Compiler(find_topology(topology))
    device = SingleDeviceSharding(compiler.devices[0])

    def there_and_back(shares, dim, x, k):
        sent = [pieces.cut([x], 4, False, 0, shares), pieces.cut([x, k], 4, False, 1, shares)]
        turned = [pieces.join(sent[0], dim, True, False), pieces.join(sent[1], dim, True, False, place=0, places=2)]
        back = pieces.paste([pieces.part(one, 4, 13924, False) for one in turned], False)
        as_sent = pieces.join(sent[0], dim, False, False)
        return back, as_sent, pieces.join(sent[1], dim, False, False, place=1, places=2)

    for shares, dim, heads, dtype in (
        ((1, 1), 128, 40, jnp.float32),
        ((3, 4), 64, 28, jnp.float32),
        ((3, 4), 64, 28, jnp.bfloat16),
    ):
        operand = jax.ShapeDtypeStruct((1, 13924, heads * dim), dtype, sharding=device)
        compiler.compile(jax.jit(functools.partial(there_and_back, shares, dim)).lower(operand, operand))
    return True


def sent_beside_products() -> list[bool]:
    """Of each of the six sends around a ring of four: does a product run between its start and its end?"""
    compiler = aot.Compiler(find_topology("v5e-4"))
    mesh = meshes.make_mesh(compiler.devices, (1, 4, 1))
    operand = jax.ShapeDtypeStruct((1, 1, 2048, 128), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, None, "sp")))
    lowered = jax.jit(lambda q, k, v: parallel_attention(q, k, v, mask=None, scale=1.0, mesh=mesh, local=local)).lower(
        *[operand] * 3
    )
    lines = compiler.compile(lowered).text.partition("\nENTRY ")[2].splitlines()
    found = []
    for start, line in enumerate(lines):
        if name := re.search(r"%(\S*) = .* collective-permute-start\(", line):
            end = next(i for i, later in enumerate(lines) if f"collective-permute-done(%{name[1]})" in later)
            found.append(any(re.search(r"dot_general|convolution", between) for between in lines[start:end]))
    return found


# Two streams: latents and text


def draw_streams(batch, heads, kv_heads, tokens, words, dim, padded):
    """(latents' and text's q, k, v), and which tokens of the text are no padding: one sample has none at all."""
    streams = [draw(batch, heads, kv_heads, length, length, dim, dim) for length in (tokens, words)]
    seen = np.random.default_rng().random((batch, words)) < 0.6
    seen[0], seen[-1, -1] = False, True
    return *streams, seen if padded else None


def errors(latents, text, seen, mesh, local=local, pad_tokens=0, **arguments):
    """Of the latents' and the text's answers. `pad_tokens` are put behind the latents."""
    (batch, _, tokens, _), mask = latents[0].shape, None
    if seen is not None:
        all_seen = np.concatenate([np.ones((batch, tokens), bool), seen], 1)
        mask = Mask(keys=all_seen[:, None, None], queries=all_seen[:, None, :, None])
    exact, _ = attention_formula(*(np.concatenate(pair, 2) for pair in zip(latents, text)), 0.3, mask)
    run = jax.jit(
        lambda *given: joint_attention(*given, scale=0.3, mesh=mesh, local=local, pad_tokens=pad_tokens, **arguments),
        compiler_options=QUICKLY,
    )
    latents = [np.pad(x, ((0, 0), (0, 0), (0, pad_tokens), (0, 0)), constant_values=9) for x in latents]
    out, words = run(*latents, Text(*text, None if seen is None else jnp.asarray(seen)))
    return [relative(*pair) for pair in zip((out[:, :, :tokens], words), (exact[:, :, :tokens], exact[:, :, tokens:]))]


@pytest.mark.parametrize(
    "degrees, ring, padded",
    [(None, None, True), ((2, 4, 1), None, True), ((1, 8, 1), None, False), ((1, 4, 2), 2, True), ((8, 1, 1), None, False)],
)  # fmt: skip
def test_any_mesh_gives_what_the_concatenation_gives(make_mesh, degrees, ring, padded):
    """Latents that no axis divides, fewer heads of keys than of queries, samples with their own length of text."""
    rng = np.random.default_rng()
    batch, tokens, words = (int(rng.integers(*bounds)) for bounds in ((1, 4), (8, 60), (1, 20)))
    heads = ((16, 8), (8, 8), (8, 4), (15, 15))[rng.integers(4)]
    operands = draw_streams(batch, *heads, tokens, words, 8, padded)
    assert max(errors(*operands, degrees and make_mesh(*degrees), ring=ring)) < TOLERANCE, (tokens, words, heads)


@pytest.mark.parametrize(
    "tokens, words, padded, heads, dim, degrees",
    [
        (128, 5, True, 4, 128, (2, 4, 1)),
        (133, 130, False, 8, 128, (2, 4, 1)),
        (131, 7, True, 20, 128, (2, 4, 1)),
        (133, 130, True, 28, 64, (2, 4, 1)),
        (131, 7, False, 3, 64, None),
        (128, 130, True, 2, 192, None),
    ],
)
def test_two_streams_by_our_kernels(make_mesh, monkeypatch, tokens, words, padded, heads, dim, degrees):
    """Text behind whole tiles and behind what is left of each chip's; bounds over both streams, far keys in one of them; heads of a chip
    in one group, in two, and in two of which one has more; heads that fill no registers. One chip, whose latents are padded."""
    monkeypatch.setattr(pieces, "BLOCK_BYTES", 128 * 128 * 4)
    monkeypatch.setattr(exchange, "LEAST_TOKENS", {None: 0})
    latents, text, seen = draw_streams(
        2, heads, heads, 4 * tokens - np.random.default_rng().integers(3), words, dim, padded
    )
    for stream in (latents, text):
        stream[0] /= 16
    far = (latents, text)[words % 2]
    far[1] *= 1 + 100 * np.random.default_rng().random((2, heads, far[1].shape[2], 1)) ** 8
    far[2] *= np.float32(1e32)  # not all heads are bounded where its values are so large: sums would not be finite
    kernel = functools.partial(tpu_attention, interpret=True)
    mesh, pad_tokens = degrees and make_mesh(*degrees), 0 if degrees else 5
    assert max(errors(latents, text, seen, mesh, kernel, pad_tokens, interpret=True)) < 2e-6  # measured


def test_a_window_of_two_streams_is_refused():
    streams = [[jnp.ones((1, 2, tokens, 8))] * 3 for tokens in (6, 3)]
    with using(Settings(window=(2, 2))), pytest.raises(NotImplementedError, match="no attention_window"):
        joint(*streams[0], Text(*streams[1]))
