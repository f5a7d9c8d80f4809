"""Oracle: softmax(scale q k^T + bias) v in float64 numpy of the whole arrays; collectives and splits counted by hand.

`by_the_compiler` runs in the process of the TPU's compiler.
"""

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
from conftest import QUICKLY, attention_formula, relative
from diffusers.tpu.kernels.attention import exchange
from diffusers.tpu.kernels.attention.key_bounds import key_bounds
from diffusers.tpu.kernels.attention.masks import Mask
from diffusers.tpu.kernels.attention.parallel import attention_by_heads, parallel_attention, plan_ring
from diffusers.tpu.kernels.attention.reference import reference_attention
from diffusers.tpu.planner import aot


TOLERANCE = 1e-6  # measured: at most 2.1e-7 in 70 draws
KINDS = [
    kind for kind in attention_masks.KINDS if kind not in ("nothing", "tail", "bfloat16 bias") and "frame" not in kind
]


def local(q, k, v, **arguments):
    """The reference, and not known to be: nothing is left to the compiler."""
    return reference_attention(q, k, v, **arguments)


def draw(rng, batch, heads, kv_heads, q_len, kv_len, dim=8):
    shapes = (batch, heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, dim + 3)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def draw_mask(rng, kind, heads, q_len, kv_len):
    return attention_masks.make_mask(rng, kind, heads, q_len, kv_len) if kind != "none" else None


def over(mesh, mask, ring=None, local=local, spread=parallel_attention, **arguments):
    """`parallel_attention` of this mesh and mask, jitted for q, k, v: quickly compiled, the values are as good."""
    if ring is not None:
        arguments["ring"] = ring
    return jax.jit(
        lambda q, k, v: spread(q, k, v, mask=mask, scale=0.3, mesh=mesh, local=local, **arguments),
        compiler_options=QUICKLY,
    )


def error(mesh, operands, mask, ring=None, **arguments) -> float:
    ours, oracle = over(mesh, mask, ring, **arguments)(*operands), attention_formula(*operands, 0.3, mask)[0]
    return relative(ours, oracle) if oracle.any() else float(jnp.abs(ours).max())


@pytest.mark.parametrize(
    "degrees, heads, kv_heads",
    [((1, 8, 1), 30, 30), ((2, 4, 1), 40, 8), ((1, 4, 2), 30, 30), ((2, 2, 2), 40, 8), ((1, 3, 2), 30, 30)],
)
def test_any_mesh_gives_what_one_chip_gives(make_mesh, degrees, heads, kv_heads):
    rng = np.random.default_rng()
    kind, length = str(rng.choice(KINDS)), int(rng.integers(8, 42))
    batch = 3 if kind == "none" else 2
    operands, mask = draw(rng, batch, heads, kv_heads, length, length), draw_mask(rng, kind, heads, length, length)
    assert error(make_mesh(*degrees), operands, mask) < TOLERANCE, (kind, length)


@pytest.mark.parametrize("kind", ["none", "causal"])
@pytest.mark.parametrize("length", [4 * 19, 4 * 19 - 1])
def test_chips_whose_rows_fill_no_tile(make_mesh, kind, length):
    """Rows may then lie in another order on the chip, unless their places count."""
    rng = np.random.default_rng()
    operands, mask = draw(rng, 2, 8, 4, length, length), draw_mask(rng, kind, 8, length, length)
    assert error(make_mesh(2, 4, 1), operands, mask, 1) < TOLERANCE


@pytest.mark.parametrize("tokens, kind", [(128, "causal"), (133, "causal"), (133, "none"), (2 * 128 + 40, "none")])
def test_kernels_around_the_exchange(make_mesh, monkeypatch, tokens, kind):
    """A chip's tokens are whole tiles, or some are left and their places may not count; blocks are of one tile."""
    monkeypatch.setattr(exchange, "BLOCK_BYTES", 128 * 256 * 4)
    rng = np.random.default_rng()
    operands = [x[..., :128] for x in draw(rng, 2, 8, 4, 4 * tokens, 4 * tokens, 128)]
    operands[0] /= 4

    def unbounded(*args, bounds=None, **arguments):
        return reference_attention(*args, **arguments)

    mask = draw_mask(rng, kind, 8, 4 * tokens, 4 * tokens)
    run = over(make_mesh(2, 4, 1), mask, 1, local=unbounded, interpret=True)
    text = str(jax.make_jaxpr(run.__wrapped__)(*operands))
    calls = [text.count(f"exchange_{name}") for name in ("cut", "join", "part", "paste")]
    assert calls == ([0, 0, 0, 0] if (tokens, kind) == (133, "causal") else [3, 3, 1, 1])
    assert relative(run(*operands), attention_formula(*operands, 0.3, mask)[0]) < TOLERANCE


