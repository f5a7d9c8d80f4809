"""Oracle: torch on the host, the same operation on the same numbers. One test for each of our operators and rules."""

import copy
import re
from operator import attrgetter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

from conftest import assert_same, relative
from diffusers import AutoencoderKLWan
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.tpu import bridge
from diffusers.tpu.compile import tracing
from diffusers.tpu.kernels.settings import Settings


@pytest.fixture
def env(chips):
    environment = bridge.environment()
    with bridge.quiet_integers(), environment:
        yield environment


def on_chip(t: torch.Tensor) -> torch.Tensor:
    return bridge.to_torch(jnp.asarray(bridge.as_numpy(t)))


def on_host(t: torch.Tensor) -> torch.Tensor:
    return bridge.from_numpy(t.jax())


def test_type_as_leaves_its_tensor_alone(env):
    x, other = on_chip(torch.randn(3)), on_chip(torch.randn(2).bfloat16())
    y = x.type_as(other)
    assert (x.dtype, y.dtype) == (torch.float32, torch.bfloat16)


def test_a_part_of_a_tensor_is_indexed_by_numbers(env):
    x, places = torch.randn(5, 4), torch.tensor([2, 0])
    for key in ([0, -1], places, (slice(None), [3, 1]), (places, slice(1, 3)), torch.tensor([True, False, True])):
        theirs, ours = (tree_map_only(torch.Tensor, put, key) for put in (torch.clone, on_chip))
        assert torch.equal(on_host(on_chip(x)[1:4][ours]), x[1:4][theirs])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("how", [{"scale_factor": 2.0}, {"scale_factor": (2.0, 1.5)}, {"size": (7, 3)}])
def test_nearest_upsampling(env, dtype, mode, how):
    x = torch.randn(2, 3, 5, 6).to(dtype)
    ours = F.interpolate(on_chip(x), mode=mode, **how)
    assert torch.equal(on_host(ours), F.interpolate(x, mode=mode, **how))
    assert on_host(F.conv2d(ours, on_chip(torch.randn(4, 3, 3, 3).to(dtype)))).dtype == dtype


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("how", [{"size": (4, 13)}, {"size": 3}, {"scale_factor": (0.4, 1.7)}])
def test_resizing_with_a_filter(env, mode, how, corners):
    x = torch.randn(2, 3, 11, 7)
    ours = F.interpolate(on_chip(x), mode=mode, antialias=True, align_corners=corners, **how)
    assert relative(on_host(ours), F.interpolate(x, mode=mode, antialias=True, align_corners=corners, **how)) < 2e-6


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-6), (torch.bfloat16, 3e-3)])
@pytest.mark.parametrize("affine", [True, False])
def test_norms(env, dtype, limit, affine):
    # In bfloat16 both round a float32 result once; torchax, rounding every step, is at 6e-3.
    x = (torch.randn(2, 6, 5, 8) * 3 + 1).to(dtype)
    w, b = (torch.randn(8).to(dtype), torch.randn(8).to(dtype)) if affine else (None, None)
    gw, gb = (torch.randn(6).to(dtype), torch.randn(6).to(dtype)) if affine else (None, None)
    put = lambda t: None if t is None else on_chip(t)  # noqa: E731
    rows = [
        (F.layer_norm(on_chip(x), (8,), put(w), put(b), 1e-6), F.layer_norm(x, (8,), w, b, 1e-6)),
        (F.rms_norm(on_chip(x), (8,), put(w), 1e-6), F.rms_norm(x, (8,), w, 1e-6)),
        (F.rms_norm(on_chip(x), (8,), put(w)), F.rms_norm(x, (8,), w)),
        (F.group_norm(on_chip(x), 3, put(gw), put(gb), 1e-6), F.group_norm(x, 3, gw, gb, 1e-6)),
    ]
    for ours, theirs in rows:
        assert ours.dtype == theirs.dtype
        assert relative(on_host(ours).float(), theirs.float()) < limit


