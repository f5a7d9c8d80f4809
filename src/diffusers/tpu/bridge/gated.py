"""One linear layer's result times another one's activation, computed by one kernel:

    values, gate = linear(x).chunk(2, -1);  values * activation(gate)        (GEGLU, SwiGLU)
    activation(linear(x)) * other_linear(x)                                  (feed-forward of Llama)

For the kernel the two halves of one layer are two layers of a stack.
"""

from typing import NamedTuple

import jax.numpy as jnp
from torchax.tensor import Tensor

from ..kernels.linear import gated
from .made_of import Layer, layer_of, made_of, operands
from .views import part_of_base


class Factor(NamedTuple):
    """A layer, or one half of its outputs (0 or 1), and its activation; "": none."""

    layer: Layer
    half: int | None
    activation: str = ""


def noted(result: Tensor, x: Tensor | Layer, activation: str) -> Tensor:
    """`result`, the activation of x (a tensor or a whole layer's result); records the layer that x comes from."""
    factor = Factor(x, None) if isinstance(x, Layer) else _factor_of(x)
    return result if factor is None else made_of(result, noted, Factor(*factor[:2], activation))


def product(result: Tensor, x: Tensor, y: Tensor) -> Tensor | None:
    """x * y by the kernel, where y is a layer's activation and x another layer's result of the same input; else None."""
    (gate,) = operands(y, noted) or (None,)
    values = None if gate is None else _factor_of(x)
    if values is None or not result.shape == x.shape == y.shape or gate.layer.x is not values.layer.x:
        return None
    pair = gate.layer, values.layer
    split, *others = {layer.lies.get("split") for layer in pair}
    if any(layer.sizes or "beside" in layer.lies for layer in pair) or pair[0].settings != pair[1].settings:
        return None
    if others or split == 1 or (split == 0 and gate.half is not None):  # splits that differ, of inputs or of halves
        return None
    stacks, numbers = zip(*(layer.lies.get("layers") or (None, None) for layer in pair))
    if pair[0] is pair[1] and {gate.half, values.half} == {0, 1}:
        (w, b), halves = pair[0][1:3], (gate.half, values.half)
        w = (w if stacks[0] is None else stacks[0]).reshape(-1, w.shape[0] // 2, w.shape[1])
        layers = [(w, b if b is None else b.reshape(2, -1)[half]) for half in halves]
        place = jnp.array(halves, jnp.int32) + (0 if numbers[0] is None else 2 * numbers[0])
    elif gate.half is values.half is None and pair[0] is not pair[1] and pair[0].w.shape == pair[1].w.shape:
        stacked = None not in stacks
        layers = [(stack if stacked else layer.w, layer.b) for stack, layer in zip(stacks, pair)]
        place = jnp.stack(numbers) if stacked else None
    else:
        return None
    whole = gated(gate.layer.x, layers, place, gate.activation, gate.layer.settings, split)
    return None if whole is None else Tensor(whole, result._env)


def _factor_of(x) -> Factor | None:
    """The layer whose result x is, or half of it; None where it is neither."""
    base, half = (part_of_base(x) if isinstance(x, Tensor) else None) or (x, None)
    if (layer := layer_of(base, by_kernel=False)) is None or half is not None and 2 * x.shape[-1] != len(layer.w):
        return None
    return Factor(layer, half)
