"""Compiles one call of tokamax's flash attention for one v7x device, in the compiler's process."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from diffusers.tpu.chips.figures import find_topology
from diffusers.tpu.chips.mesh import make_mesh
from diffusers.tpu.kernels.attention.softmax_modes import BOUND
from diffusers.tpu.planner import READER, kept, timing
from diffusers.tpu.planner.aot import Compiler
from diffusers.tpu.planner.worker import versions


def answer(request: dict, progress: Callable) -> dict:
    """Returns our computed seconds of the whole program of one call."""
    from tokamax._src.ops.attention.pallas_mosaic_tpu import Config, PallasMosaicTpuFlashAttention

    topology = find_topology(request["topology"])
    compiler = Compiler(topology)
    mesh = make_mesh(compiler.devices[:1], (1, 1, 1))
    whole = NamedSharding(mesh, PartitionSpec())
    q, k, v = (jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=whole) for shape in request["shapes"])
    attention = PallasMosaicTpuFlashAttention(config=Config(**request["config"]))

    def scaled_dot_product_attention(q, k, v):
        return attention(q, k, v)

    with jax.default_device(compiler.devices[0]):  # whose generation the kernel asks for
        lowered = jax.jit(scaled_dot_product_attention).lower(q, k, v)
    of_program = {"programs": [kept.name_of(compiler, lowered, mesh)], "reader": READER}
    if request.get("named"):
        return of_program
    progress(f"compiling {request['shapes']}")
    compiled = kept.compiled(compiler, lowered, mesh)
    timed = timing.time_program(compiled, topology.chip, [(0, 0, 0)])[BOUND]
    kernel = max(timed.operations, key=lambda o: o.seconds)
    sums = {"our_seconds": timed.seconds["total"], "slower": timed.slower["total"]}
    details = {"our_seconds_by_kind": timed.seconds, "steps": kernel.steps, "body": kernel.body}
    return {**sums, **details, **of_program, "versions": versions()}
