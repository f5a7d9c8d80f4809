"""What the Pallas kernels share: sizes of registers, a call with references by name, its cost, gradients, a product, a layout."""

import math
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
ROWS = 16  # of one of bfloat16: its sublanes
MARGIN = 12 * MIB  # of VMEM, the compiler's


def round_up(n: int, multiple: int) -> int:
    """The least multiple that is not less than n."""
    return -(-n // multiple) * multiple


def cost(*arrays, flops: float = 0, transcendentals: float = 0) -> pl.CostEstimate:
    """Of a kernel that reads or writes these arrays once. Without it the compiler starts exchanges far too early."""
    return pl.CostEstimate(
        flops=int(flops),
        transcendentals=int(transcendentals),
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays),
    )


def call_kernel(
    kernel, name: str, grid, operands, outputs, *, parallel, work, interpret, vmem_bytes=None, scalars={}, scratch={}
) -> dict[str, Array]:
    """Name -> array of the outputs of `kernel`, whose one argument has all references by name.

    Args:
        operands: name -> (array, block); outputs: name -> (shape and dtype, block); scalars, fetched before: name -> array.
        parallel: so many first axes of the grid are of programs that do not depend on each other.
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


def vmem_room(generation: str | None) -> int:
    """Bytes of VMEM that a kernel may take."""
    return chip_of(generation).vmem_bytes - MARGIN


def layer_of_stack(layer, shape: tuple[int, ...], place, number: int = 0) -> tuple[dict, pl.BlockSpec]:
    """Scalars of `call_kernel`, and the block of weights of this shape: of the layer of this number in a stack of them (of several
    numbers of the one at `number`), or of weights by themselves where it is None. `place`: from the grid's first index to the block's."""
    if layer is None:
        return {}, pl.BlockSpec(shape, lambda n, *_: place(n))
    return {"layer": layer.reshape(-1)}, pl.BlockSpec(
        (None, *shape), lambda n, *others: (others[-1][number], *place(n))
    )


def with_gradients_of(plain, kernel):
    """`kernel`, a function of arrays, whose gradients are those of `plain`, computed again from the arguments."""
    run = jax.custom_vjp(kernel)
    run.defvjp(lambda *given: (kernel(*given), given), lambda given, gradient: jax.vjp(plain, *given)[1](gradient))
    return run


def product(x, y, axis: int = 0):
    """x [M, K] times y, whose `axis` is K, in float32."""
    # Products of bfloat16 operands are exact; asked for more, the compiler refuses them.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((1,), (axis,)), ((), ()))
    return lax.dot_general(x, y, dimensions, precision=precision, preferred_element_type=jnp.float32)


def added_up(x: Float[Array, "R W"], ones: Float[Array, "W C"], parts: int = 3):
    """x in float32 times a matrix of zeros and ones in bfloat16. `parts`: of bfloat16, that x is the sum of, nearly enough."""
    total, left = 0.0, x
    for _ in range(parts):
        part = left.astype(jnp.bfloat16)
        total, left = total + product(part, ones), left - part.astype(jnp.float32)
    return total


def by_token(x: Float[Array, "B K S D"]) -> Float[Array, "B S K*D"]:
    """All heads of a token side by side, as linear layers give them."""
    return jnp.swapaxes(x, 1, 2).reshape(x.shape[0], x.shape[2], -1)
