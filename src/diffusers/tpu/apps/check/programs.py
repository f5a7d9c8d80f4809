"""Programs that a stage runs here and the planner times: a function, its arguments' shapes and mesh. `planned`: their seconds."""

import statistics
import timeit
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pkgutil import resolve_name

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...chips.devices import compile_lowered
from ...chips.figures import find_topology
from ...planner import ici
from ...planner.aot import Compiler, run_in_child
from ...planner.timing import time_program


@dataclass(frozen=True)
class Program:
    """`function` of arguments of these shapes and specs on a mesh. `options`: the compiler's."""

    function: Callable
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    mesh: Mesh
    specs: tuple[PartitionSpec, ...] = ()
    options: dict = field(default_factory=dict)

    def lower(self):
        """The lowered program. Raises ValueError for arguments that the kernel does not take."""
        if not jax.tree.leaves(jax.eval_shape(self.function, *self.arguments)):
            raise ValueError(f"expected sizes that the kernel takes, got {[x.shape for x in self.arguments]}")
        specs = self.specs or (PartitionSpec(),) * len(self.arguments)
        given = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.mesh, spec))
            for x, spec in zip(self.arguments, specs)
        ]
        return jax.jit(self.function).lower(*given)

    def compile(self):
        return compile_lowered(self.lower(), self.options)

    def placed(self, arrays) -> tuple[jax.Array, ...]:
        specs = self.specs or (PartitionSpec(),) * len(arrays)
        return tuple(jax.device_put(x, NamedSharding(self.mesh, spec)) for x, spec in zip(arrays, specs))


def measured_seconds(run: Callable, repeats: int) -> float:
    """Seconds of one run when `repeats` runs are queued together; the median of three measurements."""
    found = timeit.repeat(lambda: jax.block_until_ready([run() for _ in range(repeats)]), number=1, repeat=3)
    return statistics.median(found) / repeats


def error_of(ours, exact) -> float:
    """The largest error over the largest number, of trees of arrays on any device."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(exact), strict=True)
    return max(float(np.max(np.abs(a - b)) / np.max(np.abs(b))) for a, b in (map(wide, pair) for pair in pairs))


def wide(x) -> np.ndarray:
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def same_bits(ours, others) -> bool:
    """Whether two trees of arrays are equal to the last bit; NaN equals none."""
    return all(bool((a == b).all()) for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(others), strict=True))


# Planned, in the compiler's process


def planning(make: str, request: dict, topology: str) -> Future:
    """A future of `planned` for the programs of `make`, "module:name". The compiler runs on the host meanwhile."""
    argument = {"make": make, "request": request, "topology": topology}
    return soon(run_in_child, f"{__name__}:planned", argument, seconds=request["plan_seconds"])


def soon(function: Callable, *arguments, **options) -> Future:
    """A future of this call, which runs in a thread of its own."""
    pool = ThreadPoolExecutor(1, "planned")
    future = pool.submit(function, *arguments, **options)
    pool.shutdown(wait=False)
    return future


def planned(argument: dict, progress: Callable) -> dict:
    """Program -> planned seconds by mode of the attention kernel, compiled for a slice; an error's text if it does not compile."""
    topology, found = find_topology(argument["topology"]), {}
    compiler = Compiler(topology)
    for name, program in resolve_name(argument["make"])(argument["request"], compiler.devices, topology).items():
        progress(name)
        try:
            compiled = compiler.compile(program.lower(), program.options)
            timed = time_program(compiled, topology.chip, ici.places_of(program.mesh))
            found[name] = {mode: timing.seconds["total"] for mode, timing in timed.items()}
        except Exception as error:  # reported in its row; the others are planned
            found[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    return found