@pytest.mark.parametrize(
    "function",
    [F.silu, F.gelu, lambda x: F.gelu(x, approximate="tanh"), torch.sigmoid, lambda x: x.softmax(-1), torch.nn.SiLU()],
)
def test_activations_round_once(env, function):
    # JAX's own, rounding inside: silu 1.5 times, tanh-gelu 1.3 times the error of rounding once.
    x = torch.randn(40, 50).bfloat16() * 3
    exact = function(x.double())
    rounding = relative(exact.bfloat16().float(), exact)
    assert relative(on_host(function(on_chip(x))).float(), exact) < 1.01 * rounding


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "make, shape",
    [
        (lambda bias: torch.nn.Linear(48, 24, bias=bias), (3, 7, 48)),
        (lambda bias: torch.nn.Conv2d(6, 8, 3, padding=1, bias=bias), (2, 6, 9, 7)),
        (lambda bias: torch.nn.Conv3d(6, 8, (3, 1, 1), stride=(2, 1, 1), groups=2, bias=bias), (1, 6, 5, 4, 6)),
        (lambda bias: torch.nn.Conv1d(6, 8, 3, padding="same", dilation=2, bias=bias), (2, 6, 11)),
        (lambda bias: torch.nn.ConvTranspose2d(6, 8, 4, stride=2, padding=1, bias=bias), (2, 6, 5, 4)),
    ],
)
def test_products_round_once(env, make, shape, bias):
    module = make(bias).bfloat16().requires_grad_(False)
    x = torch.randn(shape).bfloat16()
    exact = copy.deepcopy(module).double()(x.double())
    rounding = relative(exact.bfloat16().float(), exact)
    weights = {name: on_chip(w) for name, w in module.named_parameters()}
    ours = on_host(torch.func.functional_call(module, weights, on_chip(x)))
    assert ours.dtype == torch.bfloat16
    assert relative(ours.float(), exact) < 1.05 * rounding
    wide = torch.func.functional_call(
        module.float(), {n: on_chip(w) for n, w in module.named_parameters()}, on_chip(x.float())
    )
    assert relative(on_host(wide), exact) < 1e-6


@pytest.mark.parametrize("mode, value", [("constant", 2.0), ("replicate", None), ("reflect", None)])
def test_other_padding(env, mode, value):
    x = torch.randn(2, 3, 5, 6)
    assert torch.equal(on_host(F.pad(on_chip(x), (1, 2, 0, 1), mode, value)), F.pad(x, (1, 2, 0, 1), mode, value))


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_a_convolution_whose_patches_lie_side_by_side(env, dtype, limit):
    """Of odd sizes: what is left over at the ends is not read."""
    x, w, b = (torch.randn(shape).to(dtype) for shape in ((2, 3, 4, 7, 6), (5, 3, 1, 2, 3), (5,)))
    ours = on_host(F.conv3d(*map(on_chip, (x, w, b)), stride=(1, 2, 3)))
    exact = F.conv3d(*(t.double() for t in (x, w, b)), stride=(1, 2, 3))
    assert ours.dtype == dtype and relative(ours.float(), exact) < limit


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


@pytest.mark.parametrize("function", [torch.softmax, F.softmax])
def test_softmax_in_the_dtype_asked_for(env, function):
    x = torch.randn(4, 50).bfloat16() * 3
    ours, theirs = function(on_chip(x), dim=-1, dtype=torch.float32), function(x, dim=-1, dtype=torch.float32)
    assert ours.dtype == torch.float32 and relative(on_host(ours), theirs) < 1e-6


@pytest.mark.parametrize("name", ["sum", "mean", "nansum", "linalg.vector_norm", "norm", "cumsum"])
@pytest.mark.parametrize("asked", [torch.float32, torch.int32, None])
def test_reductions_in_the_dtype_asked_for(env, name, asked):
    """Of bfloat16: 183 ones are 183 in int32, and an index."""
    if asked == torch.int32 and name in ("mean", "linalg.vector_norm", "norm"):
        return
    function, x = attrgetter(name)(torch), (torch.rand(3, 183) < 0.9).bfloat16()
    for how in ({"dim": 1}, {} if name != "cumsum" else {"dim": 0}):
        ours, theirs = function(on_chip(x), **how, dtype=asked), function(x, **how, dtype=asked)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        exact = theirs if asked else function(x.double(), **how)  # torch's own bfloat16 is off by a rounding more
        assert relative(on_host(ours).double(), exact.double()) < (1e-6 if asked else 4e-3)


