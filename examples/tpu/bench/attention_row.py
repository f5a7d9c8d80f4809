"""Compiles one attention call for one chip. `bench attention` runs `answer` in the compiler's process."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import astuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from diffusers.tpu.chips.figures import find_topology
from diffusers.tpu.chips.mesh import make_mesh
from diffusers.tpu.kernels.attention.backward import attention_gradients, blocks_of
from diffusers.tpu.kernels.attention.blocks import Blocks, Shape, candidates, choose, from_list
from diffusers.tpu.kernels.attention.kernel import shape_of, tpu_attention
from diffusers.tpu.kernels.attention.masks import Mask
from diffusers.tpu.kernels.attention.softmax_modes import BOUND
from diffusers.tpu.kernels.attention.splash import splash_attention
from diffusers.tpu.planner import READER, kept, timing
from diffusers.tpu.planner.aot import BadRequest, Compiler, OutOfMemory
from diffusers.tpu.planner.worker import versions

from .calibration import as_theirs
from .exp2 import exp2_attention


BANDS = {"causal": (None, 0), "window": (1000, 1000)}
BACKWARD = ("attention_gradients", "splash_mha_dkv")  # kernels, ours and splash's
PARTS = {  # name: the mask's part and its shape for [B, N, T, S]
    "keys": ("keys", lambda b, n, t, s: (b, 1, 1, s), jnp.bool_),
    "keys-bias": ("keys", lambda b, n, t, s: (b, n, 1, s), jnp.float32),
    "dense": ("dense", lambda b, n, t, s: (1, 1, t, s), jnp.bool_),
    "bias": ("dense", lambda b, n, t, s: (1, n, t, s), jnp.bfloat16),
}


def as_list(blocks: Blocks) -> list:
    """Returns the blocks as lists for JSON; the inverse of `from_list`."""
    return [blocks.queries, blocks.keys, blocks.piece, list(astuple(blocks.bound)), list(astuple(blocks.online))]


def answer(request: dict, progress: Callable) -> dict:
    """Returns seconds of one kernel and bundles per 1024 x 1024 scores; for our kernel `by_way`, one entry per softmax mode.

    Args:
        request: `topology`; `shape` (batch, heads, queries, keys, head size); `kernel`: "kernel" (ours), "splash", "exp2",
            "gradients" or "splash gradients", the last two without the forward pass; `blocks`: for ours as of `as_list`, for the others
            three sizes, None for the kernel's default;
            `dtype`, `turned`, `mask` ("none", or of `BANDS` or `PARTS`); `as_theirs` (see calibration); `named` (see `naming`).

    Without schedules there are no seconds and bundles, only those of compilation.

    Raises:
        BadRequest: a kernel that does not compile.
    """
    batch, heads, q_len, kv_len, dim = request["shape"]
    name, blocks, dtype = request["kernel"], request.get("blocks"), jnp.dtype(request.get("dtype", "bfloat16"))
    topology = find_topology(request["topology"])
    compiler = Compiler(topology)
    mesh = make_mesh(compiler.devices[:1], (1, 1, 1))

    def operand(shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    q = operand((batch, heads, q_len, dim))
    k = operand((batch, heads, kv_len, dim))
    kind, parts = request.get("mask", "none"), {}
    if kind in PARTS:
        part, shape_in, kind_of_values = PARTS[kind]
        parts = {part: operand(shape_in(batch, heads, q_len, kv_len), kind_of_values)}
    mask = None if kind == "none" else Mask(**parts, band=BANDS.get(kind))
    operands = (q, k, k, mask)
    if name == "gradients":
        wanted = from_list(blocks) if blocks else blocks_of(shape_of(q, k, k, mask))
        blocks, operands = as_list(wanted), (*operands, q, operand(q.shape[:3], jnp.float32), q)
    elif name in ("splash", "splash gradients", "exp2"):
        run = exp2_attention if name == "exp2" else splash_attention
        wanted = blocks and tuple(blocks)
        operands += (q,) if name == "splash gradients" else ()
    else:
        wanted = from_list(blocks) if blocks else choose(shape_of(q, k, k, mask), topology.chip.generation)
        blocks = as_list(wanted)
        run = functools.partial(
            tpu_attention, generation=topology.chip.generation, turned=request.get("turned", False)
        )

    def scaled_dot_product_attention(q, k, v, mask, *of_gradients):
        how = {"scale": dim**-0.5, "blocks": wanted}
        if name == "gradients":
            return attention_gradients(q, k, v, mask, *of_gradients, **how, generation=topology.chip.generation)
        if of_gradients:
            there = functools.partial(run, mask=mask, differentiable=True, **how)
            return jax.vjp(there, q, k, v)[1](*of_gradients)
        return run(q, k, v, mask=mask, **how)

    progress(f"compiling {name} for {topology.chip.generation}")
    try:
        with as_theirs() if request.get("as_theirs") else contextlib.nullcontext():
            lowered = jax.jit(scaled_dot_product_attention).lower(*operands)
        of_program = {"programs": [kept.name_of(compiler, lowered, mesh)], "reader": READER}
        if request.get("named"):
            return of_program
        compiled = kept.compiled(compiler, lowered, mesh)
    except (OutOfMemory, jax.errors.JaxRuntimeError) as error:
        raise BadRequest(f"{name} with blocks {blocks} does not compile: {str(error).splitlines()[0]}") from error
    answered = {"blocks": blocks, "compile_seconds": compiled.seconds, **of_program, "versions": versions()}
    if not compiled.schedules:
        return answered
    timed = timing.time_program(compiled, topology.chip, [(0, 0, 0)])
    scores = batch * heads * q_len * kv_len / 2**20
    by_way = {way: _kernel_of(of_mode, topology.chip.clock / scores) for way, of_mode in timed.items()}
    return {**answered, **({"by_way": by_way} if name == "kernel" else by_way[BOUND])}


def _kernel_of(timed: timing.Timing, bundles_per_second: float) -> dict:
    kernels = [o for o in timed.operations if o.kind == "attention" and o.steps]
    if not kernels:
        raise BadRequest(f"expected a kernel in the program, got {[o.name for o in timed.operations]}")
    kernel = max(kernels, key=lambda o: o.seconds)  # what is done beside it, norms of keys as well, is around it
    back = [o.seconds for o in kernels if o.name.startswith(BACKWARD)]
    seconds = sum(back) if back else kernel.seconds
    return {
        "bundles_per_mtile": seconds * bundles_per_second,
        "seconds": seconds,
        "around_seconds": timed.seconds["total"] - seconds,
        "steps": kernel.steps,
        "body": kernel.body,
    }


def sizes_to_try(request: dict, progress: Callable) -> list:
    """Returns up to `count` blocks to try for `shape` and `topology` (as of `answer`): the default rule's first, then ones that differ."""
    batch, heads, q_len, kv_len, dim = request["shape"]
    found = candidates(Shape(q_len, kv_len, dim, dim), find_topology(request["topology"]).chip.generation)
    chosen = [*found[:1]]
    for blocks in found[1:400]:
        if all(blocks.piece != other.piece or abs(blocks.keys - other.keys) > 2048 for other in chosen):
            chosen.append(blocks)
        if len(chosen) == request["count"]:
            break
    return [as_list(blocks) for blocks in chosen]
