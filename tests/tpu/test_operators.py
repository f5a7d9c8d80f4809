"""Oracle: torch on the host, the same operation on the same numbers. One row for each of our operators and rules."""
# ruff: noqa: F811

import copy
from operator import attrgetter

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as flex

from conftest import relative
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.tpu import bridge
from diffusers.tpu.bridge import layers
from diffusers.tpu.kernels.settings import Settings
from test_bridge import env, on_chip, on_host  # noqa: F401
from test_linear import traced


pytestmark = pytest.mark.usefixtures("idioms")  # as users have them


X, Y, WIDE = (5, 4), (2, 3), (2, 3, 11, 7)
TRUTHS = torch.tensor([True, False, True, False]), torch.tensor([True, True, False, False])
PLACES, COUNTS = torch.tensor([2, 0]), torch.tensor([2, 0, 3])
FILTERED = {"mode": "bicubic", "antialias": True}
# A function, its inputs (shapes of normal draws, or tensors) and the largest relative error; 0: every bit, and the dtype.
OPERATORS = {
    "index with a list": (lambda x: x[1:4][[0, -1]], [X], 0),
    "index with a tensor": (lambda x, at: x[1:4][at], [X, PLACES], 0),
    "index with a list behind": (lambda x: x[1:4][:, [3, 1]], [X], 0),
    "index with a tensor and a slice": (lambda x, at: x[1:4][at, 1:3], [X, PLACES], 0),
    "index with truths": (lambda x, at: x[:4][at], [X, TRUTHS[0]], 0),
    "nearest": (lambda x: F.interpolate(x.bfloat16(), mode="nearest", scale_factor=(2.0, 1.5)), [WIDE], 0),
    "nearest, exact": (lambda x: F.interpolate(x, mode="nearest-exact", size=(7, 3)), [WIDE], 0),
    "nearest, doubled": (lambda x: F.interpolate(x, mode="nearest", scale_factor=2.0), [WIDE], 0),
    "bilinear with a filter": (lambda x: F.interpolate(x, size=(4, 13), mode="bilinear", antialias=True), [WIDE], 2e-6),
    "bicubic with a filter": (lambda x: F.interpolate(x, scale_factor=(0.4, 1.7), **FILTERED), [WIDE], 2e-6),
    "bicubic, corners": (lambda x: F.interpolate(x, size=3, align_corners=True, **FILTERED), [WIDE], 2e-6),
    "pad, constant": (lambda x: F.pad(x, (1, 2, 0, 1), "constant", 2.0), [WIDE], 0),
    "pad, replicate": (lambda x: F.pad(x, (1, 2, 0, 1), "replicate"), [WIDE], 0),
    "pad, reflect": (lambda x: F.pad(x, (1, 2, 0, 1), "reflect"), [WIDE], 0),
    "softmax": (lambda x: torch.softmax(x.bfloat16(), dim=-1, dtype=torch.float32), [X], 1e-6),
    "softmax, functional": (lambda x: F.softmax(x.bfloat16(), dim=-1, dtype=torch.float32), [X], 1e-6),
    "sum of truths": (lambda x, y: x + y, TRUTHS, 0),
    "sum of a truth": (lambda x: True + x[0], TRUTHS[:1], 0),
    "running sum in place": (lambda x: x.clone().cumsum_(-1), [Y], 1e-6),
    "sum of truths in place": (lambda x, y: x.clone().add_(y), TRUTHS, 0),
    "copy, spread": (lambda x, y: x.clone().copy_(y[0]), [Y, Y], 0),
    "a number beside bfloat16": (lambda x, y: x.bfloat16() * y[0, 0] + torch.where(x > 0, x.bfloat16(), y[0, 1]), [Y, Y], 0),
    "product of a number": (lambda x: torch.einsum("ij,->ij", x, torch.tensor(2.0)), [Y], 0),
    "list of places written to": (lambda x: (y := x.clone()).__setitem__([0, 2], 1) or y, [X], 0),
    "means of windows, ends cut": (lambda x: F.avg_pool2d(x, 2, stride=2, ceil_mode=True), [WIDE], 1e-6),
    "means of windows, padded": (lambda x: F.avg_pool2d(x, (3, 2), 3, 1, ceil_mode=True), [WIDE], 1e-6),
    "means of windows, padding apart": (lambda x: F.avg_pool2d(x, 3, (3, 2), 1, True, count_include_pad=False), [WIDE], 1e-6),
    "convolution, transposed, in groups": (lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, groups=3), [(2, 6, 5, 4), (6, 2, 3, 3), (6,)], 1e-6),
    "attention to nothing": (F.scaled_dot_product_attention, [(1, 2, 5, 8), *[(1, 2, 0, 8)] * 2], 0),
    "repeat": (lambda x: x.repeat_interleave(3, dim=1), [Y], 0),
    "repeat, rows that end within a register": (lambda x: x.repeat_interleave(2, dim=-1), [(2, 3, 131)], 0),
    "repeat, flat": (lambda x: x.repeat_interleave(2), [Y], 0),
    "repeat by counts": (lambda x, n: x.repeat_interleave(n, dim=1), [Y, COUNTS], 0),
    "repeat by counts, sized": (lambda x, n: x.repeat_interleave(n, dim=1, output_size=5), [Y, COUNTS], 0),
    "attention of one batch to several": (F.scaled_dot_product_attention, [(1, 1, 2, 5, 8), *[(2, 3, 2, 7, 8)] * 2], 1e-6),
    "attention by a mask, and causal": (lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, is_causal=True), [*[(1, 2, 5, 8)] * 3, (5, 5)], 1e-6),
    "attention of five axes, a mask of four": (F.scaled_dot_product_attention, [(2, 2, 3, 4, 8), *[(2, 2, 3, 6, 8)] * 2, (2, 3, 4, 6)], 1e-6),
    "convolution, patches side by side": (  # of odd sizes: what is left over at the ends is not read
        lambda x, w, b: F.conv3d(x, w, b, stride=(1, 2, 3)), [(2, 3, 4, 7, 6), (5, 3, 1, 2, 3), (5,)], 1e-6
    ),
    "pairs turned as complex numbers": (
        lambda x, y: torch.view_as_real(torch.view_as_complex(x.reshape(2, 3, 5, -1, 2)) * torch.view_as_complex(y)).flatten(3),
        [(2, 3, 5, 8), (2, 3, 1, 4, 2)], 1e-6,
    ),
    "gather of rows": (lambda x, at: x.gather(1, at.expand(2, 7, 5)), [(2, 3, 5), torch.tensor([0, 2, 1, 1, 0, 2, 2])[None, :, None]], 0),
    "gather of repeated rows": (lambda x, at: x.gather(1, at.int().repeat(2, 1, 5).to(torch.int64)), [(2, 3, 5), torch.tensor([0, 2, 1, 1])[None, :, None]], 0),
    "gather of other rows": (lambda x, at: x.gather(1, at.repeat(2, 2, 1)), [(2, 3, 5), torch.tensor([[[0, 2, 1, 1, 0]]])], 0),
    "gather": (lambda x, at: x.gather(-1, at), [(2, 3, 5), torch.tensor([[[0, 4]] * 3, [[3, 1]] * 3])], 0),
    "take along an axis": (lambda x, at: torch.take_along_dim(x, at[None], 1), [(2, 3, 5), torch.tensor([[0, 2, 1, 1, 0]])], 0),
    "values in another's dtype": (lambda x: x.bfloat16().new_tensor([[1, 2.5]]), [X], 0),
    "take of all": (lambda x, at: x.take_along_dim(at), [Y, PLACES], 0),
    "places in sorted rows": (lambda x: torch.searchsorted(x.sort(-1)[0], x, right=True).int(), [(2, 3, 5)], 0),
    "axes changed in place": (lambda x: x.clone().transpose_(0, 1).unsqueeze_(1).squeeze_(1).flatten(), [Y], 0),
    "axes of a view changed in place": (lambda x: ((y := x.clone()), y[1:].unsqueeze_(0).squeeze_().mul_(2))[0], [Y], 0),
    "quantiles": (lambda x, y: x.quantile(y.sigmoid(), dim=1), [Y, (2,)], 1e-6),
    "spectrum": (lambda x, w: torch.view_as_real(torch.stft(x, 8, 3, window=w, return_complex=True)), [(2, 40), (8,)], 1e-6),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (7,), w, b, 1e-6), [WIDE, (7,), (7,)], 1e-6),
    "layer norm, plain": (lambda x: F.layer_norm(x, (7,)), [WIDE], 1e-6),
    "RMS norm": (lambda x, w: F.rms_norm(x, (7,), w, 1e-6), [WIDE, (7,)], 1e-6),
    "RMS norm, own epsilon": (lambda x: F.rms_norm(x, (7,)), [WIDE], 1e-6),
    "group norm": (lambda x, w, b: F.group_norm(x, 3, w, b, 1e-6), [WIDE, (3,), (3,)], 1e-6),
}  # fmt: skip


