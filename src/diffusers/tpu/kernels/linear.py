"""A linear layer for one TPU chip: x w^T + b, then an activation, or a gate and a residual.

On v6e at Wan 14B's sizes XLA reaches 61 % of the matrix units' peak in the feed-forward and 85 % elsewhere, this kernel 89 to
98 %: a block of w with all of its depth stays in VMEM while rows of x pass, so that the matrix units' own accumulators sum.
The result is rounded once; operations on it are computed in float32 and rounded where torch rounds. With 8-bit operands (`narrow`),
which `TPUConfig.linear` selects, it takes half the time.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from ..chips.devices import SUMMED_BY
from ..chips.figures import chip_of
from .kept import is_worth_its_room, layer_result
from .linear_blocks import MOST_FILL, Blocks, choose
from .narrow import Narrow, narrow_product, narrowed, takes, tpu_narrowed
from .pallas import (
    LANES,
    LOG2_E,
    SUBLANES,
    call_kernel,
    cost,
    in_steps,
    layer_of_stack,
    product,
    vmem_room,
    with_gradients_of,
)
from .rows import LEAST_WHOLE_ROWS, rows_over_mesh, whole_lanes
from .settings import Settings


SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
# Polynomial in x, from 0 to 6, of log(cdf(-x)) of the normal distribution: least squares, reweighted to equal errors. The cdf's
# relative error is 5e-5; beyond 6, GELU gives -6e-9 in place of results between that and zero.
LOG_CDF = -0.6931921, -0.79724, -0.3197294, -0.03547896, 0.004987583, -0.0004235818, 1.593547e-05

LEAST_PART = 512  # rows; with fewer the matrix units would wait for weights


def _gelu(x):
    half = 0.5 * x
    return half * jax.lax.erf(math.sqrt(0.5) * x) + half


def _gelu_by_polynomial(x):
    # x cdf(x) is max(x, 0) - |x| cdf(-|x|): one exponential and no division, a third of an error function's operations
    size = jnp.minimum(jnp.abs(x), 6)
    log = functools.reduce(lambda total, factor: total * size + factor, [factor * LOG2_E for factor in LOG_CDF[::-1]])
    return jnp.maximum(x, 0) - size * jnp.exp2(log)


def _gelu_tanh(x):
    half = 0.5 * x
    return half * jnp.tanh(x * (SQRT_2_OVER_PI + 0.044715 * SQRT_2_OVER_PI * (x * x))) + half


def _silu(x):
    # x / (1 + e^-x) would be two functions of the unit for such, and on v5e and v5p a division's eight operations more
    half = 0.5 * x
    return half * jnp.tanh(half) + half


def activation_of(name: str, generation: str | None) -> Callable[[Array], Array]:
    """The activation, "", "gelu", "gelu_tanh" or "silu", in float32, for results that are rounded to bfloat16.

    Chips have an instruction for tanh, some for the error function: XLA, too, computes these in float32 by that alone.
    """
    if name == "gelu" and not chip_of(generation).has_erf:
        return _gelu_by_polynomial
    return {"": lambda x: x, "gelu": _gelu, "gelu_tanh": _gelu_tanh, "silu": _silu}[name]


EXACT_ACTIVATIONS = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False), "silu": jax.nn.silu, "gelu_tanh": jax.nn.gelu,
}  # fmt: skip


@functools.partial(
    jax.jit, static_argnames=("turned", "activation", "part", "blocks", "generation", "interpret"), inline=True
)
def tpu_linear(
    x: Float[Array, "B M K"],
    w: Float[Array, "N K"] | Float[Array, "L N K"],
    b: Float[Array, " N"] | None,
    *,
    beside: Float[Array, "B M J"] | None = None,
    layer: Int[Array, ""] | Int[Array, "2"] | None = None,
    turned: bool = False,
    factor: tuple[Float[Array, "*L N K"], Float[Array, " N"] | None] | None = None,
    scales: tuple[Float[Array, "B M 1"], Float[Array, "N 1"]] | None = None,
    activation: str = "",
    gate: Float[Array, "B 1 N"] | None = None,
    residual: Float[Array, "B M N"] | None = None,
    part: tuple[int, int] | None = None,
    blocks: Blocks,
    generation: str | None = None,
    interpret: bool = False,
) -> Float[Array, "B M|P N"]:
    """activation(x w^T + b), or residual + gate (x w^T + b), in x's dtype; the activation is one of `activation_of`.

    `beside`: further channels of the rows of x, for the last of w's inputs; x then has a multiple of 128 channels.
    `layer`: index of the layer if w is a stack; slicing the stack would copy. `turned`: w lies in memory with its outputs minor.
    `factor`: weights and bias of another layer, whose result multiplies the activated one; `layer` then has the indices of both.
    `scales`: of the rows of x and w in 8 bits; the result is bfloat16.
    `gate`: in the dtype to which the gated result is rounded; only with a residual, which has the result's dtype.
    `part`: the first row, of a block, and the number P of rows to compute; without gate and residual.
    """
    (batch, rows, own), (columns, depth) = x.shape, w.shape[-2:]
    dtype = x.dtype if scales is None else jnp.bfloat16
    first, rows = part or (0, rows)
    before = first // blocks.rows

    of_rows = pl.BlockSpec((None, blocks.rows, blocks.columns), lambda n, i, m, *_: (i, m, n))
    inputs = {"x": x} if beside is None else {"x": x, "y": beside}
    operands = {
        name: (array, pl.BlockSpec((None, blocks.rows, array.shape[-1]), lambda n, i, m, *_: (i, before + m, 0)))
        for name, array in inputs.items()
    }
    layers = [(w, b)] if factor is None else [(w, b), factor]
    for number, (names, (weights, bias)) in enumerate(zip(("wb", "vc"), layers)):
        if turned:
            weights = jnp.swapaxes(weights, -1, -2)
            scalars, of_weight = layer_of_stack(layer, (depth, blocks.columns), lambda n: (0, n), number)
        else:
            scalars, of_weight = layer_of_stack(layer, (blocks.columns, depth), lambda n: (n, 0), number)
        bias = jnp.zeros((1, columns), jnp.float32) if bias is None else bias.astype(jnp.float32)[None]
        of_bias = pl.BlockSpec((1, blocks.columns), lambda n, i, m, *_: (0, n))
        operands |= dict(zip(names, ((weights, of_weight), (bias, of_bias))))
    if scales is not None:
        place = pl.BlockSpec((None, blocks.rows, 1), lambda n, i, m, *_: (i, before + m, 0))
        operands |= {"row_scales": (scales[0], place), "scales": (scales[1].T, operands["b"][1])}
    if gate is not None:
        place = pl.BlockSpec((None, 1, blocks.columns), lambda n, i, m, *_: (i, 0, n))
        operands["gate"] = gate.astype(jnp.float32), place
    if residual is not None:
        operands["residual"] = residual, of_rows

    one_layer, out = (jax.ShapeDtypeStruct(*of) for of in ((w.shape[-2:], w.dtype), ((batch, rows, columns), dtype)))
    read = [one_layer if name in ("w", "v") else array for name, (array, _) in operands.items()]

    def of_inputs(r, at, w):
        if beside is None:
            return product(r.x[at, :], w[...], 0 if turned else 1)
        first, last = (w[:own, :], w[own:, :]) if turned else (w[:, :own], w[:, own:])
        return product(r.x[at, :], first, 0 if turned else 1) + product(r.y[at, :], last, 0 if turned else 1)

    def tile(r, at):
        if scales is None:
            result = of_inputs(r, at, r.w)
        else:
            result = narrow_product(r.x[at, :], r.w[...]) * r.row_scales[at, :] * r.scales[...]
        result = (result + r.b[...]).astype(dtype)
        if activation:
            result = activation_of(activation, generation)(result.astype(jnp.float32)).astype(dtype)
        if factor is not None:
            other = (of_inputs(r, at, r.v) + r.c[...]).astype(dtype)
            result = result * other
        if gate is not None:
            result = (result.astype(jnp.float32) * r.gate[...]).astype(gate.dtype)
        if residual is not None:
            result = (r.residual[at, :].astype(jnp.float32) + result.astype(jnp.float32)).astype(dtype)
        r.o[at, :] = result

    return call_kernel(
        lambda r: in_steps(blocks.rows, blocks.tile, functools.partial(tile, r)),
        "linear_kernel" if part is None else SUMMED_BY,
        (pl.cdiv(columns, blocks.columns), batch, pl.cdiv(rows, blocks.rows)),
        operands,
        {"o": (out, of_rows)},
        parallel=1,
        scalars=scalars,
        work=cost(*read, out, flops=2 * batch * rows * depth * columns * (1 if factor is None else 2)),
        interpret=interpret,
        vmem_bytes=vmem_room(generation),
    )["o"]


def linear(
    x: Float[Array, "... K"],
    w: Float[Array, "N K"],
    b: Float[Array, " N"] | None,
    activation: str,
    settings: Settings,
    gate: Float[Array, "B|1 1 N"] | None = None,
    residual: Float[Array, "... N"] | None = None,
    split: int | None = None,
    layers: tuple[Float[Array, "L N K"], Int[Array, ""]] | None = None,
    narrow: Narrow | None = None,
    turned: bool = False,
    beside: Float[Array, "... J"] | None = None,
) -> Float[Array, "... N"] | None:
    """As `tpu_linear`, on all chips of the mesh; None for a call that the kernel does not support. With a gate x is [B, T, K].

    `split`: the axis of w that is split over `tp`; if inputs are, the chips' rounded sums are added, as the compiler does.
    `layers`: the stack of w, and its index. `narrow`: w in 8 bits, if known. `turned` (bfloat16), `beside`: as in `tpu_linear`.
    """
    narrows = settings.linear != "bfloat16" and not settings.differentiable and takes(x, w, settings)
    if narrows:
        w = narrowed(w, settings.linear) if narrow is None else narrow
    elif x.dtype != jnp.bfloat16 or w.dtype != x.dtype:
        return None
    if beside is not None and (narrows or settings.differentiable or split is not None or x.shape[-1] % LANES):
        x, beside = jnp.concatenate([x, beside], -1), None
    followed = activation or gate is not None or residual is not None
    if settings.differentiable and (not followed or is_worth_its_room(w.shape[1], settings.generation)):
        result = _differentiable(x, w, b, settings, split, turned)  # read by what follows, and by its gradient
        return result if result is None else _followed(result, activation, gate, residual)

    run = _kernel_for(x, w, activation, settings, gate, residual, split, turned)
    if run is None:
        return _plain(activation, narrowed(x, settings.linear), w, b, gate, residual) if narrows else None
    if not settings.differentiable:
        return run(x, w, b, gate, residual, None if narrows else layers, beside=beside)

    def plain(x, w, b, gate, residual):
        return _followed(_differentiable(x, w, b, settings, split, turned), activation, gate, residual)

    return with_gradients_of(plain, lambda *given: run(*given))(x, w, b, gate, residual)


def gated(
    x: Float[Array, "... K"],
    layers: tuple[tuple[Float[Array, "*L N K"], Float[Array, " N"] | None], ...],
    place: Int[Array, "2"] | None,
    activation: str,
    settings: Settings,
    split: int | None = None,
) -> Float[Array, "... N"] | None:
    """activation(x w^T + b) (x v^T + c) of layers (w, b) and (v, c), on all chips of the mesh; None if the kernel cannot.

    `place`: w and v are stacks, in which the layers have these indices. `split`: 0 if the outputs of both are split over `tp`.
    Source: Shazeer, GLU Variants Improve Transformer, 2020.
    """
    (w, b), factor = layers
    of_one = jax.ShapeDtypeStruct(w.shape[-2:], w.dtype)
    plain = not settings.differentiable and settings.linear == "bfloat16" and x.dtype == w.dtype == jnp.bfloat16
    run = _kernel_for(x, of_one, activation, settings, None, None, split, products=2) if plain else None
    return None if run is None else run(x, w, b, None, None, None if place is None else (w, place), factor)


def _kernel_for(
    x, w, activation, settings, gate, residual, split, turned=False, products=1
) -> Callable[..., Array] | None:
    """A function that computes `linear` of arrays like these, or of a `Narrow` w, by the kernel (`gated` if `products` is 2), or
    None for what the kernel does not support."""
    narrow = isinstance(w, Narrow)
    few = w.shape[0] < LANES and not w.shape[0] % (2 * SUBLANES) and split is None
    taken = settings.own_layers and len(x.shape) > 1 and (few or whole_lanes(w.shape[0])) and whole_lanes(w.shape[1])
    found = rows_over_mesh(x.shape, settings, split is not None) if taken else None
    if found is None:
        return None
    parts = [1, 1]
    if found.mesh is not None and split is not None:
        parts[split] = found.mesh.shape["tp"]
    columns, depth = (size // part for size, part in zip(w.shape, parts))
    followed = activation or gate is not None or residual is not None
    if (max(parts) > 1 and (gate is not None or residual is not None)) or (parts[1] > 1 and followed):
        return None
    # For samples that end within a register the compiler takes seconds a layer; sums over chips it exchanges in float32.
    uneven = math.prod(x.shape[:-2]) > 1 and x.shape[-2] % SUBLANES != 0
    how = {"patient": uneven or max(parts[1], products) > 1, "narrow": narrow, "products": products}
    blocks = choose(found.rows, columns, depth, settings.generation, residual is not None, **how)
    if blocks is not None and gate is not None:  # then each sample has blocks of its own
        own = found.rows * (1 if found.mesh is None else found.mesh.shape["dp"]) // math.prod(x.shape[:-2])
        if own < found.rows and blocks.rows > MOST_FILL * own:
            blocks = choose(own, columns, depth, settings.generation, True, **how) if own >= LEAST_WHOLE_ROWS else None
    least = min(found.least, LEAST_WHOLE_ROWS) if uneven else found.least
    if blocks is None or found.rows < least or not ((few or whole_lanes(columns)) and whole_lanes(depth)):
        return None
    over, summed = ["tp" if part > 1 else None for part in parts], parts[1] > 1
    total, meanwhile = _sum_over_tp(parts[1], settings)
    pieces = _two_parts(found.rows, columns, depth, settings.generation, how) if meanwhile else []

    def local(x, w, b, gate, residual, layer, factor, beside):
        # Samples are merged into one, unless each has a gate or ends within a register: then the reshape is a copy, for which
        # the compiler takes minutes (47,700 rows of 3,072). The order of rows is free, so that axes may be swapped instead.
        ends_within = x.shape[-2] % SUBLANES
        turns = gate is None and x.ndim > 2 and ends_within and not x.shape[-3] % SUBLANES
        by_row = x, residual, beside
        x, residual, beside = (jnp.swapaxes(rows, -2, -3) if turns and rows is not None else rows for rows in by_row)
        apart = gate is not None or (ends_within and not turns and MOST_FILL * x.shape[-2] > blocks.rows)
        batch = math.prod(x.shape[:-2]) if apart else 1
        flat, scales = x.reshape(batch, -1, x.shape[-1]), None
        if narrow:
            flat, *scales = tpu_narrowed(flat, settings.linear, interpret=settings.interpreted)
            w, scales = w.values, (*scales, w.scale)
        layer_of = functools.partial(
            tpu_linear,
            flat,
            w,
            b,
            beside=None if beside is None else beside.reshape(*flat.shape[:-1], -1),
            layer=layer,
            turned=turned,
            factor=factor,
            scales=scales,
            activation=activation,
            gate=None if gate is None else jnp.broadcast_to(gate, (batch, *gate.shape[1:])),
            residual=None if residual is None else residual.reshape(*flat.shape[:-1], -1),
            generation=settings.generation,
            interpret=settings.interpreted,
        )
        taken = pieces if pieces and batch == 1 else [(None, blocks)]
        results = [total(layer_of(part=part, blocks=of_part)) for part, of_part in taken]
        out = jnp.concatenate(results, 1).reshape(*x.shape[:-1], -1)
        return jnp.swapaxes(out, -2, -3) if turns else out

    def run(x, w, b, gate=None, residual=None, layers=None, factor=None, beside=None):
        w, layer = (w, None) if layers is None else layers
        rows, of_gate = tuple(found.spec)[:2], P("dp" if gate is not None and gate.shape[0] > 1 else None)
        inputs, outputs = (found.spec if split is None else P(*rows, axis) for axis in (over[1], over[0]))
        of_weights = P(*over) if layer is None else P(None, *over)
        of_weights = Narrow(of_weights, P(over[0], None)) if narrow else of_weights
        of_factor = P() if factor is None else (of_weights, P(over[0]))
        specs = inputs, of_weights, P(over[0]), of_gate, outputs, P(), of_factor, inputs
        b, after = (None, b) if summed else (b, None)
        out = replace(found, spec=outputs).run(local, (x, w, b, gate, residual, layer, factor, beside), specs)
        return out if after is None else (out.astype(jnp.float32) + after).astype(out.dtype)

    return run


def _sum_over_tp(chips: int, settings: Settings) -> tuple[Callable[[Array], Array], bool]:
    """A function that sums a chip's array with those of the other chips of `tp`; and whether cores can compute meanwhile."""
    if chips == 1:
        return lambda x: x, False
    beside = chip_of(settings.generation).sums_beside
    if chips == 2 and not beside and not settings.added:
        return lambda x: x + jax.lax.ppermute(x, "tp", [(0, 1), (1, 0)]), True  # as much is sent
    return functools.partial(jax.lax.psum, axis_name="tp"), beside and not settings.added


