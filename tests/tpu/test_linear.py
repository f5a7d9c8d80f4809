"""Oracles: float64 for the linear kernel, and upstream's own modules in one process for where it is used."""

import copy
import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

import tiny
from conftest import relative, slow, wide
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from diffusers.models.transformers.transformer_wan_flax import PLAN
from diffusers.tpu import TPUConfig, bridge
from diffusers.tpu.bridge import layers
from diffusers.tpu.chips.devices import SUMMED_BY
from diffusers.tpu.chips.mesh import make_mesh
from diffusers.tpu.kernels import linear, linear_blocks, narrow
from diffusers.tpu.kernels.pallas import round_up
from diffusers.tpu.kernels.settings import Settings, using


KERNEL = Settings(layers="kernel")


ACTIVATIONS = {"": lambda x: x, "silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "gelu": F.gelu}


def draw(*shape, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng().standard_normal(shape), dtype)


def arrays(*tensors) -> list[jax.Array]:
    return [jnp.asarray(bridge.as_numpy(tensor.detach().contiguous())) for tensor in tensors]


def traced(settings, function):
    """A function of torch's tensors as one of arrays, compiled with these settings."""

    def of_arrays(*given):
        with using(settings), bridge.quiet_integers(), bridge.environment():
            return tree_map(lambda tensor: tensor.jax(), function(*map(bridge.to_torch, given)))

    return jax.jit(of_arrays)


def noted(monkeypatch, module, name, what) -> list:
    """What `what` gives of the arguments of each call of a module's function from here on."""
    calls, run = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given, **how: (calls.append(what(*given, **how)), run(*given, **how))[1])
    return calls


def follows(*given, **how) -> list:
    """Of a call of `fast_linear`: its activation, whether it has a gate, and a residual."""
    return [given[3], *(x is not None for x in given[5:7])]


def activated(activation: str, x: np.ndarray) -> np.ndarray:
    return ACTIVATIONS[activation](torch.tensor(x)).numpy()


@pytest.mark.parametrize("activation, bias", [("", True), ("gelu_tanh", False), ("gelu", False), ("silu", True)])
def test_any_number_of_rows(activation, bias):
    """Odd rows, half lanes, few columns, a last block of columns that is not full; both round once before and once after the activation."""
    rng = np.random.default_rng()
    columns = 16 * int(rng.integers(1, 8)) if activation == "gelu" else 64 * int(rng.integers(2, 16))
    rows, depth = int(rng.integers(1, 1500)), 64 * int(rng.integers(2, 8))
    x, w, b = draw(rows, depth), draw(columns, depth), draw(columns) if bias else None
    tile = 16 * int(rng.integers(16, 25))
    blocks = linear_blocks.Blocks(int(rng.choice([1, 2])) * tile, 128 * int(rng.integers(1, 4)), tile)
    run = jax.jit(lambda x, w, b: linear.tpu_linear(x, w, b, activation=activation, blocks=blocks, interpret=True))
    ours = run(x[None], w, b)[0]
    theirs = wide(x) @ wide(w).T + (0 if b is None else wide(b))
    exact, rounded = (activated(activation, x) for x in (theirs, wide(jnp.asarray(theirs, jnp.bfloat16))))
    limit = relative(jnp.asarray(rounded, jnp.bfloat16), exact)
    assert relative(ours, exact) < 1.05 * limit, (rows, columns, depth, blocks)


