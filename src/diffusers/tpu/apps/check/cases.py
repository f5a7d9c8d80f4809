"""The kernels of stage 4 and of its plan: for each its arguments, its call as a model makes it, and its reference."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from ...chips.devices import compiler_options
from ...chips.figures import Topology, generation_of
from ...chips.mesh import make_mesh
from ...kernels.attention.api import attention
from ...kernels.attention.kernel import tpu_attention
from ...kernels.attention.key_bounds import key_bounds
from ...kernels.attention.reference import reference_attention
from ...kernels.attention.softmax_modes import BOUND, CENTRED, MODES, ONLINE
from ...kernels.convolution import convolution
from ...kernels.linear import linear
from ...kernels.norm import Norm
from ...kernels.rotary import normed_and_rotated
from ...kernels.settings import Settings, using
from .programs import Program


SIZES = ("published", "ragged")
HEAD = 128
OFFSET = 300.0  # of all keys: far too large for the mode "bound", but it cancels around their mean
# Factors of normal queries and keys: with 4 for both, scores are 16 times as large, beyond the mode "centred".
SCALES = {BOUND: 1.0, CENTRED: 1.0, ONLINE: 4.0}


@dataclass(frozen=True)
class Kernel:
    """`arguments(shape, key, mode)`; `run(settings, tally, *arguments)`, None if it does not take them; `reference(*arguments)`.
    `degrees`: number of chips -> the mesh of a kernel that needs several; None: it runs on one."""

    arguments: Callable
    run: Callable
    reference: Callable
    modes: tuple[str, ...] = ("",)
    degrees: Callable[[int], tuple[int, int, int]] | None = None


def _normal(key, *shapes, dtype=jnp.bfloat16) -> list[jax.Array]:
    keys = jax.random.split(key, len(shapes))
    return [jax.random.normal(one, shape, jnp.float32).astype(dtype) for one, shape in zip(keys, shapes)]


def _attention_arguments(shape, key, mode):
    batch, heads, q_len, kv_len, dim = shape
    of_keys = (batch, heads, kv_len, dim)
    q, k, v = _normal(key, (batch, heads, q_len, dim), of_keys, of_keys, dtype=jnp.float32)
    direction = jnp.full((dim,), dim**-0.5)
    k = SCALES.get(mode, 1.0) * k + (OFFSET * direction if mode == CENTRED else 0.0)
    return tuple(x.astype(jnp.bfloat16) for x in (SCALES.get(mode, 1.0) * q, k, v))


def _attention(settings, tally, q, k, v):
    how = {"generation": settings.generation, "interpret": settings.interpreted, "tally": tally}

    def scaled_dot_product_attention(q, k, v):  # by this name the planner finds attention
        return tpu_attention(q, k, v, scale=q.shape[-1] ** -0.5, **how)

    return jax.jit(scaled_dot_product_attention)(q, k, v)


def _attention_reference(q, k, v):
    return reference_attention(q, k, v, scale=q.shape[-1] ** -0.5)


def _exchange(settings, tally, q, k, v):
    with using(settings):
        return attention(q, k, v)


def _key_norms(settings, tally, q, k, v):
    found = key_bounds(k, v, interpret=settings.interpreted)
    return found.reach, found.radius


def _key_norms_reference(q, k, v):
    found = key_bounds(k.astype(jnp.float32), v.astype(jnp.float32))
    return found.reach, found.radius


def _linear_arguments(shape, key, mode):
    rows, depth, columns = shape
    x, w, b = _normal(key, (1, rows, depth), (columns, depth), (columns,))
    return x, w * depth**-0.5, b


def _sum_reference(x, w, b):
    return jnp.matmul(x.astype(jnp.float32), w.astype(jnp.float32).T, precision="highest") + b.astype(jnp.float32)


def _linear_reference(x, w, b):
    y = _sum_reference(x, w, b)
    return jax.nn.gelu(y.astype(x.dtype).astype(jnp.float32), approximate=True)


def _rotary_arguments(shape, key, mode):
    tokens, channels, of_head = shape
    x, weight = _normal(key, (1, tokens, channels), (of_head or channels,))
    angles = jnp.arange(tokens)[:, None] * jnp.repeat(10000.0 ** -jnp.linspace(0, 1, (of_head or HEAD) // 2), 2)
    return x, weight, jnp.cos(angles), jnp.sin(angles)


def _rotary(settings, tally, x, weight, cos, sin):
    return normed_and_rotated(x, Norm(weight, 1e-6), (cos, sin), settings)


def _convolution_arguments(shape, key, mode):
    height, width, channels, features = shape
    x, w, b = _normal(key, (1, height + 2, 1, width, channels), (3, 1, 3, features, channels), (features,))
    return x, w * (9 * channels) ** -0.5, b


def _convolution_reference(x, w, b):
    numbers, around = ("NDHWC", "DHWOI", "NDHWC"), [(0, 0), (0, 0), (1, 1)]
    how = {"padding": around, "dimension_numbers": numbers, "precision": "highest"}
    x, w, b = (array.astype(jnp.float32) for array in (x, w, b))
    return lax.conv_general_dilated(x, w, (1, 1, 1), **how) + b


KERNELS = {
    "attention": Kernel(_attention_arguments, _attention, _attention_reference, MODES),
    "key_norms": Kernel(_attention_arguments, _key_norms, _key_norms_reference),
    "linear": Kernel(
        _linear_arguments, lambda settings, _, x, w, b: linear(x, w, b, "gelu_tanh", settings), _linear_reference
    ),
    "rotary": Kernel(_rotary_arguments, _rotary, lambda *arguments: _rotary(Settings(layers="xla"), None, *arguments)),
    "convolution": Kernel(
        _convolution_arguments,
        lambda settings, _, x, w, b: convolution(x, w, b, settings, edge=1),
        _convolution_reference,
    ),
    "exchange": Kernel(_attention_arguments, _exchange, _attention_reference, degrees=lambda chips: (1, chips, 1)),
    "sum": Kernel(
        _linear_arguments,
        lambda settings, _, x, w, b: linear(x, w, b, "", settings, split=1),
        _sum_reference,
        degrees=lambda chips: (1, chips // 2, 2),
    ),
}


def programs(request: dict, devices: tuple, topology: Topology | None = None) -> dict[str, Program]:
    """ "KERNEL SIZE" -> its program, on one of these devices, or on all of them if it needs several.

    `topology`: of devices that this machine does not have.
    """
    generation = topology.chip.generation if topology else generation_of(devices[0])
    found = {}
    for name, kernel in KERNELS.items():
        several = kernel.degrees is not None
        if several and len(devices) == 1:
            continue
        mesh = make_mesh(devices if several else devices[:1], kernel.degrees(len(devices)) if several else (1, 1, 1))
        how = {"platform": devices[0].platform, "generation": generation, "kernel": "kernel", "layers": "kernel"}
        settings = Settings(mesh=mesh if several else None, **how)
        options = compiler_options(devices[0], True) if several else {}
        for size in SIZES:
            make = functools.partial(kernel.arguments, request[size][name], mode=kernel.modes[0])
            arguments = jax.eval_shape(make, jax.random.key(0))
            found[f"{name} {size}"] = Program(
                functools.partial(kernel.run, settings, None), arguments, mesh, options=options
            )
    return found