@pytest.mark.parametrize("ring, length, dim", [(1, 37, 8), (2, 37, 8), (4, 40, 8), (1, 4 * 131, 128)])
def test_bounds_taken_before_the_exchange_are_those_of_the_keys_that_come(make_mesh, ring, length, dim):
    """Of every head, with the padding of the last chip, and on every hop of a ring; those of 128 by a kernel, odd rows too."""

    def checking(q, k, v, *, bounds, mask=None, **arguments):
        seen = None if mask is None else jnp.swapaxes(mask.keys, 2, 3)
        pairs = zip(jax.tree.leaves(bounds), jax.tree.leaves(key_bounds(k, v, seen)))
        agree = jnp.stack([jnp.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in pairs]).all()
        out = reference_attention(q, k, v, mask=mask, **arguments)
        return jax.tree.map(lambda x: jnp.where(agree, x, jnp.nan), out)

    operands = draw(np.random.default_rng(), 2, 8, 4, length, length, dim)
    operands[0] /= 8 * np.sqrt(dim / 8)  # a logit's rounding is an error of the weight, and these keys make large ones
    operands[1] *= 1 + 30 * np.random.default_rng().random((2, 4, length, 1)) ** 8  # some keys far from the others
    assert error(make_mesh(2, 4, 1), operands, None, ring, local=checking, interpret=True) < TOLERANCE