@pytest.mark.parametrize("generation", ["v5e", "v6e", "v7x", None])
def test_blocks_fit_and_keep_the_units_busy(generation):
    for rows, columns, depth in [(18900, 5120, 5120), (18900, 13824, 5120), (9450, 5120, 13824), (32760, 8960, 1536)]:
        blocks = linear_blocks.choose(rows, columns, depth, generation)
        assert blocks is not None and blocks.rows % blocks.tile == blocks.columns % linear.LANES == 0
        assert blocks.columns * depth <= linear_blocks.MOST_WORK
    for rows in (226, 333, 512, 576, 1024, 1088, 1152):  # padding is no work
        blocks = linear_blocks.choose(rows, 12288, 3072, generation)
        assert blocks is None or round_up(rows, blocks.rows) <= max(linear_blocks.TILE_ROWS, 1.01 * rows)
    # Columns fill whole units of 256.
    for rows, columns, depth in [(8858, 2432, 9728), (47616, 1792, 7168), (4224, 3840, 10240)]:
        blocks = linear_blocks.choose(rows, columns, depth, "v6e", residual=True)
        assert -(-columns // blocks.columns) * round_up(blocks.columns, 256) < 1.06 * columns
    assert linear_blocks.choose(4096, 1280, 1 << 20, generation) is None
    # of FLUX.1's single blocks on v6e-4 the compiler said: 118.9 MiB of 116
    assert linear_blocks.choose(1024, 3072, 15360, "v6e", residual=True) != linear_blocks.Blocks(768, 1024)


@pytest.mark.parametrize("rows, samples", [(1040, 1), (1042, 3), (78, 1)])
def test_samples_whose_last_rows_fill_no_register_stay_apart(monkeypatch, rows, samples):
    """To make their rows one's would be a copy."""
    given = noted(monkeypatch, linear, "tpu_linear", lambda x, *_, **how: x.shape[0])
    x, w = draw(3, rows, 256), draw(256, 256)
    ours, exact = linear.linear(x, w, None, "", KERNEL), wide(x) @ wide(w).T
    assert given == [samples]
    assert relative(ours, exact) <= 1.05 * relative(jnp.asarray(exact, jnp.bfloat16), exact)


@pytest.mark.parametrize("samples, rows, height", [(64, 16, None), (2, 150, 160), (1, 300, 304)])
def test_samples_with_a_gate_each_have_blocks_of_their_own(monkeypatch, samples, rows, height):
    """Of rows that fill no block the layer leaves its gate to the compiler: Latte's frames of each position."""
    given = noted(monkeypatch, linear, "tpu_linear", lambda *_, blocks, **how: blocks.rows)
    x, w, gate, residual = draw(samples, rows, 128), draw(256, 128), draw(samples, 1, 256), draw(samples, rows, 256)
    ours = linear.linear(x, w, None, "", KERNEL, gate, residual)
    assert (given, ours is None) == (([], True) if height is None else ([height], False))
    exact = wide(residual) + wide(gate) * (wide(x) @ wide(w).T)
    assert height is None or relative(ours, exact) < 2 * relative(wide(jnp.asarray(exact, jnp.bfloat16)), exact)


@pytest.mark.parametrize("degrees", [(2, 4, 1), (1, 8, 1), (8, 1, 1)])
def test_over_a_mesh_and_what_is_not_taken(chips, degrees):
    settings = Settings(layers="kernel", mesh=make_mesh(chips, degrees))
    x, w, b = draw(8, 79, 128), draw(256, 128), draw(256)
    run = jax.jit(lambda x, w, b: linear.linear(x, w, b, "silu", settings))
    one = linear.linear(x, w, b, "silu", KERNEL)
    np.testing.assert_array_equal(wide(run(x, w, b)), wide(one))
    refused = [(x[:7], w, b), (x[..., :96], w[:, :96], b), (x.astype(jnp.float32), w, b), (x[0], w, b)]
    fits = [0] if degrees == (1, 8, 1) else []
    for number, (x_, w_, b_) in enumerate(refused):
        assert (linear.linear(x_, w_, b_, "", settings) is None) == (number not in fits), number
    others = Settings(), Settings(layers="xla", platform="tpu", generation="v6e")
    for other in (*others, replace(settings, mesh=make_mesh(chips, (1, 4, 2)))):
        assert linear.linear(x, w, b, "", other) is None


@pytest.mark.parametrize(
    "split, activation, tokens, generation",
    [(0, "silu", 79, None), (1, "", 41, None), (1, "", 79, None), (1, "", 128, None), (1, "", 79, "v5e")],
)
def test_of_a_weight_over_tp(chips, monkeypatch, split, activation, tokens, generation):
    """Each chip of `tp` has columns of the result, or adds to all of them, of many rows in two parts; also where the weight is a layer
    of a stack."""
    monkeypatch.setattr(linear, "LEAST_PART", 16)
    settings = Settings(layers="kernel", mesh=make_mesh(chips, (2, 2, 2)), generation=generation)
    x, w, b = draw(2, tokens, 256), draw(512, 256), draw(512)
    run = jax.jit(lambda x, w, b: linear.linear(x, w, b, activation, settings, split=split))
    text = str(jax.make_jaxpr(run)(x, w, b))
    assert (SUMMED_BY in text) == (split == 1 and tokens > 41) and ("ppermute" in text) == (generation == "v5e")
    exact = wide(x) @ wide(w).T + wide(b)
    exact = exact / (1 + np.exp(-exact)) if activation else exact
    stack = jnp.stack([-w, w, 2 * w]), jnp.int32(1)
    for turned in (False, True):
        how = {"split": split, "turned": turned}
        of_stack = jax.jit(lambda x, w, b, layers: linear.linear(x, w, b, activation, settings, **how, layers=layers))  # noqa: B023
        np.testing.assert_array_equal(wide(of_stack(x, w, b, stack)), wide(run(x, w, b)))
    ours, one = run(x, w, b), linear.linear(x, w, b, activation, KERNEL)
    assert relative(ours, exact) <= (1 + split) * relative(one, exact)  # of two sums each is rounded
    assert linear.linear(x, w, b, "silu", settings, residual=x, split=split) is None


def in_8_bits(x: np.ndarray, kind: str) -> np.ndarray:
    """Rows of x [..., K] rounded to numbers of 8 bits times their scale. Numbers halfway between two go either way in other than float32."""
    dtype, most = narrow.TYPES[kind]
    largest = np.abs(x).max(-1, keepdims=True)
    scaled = x.astype(np.float32) * (np.float32(most) / largest.astype(np.float32))
    rounded = np.round(scaled) if kind == "int8" else scaled.astype(dtype)
    return rounded.astype(np.float64) * (largest / most)


@pytest.mark.parametrize("degrees, split", [(None, None), ((2, 4, 1), None), ((2, 2, 2), 0), ((2, 2, 2), 1)])
@pytest.mark.parametrize("kind", narrow.TYPES)
def test_products_of_8_bits(chips, monkeypatch, kind, degrees, split):
    """By the kernels and by plain operations; of inputs over `tp` each chip has scales of its own, which are no worse. The stack that a
    weight is a layer of is not read."""
    monkeypatch.setattr(narrow, "BYTES_OF_A_WEIGHT", 0)
    monkeypatch.setattr(linear, "LEAST_PART", 32)
    rng, mesh = np.random.default_rng(), degrees and make_mesh(chips, degrees)
    tokens, columns, depth = int(rng.integers(40, 400)), 128 * int(rng.integers(2, 6)), 256 * int(rng.integers(1, 4))
    x, w, b, residual = draw(2, tokens, depth), draw(columns, depth), draw(columns), draw(2, tokens, columns)
    exact, sums = wide(x) @ wide(w).T + wide(b), in_8_bits(wide(x), kind) @ in_8_bits(wide(w), kind).T + wide(b)
    stack = jnp.stack([-w, w]), jnp.int32(1)
    for layers in ("kernel", "xla"):
        settings = Settings(layers=layers, linear=kind, mesh=mesh)
        run = jax.jit(lambda x, w, b, *more: linear.linear(x, w, b, "", settings, *more, split=split, layers=stack))
        ours, loss = run(x, w, b), relative(sums, exact)
        assert relative(ours, exact) < 1.01 * np.hypot(loss, 2**-8), (layers, tokens, columns, depth)
        if split != 1:
            assert relative(ours, sums) < 1.1 * relative(jnp.asarray(sums, jnp.bfloat16), sums) + loss / 100
        added = run(x, w, b, jnp.ones((1, 1, columns), jnp.float32), residual)
        assert relative(added, sums + wide(residual)) < 2**-7 + loss * (split == 1)
    plain = replace(settings, layers="auto")
    assert linear.linear(x[:, :1], w, b, "", plain) is None  # what conditions all tokens stays in bfloat16
    monkeypatch.undo()
    assert linear.linear(x, w, b, "", plain) is None  # as few tokens do


def test_numbers_that_a_chip_does_not_multiply_are_refused():
    for generation, kind, other in (("v6e", "int8", "fp8"), ("v5e", "int8", "fp8"), ("v7x", "fp8", "int8")):
        Settings(platform="tpu", generation=generation, linear=kind)
        with pytest.raises(ValueError, match=f"'bfloat16' or '{kind}' on {generation}, got '{other}'"):
            Settings(platform="tpu", generation=generation, linear=other)
    with pytest.raises(ValueError, match="linear to be one of"):
        TPUConfig(linear="int4")


@pytest.mark.parametrize("kernel", [False, slow(True)])
def test_products_of_8_bits_of_a_denoiser(attach, own_store, monkeypatch, kernel):
    """Against upstream with the same rounding, computed in float64; asked for no more, values are those of before to the last bit."""
    monkeypatch.setattr(narrow, "BYTES_OF_A_WEIGHT", 0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 64, "ffn_dim": 384, "num_layers": 2, "text_dim": 128}
    model = WanTransformer3DModel(patch_size=(1, 2, 2), rope_max_seq_len=32, **sizes).eval().bfloat16()
    arguments = torch.randn(2, 16, 3, 8, 16).bfloat16(), torch.tensor([900, 20]), torch.randn(2, 24, 128).bfloat16()
    how = {"plan": PLAN, "layers": "kernel" if kernel else "auto"}
    plain, rounded = F.linear, []

    def of_8_bits(x, w, b=None):
        if x.ndim < 3 or min(w.shape) < 128:
            return plain(x, w, b)
        rounded.append(w.shape)
        x_, w_ = (torch.tensor(in_8_bits(wide(t.bfloat16()), "int8")) for t in (x, w))
        return (x_ @ w_.T + b.double()).to(x.dtype)

    def found(**more) -> torch.Tensor:
        runner = attach(model, 2, 4, 1, **how, **more)
        ours = model(*arguments, return_dict=False)[0]
        runner.detach()
        return ours

    with torch.no_grad():
        before, ours, after = found(), found(linear="int8"), found()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(F, "linear", of_8_bits)
            exact = copy.deepcopy(model).float()(*(a.float() for a in arguments), return_dict=False)[0]
            theirs = model(*arguments, return_dict=False)[0]
    assert len(rounded) == 2 * (2 * 10 + 2)  # blocks of ten, and the text's two
    assert torch.equal(before, after) and not torch.equal(before, ours)
    assert relative(ours, exact) < 1.25 * relative(theirs, exact)


# Upstream's words for what follows a layer, and what the layer does with it: its activation, its gate and residual. None: neither.
FOLLOWING = {
    "silu": (lambda y, h, g: F.silu(y), ["silu", False, False]),
    "lumina's silu": (lambda y, h, g: F.silu(y.float()).type_as(y), ["silu", False, False]),
    "gelu_tanh": (lambda y, h, g: F.gelu(y, approximate="tanh"), ["gelu_tanh", False, False]),
    "gelu": (lambda y, h, g: F.gelu(y), ["gelu", False, False]),
    "wan": (lambda y, h, g: (h.float() + y * g).type_as(h), ["", True, True]),
    "wan's feed-forward": (lambda y, h, g: (h.float() + y.float() * g).type_as(h), ["", True, True]),
    "cross-attention": (lambda y, h, g: h + y, ["", False, True]),
    "attention": (lambda y, h, g: y / 1.0 + h, ["", False, True]),
    "dit": (lambda y, h, g: h + g.bfloat16() * y, ["", True, True]),
    "to": (lambda y, h, g: (y * g + h.float()).to(torch.bfloat16), ["", True, True]),
    "in float32": (lambda y, h, g: h.float() + y * g, None),
    "scaled": (lambda y, h, g: torch.add(h, y, alpha=2), None),
    "another gate": (lambda y, h, g: (h.float() + y * h.float()).type_as(h), None),
    "written to": (lambda y, h, g: (h.float() + y.mul_(2) * g).type_as(h), None),
}


@pytest.mark.parametrize(
    "words, degrees", [*((words, None) for words in FOLLOWING), ("wan", (2, 4, 1)), ("cross-attention", (2, 4, 1))]
)
@torch.no_grad()
def test_an_activation_a_gate_and_a_residual_after_a_layer_are_the_layers(chips, monkeypatch, degrees, words):
    """Upstream's operations in float64; a gate of each sample, rows that fill no block and that the chips do not divide.

    The layer's own result is dead code where it does what follows.
    """
    follow, second = FOLLOWING[words]
    asked = noted(monkeypatch, layers, "fast_linear", follows)
    layer = torch.nn.Linear(128, 256).bfloat16()
    x, h, g = torch.randn(2, 150, 128).bfloat16(), torch.randn(2, 150, 256).bfloat16(), torch.randn(2, 1, 256)
    given = arrays(x, layer.weight, layer.bias, h, g)
    settings = Settings(layers="kernel", mesh=degrees and make_mesh(chips, degrees))
    theirs, exact = follow(layer(x), h, g), follow(layer.double()(x.double()), h.double(), g.double())
    ours = traced(settings, lambda x, w, b, h, g: follow(F.linear(x, w, b), h, g))(*given)
    assert asked == [[""], *([] if second is None else [second])]
    assert ours.dtype == (jnp.float32 if words == "in float32" else jnp.bfloat16)
    assert relative(ours, exact) < 1.05 * relative(theirs, exact)


@pytest.mark.parametrize("degrees, own", [(None, 256), (None, 192), ((2, 4, 1), 128)])
@torch.no_grad()
def test_a_layer_of_channels_side_by_side_reads_them_where_they_are(chips, monkeypatch, degrees, own):
    """As FLUX's blocks of one stream: attention's beside the feed-forward's. Of what fills no whole lanes they are put together."""
    asked = noted(monkeypatch, linear, "tpu_linear", lambda *_, beside, **how: beside is not None)
    layer, tokens = torch.nn.Linear(own + 320, 256).bfloat16(), int(np.random.default_rng().integers(9, 300))
    h, first, last = (torch.randn(2, tokens, size).bfloat16() for size in (256, own, 320))
    g = torch.randn(2, 1, 256).bfloat16()
    settings = Settings(layers="kernel", mesh=degrees and make_mesh(chips, degrees))

    def run(w, b, first, last, h, g):
        return h + g * F.linear(torch.cat([first, last], dim=2), w, b)

    given = layer.weight, layer.bias, first, last, h, g
    ours, theirs, exact = traced(settings, run)(*arrays(*given)), run(*given), run(*(t.double() for t in given))
    assert relative(ours, exact) < 1.05 * relative(theirs, exact)
    assert set(asked) == {own % 128 == 0}


def halves(y, other):
    values, gate = y.chunk(2, -1)
    return values * F.gelu(gate)


def packed(y, other):
    gate, values = y.split([128, 128], dim=-1)
    return F.silu(gate) * values


def written(y, other):
    values, gate = y.chunk(2, -1)
    gate.mul_(2)
    return values * F.gelu(gate)


GATED = {  # upstream's words for a layer's product with an activated one, and whether the kernel computes it
    "geglu": (halves, True),
    "swiglu, gate first": (packed, True),
    "two layers": (lambda y, other: F.silu(other) * y, True),
    "lumina's": (lambda y, other: F.silu(y.float()).to(y.dtype) * other, True),
    "written to": (written, False),
    "by itself": (lambda y, other: y * F.silu(y), False),
    "slices": (lambda y, other: y[..., :128] * F.silu(y[..., 128:]), True),
    "quarters": (lambda y, other: y[..., :64] * F.silu(y[..., 64:128]), False),
}


@pytest.mark.parametrize(
    "words, degrees",
    [*itertools.product(GATED, [None, (2, 4, 1)]), *((w, (2, 2, 2)) for w in ("two layers", "slices"))],
)
@torch.no_grad()
def test_a_layer_times_another_ones_activation(chips, monkeypatch, words, degrees):
    """Upstream's operations in float64; weights by themselves and of a stack; frames beside frames, whose rows change places."""
    follow, taken = GATED[words]
    split = 0 if degrees == (2, 2, 2) else None  # outputs over `tp`
    taken = taken and (split is None or words == "two layers")
    found = noted(monkeypatch, linear, "tpu_linear", lambda *_, factor, **how: factor is not None)
    rng, layer, other = np.random.default_rng(), *(torch.nn.Linear(320, 256).bfloat16() for _ in range(2))
    shape = (2, int(rng.integers(9, 300))) if degrees else (16, int(rng.integers(9, 40)))
    x = torch.randn(*shape, 320).bfloat16()
    settings = Settings(layers="kernel", mesh=degrees and make_mesh(chips, degrees))

    def run(stacked, x, *of_layers):
        def lying(w):
            stack = jnp.stack([-w.jax(), w.jax(), 2 * w.jax()]), jnp.int32(1)
            return layers.lying(w, split, stack if stacked else None)

        w, b, v, c = (lying(t) if t.ndim == 2 else t for t in of_layers)
        return follow(F.linear(x, w, b), F.linear(x, v, c))

    theirs = follow(layer(x), other(x))
    exact = follow(layer.double()(x.double()), other.double()(x.double()))
    given = arrays(x, *layer.bfloat16().parameters(), *other.bfloat16().parameters())
    for stacked in (False, True):
        found.clear()
        ours = traced(settings, functools.partial(run, stacked))(*given)
        assert any(found) == taken
        assert relative(ours, exact) < 1.05 * relative(theirs, exact), stacked


@pytest.mark.parametrize(
    "degrees, tokens",
    [((2, 4, 1), (3, 8, 16)), slow((1, 1, 1), (1, 6, 10)), slow((1, 8, 1), (1, 6, 10))],
)
def test_wans_transformer_by_all_kernels(attach, own_store, monkeypatch, degrees, tokens):
    """Heads of 128 and bfloat16, as the published ones. On the last mesh tokens do not divide."""
    sizes = {"num_attention_heads": 4, "attention_head_dim": 128, "ffn_dim": 768, "num_layers": 2, "text_dim": 128}
    model = WanTransformer3DModel(patch_size=(1, 2, 2), rope_max_seq_len=32, **sizes).eval()
    model = tiny.with_uneven_norms(model).bfloat16()
    taken = noted(monkeypatch, linear, "tpu_linear", lambda x, w, *_, **how: w.shape)
    arguments = torch.randn(2, 16, *tokens).bfloat16(), torch.tensor([900, 20]), torch.randn(2, 24, 128).bfloat16()
    with torch.no_grad():
        theirs = model(*arguments, return_dict=False)[0]
        exact = copy.deepcopy(model).float()(*(a.float() for a in arguments), return_dict=False)[0]
        runner = attach(model, *degrees, plan=PLAN, attention="kernel", layers="kernel")
        ours = model(*arguments, return_dict=False)[0]
        runner.detach()
    assert relative(ours, exact) < 1.25 * relative(theirs, exact)
    assert (768, 512) in taken  # the feed-forward's first
    assert {type(m.processor) for m in model.modules() if hasattr(m, "processor")} == {WanAttnProcessor}
