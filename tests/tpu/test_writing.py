"""Oracle: torch on the host. What is written to device tensors, to their parts and views, and to `out=`."""
# ruff: noqa: F811

import contextlib
import random
import warnings

import jax
import numpy as np
import pytest
import torch

from conftest import relative
from diffusers.tpu import bridge
from diffusers.tpu.kernels.settings import Settings, using
from test_bridge import env, on_chip, on_host  # noqa: F401


pytestmark = pytest.mark.usefixtures("idioms")  # as users have them


BEHIND = slice(None), slice(3, None)


@pytest.mark.parametrize("count, cut", [(1, BEHIND), (2, BEHIND), (2, (slice(None), slice(2, 9))), (2, (slice(2),))])
def test_a_part_that_is_written_among_chips_or_at_the_end_is_no_scatter(env, make_mesh, count, cut):
    batch = 1 if count == 1 else 4
    x, value = torch.randn(batch, 21, 3), torch.randn(batch, 21, 3)[cut]
    expected = x.clone()
    expected[cut] = value

    def run(x, value):
        there = bridge.to_torch(x)
        there[cut] = bridge.to_torch(value)
        return there.jax()

    with env, using(Settings(mesh=make_mesh(1, count, 1))):
        traced = jax.jit(run).trace(x.numpy(), value.numpy())
        assert "scatter" not in str(traced.jaxpr)
        assert torch.equal(torch.from_numpy(np.array(traced.lower().compile()(x.numpy(), value.numpy()))), expected)


EVEN, FLOAT = (..., slice(0, None, 2)), torch.float32
CASTS = [
    (torch.bfloat16, EVEN, torch.randn(2, 3, 2)),
    *((to, EVEN, x) for to, x in ((torch.bool, 1), (torch.int32, 1.7), (FLOAT, True))),
]
MORE_AXES = [(FLOAT, p, torch.randn(s)) for p, s in ((1, (1, 4)), ((0, 2), (1,)), (slice(1), (1, 1, 3, 4)))]


@pytest.mark.parametrize("dtype, place, value", CASTS + MORE_AXES)
def test_a_value_is_cast_and_spread_as_the_place_it_is_written_to(env, recwarn, dtype, place, value):
    target = torch.zeros(2, 3, 4, dtype=dtype)
    ours = on_chip(target)
    ours[place] = on_chip(value) if isinstance(value, torch.Tensor) else value
    target[place] = value
    assert torch.equal(on_host(ours), target) and not [w for w in recwarn if "scatter" in str(w.message)]


@pytest.mark.parametrize("shape", [(2, 3), (0,), (4, 2)])
def test_a_result_written_to_out_has_its_shape_and_may_not_lose_its_kind(env, shape):
    def of(device, dtype):
        x, out = torch.arange(6.0, device=device).reshape(2, 3), torch.zeros(shape, dtype=dtype, device=device)
        assert torch.add(x, x, out=out) is out
        return out.cpu()

    with warnings.catch_warnings(action="ignore"):  # torch's, that it resizes an output with elements
        for dtype in (torch.float32, torch.bfloat16):
            ours, expected = of("jax", dtype), of("cpu", dtype)
            assert ours.dtype == dtype and torch.equal(ours, expected)
        for device in ("jax", "cpu"):
            with pytest.raises(RuntimeError, match="can't be cast"):
                of(device, torch.int32)


# Of x, by its axis n; torch copies for the last ones, and for some as the strides are.
VIEWS = (
    "x.transpose(n, -1); x.movedim(n, 0); x.unsqueeze(n); x.squeeze(); x.unflatten(n, (1, -1)); x.flatten(n); x.reshape(-1); x.view(-1);"
    " x.chunk(2, n)[-1]; x.unbind(n)[0]; x.narrow(n, 0, 1); x.select(n, -1); x[::2]; x[..., -2:]; x[-1, None]; x.detach();"
    " x.contiguous(); x[[0]]; x.clone(); x * 2"
).split("; ")
CHANGES = (
    "x.fill_(5); x.add_(3); x.copy_(x.flip(0)); x.masked_fill_(x < 1, 9); x[-1:].mul_(-2); x.__setitem__(x > 2, 1); x.__setitem__(0, 4)"
).split("; ")


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_views_and_copies_share_what_is_written_as_in_torch(env, dtype):
    """In random programs; every tensor that one made is compared at its end."""

    def run(x, draws):
        made = [x]
        for _ in range(8):
            x = draws.choice(made)
            writes = draws.random() < 0.4
            result = eval(draws.choice(CHANGES if writes else VIEWS), {"x": x, "n": draws.randrange(x.ndim)})
            made += [] if writes else [result]
        return made

    ran = 0
    while ran < 12:
        seed, x = random.random(), torch.randint(-4, 9, (2, 4, 6)).to(dtype)
        try:
            expected, ran = run(x.clone(), random.Random(seed)), ran + 1
        except (IndexError, RuntimeError, ValueError):  # torch has no such program
            continue
        for where in (contextlib.nullcontext(), env):  # a script's own lines, and those of a model
            with where:
                ours = run(on_chip(x), random.Random(seed))
            assert [on_host(t).tolist() for t in ours] == [t.tolist() for t in expected]


def test_to_copies_where_that_is_asked_for_alone(env):
    x = on_chip(torch.zeros(2))
    with env:
        x.to(x.dtype).add_(1)
        x.to(x.dtype, copy=True).add_(1)
        x.to(x.device, x.dtype, False, True).add_(1)
    assert on_host(x).tolist() == [1, 1]


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
