"""One attention call on one chip, compiled, in the compiler's process: `answer` is what `bench attention` runs in a child."""

import contextlib
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ..aot import BadRequest, Compiler, OutOfMemory
from ..attention.blocks import Shape, as_list, candidates, choose, from_list
from ..attention.kernel import tpu_attention
from ..attention.masks import Mask
from ..attention.splash import splash_attention
from ..devices import find_topology
from ..mesh import make_mesh
from ..sharding import PartitionSpec, named
from . import timing
from .calibration import as_theirs
from .exp2 import exp2_attention
from .worker import versions


MASKS = {  # name: the mask's part and its shape for [B, N, T, S]
    "none": None,
    "keys": ("keys", lambda b, n, t, s: (b, 1, 1, s), jnp.bool_),
    "keys-bias": ("keys", lambda b, n, t, s: (b, n, 1, s), jnp.float32),
    "dense": ("dense", lambda b, n, t, s: (1, 1, t, s), jnp.bool_),
    "bias": ("dense", lambda b, n, t, s: (1, n, t, s), jnp.bfloat16),
}


def answer(request: dict, progress: Callable) -> dict:
    """Cycles of one kernel, in all and per 1024 x 1024 scores.

    Args:
        request: `topology`; `shape` (batch, heads, queries, keys, head size); `kernel`: "bound" or "online" (ours, one
            of its ways), "kernel" (ours, both: compiled, not timed), "splash", "exp2"; `blocks`, as `Blocks` in a list
            for ours and three sizes for the others, None for the kernel's own; `kv_heads`, `dtype`, `mask` (of `MASKS`,
            "causal" or "window"); `as_theirs` (see calibration); `with_lse`.

    Raises BadRequest for what does not compile.
    """
    batch, heads, q_len, kv_len, dim = request["shape"]
    name, blocks, dtype = request["kernel"], request.get("blocks"), jnp.dtype(request.get("dtype", "bfloat16"))
    topology = find_topology(request["topology"])
    compiler = Compiler(topology)
    mesh = make_mesh(compiler.devices[:1], (1, 1, 1))

    def operand(shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=named(mesh, PartitionSpec()))

    q = operand((batch, heads, q_len, dim))
    k = operand((batch, request.get("kv_heads") or heads, kv_len, dim))
    mask, parts = Mask(), {}
    if request.get("mask") == "causal":
        mask = Mask(band=(None, 0))
    elif request.get("mask") == "window":
        mask = Mask(band=(1000, 1000))
    elif MASKS[request.get("mask", "none")]:
        part, shape_of, kind = MASKS[request["mask"]]
        parts = {part: operand(shape_of(batch, heads, q_len, kv_len), kind)}
    if name in ("splash", "exp2"):
        run = splash_attention if name == "splash" else exp2_attention
    else:
        if blocks is None:
            dense = parts.get("dense")
            out = 4 if request.get("with_lse") else dtype.itemsize
            shape = Shape(
                *(q_len, kv_len, dim, dim, dtype.itemsize, out, "keys" in parts, dense.dtype.itemsize if dense else 0)
            )
            blocks = as_list(choose(shape, topology.chip.generation))
        ways = ("bound", "online") if name == "kernel" else (name,)
        run = functools.partial(tpu_attention, paths=ways, generation=topology.chip.generation)

    def scaled_dot_product_attention(q, k, v, parts):
        wanted = from_list(blocks) if name not in ("splash", "exp2") else blocks and tuple(blocks)
        whole = Mask(**parts, band=mask.band)
        options = {"with_lse": True} if request.get("with_lse") else {}
        return run(q, k, v, scale=dim**-0.5, mask=whole if whole.kind else None, blocks=wanted, **options)

    progress(f"compiling {name} for {topology.chip.generation}")
    try:
        with as_theirs() if request.get("as_theirs") else contextlib.nullcontext():
            lowered = jax.jit(scaled_dot_product_attention).lower(q, k, k, parts)
        compiled = compiler.compile(lowered)
    except (OutOfMemory, jax.errors.JaxRuntimeError) as error:
        raise BadRequest(f"{name} with blocks {blocks} does not compile: {str(error).splitlines()[0]}") from error
    timed = timing.time_program(compiled, topology.chip, [(0, 0, 0)])
    kernels = [o for o in timed.operations if o.steps]
    if len(kernels) != 1:
        raise BadRequest(f"expected one kernel in the program, got {[o.name for o in kernels]}")
    seconds = kernels[0].seconds
    return {
        "blocks": blocks,
        "bundles_per_mtile": seconds * topology.chip.clock / (batch * heads * q_len * kv_len / 2**20),
        "seconds": seconds,
        "around_seconds": timed.seconds["total"] - seconds,
        "steps": kernels[0].steps,
        "body": kernels[0].body,
        "compile_seconds": compiled.seconds,
        "versions": versions(),
    }


def sizes_to_try(request: dict, progress: Callable) -> list:
    """Candidates of blocks for `shape` and `topology` (as for `answer`), the rule's own first, then ones unlike it."""
    batch, heads, q_len, kv_len, dim = request["shape"]
    found = candidates(Shape(q_len, kv_len, dim, dim), find_topology(request["topology"]).chip.generation)
    chosen = found[:1]
    for blocks in found[1:400]:
        if all(blocks.piece != other.piece or abs(blocks.keys - other.keys) > 2048 for other in chosen):
            chosen.append(blocks)
        if len(chosen) == request["count"]:
            break
    return [as_list(blocks) for blocks in chosen]