def _two_parts(rows: int, columns: int, depth: int, generation: str | None, how: dict) -> list[tuple]:
    """((first row, number), blocks) of two parts of a layer's rows, of which one's results are summed while the other is computed;
    none for few rows. `how`: as for `choose`."""
    blocks = choose(rows // 2, columns, depth, generation, **how) if rows >= 2 * LEAST_PART else None
    if blocks is None or blocks.rows >= rows:
        return []
    first = max(round(rows / 2 / blocks.rows), 1) * blocks.rows
    return [((0, first), blocks), ((first, rows - first), blocks)]


def _differentiable(x, w, b, settings: Settings, split: int | None, turned: bool) -> Array | None:
    """A layer by the kernel, whose gradient by x is also the kernel's, of w with inputs and outputs swapped."""
    if (run := _kernel_for(x, w, "", settings, None, None, split, turned)) is None:
        return None

    def back(given, gradient):
        w, other = given[1].T, None if split is None else 1 - split
        of_x, *others = jax.vjp(lambda x, w, b: _plain("", x, w, b, None, None), *given)[1](gradient)
        by_kernel = _kernel_for(gradient, w, "", settings, None, None, other, not turned)
        return of_x if by_kernel is None else by_kernel(gradient, w, None), *others

    layer = jax.custom_vjp(lambda *given: run(*given))
    layer.defvjp(lambda *given: (run(*given), given), back)
    return layer_result(layer(x, w, b), w.shape[1])


def _plain(activation: str, x, w, b, gate, residual):
    """As `tpu_linear`, by plain operations; also for `Narrow` x and w."""
    if isinstance(x, Narrow):
        result, dtype = narrow_product(x.values, w.values) * x.scale * w.scale[:, 0], jnp.bfloat16
    else:
        result, dtype = jnp.einsum("...a,ba->...b", x, w, preferred_element_type=jnp.float32), x.dtype
    return _followed((result if b is None else result + b).astype(dtype), activation, gate, residual)


def _followed(result, activation: str, gate, residual):
    """A layer's result with activation, gate and residual applied, by plain operations."""
    dtype = result.dtype
    if activation:
        result = EXACT_ACTIVATIONS[activation](_apart(result).astype(jnp.float32)).astype(dtype)
    result = result if gate is None else (result.astype(jnp.float32) * gate).astype(gate.dtype)
    return result if residual is None else (residual.astype(jnp.float32) + result).astype(dtype)


@jax.custom_vjp
def _apart(x):
    """x, with its gradient computed once: XLA would recompute an activation's in the product after it, for every tile."""
    return x


_apart.defvjp(lambda x: (x, None), lambda _, gradient: (jax.lax.optimization_barrier(gradient),))
