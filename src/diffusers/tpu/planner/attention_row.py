"""One attention call on one chip, compiled, in the compiler's process: `answer` is what `bench attention` runs in a child."""

import contextlib
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ..aot import BadRequest, Compiler, OutOfMemory
from ..attention.online import BLOCKS as ONLINE_BLOCKS
from ..attention.online import online_attention
from ..attention.splash import BLOCKS as SPLASH_BLOCKS
from ..attention.splash import splash_attention
from ..devices import find_topology
from ..mesh import make_mesh
from ..sharding import PartitionSpec, named
from . import timing
from .calibration import padding_as_theirs
from .worker import versions


KERNELS = {"splash": (splash_attention, SPLASH_BLOCKS), "online": (online_attention, ONLINE_BLOCKS)}


def answer(request: dict, progress: Callable) -> dict:
    """Cycles of the kernel for `shape` (batch, heads, queries, keys, head size), in all and per 1024 x 1024 scores."""
    batch, heads, q_len, kv_len, dim = request["shape"]
    kernel, usual = KERNELS[request["kernel"]]
    blocks = tuple(request["blocks"] or usual)
    topology = find_topology(request["topology"])
    compiler = Compiler(topology)
    mesh = make_mesh(compiler.devices[:1], (1, 1, 1))

    def operand(length: int):
        return jax.ShapeDtypeStruct((batch, heads, length, dim), jnp.bfloat16, sharding=named(mesh, PartitionSpec()))

    def scaled_dot_product_attention(q, k, v):
        return kernel(q, k, v, scale=dim**-0.5, blocks=blocks)

    progress(f"compiling {request['kernel']} for {topology.chip.generation}")
    whole = jax.jit(scaled_dot_product_attention)
    as_theirs = padding_as_theirs() if request.get("as_theirs") else contextlib.nullcontext()
    try:
        with as_theirs:
            lowered = whole.lower(operand(q_len), operand(kv_len), operand(kv_len))
        compiled = compiler.compile(lowered)
    except (OutOfMemory, jax.errors.JaxRuntimeError) as error:
        raise BadRequest(
            f"{request['kernel']} with blocks {blocks} does not compile: {str(error).splitlines()[0]}"
        ) from error
    timed = timing.time_program(compiled, topology.chip, [(0, 0, 0)])
    kernels = [o for o in timed.operations if o.steps]
    if len(kernels) != 1:
        raise BadRequest(f"expected one kernel in the program, got {[o.name for o in kernels]}")
    seconds = kernels[0].seconds
    return {
        "blocks": list(blocks),
        "bundles_per_mtile": seconds * topology.chip.clock / (batch * heads * q_len * kv_len / 2**20),
        "seconds": seconds,
        "around_seconds": timed.seconds["total"] - seconds,
        "steps": kernels[0].steps,
        "body": kernels[0].body,
        "compile_seconds": compiled.seconds,
        "versions": versions(),
    }
