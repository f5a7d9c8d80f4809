"""Attention for one TPU chip: scores transposed (keys along sublanes, queries along lanes), exponentials to base 2.

Sums over keys then run down the sublanes without a transposition, and e^x is 2^(x log2 e). Scores are computed some tiles
ahead of their exponentials (`Blocks.lag`), so that the matrix units never wait: that, not the number of operations, is
what the time hangs on. What is subtracted from scores: `ways`.

Where scores need the factor scale * log2 e: instead of a subtraction (way "bound"), which costs the same; else, as q
times the factor is no bfloat16, in a second half of the matrix unit's depth, which heads of 128 leave unused on v6e and
later: [q_high; q_low] against [k, k]. One bfloat16 rounding of q more would double the error of scores of deviation 4.

Blocks of keys that no query may see are neither fetched nor computed; those that a mask or the end of the keys cuts take
a body with masking, all others one without.

In order: `kernel_operands`, what goes in; here, the call, what comes out and what stays on the chip between steps of its grid
(`blocks.vmem_bytes` counts all of it); `kernel_body`, one step; `kernel_tiles`, its straight code. How long that takes
is read from its schedule, which tells ways apart by their codes: `planner.bundles`.
"""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from ..cost import cost
from . import kernel_body
from .blocks import LANES, Blocks, Shape, choose, folded_parts, vmem_bytes
from .kernel_call import LOG2_E, SUBLANES, Call
from .kernel_operands import key_bias, make_operands, row_of
from .key_bounds import KeyBounds
from .masks import Mask
from .softmax_modes import BOUND, WAYS, ModeCounter, largest_radius, open_ways


VMEM_MARGIN = 8 << 20  # the compiler's own, beside what `blocks.vmem_bytes` counts


def unsupported(q, k, v, mask: Mask | None) -> str | None:
    """What of this call the kernel does not take, or None."""
    return None if q.dtype in (jnp.bfloat16, jnp.float32) else f"{q.dtype}"


def shape_of(q, k, v, mask: Mask | None, with_lse: bool = False) -> Shape:
    """What the sizes of blocks for this call depend on; arrays, or their shapes and dtypes."""
    mask = mask or Mask()
    return Shape(
        q_len=q.shape[2],
        kv_len=k.shape[2],
        dim=q.shape[3],
        out_dim=v.shape[3],
        bytes=q.dtype.itemsize,
        out_bytes=4 if with_lse else q.dtype.itemsize,
        masked=0 if mask.keys is None else k.shape[2] - mask.whole,
        dense_bytes=0 if mask.dense is None else mask.dense.dtype.itemsize,
    )


def tpu_attention(
    q: Float[Array, "B N T D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S E"],
    *,
    scale: float,
    mask: Mask | None = None,
    first_row: int | Array = 0,
    first_key: int | Array = 0,
    with_lse: bool = False,
    bounds: KeyBounds | None = None,
    generation: str | None = None,
    wanted: tuple[int, int, int] | None = None,
    blocks: Blocks | None = None,
    smoothing: bool = True,
    ways: tuple[str, ...] = WAYS,
    tally: ModeCounter | None = None,
    interpret=False,
) -> Float[Array, "B N T E"] | tuple[Float[Array, "B N T E"], Float[Array, "B N T"]]:
    """Attention with the arguments of `reference_attention`.

    Args:
        bounds: of the keys and values that some query sees; None: they are computed.
        generation: of the chip, for the sizes of blocks; None: `figures.DEFAULT_GENERATION`.
        wanted, blocks: queries, keys and keys of one product instead of those of `blocks.choose`; or all sizes.
        smoothing: with the way "centred"; False: without, for which fewer heads are tame enough and less is compiled.
        ways: those that are compiled. With "bound" alone the caller vouches for the bound: for benchmarks.
        tally: is told which way each head and block of queries goes; costs a call to the host.
        interpret: True, or parameters of Pallas's TPU interpreter.

    Raises:
        TypeError: a dtype that is neither bfloat16 nor float32.
        ValueError: blocks that do not fit VMEM.
        NotImplementedError: a generation that nothing is known of.
    """
    mask = mask or Mask()
    if reason := unsupported(q, k, v, mask):
        raise TypeError(
            f"expected bfloat16 or float32 for the attention kernel, got {reason}; cast the model with .to()"
        )
    shape = shape_of(q, k, v, mask, with_lse)
    blocks = blocks or choose(shape, generation, wanted)
    bias = key_bias(mask.keys)
    if scale < 0:
        q, scale = -q, -scale
    added = mask.dense is not None or (bias is not None and mask.keys.dtype != jnp.bool_)
    call = _static(q, k, mask, shape, blocks, open_ways(ways, added, smoothing), scale, generation)
    scalars, inputs = make_operands(call, q, k, v, mask, bias, first_row - first_key, bounds, interpret)
    outputs, scratch, scores = (
        _outputs(call, q, v, with_lse, tally is not None),
        _scratch(call, q, k, v),
        math.prod(q.shape[:3]) * call.kv_len,
    )
    call = replace(call, names=(*scalars, *inputs, *outputs, *scratch))
    results = pl.pallas_call(
        functools.partial(kernel_body.run, call=call),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(q.shape[0] * q.shape[1], pl.cdiv(call.q_len, blocks.queries), call.kv_blocks),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=[spec for _, spec in outputs.values()],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[shape for shape, _ in outputs.values()],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_bytes(blocks, shape) + VMEM_MARGIN,
        ),
        cost_estimate=cost(q, k, v, q, flops=2 * scores * (q.shape[3] + v.shape[3]), transcendentals=scores),
        interpret=interpret,
        name="attention_kernel",
    )(*scalars.values(), *(x for x, _ in inputs.values()))
    results = dict(zip(outputs, results))
    if tally is not None:
        jax.debug.callback(tally.of(f"{list(q.shape)} with {k.shape[2]} keys"), results["went"][:, :, 0, 0])
    return _as_asked(q.shape, mask, results["o"], *([results["lse"]] if with_lse else []))