@pytest.mark.parametrize("add", [lambda x, y: x + y, lambda x, y: True + x[0], lambda x, y: x.clone().add_(y)])
def test_a_sum_of_truths_is_a_truth(env, add):
    x, y = torch.tensor([True, False, True, False]), torch.tensor([True, True, False, False])
    ours, theirs = add(on_chip(x), on_chip(y)), add(x, y)
    assert ours.dtype == theirs.dtype == torch.bool and torch.equal(on_host(ours), theirs)


def test_a_value_is_cast_to_the_tensor_it_is_written_into(env, recwarn):
    target, value = torch.zeros(2, 4).bfloat16(), torch.randn(2, 2)
    ours = on_chip(target)
    ours[..., 0::2] = on_chip(value)
    target[..., 0::2] = value
    assert torch.equal(on_host(ours), target)
    for dtype, value in ((torch.bool, 1), (torch.int32, 1.7), (torch.float32, True)):
        target = torch.zeros(2, 4, dtype=dtype)
        ours = on_chip(target)
        ours[0, :3], target[0, :3] = value, value
        assert torch.equal(on_host(ours), target)
    assert not [w for w in recwarn if "scatter" in str(w.message)]


WRITES = {
    "set": lambda x, mask, value: x.__setitem__(mask, value),
    "put": lambda x, mask, value: x.copy_(torch.index_put(x, (mask,), value)),
    "add": lambda x, mask, value: x.index_put_((mask,), value, accumulate=True),
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("shape, axes", [((4, 3), 1), ((2, 3, 4), 2), ((5,), 1)])
def test_what_is_written_where_a_mask_holds(env, how, shape, axes):
    """One value for all entries, one for each, and what broadcasts to either."""
    mask = torch.rand(shape[:axes]) < 0.5
    mask[(0,) * axes], mask[(-1,) * axes] = True, True
    entry, number = shape[axes:], int(mask.sum())
    for value in map(torch.randn, ((), (1,), entry, (1, *entry), (number, *entry), (number, *[1] * len(entry)))):
        x = torch.randn(shape)
        ours = on_chip(x.clone())
        WRITES[how](ours, on_chip(mask), on_chip(value))
        WRITES[how](x, mask, value)
        assert relative(on_host(ours), x) < 1e-6, value.shape


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("mask", ["none", "bool", "bias", "causal"])
def test_scaled_dot_product_attention_in_both_forms(env, lead, mask):
    if not lead and mask == "bias":
        lead = (1,)
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
        drawn.append(F.scaled_dot_product_attention(*map(where, (q, k, v)), dropout_p=0.4, **given))
        drawn.append(torch.rand(3))
    assert relative(on_host(drawn[2]), drawn[0]) < 1e-6 and torch.equal(drawn[1], drawn[3])


@pytest.mark.parametrize("lead", [(3,), (2, 3)])
def test_one_batch_of_queries_looks_at_keys_of_several(env, lead):
    q, k, v = torch.randn(*(1,) * len(lead), 2, 5, 8), torch.randn(*lead, 2, 7, 8), torch.randn(*lead, 2, 7, 8)
    ours = F.scaled_dot_product_attention(on_chip(q), on_chip(k), on_chip(v))
    theirs = F.scaled_dot_product_attention(q, k, v)
    assert ours.shape == theirs.shape and relative(on_host(ours), theirs) < 1e-6


def dispatched_mask(form, batch, heads, t, s):
    keys = torch.arange(s) < torch.tensor([s - 3, s])[:, None]
    pairs = torch.rand(batch, 1, t, s) < 0.6
    pairs[..., 0] = True
    return {
        "none": None,
        "[B, S]": keys,
        "[B, 1, 1, S]": keys[:, None, None],
        "[B, 1, T, S]": pairs,
        "[B, N, T, S]": pairs & (torch.rand(1, heads, t, s) < 2),
        "[T, S]": pairs[0, 0],
        "a row without keys": pairs & (torch.arange(t) > 0)[:, None],
        "bias": torch.randn(batch, heads, t, s),
        "bias [B, S]": torch.randn(batch, s),
        "-inf": torch.zeros(batch, 1, t, s).masked_fill(~pairs, float("-inf")),
    }[form]


@pytest.mark.parametrize("t, s", [(5, 7), (6, 6)])
@pytest.mark.parametrize(
    "form, more",
    [
        ("none", {}),
        ("none", {"is_causal": True}),
        ("none", {"scale": 0.7}),
        ("none", {"enable_gqa": True}),
        ("[B, S]", {}),
        ("[B, 1, 1, S]", {"enable_gqa": True}),
        ("[B, 1, T, S]", {"scale": 0.2}),
        ("[B, N, T, S]", {}),
        ("[T, S]", {}),
        ("a row without keys", {}),
        ("bias", {"enable_gqa": True, "scale": 0.2}),
        ("bias [B, S]", {}),
        ("-inf", {}),
    ],
)
def test_the_dispatcher_gives_what_native_gives(env, form, more, t, s):
    q, k, v = torch.randn(2, t, 4, 8), *torch.randn(2, 2, s, 2 if more.get("enable_gqa") else 4, 8)
    mask = dispatched_mask(form, 2, 4, t, s)
    theirs = dispatch_attention_fn(q, k, v, attn_mask=mask, backend="native", **more)
    on_chips = (None if x is None else on_chip(x) for x in (q, k, v, mask))
    ours = dispatch_attention_fn(*on_chips, backend="tpu", **more)
    assert ours.shape == theirs.shape and relative(on_host(ours), theirs) < 1e-6


def test_the_dispatcher_refuses_what_the_tpu_cannot(env):
    q, k = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 3, 8)
    x, y = on_chip(q), on_chip(k)
    for more, error, words in [
        ({"attention_kwargs": {"return_lse": True}}, NotImplementedError, "log-sum-exp"),
        ({}, ValueError, "4 query and 3 key heads"),
        ({"enable_gqa": True}, ValueError, "4 query and 3 key heads, enable_gqa=True"),
    ]:
        with pytest.raises(error, match=words):
            dispatch_attention_fn(x, y, y, backend="tpu", **more)
    for mask, error, words in [
        (torch.ones(5, 6, dtype=torch.bool), ValueError, r"\[2, 4, 5, 5\], got \[5, 6\]"),
        (torch.ones(5, 5, dtype=torch.int32), TypeError, "bool or floating attention mask, got int32"),
    ]:
        with pytest.raises(error, match=words):
            dispatch_attention_fn(x, x, x, attn_mask=on_chip(mask), backend="tpu")
    with pytest.raises(RuntimeError, match="TPU path"):
        dispatch_attention_fn(q, q, q, backend="tpu")


