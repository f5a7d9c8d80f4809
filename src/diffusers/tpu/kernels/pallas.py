"""What the Pallas kernels share: sizes of registers, a call with references by name, its cost, gradients, a product, a layout."""

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from ..chips.figures import MIB, chip_of


LANES, SUBLANES = 128, 8  # of a register of 32-bit numbers
LOG2_E = math.log2(math.e)  # exponentials are to base 2
ROWS = 16  # sublanes of a register of bfloat16
MARGIN = 12 * MIB  # VMEM that is left to the compiler


def round_up(n: int, multiple: int) -> int:
    """The least multiple that is not less than n."""
    return -(-n // multiple) * multiple


def cost(*arrays, flops: float = 0, transcendentals: float = 0) -> pl.CostEstimate:
    """The cost of a kernel that reads or writes these arrays once. Without it the compiler starts exchanges far too early."""
    moved = sum(x.size * x.dtype.itemsize for x in arrays)
    return pl.CostEstimate(flops=int(flops), transcendentals=int(transcendentals), bytes_accessed=moved)


def call_kernel(
    kernel, name: str, grid, operands, outputs, *, parallel, work, interpret, vmem_bytes=None, scalars={}, scratch={}
) -> dict[str, Array]:
    """Name -> array of the outputs of `kernel`, whose one argument has all references by name.

    Args:
        operands: name -> (array, block); outputs: name -> (shape and dtype, block); scalars, prefetched: name -> array.
        parallel: number of leading axes of the grid whose steps are independent.
        work: its `cost`.
    """
    names = (*scalars, *operands, *outputs, *scratch)
    results = pl.pallas_call(
        lambda *refs: kernel(SimpleNamespace(**dict(zip(names, refs)))),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=grid,
            in_specs=[spec for _, spec in operands.values()],
            out_specs=[spec for _, spec in outputs.values()],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[shape for shape, _ in outputs.values()],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * parallel + ("arbitrary",) * (len(grid) - parallel),
            vmem_limit_bytes=vmem_bytes,
        ),
        cost_estimate=work,
        interpret=interpret,
        name=name,
    )(*scalars.values(), *(x for x, _ in operands.values()))
    return dict(zip(outputs, results))


def in_steps(length: int, step: int, run: Callable):
    """`run` on slices of `step` in a loop, which keeps code short."""
    pl.loop(0, length // step)(lambda n: run(pl.ds(pl.multiple_of(n * step, step), step)))


def vmem_room(generation: str | None) -> int:
    """Bytes of VMEM that a kernel may take."""
    return chip_of(generation).vmem_bytes - MARGIN


def layer_of_stack(layer, shape: tuple[int, ...], place, number: int = 0) -> tuple[dict, pl.BlockSpec]:
    """(scalars for `call_kernel`, block of weights of this shape). `layer`: index into a stack of weights, or several indices, of
    which `number` selects one; None: the weights are not stacked. `place`: block indices from the grid's first index."""
    if layer is None:
        return {}, pl.BlockSpec(shape, lambda n, *_: place(n))
    return {"layer": layer.reshape(-1)}, pl.BlockSpec(
        (None, *shape), lambda n, *others: (others[-1][number], *place(n))
    )


def with_gradients_of(plain, kernel):
    """`kernel`, a function of arrays, with the gradients of `plain`, recomputed from the arguments."""
    run = jax.custom_vjp(kernel)
    run.defvjp(lambda *given: (kernel(*given), given), lambda given, gradient: jax.vjp(plain, *given)[1](gradient))
    return run


def product(x, y, axis: int = 0):
    """x [M, K] times y, whose `axis` has the K entries to sum over, in float32."""
    # Products of bfloat16 operands are exact; the compiler refuses a higher precision for them.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((1,), (axis,)), ((), ()))
    return lax.dot_general(x, y, dimensions, precision=precision, preferred_element_type=jnp.float32)


def parts_of(x: Float[Array, "..."], dtype, number: int) -> Iterator[Array]:
    """So many arrays of this dtype whose sum is x in float32, up to the last one's rounding."""
    for _ in range(number):
        part = x.astype(dtype)
        yield part
        x = x - part.astype(jnp.float32)


def added_up(x: Float[Array, "R W"], ones: Float[Array, "W C"], parts: int = 3):
    """x in float32 times a bfloat16 matrix of zeros and ones. `parts`: how many bfloat16 parts x is split into."""
    return sum(product(part, ones) for part in parts_of(x, jnp.bfloat16, parts))


def by_token(x: Float[Array, "B K S D"]) -> Float[Array, "B S K*D"]:
    """All heads of a token side by side, the layout of linear layers."""
    return jnp.swapaxes(x, 1, 2).reshape(x.shape[0], x.shape[2], -1)


def as_heads(x, dim: int, turned: bool = False) -> Float[Array, "B N T D"]:
    """[B, N, T, D] from [B, T, N D], or if `turned` from [B, N D, T], or from itself."""
    if x.ndim == 4:
        return x
    if turned:
        return jnp.swapaxes(x.reshape(x.shape[0], x.shape[1] // dim, dim, x.shape[2]), 2, 3)
    return jnp.swapaxes(x.reshape(*x.shape[:2], x.shape[2] // dim, dim), 1, 2)
