"""Linear layers fused with the operations that follow: upstream has them one by one, one kernel computes all of them.

    activation(linear(x))
    h + linear(x)                                   h + gate * linear(x)                       (a layer's product with another: `gated`)
    (h.float() + linear(x) * gate).to(h.dtype)

Each intermediate result records what it was made of (`made_of`). The last operation calls the kernel for the whole chain, which
rounds where the single operations round; those are dead code then.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from torchax.tensor import Tensor

from ..chips.sharding import Packed
from ..kernels.kept import layer_result
from ..kernels.linear import activation_of
from ..kernels.linear import linear as fast_linear
from ..kernels.narrow import Narrow
from ..kernels.pallas import SUBLANES
from ..kernels.settings import current
from . import gated, norms
from .made_of import Layer, Widened, beside, layer_of, made_of, of_layer, operands, same_as, widened
from .on_host import NotTaken
from .views import has_values


aten = torch.ops.aten

MANY_ENTRIES, MOST_BEHIND = 1 << 22, 64  # of a concatenated array, and of its pieces
ROWS_OF_A_TILE = 256  # of a chip; with no more rows a product by XLA waits for its weights
FEW_ROWS = 64  # rows are samples, of which scales and shifts are computed; more rows are tokens


def register(env):
    """Register linear layers, and the operators that can follow one, in the environment."""
    for function in (F.linear, aten.linear.default):
        env.override_op_definition(function, linear)
    env.override_op_definition(aten.view.default, reshaped)
    for overload, ours in (
        (aten.view_as_complex.default, norms.as_complex),
        (aten.view_as_real.default, norms.as_real),
    ):
        env.override_op_definition(overload, functools.partial(ours, env._get_op_or_decomp(overload).func))
    times, plus = (functools.partial(norms.followed, name) for name in ("times", "plus"))
    of_norms = times, norms.by_hand, norms.turned, norms.turned_complex
    for overload, one, *follow in (
        (aten.mul.Tensor, jnp.multiply, gated.product, _gated, *of_norms),
        (aten.add.Tensor, jnp.add, _added, _with_residual, plus),
        (aten.sub.Tensor, jnp.subtract),
    ):
        theirs = env._get_op_or_decomp(overload)
        operator = replace(theirs, func=functools.partial(_in_one, theirs.func, one))
        env.override_op_definition(overload, functools.partial(_followed, env, operator, follow))
    for overload, note in (
        (aten.pow.Tensor_Scalar, norms.squared),
        (aten.mean.dim, norms.mean),
        (aten.add.Tensor, norms.with_eps),
        (aten.rsqrt.default, norms.inverse),
        (aten.div.Tensor, _by_one),
    ):
        theirs = env._get_op_or_decomp(overload)
        env.override_op_definition(overload, functools.partial(_noted, env, theirs, note))


def unpacked(stored: Tensor, packed: Packed) -> Tensor:
    """A weight or bias in upstream's order; records `stored`, in another order, which `linear` uses."""
    return made_of(Tensor(packed.apart(stored.jax(), packed.axis), stored._env), unpacked, stored, packed)


def lying(weight: Tensor, split: int | None, layers: tuple | None, narrow: Narrow | None = None) -> Tensor:
    """The weight; records that `tp` splits its outputs (`split` 0) or inputs (1), the stack on the chips and its index there
    (`layers`), and its 8-bit form (`narrow`)."""
    return made_of(weight, lying, split, layers, narrow)


def by_output(weight: Tensor, everywhere: jax.sharding.Sharding) -> Tensor:
    """The weight, whose outputs are split over all chips; records the sharding `everywhere` to gather them to."""
    return made_of(weight, by_output, everywhere)


