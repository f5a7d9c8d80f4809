"""Oracle: torch on the host, the same operation on the same numbers. One test for each of our operators and rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from conftest import relative
from diffusers import AutoencoderKLWan
from diffusers.tpu import bridge
from diffusers.tpu.chips.sharding import ModelPlan
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


def test_values_cross_and_come_back(chips):
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.bool, torch.uint8, torch.int64):
        t = (torch.rand(5, 3) * 9 - 4 * (dtype == torch.bool)).clamp(min=0).to(dtype).t()
        back = bridge.from_numpy(jnp.asarray(bridge.as_numpy(t)))
        assert torch.equal(back.to(dtype), t) and (back.dtype == dtype or dtype is torch.int64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_values_that_the_host_knows(env, dtype):
    """To the last bit those of the chips, which are not asked; what is written is seen."""
    table = (torch.randn(7) * 100).to(dtype)
    t = table.to("jax")
    whole, half = t.float(), dtype == torch.bfloat16
    zero, tenth = torch.zeros(1, device="jax"), torch.full((2,), 0.1, device="jax")
    parts = [t, torch.cat([t, zero]), t[1:4], t[None, 2], t.expand(3, 7), *t.unbind(), t.clone()]
    made = [tenth, whole, t.bfloat16()[2:], whole * 0.1, whole - 1 / 3, whole < 0.1, -whole]
    # With 16 bits the chips round numbers first, torch does not.
    numbers = [t - 0.3, t * 0.1, t * t, t >= t[3], t == 0.1]
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

    x = bridge.Deferred(jax.ShapeDtypeStruct((2, 3), jnp.bfloat16), compute)
    assert (x.shape, x.ndim, x.dtype, x.device.type, calls) == ((2, 3), 2, torch.bfloat16, "jax", [])
    y = x.chunk(3, dim=1)[2] + x.unflatten(0, (1, 2)).sum()
    assert float(on_host(y).float()[0, 0]) == 7 and calls == [1]


def pure_function(module, call, given, mesh):
    leaves, spec = torch.utils._pytree.tree_flatten(given)
    specs = {name: jax.sharding.PartitionSpec() for name, _ in (*module.named_parameters(), *module.named_buffers())}
    return tracing.PureFunction(
        module=module, call=call, spec=spec, leaves=leaves, groups=[], specs=specs, plan=ModelPlan(),
        attention=Settings(mesh=mesh), matmul_precision="highest",
    )  # fmt: skip


def test_a_trace_leaves_no_tracer_in_the_module(make_mesh):
    vae = AutoencoderKLWan(base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[True]).eval()
    before = {name: set(vars(m)) for name, m in vae.named_modules()}
    function = pure_function(vae, vae.decode, ((tracing.TENSOR,), {"return_dict": False}), make_mesh(1, 1, 1))
    z = torch.randn(1, 4, 2, 4, 4)
    tensors = (*vae.named_parameters(), *vae.named_buffers())
    weights = {name: jnp.asarray(bridge.as_numpy(t)) for name, t in tensors}
    found = []

    def run(*arguments):
        arrays, result = function(*arguments)
        found.append(result)
        return arrays

    with tracing.undone_trace(vae):
        (ours,) = jax.jit(run)(weights, [jnp.asarray(z.numpy())], {})
    assert {name: set(vars(m)) for name, m in vae.named_modules()} == before
    with torch.no_grad():
        assert relative(ours, vae.decode(z).sample) < 1e-5
    assert isinstance(found[0].output([torch.zeros(1)]), tuple)


def test_an_output_that_hides_tensors_is_refused(make_mesh):
    odd = torch.nn.Module()
    function = pure_function(odd, lambda x: (x, np.random.default_rng()), ((tracing.TENSOR,), {}), make_mesh(1, 1, 1))
    with pytest.raises(NotImplementedError, match="Generator"):
        jax.eval_shape(function, {}, [jnp.ones(2)], {})


def test_a_device_tensor_shares_no_memory_with_the_hosts(env, make_mesh):
    """What is written into the host's tensor afterwards is in no array, and what is written into a copy on the host neither."""
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    ways = (
        lambda x: x.to("jax"), lambda x: x.to("cuda"), env.moved, lambda x: bridge.to_torch(bridge.to_jax(x, one)),
        lambda x: torch.tensor(x.numpy(), device="jax"), lambda x: torch.as_tensor(x.numpy(), device="jax"),
        lambda x: torch.from_numpy(x.numpy()).to("jax"), lambda x: env.moved(torch.zeros(len(x))).copy_(x),
    )  # fmt: skip
    for number, way in enumerate(ways):
        x = torch.ones(1 << 12)  # of aligned memory, which JAX's CPU backend takes as it is
        with env.override_property(mesh=make_mesh(1, 2, 1)):
            ours = way(x)
        x.fill_(7)
        ours.cpu().fill_(8)
        ours.numpy().fill(9)
        assert torch.equal(on_host(ours), torch.ones(1 << 12)), number


def test_a_view_taken_outside_stays_one(env):
    x = env.moved(torch.zeros(8))
    with env.left():
        part = x[:4]
        part += 1
    before = x * 1
    with env.left():
        part.fill_(7)
    assert [on_host(t).tolist() for t in (before, x)] == [[1] * 4 + [0] * 4, [7] * 4 + [0] * 4]