def _static(q, k, mask: Mask, shape: Shape, blocks: Blocks, ways, scale: float, generation: str | None) -> Call:
    """What is static of the call, without its references' names."""
    heads, kv_heads = q.shape[1], k.shape[1]
    groups, keys = heads // kv_heads, mask.keys
    folded = folded_parts(shape, generation) if set(ways) - {BOUND} else 0
    return Call(
        blocks=blocks,
        names=(),
        q_len=shape.q_len,
        kv_len=shape.kv_len,
        ways=ways,
        factor=scale * LOG2_E,
        folded=folded,
        twice=folded == 2 and shape.dim % LANES != 0,
        limit=largest_radius(mask.band is None and (keys is None or keys.shape[1] == 1 or groups == 1)),
        band=mask.band,
        frame=mask.frame,
        keys=keys is not None,
        whole=mask.whole,
        dense=mask.dense is not None,
        dtype=q.dtype,
        row_of_keys=None if keys is None else functools.partial(row_of, keys.shape, heads),
        row_of_kv=lambda h: lax.div(h, groups),
    )


def _outputs(call: Call, q, v, with_lse: bool, with_way: bool) -> dict[str, tuple[jax.ShapeDtypeStruct, pl.BlockSpec]]:
    """Name -> (array, the block of a program): the result with tokens minor, the log-sum-exp, the code of the way."""
    rows, queries, dtype = q.shape[0] * q.shape[1], call.blocks.queries, jnp.float32 if with_lse else q.dtype

    def of_rows(height: int, dtype):
        spec = pl.BlockSpec((None, height, queries), lambda h, i, j, *s: (h, 0, i))
        return jax.ShapeDtypeStruct((rows, height, call.q_len), dtype), spec

    outputs = {"o": of_rows(v.shape[3], dtype)}
    if with_lse:
        outputs["lse"] = of_rows(1, jnp.float32)
    if with_way:
        shape = (rows, pl.cdiv(call.q_len, queries), 1, LANES)
        spec = pl.BlockSpec((None, None, 1, LANES), lambda h, i, j, *s: (h, i, 0, 0))
        outputs["went"] = jax.ShapeDtypeStruct(shape, jnp.int32), spec
    return outputs


def _scratch(call: Call, q, k, v) -> dict:
    """What a program keeps from block to block of keys: what is subtracted, sums, the result; q and k as they meet."""
    blocks, dim, out_dim = call.blocks, q.shape[3], v.shape[3]
    return {
        "m": pltpu.VMEM((SUBLANES, blocks.queries), jnp.float32),
        "l": pltpu.VMEM((SUBLANES, blocks.queries), jnp.float32),
        "acc": pltpu.VMEM((out_dim, blocks.queries), jnp.float32),
        "true_v": pltpu.VMEM((out_dim, blocks.keys), v.dtype),
        "column": pltpu.VMEM((blocks.keys if call.keys else SUBLANES, LANES), jnp.float32),
        "folded": pltpu.VMEM((dim * call.folded or SUBLANES, blocks.queries if call.folded else LANES), q.dtype),
        "twice": pltpu.VMEM((blocks.keys, 2 * dim) if call.twice else (SUBLANES, LANES), k.dtype),
        "way": pltpu.SMEM((1,), jnp.int32),
    }


def _as_asked(shape, mask: Mask, out, lse=None):
    """[B, N, T, E] of the kernel's result, zeros (and -inf) in rows that the mask takes away."""
    batch, heads, q_len, _ = shape
    out_dim = out.shape[1]
    out = jnp.swapaxes(out.reshape(batch, heads * out_dim, q_len), 1, 2).reshape(batch, q_len, heads, out_dim)
    out = jnp.swapaxes(out, 1, 2)
    if mask.queries is not None:
        out = jnp.where(mask.queries, out, 0)
    if lse is None:
        return out
    lse = lse.reshape(batch, heads, q_len)
    return out, lse if mask.queries is None else jnp.where(mask.queries[..., 0], lse, -jnp.inf)