def recast(weight: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """`result`, the weight in another dtype: records the weight's placement, but no stack."""
    if (of := operands(weight, unpacked)) is not None:
        stored, packed = of
        return made_of(result, unpacked, recast(stored, stored.to(result.dtype)), packed)
    if lies := how_it_lies(weight):
        return lying(result, **{**lies, "layers": None})
    everywhere = operands(weight, by_output)
    return result if everywhere is None else by_output(result, *everywhere)


def how_it_lies(weight: Tensor) -> dict:
    """What `lying` recorded for a weight, by name; empty where it recorded nothing."""
    return dict(zip(("split", "layers", "narrow"), operands(weight, lying) or ()))


def linear(input, weight, bias=None):
    """x w^T + b, summed in float32 and rounded once, as torch does it; torchax rounds before it adds the bias."""
    if (of := operands(weight, unpacked)) is not None:
        return _packed(input, bias, *of)
    x, w, b = input.jax(), weight.jax(), None if bias is None else bias.jax()
    check_kinds(x, w)
    if x.shape[-1:] != w.shape[-1:]:  # JAX would broadcast one entry
        raise NotTaken
    everywhere = operands(weight, by_output)
    if everywhere is not None and math.prod(x.shape[:-1]) > FEW_ROWS:  # a timestep per token, as in image-to-video
        w, everywhere = jax.lax.with_sharding_constraint(w, *everywhere), None
    (first, last), lies = operands(input, beside) or (x, None), how_it_lies(weight)
    layer = Layer(first, w, b, current(), lies if last is None else {**lies, "beside": last})
    if everywhere is None and (result := fast_linear(first, w, b, "", current(), **layer.lies)) is not None:
        return of_layer(Tensor(result, input._env), layer)
    dtype = jnp.promote_types(x.dtype, w.dtype)
    x = jnp.concatenate(_computed_before([x] if last is None else [first, last], len(w)), -1)
    result = jnp.einsum("...a,ba->...b", x, w, preferred_element_type=jnp.promote_types(dtype, jnp.float32))
    result = (result if b is None else result + b).astype(dtype)
    if everywhere is not None:
        # Gathered in one exchange; the compiler would exchange the scales and shifts that are sliced from it one by one.
        result = jax.lax.with_sharding_constraint(result, *everywhere)
    result = Tensor(layer_result(result, w.shape[1]), input._env)
    if everywhere is not None:
        return result
    return of_layer(result, Layer(x, w, b, layer.settings, lies, by_kernel=False))


def _computed_before(parts: list[jax.Array], columns: int) -> list[jax.Array]:
    """Inputs of a product by XLA. An activation, which such wide inputs come from, it would compute again for each of its tiles.

    On one chip products of so many rows are the kernel's; those of text stay as they are.
    """
    wide, chips = sum(x.shape[-1] for x in parts) > columns, current().chips
    many = chips > 1 and math.prod(parts[0].shape[:-1]) > ROWS_OF_A_TILE * chips
    taken = wide and many and current().own_layers and isinstance(parts[0], jax.core.Tracer)
    return jax.lax.optimization_barrier(parts) if taken else parts


def by_position(input, weight, b) -> Tensor | None:
    """A pointwise convolution of [B, C, ...] by the linear kernel; None where that does not support it.

    A TPU stores such weights with the longer one of outputs and inputs last.
    """
    x, w, lies = tokens_of(input.jax()), weight.jax(), how_it_lies(weight)
    layers = lies.get("layers")
    layers = None if layers is None else (layers[0].reshape(*layers[0].shape[: -w.ndim], *w.shape[:2]), layers[1])
    lies = {"split": lies.get("split"), "layers": layers, "turned": len(w) > w.shape[1]}
    settings = replace(current(), linear="bfloat16")
    layer = Layer(x, w.reshape(w.shape[:2]), b, settings, lies, input.shape[2:])
    result = _again(layer)
    return None if result is None else of_layer(Tensor(result, input._env), layer)


def tokens_of(x: jax.Array) -> jax.Array:
    """Maps [B, C, ...] as [B, T, C]."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], -1), 1, 2)


def _packed(input, bias, stored: Tensor, packed: Packed) -> Tensor:
    """`linear` with a weight as it is stored: each chip of `tp` has its part of each projection.

    Where chips share a sequence each projection is a product of its own, so that exchanges of one overlap with the other products.
    """
    outward, settings = packed.axis == 0, current()
    shared = settings.sequence and settings.mesh.shape["sp"] > 1
    shared = shared and settings.linear == "bfloat16" and settings.layers != "kernel"
    if outward:
        bias = None if bias is None else operands(bias, unpacked)[0]
    if shared and (len(packed.sizes) > 2 if outward else packed.tp == 1):
        return _by_projection(input, bias, stored, packed)
    if not outward:
        return linear(input if packed.tp == 1 else Tensor(packed.together(input.jax()), input._env), stored, bias)
    result = linear(input, stored, bias)
    return result if packed.tp == 1 else Tensor(packed.apart(result.jax(), input.ndim - 1), input._env)


def _by_projection(input, bias, stored: Tensor, packed: Packed) -> Tensor:
    """One product for each projection in the weight, summed in float32 and rounded once. Each is sliced directly from the stack."""
    x, w, axis = input.jax(), stored.jax(), packed.axis
    stack, layer = how_it_lies(stored).get("layers") or (w[None], 0)
    sizes, shape = [size // packed.tp for size in packed.sizes], [packed.tp if axis == 0 else 1, *w.shape]
    shape[axis + 1] //= shape[0]
    weights, at = [], 0
    for size in sizes:
        start, extent = [layer, 0, 0, 0], [1, *shape]
        start[axis + 2], extent[axis + 2] = at, size
        part = jax.lax.dynamic_slice(stack.reshape(-1, *shape), start, extent)
        weights.append(part.reshape(-1, w.shape[1]) if axis == 0 else part.reshape(w.shape[0], -1))
        at += size
    dtype = jnp.promote_types(x.dtype, w.dtype)
    product = functools.partial(
        jnp.einsum, "...a,ba->...b", preferred_element_type=jnp.promote_types(dtype, jnp.float32)
    )
    if axis == 1:
        parts = jnp.split(x, [*itertools.accumulate(sizes)][:-1], -1)
        result = sum(map(product, _computed_before(parts, len(w)), weights))
        result = result if bias is None else result + bias.jax()
        return Tensor(layer_result(result.astype(dtype), w.shape[1]), input._env)
    biases = [None] * len(sizes) if bias is None else packed.parts(bias.jax(), 0)
    results = [product(x, part) if b is None else product(x, part) + b for part, b in zip(weights, biases)]
    results = [layer_result(result.astype(dtype), w.shape[1]) for result in results]
    return Tensor(jnp.concatenate(results, -1), input._env)


def reshaped(x, shape):
    """`aten.view`; the result keeps the record of a norm, for pairs of its entries, also of a norm that was widened since."""
    array = x.jax()
    result = array.reshape(shape)
    if isinstance(array, jax.core.Tracer) and (behind := _behind_each_other(array, result.shape)) is not None:
        result = behind
    result, of, wide = Tensor(result, x._env), norms.normed(x), widened(x)
    if wide is not None and wide.norm is not None:
        return made_of(result, Widened, wide.narrow.reshape(shape), None, wide.norm)
    return result if of is None else made_of(result, norms.Normed, *of)


def _behind_each_other(x: jax.Array, shape: tuple[int, ...]) -> jax.Array | None:
    """x [..., a, b, C] as [..., a * b, C], concatenated from a arrays; None where XLA compiles the reshape quickly.

    Where b rows fill no whole registers XLA unrolls the moves of all rows: a minute of compilation for 30 x 1590 x 3072 (Mochi).
    """
    if x.ndim < 3 or len(shape) < 2 or current().chips > 1 or not current().own_layers or x.size < MANY_ENTRIES:
        return None
    *_, rows, columns = x.shape
    count, rest = divmod(shape[-2], rows)
    within = rows % (SUBLANES * 4 // x.dtype.itemsize)
    if shape[-1] != columns or rest or not 1 < count <= MOST_BEHIND or not within:
        return None
    apart = x.reshape(*shape[:-2], count, rows, columns)
    return jnp.concatenate([apart[..., n, :, :] for n in range(count)], -2)


def check_kinds(*arrays: jax.Array):
    """Raises NotTaken for integers beside floats, which torch's products refuse. Floats of different dtypes are promoted, which
    scripts under autocast expect."""
    if len({jnp.issubdtype(array.dtype, jnp.inexact) for array in arrays}) > 1:
        raise NotTaken


ACTIVATIONS = {  # names of `activation_of`
    aten.silu.default: lambda: "silu",
    aten.gelu.default: lambda *, approximate="none": "gelu_tanh" if approximate == "tanh" else "gelu",
}


def activated(overload, plain, x, *args, **kwargs):
    """The activation, by the linear layer's kernel where x is a layer's result and the kernel has that activation."""
    layer, activation = layer_of(x), ACTIVATIONS.get(overload, lambda: "")(*args, **kwargs)
    if activation and (wide := widened(x)) is not None and wide.layer is not None:
        return made_of(plain(x, *args, **kwargs), activated, wide.layer, activation)
    if layer is not None and activation:
        result = Tensor(_again(layer, activation=activation), x._env)
    elif activation == "gelu" and x.dtype == torch.bfloat16:
        array = x.jax()
        of_float32 = activation_of(activation, current().generation)
        result = Tensor(of_float32(array.astype(jnp.float32)).astype(array.dtype), x._env)
    else:
        result = plain(x, *args, **kwargs)
    return gated.noted(result, x, activation) if activation else result


def cast(x, result):
    """`result`, x in another dtype. A residual sum that is cast back to its first dtype is computed by the layer's kernel.

    A cast to a wider dtype and back gives the first array again: weights that are stored in one dtype and cast for each call
    (upstream's layerwise casting) do not count as written to.
    """
    if result is x or not (isinstance(x, Tensor) and isinstance(result, Tensor)):
        return result
    if x.dtype == result.dtype:
        return same_as(x) if result.jax() is x.jax() else result
    before = widened(x)
    if before is not None and before.narrow.dtype == result.jax().dtype:
        return Tensor(before.narrow, result._env)
    if _holds(result.jax().dtype, x.jax().dtype):
        return made_of(result, Widened, x.jax(), layer_of(x), norms.normed(x))
    if (norm := norms.narrowed(x, result)) is not None:
        return norm
    if result.dtype != torch.bfloat16:
        return result
    if (of := operands(x, activated)) is not None and of[0].x.dtype == result.jax().dtype:
        layer, activation = of
        return gated.noted(Tensor(_again(layer, activation=activation), result._env), layer, activation)
    total = operands(x, _added)
    whole = None if total is None else _again(*total)
    return result if whole is None else Tensor(whole, result._env)


@functools.cache
def _holds(wide, narrow) -> bool:
    """Whether `wide` represents every number of `narrow`; False for dtypes other than floats."""
    if not (jnp.issubdtype(wide, jnp.floating) and jnp.issubdtype(narrow, jnp.floating)):
        return False
    wide, narrow = jnp.finfo(wide), jnp.finfo(narrow)
    return wide.nmant >= narrow.nmant and wide.maxexp >= narrow.maxexp and wide.minexp <= narrow.minexp


def _in_one(plain, operator, x, y, **alpha):
    """torchax's arithmetic, outside of a trace as one operation: torchax also multiplies by 1 and moves a number to the chips."""
    if alpha or not (has_values(x) and (isinstance(y, float) or has_values(y))):
        return plain(x, y, **alpha)
    if isinstance(y, float):
        y = np.asarray(y, x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else np.float32)
    return operator(x, y)


def _followed(env, operator, follows, x, y, **kwargs):
    """torchax's operator of two tensors, or what the first of `follows` that applies returns; boolean for booleans, as in torch."""
    result = _made(env, operator, x, y, **kwargs)
    if result.dtype != torch.bool and _is_truth(x) and _is_truth(y):
        return Tensor(result.jax() != 0, env)
    if kwargs or not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return result
    followed = (follow(result, *pair) for follow in follows for pair in ((x, y), (y, x)))
    return next((tensor for tensor in followed if tensor is not None), result)


def _noted(env, operator, note, x, *args, **kwargs):
    """torchax's operator of a tensor, or what `note` makes of its result and the arguments, if that is not None."""
    result = _made(env, operator, x, *args, **kwargs)
    noted = note(result, x, *args) if isinstance(x, Tensor) and not kwargs else None
    return result if noted is None else noted


def _made(env, operator, *args, **kwargs):
    if not operator.is_jax_function:
        return operator.func(*args, **kwargs)
    arrays, named = env.t2j_iso((args, kwargs))
    return env.j2t_iso(operator.func(*arrays, **named))


def _is_truth(x) -> bool:
    return isinstance(x, bool) or (isinstance(x, torch.Tensor) and x.dtype == torch.bool)


def _gated(result, x, gate):
    """Records x * gate, where x is a layer's output [B, T, N] and the gate is one for all tokens, [B, 1, N]."""
    wide = widened(x)
    layer = layer_of(x) if wide is None else wide.layer
    if layer is None or gate.ndim != 3 or x.ndim != 3 or gate.shape[1] != 1 or gate.shape[2] != x.shape[2]:
        return None
    if layer.sizes is not None:  # a 1-d convolution
        return None
    return made_of(result, _gated, layer, gate.jax().astype(result.jax().dtype)) if result.shape == x.shape else None


def _by_one(result, x, divisor):
    """x itself where the divisor is 1: upstream's attention divides its layer's output by such a factor."""
    return same_as(x) if isinstance(divisor, (int, float)) and divisor == 1 and result.dtype == x.dtype else None


def _added(result, x, residual):
    """The sum by the layer's kernel where both are in its dtype; a float32 sum is recorded, for when it is cast back."""
    layer, gate = operands(x, _gated) or (layer_of(x), None)
    if layer is None or result.shape != x.shape or residual.shape != x.shape:
        return None
    if result.dtype == torch.float32:
        wide = widened(residual)
        return None if wide is None else made_of(result, _added, layer, gate, wide.narrow)
    whole = _again(layer, gate, residual.jax())
    return None if whole is None else Tensor(whole, result._env)


def takes_residual(result: Tensor, again: Callable[[jax.Array], jax.Array]) -> Tensor:
    """The result; records that `again(residual)` computes the sum of both, at little more than the result's own cost."""
    return made_of(result, takes_residual, again)


def _with_residual(result, x, residual):
    (again,) = operands(x, takes_residual) or (None,)
    alike = result.shape == x.shape == residual.shape and result.dtype == x.dtype == residual.dtype
    return Tensor(again(residual.jax()), result._env) if again is not None and alike else None


def _again(layer: Layer, gate=None, residual=None, activation: str = "") -> jax.Array | None:
    """The layer with its activation, gate or residual, in its own settings; None where the kernel does not support it."""
    x, w, b, settings, lies, sizes, _ = layer
    if residual is not None and residual.dtype != x.dtype:
        return None
    residual = residual if residual is None or sizes is None else tokens_of(residual)
    result = fast_linear(x, w, b, activation, settings, gate, residual, **lies)
    return result if result is None or sizes is None else jnp.moveaxis(result, 2, 1).reshape(len(x), -1, *sizes)