@pytest.mark.parametrize("dim", [8, 128])
def test_keys_that_are_none_have_no_part_in_the_bounds(dim):
    """Of 128 entries by a kernel."""
    _, k, v = draw(np.random.default_rng(), 2, 4, 4, 600, 600, dim)
    theirs = key_bounds(k[:, :, :531], v[:, :, :531])
    k, v = (x.at[:, :, 531:].set(jnp.nan) for x in (jnp.asarray(k), jnp.asarray(v)))
    ours = key_bounds(k, v, jnp.asarray(531), interpret=True)
    assert jnp.allclose(ours.reach, theirs.reach, rtol=1e-3) and jnp.allclose(ours.radius, theirs.radius, rtol=1e-5)
    assert jnp.allclose(ours.centre, theirs.centre, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_every_mask_over_every_split(make_mesh, kind):
    """Of rings in front of Ulysses, or one of them alone."""
    rng = np.random.default_rng()
    ring = (2, 4, 1)[KINDS.index(kind) % 3]
    length = int(rng.choice([5, 16, 17, 23]))
    operands, mask = draw(rng, 2, 8, 4, length, length), draw_mask(rng, kind, 8, length, length)
    assert error(make_mesh(2, 4, 1), operands, mask, ring) < TOLERANCE, (ring, length)


@pytest.mark.parametrize("kind", KINDS[::2])
def test_keys_of_another_length_are_whole_everywhere(make_mesh, kind):
    rng = np.random.default_rng()
    q_len, kv_len = ((21, 5), (9, 40))[rng.integers(2)]
    operands, mask = draw(rng, 2, 6, 2, q_len, kv_len), draw_mask(rng, kind, 6, q_len, kv_len)
    assert error(make_mesh(1, 4, 2), operands, mask) < TOLERANCE, (q_len, kv_len)


@pytest.mark.parametrize("ring", [2])
def test_masked_keys_may_hold_anything(make_mesh, ring):
    """NaN in keys that no query sees; the second of the batch has none at all, and gives zeros."""
    rng = np.random.default_rng()
    q, k, v = draw(rng, 2, 8, 8, 41, 41)
    mask = Mask(keys=np.arange(41) < np.array([29, 0])[:, None, None, None])
    hidden = ~np.swapaxes(mask.keys, 2, 3)
    ours = np.asarray(
        over(make_mesh(1, 8, 1), mask, ring)(q, np.where(hidden, np.nan, k), np.where(hidden, np.nan, v))
    )
    assert relative(ours, attention_formula(q, k, v, 0.3, mask)[0]) < TOLERANCE
    assert not ours[1].any()


def test_parts_of_the_keys_are_merged_in_float32(make_mesh):
    operands = [jnp.asarray(x, jnp.bfloat16) for x in draw(np.random.default_rng(), 1, 1, 1, 64, 64, dim=32)]
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
    rng = np.random.default_rng()
    kind, mesh = str(rng.choice(["keys by head", "bias", "outer"])), make_mesh(*degrees)
    operands = draw(rng, 2, heads, kv_heads, q_len, kv_len)
    mask = draw_mask(rng, kind, heads, q_len, kv_len)
    assert error(mesh, operands, mask, spread=attention_by_heads) < TOLERANCE, kind
    if q_len < degrees[1]:
        assert error(mesh, operands, mask) < TOLERANCE, kind


@pytest.mark.parametrize(
    "sp, heads, kv_heads, ring, split",
    [
        (8, 30, 30, None, (4, 2)),
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
        over(make_mesh(1, 8, 1), None, ring)(*draw(np.random.default_rng(), 1, 30, 10, 16, 16))


@pytest.mark.parametrize("heads, exchanges, sends", [(8, 4, 0), (2, 4, 6), (1, 0, 14)])
def test_collectives_of_the_compiled_program(make_mesh, heads, exchanges, sends):
    """Ulysses: q, k, v and back. A ring: k and v on all hops but the last. Keys are gathered nowhere, masked or not."""
    rng, mesh = np.random.default_rng(), make_mesh(1, 8, 1)
    operands = [
        jax.device_put(x, NamedSharding(mesh, P(None, None, "sp"))) for x in draw(rng, 2, heads, heads, 40, 40)
    ]
    mask = draw_mask(rng, str(rng.choice(["none", "keys", "causal"])), heads, 40, 40)
    text = over(mesh, mask).lower(*operands).compile().as_text()
    found = [
        len(re.findall(rf" {name}(?:-start)?\(", text)) for name in ("all-to-all", "collective-permute", "all-gather")
    ]
    assert found == [exchanges, sends, 0]


@pytest.mark.parametrize("band, hops", [((5, 0), 2), ((6, 0), 3), ((3, 4), 3), ((0, 0), 1)])
def test_a_window_ends_the_journey(make_mesh, band, hops):
    """Chunks of 5 keys; a window over whole neighbours needs theirs and no other's."""
    operands = draw(np.random.default_rng(), 1, 1, 1, 40, 40)
    f = over(make_mesh(1, 8, 1), Mask(band=band))
    assert str(f.trace(*operands).jaxpr).count("ppermute") == 2 * (hops - 1)
    assert relative(f(*operands), attention_formula(*operands, 0.3, Mask(band=band))[0]) < TOLERANCE


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
    from diffusers.tpu.chips.figures import find_topology

    compiler = aot.Compiler(find_topology(topology))
    device = SingleDeviceSharding(compiler.devices[0])

    def there_and_back(x, k):
        pieces = [exchange.cut(array, 4, False) for array in (x, k)]
        turned = exchange.join(pieces[0], True, False)
        back = exchange.paste(exchange.part(turned, 4, 13924, False), False)
        return back, exchange.join(pieces[1], False, False)

    operand = jax.ShapeDtypeStruct((1, 13924, 5120), jnp.float32, sharding=device)
    compiler.compile(jax.jit(there_and_back).lower(operand, operand))
    return True


def sent_beside_products() -> list[bool]:
    """Of each of the six sends around a ring of four: does a product run between its start and its end?"""
    from diffusers.tpu.chips.figures import find_topology
    from diffusers.tpu.chips.mesh import make_mesh

    compiler = aot.Compiler(find_topology("v5e-4"))
    mesh = make_mesh(compiler.devices, (1, 4, 1))
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