@pytest.mark.parametrize("repeats, dim", [(3, 1), (2, None), ([2, 0, 3], 1), ([1, 4], 0)])
@pytest.mark.parametrize("sized", [False, True])
def test_repeat_interleave(env, repeats, dim, sized):
    x = torch.randn(2, 3)
    count = torch.tensor(repeats) if isinstance(repeats, list) else repeats
    theirs = x.repeat_interleave(count, dim=dim)
    more = {"output_size": theirs.shape[dim or 0]} if sized else {}
    ours = on_chip(x).repeat_interleave(on_chip(count) if isinstance(repeats, list) else count, dim=dim, **more)
    assert torch.equal(on_host(ours), theirs)


@pytest.mark.parametrize(
    "dim, index, sizes",
    [(1, (2, 7, 1), (2, 7, 5)), (1, (2, 7, 5), (2, 7, 5)), (-1, (2, 3, 8), (2, 3, 8)), (0, (4, 1, 1), (4, 3, 5)), (0, (1, 2, 2), (1, 2, 2))],
)  # fmt: skip
def test_gather(env, dim, index, sizes):
    """An index that is repeated along other axes takes whole rows: so many entries as it had are computed."""
    x, index = torch.randn(2, 3, 5), torch.randint(0, (2, 3, 5)[dim], index)

    def run(*arrays):
        x, index = map(bridge.to_torch, arrays)
        return x.gather(dim, index.expand(*sizes)).jax()

    arrays = [on_chip(t).jax() for t in (x, index)]
    theirs = x.gather(dim, index.expand(*sizes)).numpy()
    assert np.array_equal(run(*arrays), theirs) and np.array_equal(jax.jit(run)(*arrays), theirs)
    lowered = jax.jit(run).lower(*arrays).as_text()
    (places,) = re.findall(r"stablehlo.gather.*, tensor<([\dx]+)xi\d+>\) ->", lowered)
    if sizes[1:] != (2, 2):  # torchax's own: places in all axes
        assert np.prod([int(n) for n in places.split("x")]) == index.numel()


