"""Gradients of kernels. Oracle: attention's formula in float64 numpy, the others' plain operations in float32; kernels are interpreted."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from attention_masks import KINDS, attention_formula, draw, gradients_formula, make_mask, spoilt
from conftest import QUICKLY, relative, slow
from diffusers.tpu.chips.mesh import make_mesh
from diffusers.tpu.compile.tracing.keeping import kept_by_blocks
from diffusers.tpu.kernels import convolution, linear, rotary
from diffusers.tpu.kernels.attention import api
from diffusers.tpu.kernels.attention.backward import attention_gradients, blocks_of, chunk_of, differentiable_attention
from diffusers.tpu.kernels.attention.blocks import Blocks, Shape, Tile
from diffusers.tpu.kernels.attention.exchange import Exchange
from diffusers.tpu.kernels.attention.masks import Mask
from diffusers.tpu.kernels.kept import layer_result
from diffusers.tpu.kernels.norm import Norm, _plainly, normed
from diffusers.tpu.kernels.settings import Settings, using


SMALL = Blocks(256, 256, 128, Tile(128, 128, 1), Tile(128, 128, 1))
KERNELS = Settings(layers="kernel", interpret=True, differentiable=True)
BACK = functools.partial(jax.jit, compiler_options=QUICKLY)


def drawn(rng, heads, kv_heads, t, s, dim, v_dim=None):
    """q, k, v and gradients of output and log-sum-exp."""
    q, k, v = draw(heads, kv_heads, t, s, dim, v_dim)
    shapes = (*q.shape[:3], v.shape[3]), q.shape[:3]
    return q, k, v, *(rng.standard_normal(shape).astype(np.float32) for shape in shapes)


RARE = ("prefix", "keys", "bfloat16 bias", "half window", "window", "keys, causal", "causal by frame", "dense")


@pytest.mark.parametrize("kind", [slow(kind) if kind in RARE else kind for kind in KINDS])
def test_every_mask(kind, monkeypatch):
    """Odd lengths, grouped heads, chunks of queries; keys that nobody sees hold NaN."""
    rng = np.random.default_rng()
    (t, s), dim = rng.integers(130, 400, 2), int(rng.choice([40, 64, 128]))
    q, k, v, of_out, of_lse = drawn(rng, 2, int(rng.choice([1, 2])), t, s, dim, int(rng.choice([dim, 72])))
    mask = make_mask(rng, kind, 2, t, s)
    expected = gradients_formula(q, k, v, of_out, of_lse, 0.1, mask)[:3]
    out, lse = (x.astype(np.float32) for x in attention_formula(q, k, v, 0.1, mask))
    k, v = spoilt(q, k, v, mask)
    monkeypatch.setattr("diffusers.tpu.kernels.attention.backward.chunk_of", lambda *_: 1)
    how = {"scale": 0.1, "blocks": SMALL, "interpret": True}
    found = BACK(functools.partial(attention_gradients, **how))(q, k, v, mask, out, lse, of_out, of_lse)
    for ours, theirs in zip(found, expected):
        apart = np.linalg.norm(ours - theirs)
        assert np.isfinite(ours).all() and apart <= 3e-6 * np.linalg.norm(theirs)  # measured: 6e-7


def test_bfloat16_is_as_exact_as_plain_products_in_it():
    rng = np.random.default_rng()
    given = [jnp.asarray(x, jnp.bfloat16) for x in drawn(rng, 2, 2, 300, 260, 64)[:4]]
    wide = [np.asarray(x, np.float32) for x in given]
    expected = gradients_formula(*wide, 0, 0.125)[:3]

    def rounded(x):
        return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)

    q, k, v, of_out = wide
    *_, of_scores = gradients_formula(*wide, 0, 0.125)
    theirs = 0.125 * rounded(of_scores) @ k, 0.125 * rounded(of_scores).swapaxes(2, 3) @ q
    attend = functools.partial(differentiable_attention, scale=0.125, blocks=SMALL, back=SMALL, interpret=True)
    found = BACK(lambda q, k, v, g: jax.vjp(attend, q, k, v)[1](g))(*given)
    for ours, plain, exact in zip(found, theirs, expected):
        assert relative(ours, exact) < 1.25 * relative(rounded(plain), exact)
    assert relative(found[2], expected[2]) < 4e-3  # weights and result are rounded


def test_a_bias_is_differentiated_where_it_asks():
    rng = np.random.default_rng()
    q, k, v, of_out, of_lse = map(jnp.asarray, drawn(rng, 2, 2, 150, 140, 40))
    bias = rng.standard_normal((1, 2, 150, 140)).astype(np.float32)

    def loss(q, bias):
        how = {"blocks": SMALL, "back": SMALL, "interpret": True}
        out, lse = differentiable_attention(q, k, v, scale=0.1, mask=Mask(dense=bias), with_lse=True, **how)
        return (out * of_out).sum() + (lse * of_lse).sum()

    found = BACK(jax.grad(loss, (0, 1)))(q, bias)
    of_q, *_, of_scores = gradients_formula(q, k, v, of_out, of_lse, 0.1, Mask(dense=bias))
    assert relative(found[0], of_q) < 3e-6 and relative(found[1], of_scores.sum(0, keepdims=True)) < 3e-6


@pytest.mark.parametrize("heads, kind", [(2, "none"), (1, "prefix"), (1, "causal"), (4, "keys")])
def test_over_chips_with_blocks_that_are_computed_again(make_mesh, heads, kind):
    """By the public function: a ring, Ulysses and both, where the last chip holds padding; the second use of a block recomputes the
    first. With gradients and without."""
    rng, t = np.random.default_rng(), 251
    q, k, v, of_out, _ = drawn(rng, heads, heads, t, t, 16)
    mask = make_mask(rng, kind, heads, t, t)
    settings = Settings(mesh=make_mesh(2, 4, 1), kernel="kernel", interpret=True, differentiable=True)

    def attend(q, k, v, settings=dataclasses.replace(settings, differentiable=False)):
        with using(settings):
            return api.attention(q, k, v, mask=mask, scale=0.1)

    def back(q, k, v, of_out):
        return jax.vjp(jax.checkpoint(functools.partial(attend, settings=settings)), q, k, v)[1](of_out)

    found = BACK(lambda *given: (attend(*given[:3]), *back(*given)))(q, k, v, of_out)
    expected = attention_formula(q, k, v, 0.1, mask)[0], *gradients_formula(q, k, v, of_out, 0, 0.1, mask)[:3]
    for ours, theirs in zip(found, expected, strict=True):
        assert relative(ours, theirs) < 3e-6  # measured: 5e-7
    with using(dataclasses.replace(settings, kernel="auto", platform="tpu", generation="v6e", interpret=True)):
        jax.eval_shape(functools.partial(api.attention, scale=0.1), *map(jnp.asarray, (q, k, v)))
    assert any(how.kernel == "kernel" and how.q == q.shape for how in api.explain())


@pytest.mark.parametrize("dim, dtype_bytes", [(64, 2), (128, 2), (512, 2), (128, 4)])
def test_blocks_fit_every_length(dim, dtype_bytes):
    for tokens in (1, 77, 1300, 14040, 75600, 250000):
        shape = Shape(tokens, tokens, dim, dim, dtype_bytes)
        for generation in ("v5e", "v7x"):
            blocks = blocks_of(shape)
            assert chunk_of(blocks, shape, generation) >= 1 and blocks.queries % blocks.piece == 0
            assert blocks.keys % blocks.bound.keys == 0 and blocks.keys < tokens + 256


def of_linear(activation, gated, split, kept, draw):
    """`split`: the axis of w over `tp`, of a mesh then. `kept`: what follows is not in the kernel."""
    x, w, b = draw(2, 150, 256), draw(512, 256), draw(512)
    more = (draw(2, 1, 512), draw(2, 150, 512)) if gated else (None, None)
    mesh = None if split is None else make_mesh((*jax.devices(),), (2, 2, 2))
    settings = dataclasses.replace(KERNELS, mesh=mesh)
    run = lambda x, w, b, *more: linear.linear(x, w, b, activation, settings, *more, split=split)  # noqa: E731
    back = jax.make_jaxpr(jax.grad(lambda x: run(x, w, b, *more).astype(jnp.float32).sum()))(x)
    assert str(back).count("pallas_call") == (2 if kept else 3)  # there, again before an activation, and back to x
    return run, functools.partial(linear._plain, activation), (x, w, b, *more)


def of_rotary(draw):
    angle = np.repeat(np.random.default_rng().uniform(-9, 9, (300, 64)), 2, 1)
    tables = tuple(jnp.asarray(f(angle), jnp.float32) for f in (np.cos, np.sin))
    norm = functools.partial(Norm, eps=1e-6)
    run = lambda x, w: rotary.normed_and_rotated(x, norm(w), tables, KERNELS)  # noqa: E731
    return run, lambda x, w: rotary._plainly(x, norm(w), tables, False), (draw(1, 300, 256), draw(256))


def of_norm(draw):
    norm = functools.partial(Norm, eps=1e-6, centred=True)
    how = {"names": ("times", "times", "plus"), "own": 1, "eps": 1e-6, "centred": True, "wide": True}
    run = lambda x, w, *steps: normed(x, norm(w), KERNELS, (("times", steps[0]), ("plus", steps[1])), True)  # noqa: E731
    plain = lambda x, w, *steps: _plainly(x, w[None, None], *steps, **how)  # noqa: E731
    return run, plain, (draw(2, 300, 320), draw(320), draw(2, 1, 320), draw(1, 1, 320))


def of_convolution(edge, repeated, doubled, draw):
    how = {"edge": edge, "repeated": repeated, "doubled": doubled}
    run = functools.partial(convolution.convolution, settings=KERNELS, **how)
    plain = functools.partial(convolution._plain, wide=False, **how)
    return run, plain, (draw(1, 18, 3, 32, 64), draw(3, 2, 3, 128, 64), draw(128))


@pytest.mark.parametrize(
    "case",
    [
        functools.partial(of_linear, "gelu_tanh", False, None, False),
        functools.partial(of_linear, "gelu_tanh", False, None, True),
        functools.partial(of_linear, "", True, 0, True),
        functools.partial(of_linear, "", False, 1, True),
        of_rotary,
        of_norm,
        functools.partial(of_convolution, 1, False, False),
        functools.partial(of_convolution, 1, False, True),
        functools.partial(of_convolution, 0, False, False),
        functools.partial(of_convolution, 1, True, False),
    ],
)
def test_other_kernels_have_gradients_of_plain_operations(chips, case, monkeypatch):
    if isinstance(case, functools.partial) and case.args[-1] is True:
        monkeypatch.setattr("diffusers.tpu.kernels.kept.MOVED", 0)
    rng = np.random.default_rng()
    run, plain, given = case(lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16))
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), given)
    weights = jnp.asarray(rng.standard_normal(run(*given).shape), jnp.float32)
    programs = (jax.grad(lambda *x, f=f: (f(*x) * weights).sum(), [*range(len(given))]) for f in (run, plain))
    program = str(jax.make_jaxpr(run)(*given))
    assert "pallas_call" in program and "custom_vjp" in program
    found, expected = (BACK(program)(*x) for program, x in zip(programs, (given, exact)))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        assert relative(ours, theirs) < 5e-3  # measured: at most 2.9e-3


@pytest.mark.parametrize("count, behind, turned", [(4, 0, True), (4, 70, False), (1, 70, True)])
def test_exchanges_go_back(chips, count, behind, turned):
    """Whole numbers, whose products with what comes there and with what comes back have one sum; chips' tokens fill no whole tiles."""
    mesh, rng, exchange = (
        Mesh(np.array(chips[:count]), ("ulysses",)),
        np.random.default_rng(),
        Exchange(count, False, True),
    )
    x, own = (rng.integers(-9, 9, (1, 8, tokens, 64)).astype(np.float32) for tokens in (4 * 150, behind))
    tokens, heads = P(None, None, "ulysses"), P(None, "ulysses")
    on_chips = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    to_heads = on_chips(
        lambda x, own: exchange.to_heads(x, turned, own if behind else None), in_specs=(tokens, heads), out_specs=heads
    )
    to_sequence = on_chips(lambda x: exchange.to_sequence(x, behind), in_specs=heads, out_specs=tokens)
    with using(KERNELS):
        for run, given in ((to_heads, (x, own)), (to_sequence, (np.concatenate([x, own], 2),))):
            there, back = BACK(functools.partial(jax.vjp, run))(*given)
            gradient = rng.integers(-9, 9, there.shape).astype(np.float32)
            found = BACK(lambda gradient: back(gradient))(gradient)  # noqa: B023
            assert [g.shape for g in found] == [g.shape for g in given]
            assert (there * gradient).sum() == sum((a * b).sum() for a, b in zip(given, found)) != 0
    with using(dataclasses.replace(KERNELS, differentiable=False)):
        np.testing.assert_array_equal(to_sequence(to_heads(x, own)), x)