NUMBERS, SQUARE = torch.arange(12).reshape(4, 3), (3, 3)
REFUSED = {  # what torchax or JAX computes all the same
    "a layer of whole numbers": (F.linear, [NUMBERS, SQUARE]),
    "a layer of one entry": (F.linear, [(4, 1), SQUARE]),
    "a product with whole numbers": (torch.matmul, [(2, 4), NUMBERS]),
    "products with whole numbers": (torch.bmm, [(1, 2, 4), NUMBERS[None]]),
    "a sum of products with whole numbers": (torch.einsum, ["ab,bc->ac", (2, 4), NUMBERS]),
    "truths as places": (F.embedding, [TRUTHS[0], SQUARE]),
    "a norm of another length": (lambda x: F.layer_norm(x, (5,)), [(4, 1)]),
    "a place beyond an axis": (lambda x: x[:, 3], [SQUARE]),
    "steps back": (lambda x: x[::-1], [SQUARE]),
    "an RMS norm of another length": (lambda x: F.rms_norm(x, (5,)), [(4, 1)]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_ends_in_its_error_in_a_trace_too(env, name):
    function, inputs = REFUSED[name]
    given = [torch.randn(x) if isinstance(x, tuple) else x for x in inputs]
    with pytest.raises((RuntimeError, IndexError, ValueError)) as theirs:
        function(*given)
    tensors = [x for x in given if isinstance(x, torch.Tensor)]

    def run(*arrays):
        there = map(bridge.to_torch, arrays)
        function(*(next(there) if isinstance(x, torch.Tensor) else x for x in given))

    for call in (run, jax.jit(run)):
        with env, pytest.raises(type(theirs.value)) as ours:
            call(*map(bridge.as_numpy, tensors))
        assert str(ours.value) == str(theirs.value)


def test_axes_that_a_view_depends_on_are_not_changed_in_place(env):
    x = on_chip(torch.randn(X)).clone()
    rows = x[1:]
    with pytest.raises(NotImplementedError, match="views of it"):
        x.t_()
    assert torch.equal(on_host(rows), on_host(x)[1:])


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(env, name):
    function, given, limit = OPERATORS[name]
    tensors = [torch.randn(one) if isinstance(one, tuple) else one for one in given]
    ours, theirs = function(*map(on_chip, tensors)), function(*tensors)
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    if limit == 0:
        assert torch.equal(on_host(ours), theirs)
    else:
        assert relative(on_host(ours), theirs) < limit


ROUNDED = {
    # JAX's own, rounding inside: silu 1.5 times, tanh-gelu 1.3 times the error of rounding once; torchax's norms 2 times.
    **dict.fromkeys([F.silu, F.gelu, torch.sigmoid, torch.nn.SiLU()], 1.01),
    (lambda x: F.gelu(x, approximate="tanh")): 1.01,
    (lambda x: x.softmax(-1)): 1.01,
    (lambda x: F.layer_norm(x, x.shape[-1:], eps=1e-6)): 1.05,
    (lambda x: F.rms_norm(x / 64, x.shape[-1:])): 1.05,  # squares below bfloat16's own epsilon
}


@pytest.mark.parametrize("function", ROUNDED)
def test_functions_of_bfloat16_round_once(env, function):
    x = torch.randn(40, 50).bfloat16() * 3
    exact = function(x.double())
    assert relative(on_host(function(on_chip(x))), exact) < ROUNDED[function] * relative(exact.bfloat16(), exact)


@pytest.mark.parametrize("name", ["sum", "mean", "nansum", "linalg.vector_norm", "norm", "cumsum"])
def test_reductions_in_the_dtype_asked_for(env, name):
    """Of bfloat16: 183 ones are 183 in int32, and an index. Bytes add up to more than one holds."""
    function, x = attrgetter(name)(torch), (torch.rand(3, 183) < 0.9).bfloat16()
    for asked in (torch.float32, None, *([torch.int32] if "sum" in name else [])):
        for how in ({"dim": 1}, {} if name != "cumsum" else {"dim": 0}):
            ours, theirs = function(on_chip(x), **how, dtype=asked), function(x, **how, dtype=asked)
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            exact = theirs if asked else function(x.double(), **how)  # torch's own bfloat16 is off by a rounding more
            assert relative(on_host(ours), exact) < (1e-6 if asked else 4e-3)
    if "sum" in name:
        x = torch.randint(100, 256, (3, 183), dtype=torch.uint8)
        assert torch.equal(on_host(function(on_chip(x), dim=1)).long(), function(x, dim=1))


PRODUCTS = [
    (torch.nn.Linear(48, 24), (3, 7, 48)),
    (torch.nn.Conv2d(6, 8, 3, padding=1), (2, 6, 9, 7)),
    (torch.nn.Conv3d(6, 8, (3, 1, 1), stride=(2, 1, 1), groups=2), (1, 6, 5, 4, 6)),
    (torch.nn.Conv1d(6, 8, 3, padding="same", dilation=2, bias=False), (2, 6, 11)),
    (torch.nn.Conv1d(6, 6, 4, groups=6, bias=False), (2, 6, 11)),
    (torch.nn.Conv2d(6, 6, (3, 5), padding=(1, 2), groups=6), (2, 6, 9, 7)),
    (torch.nn.ConvTranspose2d(6, 8, 4, stride=2, padding=1), (2, 6, 5, 4)),
]


@pytest.mark.parametrize("module, shape", PRODUCTS)
def test_products_round_once(env, module, shape):
    module, x = module.bfloat16().requires_grad_(False), torch.randn(shape).bfloat16()
    exact = copy.deepcopy(module).double()(x.double())

    def found(dtype):
        weights = {name: on_chip(w) for name, w in module.to(dtype).named_parameters()}
        return on_host(torch.func.functional_call(module, weights, on_chip(x.to(dtype))))

    ours = found(torch.bfloat16)
    assert ours.dtype == torch.bfloat16 and relative(ours, exact) < 1.05 * relative(exact.bfloat16(), exact)
    assert relative(found(torch.float32), exact) < 1e-6


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("pad", [(1, 2), (1, 0, 2, 1), (0, 1, 0, 0, 2, 0)])
def test_a_convolution_does_the_padding_before_it(env, pad, written):
    """Unless the padded tensor was written to in between."""
    x, conv = torch.randn(1, 3, 5, 6, 7), torch.nn.Conv3d(3, 4, (2, 3, 3), padding=(0, 1, 0))

    def run(x, weight, bias):
        x = F.pad(x, pad)
        if written:
            x[:, :, -1] = 3.0
        return F.conv3d(x, weight, bias, padding=conv.padding)

    with torch.no_grad():
        ours = on_host(run(*(on_chip(t.detach()) for t in (x, conv.weight, conv.bias))))
        assert relative(ours, run(x, conv.weight, conv.bias)) < 1e-6


def test_vmap_of_device_tensors(env):
    def rule(row, column, shift):
        return (row // 3 >= column) & row.new_ones((), dtype=torch.bool) | (column < shift)

    mapped = torch.vmap(torch.vmap(rule, in_dims=(None, 0, None)), in_dims=(0, None, None), out_dims=1)
    rows, columns, shift = torch.arange(12), torch.arange(5), torch.tensor(2)
    assert torch.equal(on_host(mapped(on_chip(rows), on_chip(columns), shift)), mapped(rows, columns, shift))


def test_flex_attention_is_of_the_entries_that_blocks_and_their_rule_leave(env):
    q, k, v = (torch.randn(1, 2, n, 16) for n in (100, 150, 150))
    made, seen = flex.create_block_mask, torch.arange(100)[:, None] * 9 >= torch.arange(150) * 7
    by_rule = made(lambda b, h, i, j: i * 9 >= j * 7, None, None, 100, 150, device=on_chip(q).device, BLOCK_SIZE=32)
    at, count = torch.tensor([[[[1, 0, 2], [2, 1, 0]]]]).int(), torch.tensor([[[1, 2]]]).int()
    parts = map(on_chip, (torch.zeros_like(count), at, count, at))
    by_blocks = flex.BlockMask.from_kv_blocks(*parts, BLOCK_SIZE=50)
    blocks = torch.tensor([[False, True, False], [False, True, True]])
    blocks = blocks.repeat_interleave(50, 0).repeat_interleave(50, 1)
    for block_mask, mask in ((by_rule, seen), (by_blocks, blocks), (None, None)):
        ours = flex.flex_attention(*map(on_chip, (q, k, v)), block_mask=block_mask)
        assert relative(on_host(ours), F.scaled_dot_product_attention(q, k, v, mask)) < 1e-6


@pytest.mark.parametrize("lead, mask", [((), "none"), ((3,), "bias"), ((2, 3), "bool"), ((2, 1, 3), "causal")])
def test_scaled_dot_product_attention_in_both_forms(env, lead, mask):
    q, k, v = torch.randn(*lead, 5, 8), torch.randn(*lead, 7, 8), torch.randn(*lead, 7, 8)
    keywords = {"scale": 0.4, "is_causal": mask == "causal"}
    if mask == "bool":
        keywords["attn_mask"] = torch.rand(5, 7) < 0.7
        keywords["attn_mask"][:, 0] = True
    if mask == "bias":
        keywords["attn_mask"] = torch.randn(*lead[:-1], 1, 5, 7)
    theirs = F.scaled_dot_product_attention(q, k, v, **keywords)
    chip = {name: on_chip(x) if isinstance(x, torch.Tensor) else x for name, x in keywords.items()}
    ours = F.scaled_dot_product_attention(query=on_chip(q), key=on_chip(k), value=on_chip(v), **chip)
    assert relative(on_host(ours), theirs) < 1e-6
    positional = (chip.get("attn_mask"), 0.0, keywords["is_causal"])
    aten = torch.ops.aten.scaled_dot_product_attention(on_chip(q), on_chip(k), on_chip(v), *positional, scale=0.4)
    assert relative(on_host(aten), theirs) < 1e-6
    drawn = []
    for where, given in ((lambda x: x, keywords), (on_chip, chip)):
        torch.manual_seed(3)
        dropped = F.scaled_dot_product_attention(*map(where, (q, k, v)), dropout_p=0.4, **given)
        drawn.append((dropped, torch.rand(3)))
    (theirs, after), (ours, ours_after) = drawn
    assert relative(on_host(ours), theirs) < 1e-6 and torch.equal(after, ours_after)


@pytest.mark.parametrize(
    "form, more",
    [
        ("none", {"is_causal": True}), ("none", {"enable_gqa": True, "scale": 0.7}), ("keys", {}), ("keys, of heads", {}),
        ("pairs", {"scale": 0.2}), ("pairs of all", {}), ("a row without keys", {}), ("bias", {"enable_gqa": True}), ("-inf", {}),
    ],
)  # fmt: skip
def test_the_dispatcher_gives_what_native_gives(env, form, more):
    t, s = 5, 7
    q, k, v = torch.randn(2, t, 4, 8), *torch.randn(2, 2, s, 2 if more.get("enable_gqa") else 4, 8)
    keys, pairs = torch.arange(s) < torch.tensor([s - 3, s])[:, None], torch.rand(2, 1, t, s) < 0.6
    pairs[..., 0] = True
    mask = {
        "none": None, "keys": keys, "keys, of heads": keys[:, None, None], "pairs": pairs, "pairs of all": pairs[0, 0],
        "a row without keys": pairs & (torch.arange(t) > 0)[:, None], "bias": torch.randn(2, 4, t, s),
        "-inf": torch.zeros(2, 1, t, s).masked_fill(~pairs, float("-inf")),
    }[form]  # fmt: skip
    theirs = dispatch_attention_fn(q, k, v, attn_mask=mask, backend="native", **more)
    on_chips = (None if x is None else on_chip(x) for x in (q, k, v, mask))
    ours = dispatch_attention_fn(*on_chips, backend="tpu", **more)
    assert ours.shape == theirs.shape and relative(on_host(ours), theirs) < 1e-6


def test_the_dispatcher_refuses_what_the_tpu_cannot(env):
    q, k = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 3, 8)
    x, y = on_chip(q), on_chip(k)
    for given, more, error, words in [
        ((x, y, y), {"attention_kwargs": {"return_lse": True}}, NotImplementedError, "log-sum-exp"),
        ((x, y, y), {"enable_gqa": True}, ValueError, "4 query and 3 key heads, enable_gqa=True"),
        ((x, x, x), {"attn_mask": on_chip(torch.ones(5, 6) > 0)}, ValueError, r"\[2, 4, 5, 5\], got \[5, 6\]"),
        ((x, x, x), {"attn_mask": on_chip(torch.ones(5, 5).int())}, TypeError, "bool or floating .* mask, got int32"),
        ((q, q, q), {}, RuntimeError, "TPU path"),
    ]:
        with pytest.raises(error, match=words):
            dispatch_attention_fn(*given, backend="tpu", **more)


def test_host_tensors_and_device_tensors_meet(env):
    table, x = torch.randn(10), on_chip(torch.randn(10))
    assert torch.equal(on_host(table[on_chip(torch.tensor([3, 7]))]), table[[3, 7]])
    assert relative(on_host(table * x), table * on_host(x)) < 1e-7
    assert relative(on_host(torch.cat([table, x])), torch.cat([table, on_host(x)])) == 0
    # A scalar does not widen the other side, as in torch.
    assert (torch.tensor(2.0) * on_chip(torch.ones(2).bfloat16())).dtype == torch.bfloat16
    target, source = torch.zeros(4), on_chip(torch.arange(4.0))
    target[1:3] = source[1:3]
    assert type(target) is torch.Tensor and target.tolist() == [0, 1, 2, 0]
    assert target.copy_(source).tolist() == [0, 1, 2, 3]
    made = torch.tensor([source[3], source[1]])
    assert type(made) is torch.Tensor and made.dtype == torch.float32 and made.tolist() == [3.0, 1.0]
    out = F.scaled_dot_product_attention(query=table[None, None], key=table[None, None], value=table[None, None])
    assert type(out) is torch.Tensor and out.device.type == "cpu"
    wide = torch.tensor([999.999999999, 1.5], dtype=torch.float64)  # converted before the way to the device
    assert on_host(wide.to(device="jax", dtype=torch.int64)).tolist() == [999, 1]


@pytest.mark.parametrize("rows, parts", [(5, 3), (8, 0)])
def test_rows_that_end_within_a_register_are_put_one_behind_the_other(monkeypatch, rows, parts):
    """As a reshape the TPU's compiler takes minutes for them."""
    monkeypatch.setattr(layers, "MANY_ENTRIES", 1)
    x = np.random.randn(6, rows, 16).astype(np.float32)
    run = traced(Settings(layers="kernel"), lambda x: x.view(2, -1, 16))
    joined = [e for e in run.trace(x).jaxpr.eqns if e.primitive.name == "concatenate"]
    assert [len(e.invars) for e in joined] == ([parts] if parts else [])
    np.testing.assert_array_equal(run(x), x.reshape(2, -1, 16))