def test_a_host_tensor_moves_to_the_device_tensor_it_meets(env):
    table, index, x = torch.randn(10), on_chip(torch.tensor([3, 7])), on_chip(torch.randn(10))
    assert torch.equal(on_host(table[index]), table[[3, 7]])
    assert relative(on_host(table * x), table * on_host(x)) < 1e-7
    assert relative(on_host(torch.cat([table, x])), torch.cat([table, on_host(x)])) == 0
    # A scalar does not widen the other side, as in torch.
    assert (torch.tensor(2.0) * on_chip(torch.ones(2).bfloat16())).dtype == torch.bfloat16


def test_written_into_a_host_tensor_stays_one(env):
    target, source = torch.zeros(4), on_chip(torch.arange(4.0))
    target[1:3] = source[1:3]
    assert type(target) is torch.Tensor and target.tolist() == [0, 1, 2, 0]
    assert target.copy_(source).tolist() == [0, 1, 2, 3]


def test_a_host_tensor_made_of_device_tensors_has_their_values(env):
    timesteps = on_chip(torch.tensor([999.5, 3.0]))
    made = torch.tensor([timesteps[1], timesteps[0]])
    assert type(made) is torch.Tensor and made.dtype == torch.float32 and made.tolist() == [3.0, 999.5]


def test_host_tensors_among_themselves_stay_on_the_host(env):
    q = torch.randn(1, 2, 3, 4)
    out = F.scaled_dot_product_attention(query=q, key=q, value=q)
    assert type(out) is torch.Tensor and out.device.type == "cpu"


def test_a_dtype_is_converted_before_the_way_to_the_device(env):
    t = torch.tensor([999.999999999, 1.5], dtype=torch.float64)
    assert on_host(t.to(device="jax", dtype=torch.int64)).tolist() == [999, 1]


def test_random_draws_are_torchs_own(env):
    torch.manual_seed(3)
    theirs = torch.randn(4)
    torch.manual_seed(3)
    assert torch.equal(on_host(torch.randn(4, device="jax")), theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.bool, torch.uint8, torch.int64])