def test_blocks_keep_what_there_is_room_for():
    """Of a block's layers with a gradient that reads them the dearer first; nothing of one that is only added to its input, or cheap."""
    w = [jnp.ones(shape, jnp.bfloat16) for shape in ((64, 256), (256, 96), (96, 64))]

    def step(carry, scale):
        x = jnp.tanh(layer_result(carry[0] + 1, 640))
        for n, layer in enumerate(w):
            x = layer_result(x @ layer * scale, 100 * len(layer))
            x = jnp.tanh(x) if n < 2 else x
        return [carry[0] + x], ()

    carry, blocks = [jnp.ones((2, 50, 64), jnp.bfloat16)], 5
    first, second, third = (2 * 50 * columns * 2 for columns in (256, 96, 64))
    needed = 4 * (first + second + 2 * third) + blocks * third
    with using(KERNELS):
        dear = [second]
        for room, kept in ((first, []), (blocks * second, dear), (blocks * first, dear), (1e9, [*dear, first])):
            policy, taken = kept_by_blocks(step, carry, jnp.bfloat16(1), blocks, KERNELS, needed + room)
            assert taken == blocks * sum(kept)
            back = jax.vjp(jax.checkpoint(step, policy=policy), carry, jnp.bfloat16(1))[1]
            assert sorted(x.nbytes for x in jax.tree.leaves(back) if x.shape in ((2, 50, 256), (2, 50, 96))) == kept