def test_values_cross_and_come_back(chips, dtype):
    t = torch.randint(0, 2, (3, 5)).to(dtype) if dtype in (torch.bool,) else (torch.rand(5, 3) * 9).to(dtype).t()
    back = bridge.from_numpy(jnp.asarray(bridge.as_numpy(t)))
    assert torch.equal(back.to(dtype), t) and (back.dtype == dtype or dtype is torch.int64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_values_that_the_host_knows(env, dtype):
    """To the last bit those of the chips, which are not asked; what is written is seen."""
    table = (torch.randn(7) * 100).to(dtype)
    t = table.to("jax")
    whole, half = t.float(), dtype == torch.bfloat16
    parts = [
        t,
        torch.cat([t, torch.zeros(1, device="jax")]),
        t[1:4],
        t[None, 2],
        t.expand(3, 7),
        *t.unbind(),
        t.clone(),
    ]
    made = [
        torch.full((2,), 0.1, device="jax"),
        whole,
        t.bfloat16()[2:],
        whole * 0.1,
        whole - 1 / 3,
        whole < 0.1,
        -whole,
    ]
    numbers = [
        t - 0.3,
        t * 0.1,
        t * t,
        t >= t[3],
        t == 0.1,
    ]  # with 16 bits the chips round numbers first, torch does not
    for one in [*parts, *made, *([] if half else numbers)]:
        values = bridge.known_values(one)
        assert np.array_equal(values, np.asarray(one.jax()), equal_nan=True) and values.dtype == one.jax().dtype
    unknown = [whole.exp(), on_chip(table), whole * torch.randn(7, dtype=torch.float64)[0], *(numbers if half else [])]
    assert all(bridge.known_values(one) is None for one in unknown)
    entry, later = t[3], whole[2] >= whole[3]
    t.jax().delete()
    assert (float(entry), entry.item(), bool(later)) == (float(table[3]), table[3].item(), bool(table[2] >= table[3]))
    t = table.to("jax")
    entry = t[3]
    assert float(entry) == float(table[3])
    t[3] = 7
    assert float(t[3]) == float(entry) == 7 and float(t[2]) == float(table[2])
    t.add_(1)
    assert float(t[3]) == 8
    with env.left():
        t[3] = 5
    assert float(t[3]) == 5


def test_a_deferred_tensor_is_computed_once_and_only_when_used(env):
    calls = []

    def compute():
        calls.append(1)
        x.settle(jnp.ones((2, 3), jnp.bfloat16))

    x = bridge.deferred(jax.ShapeDtypeStruct((2, 3), jnp.bfloat16), compute)
    assert (x.shape, x.ndim, x.dtype, x.device.type, calls) == ((2, 3), 2, torch.bfloat16, "jax", [])
    y = x.chunk(3, dim=1)[2] + x.unflatten(0, (1, 2)).sum()
    assert float(on_host(y).float()[0, 0]) == 7 and calls == [1]


def test_a_trace_leaves_no_tracer_in_the_module(make_mesh):
    vae = AutoencoderKLWan(base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[True]).eval()
    before = {name: set(vars(m)) for name, m in vae.named_modules()}
    leaves, spec = torch.utils._pytree.tree_flatten(((tracing.INPUT,), {"return_dict": False}))
    tensors = dict((*vae.named_parameters(), *vae.named_buffers()))
    function = tracing.PureFunction(
        module=vae, call=vae.decode, spec=spec, leaves=leaves, groups=[],
        specs={name: jax.sharding.PartitionSpec() for name in tensors}, mesh=make_mesh(1, 1, 1), carry=None,
        attention=Settings(), matmul_precision="highest", processors={}, methods={},
    )  # fmt: skip
    z = torch.randn(1, 4, 2, 4, 4)
    weights = {name: jnp.asarray(bridge.as_numpy(t)) for name, t in tensors.items()}
    found = []

    def run(*arguments):
        arrays, result = function(*arguments)
        found.append(result)
        return arrays

    with tracing.undone_trace(vae):
        (ours,) = jax.jit(run)(weights, [jnp.asarray(z.numpy())])
    assert {name: set(vars(m)) for name, m in vae.named_modules()} == before
    with torch.no_grad():
        assert relative(ours, vae.decode(z).sample) < 1e-5
    assert isinstance(found[0].output([torch.zeros(1)]), tuple)


def test_an_output_that_hides_tensors_is_refused(make_mesh):
    class Odd(torch.nn.Module):
        def forward(self, x):
            return x, np.random.default_rng()

    leaves, spec = torch.utils._pytree.tree_flatten(((tracing.INPUT,), {}))
    odd = Odd()
    function = tracing.PureFunction(
        module=odd, call=odd.forward, spec=spec, leaves=leaves, groups=[], specs={}, mesh=make_mesh(1, 1, 1), carry=None,
        attention=Settings(), matmul_precision="highest", processors={}, methods={},
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match="Generator"):
        jax.eval_shape(function, {}, [jnp.ones(2)])


WAYS_IN = {
    "to jax": lambda env, x: x.to("jax"),
    "to cuda": lambda env, x: x.to("cuda"),
    "moved": lambda env, x: env.moved(x),
    "a model's input": lambda env, x: bridge.to_torch(
        bridge.to_jax(x, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    ),
    "torch.tensor": lambda env, x: torch.tensor(x.numpy(), device="jax"),
    "torch.as_tensor": lambda env, x: torch.as_tensor(x.numpy(), device="jax"),
    "torch.from_numpy": lambda env, x: torch.from_numpy(x.numpy()).to("jax"),
    "written into": lambda env, x: env.moved(torch.zeros(len(x))).copy_(x),
}


@pytest.mark.parametrize("way", WAYS_IN)
def test_a_device_tensor_shares_no_memory_with_the_hosts(env, make_mesh, way):
    """What is written into the host's tensor afterwards is in no array, and what is written into a copy on the host neither."""
    x = torch.ones(1 << 12)  # of aligned memory, which JAX's CPU backend takes as it is
    with env.override_property(mesh=make_mesh(1, 2, 1)):
        ours = WAYS_IN[way](env, x)
    x.fill_(7)
    ours.cpu().fill_(8)
    ours.numpy().fill(9)
    assert_same(on_host(ours), torch.ones(1 << 12))


def test_a_view_taken_outside_stays_one(env):
    x = env.moved(torch.zeros(8))
    with env.left():
        part = x[:4]
        part += 1
    before = x * 1
    with env.left():
        part.fill_(7)
    assert on_host(before).tolist() == [1] * 4 + [0] * 4
    assert on_host(x).tolist() == [7] * 4 + [0] * 4
