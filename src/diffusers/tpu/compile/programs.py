"""Programs: the trace of a call, and the executable that is compiled from it before its first run."""

import contextlib
import functools
import hashlib
import threading
import time
import weakref
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...utils import logging
from .. import bridge
from ..chips import hosts
from ..chips.devices import compile_lowered, compiled_anew
from ..chips.sharding import fit
from ..common import notices
from ..common.errors import told_if_slow
from . import tracing
from .call import Call
from .store.keys import Key
from .weights import PlacedWeights


logger = logging.get_logger(__name__)
WORTH_A_WORD = 5.0  # seconds: after shorter compilations nothing is announced
ANOTHER = ("another form of the call", "the last one")
_evicted = 0
_executables = weakref.WeakValueDictionary()
_compiling = threading.RLock()  # a compilation may turn off JAX's cache of compiled programs


@dataclass
class Program:
    """The program of calls like one call, `branches` of them side by side.

    Attributes:
        traced: JAX's trace, until it is compiled.
        result: what the trace found besides its arrays; it builds upstream's return value from flat output arrays.
        compile_seconds: of the trace and the compilation.
        calls: how often it ran.
        avals: shapes and dtypes of one call's flat outputs.
        key: its cache key on disk, for other processes; None: it is not written.
        recalled: it was compiled by another process and loaded from disk.
        given: shapes and shardings of weights, numbers and inputs of one call that it was traced with.
        executables: the compiled executables by name; the name is empty for a call without gradients.
        differentiable: the `gradients.Differentiable` of a call that asks for gradients.
    """

    name: str
    entry: str
    shapes: tuple
    branches: int
    mesh: Mesh
    options: dict
    traced: jax.stages.Traced | None
    result: tracing.TraceResult
    compile_seconds: float
    executables: dict[str, jax.stages.Compiled] = field(default_factory=dict)
    calls: int = 0
    avals: list = field(default_factory=list)
    key: Key | None = None
    recalled: bool = False
    given: tuple = ()
    differentiable: object = None

    @property
    def compiled(self) -> jax.stages.Compiled | None:
        return self.executables.get("")

    @property
    def code_bytes(self) -> int:
        """Bytes of a chip that the code of its executables takes."""
        found = (one.memory_analysis() for one in self.executables.values())
        return sum(one.generated_code_size_in_bytes for one in found if one is not None)

    def run(self, calls: list[Call], cached: list[list[jax.Array]]) -> list[list[jax.Array]]:
        """Flat output arrays of each call. If there are fewer calls than branches, the last call fills the rest.

        `cached`: the step cache's arrays of each call, on this program's mesh.
        The first run blocks until its results are ready, so that a runtime error, such as exhausted memory, is raised here.
        """
        inputs = [call.values.inputs + kept for call, kept in zip(calls, cached)]
        inputs += [inputs[-1]] * (self.branches - len(inputs))
        values, first = calls[-1].values, not self.calls
        self.calls += 1
        with told_if_slow(lambda: f"the first run of {self.name}.{self.entry}") if first else contextlib.nullcontext():
            outputs = self.compiled(values.weights, values.numbers, inputs)
            if first:
                jax.block_until_ready(outputs)
        return outputs[: len(calls)]

    def compile(self) -> bool:
        """Compile it; False: another thread already has. Modules with the same program, such as two experts, share one."""
        with _compiling:
            if self.compiled is not None:
                return False
            start = time.perf_counter()
            self.executables[""] = self.compile_lowered(self.traced.lower())
            self.traced = None
            self.compile_seconds += time.perf_counter() - start
            logger.info(f"compiled {self.name}.{self.entry} in {self.compile_seconds:.1f} s")
            return True

    def compile_lowered(self, lowered: jax.stages.Lowered, part: str = "") -> jax.stages.Compiled:
        """Compile it, or reuse another module's equal executable. `part`: name of the part where processes compare programs."""
        # With names: the text leaves out unused arguments, and two texts may differ only in which arguments these are.
        text = lowered.as_text(debug_info=True).encode()
        if hosts.process_count() > 1:  # processes with different programs would deadlock
            digest = hashlib.sha256(lowered.as_text().encode()).hexdigest()
            what = f"{self.name}.{self.entry} of {self.shapes}{part}"
            hosts.agree(what, {"program": digest, "options": str(self.options)})
        key = (hashlib.sha256(text).digest(), lowered.in_tree, lowered.out_tree, self.mesh, *self.options.items())
        with _compiling:
            if (compiled := _executables.get(key)) is None:
                with contextlib.nullcontext() if self.key is None else compiled_anew():
                    compiled = _executables[key] = compile_lowered(lowered, self.options)
        return compiled


def clear_jax_caches(most: int):
    """Count an evicted program. After every `most` // 4, of `most` cached, clear JAX's caches of thousands of operations."""
    global _evicted
    _evicted += 1
    if _evicted >= max(1, most // 4) and _compiling.acquire(blocking=False):
        try:
            _evicted = 0
            jax.clear_caches()
        finally:
            _compiling.release()


def announce(program: Program, former: Program):
    """Warn once that a program is compiled after `former`, for which shapes, and how long that took, unless it was short."""
    if former.compile_seconds < WORTH_A_WORD:
        return
    name = f"{program.name}.{program.entry}"
    pairs = [(list(new), list(old)) for (new, _), (old, _) in zip(program.shapes, former.shapes) if new != old]
    new, old = (", ".join(map(str, shapes)) for shapes in zip(*pairs)) if pairs else ANOTHER
    notices.warn_once(
        f"compiles {name} {program.shapes} {program.branches}",
        f"{name} is compiled for {new}, after {old}: some {former.compile_seconds:.0f} s, as the last time; for what it was"
        " compiled for before nothing is compiled",
    )


def cached_sharding(mesh: Mesh, sequence: bool, shape: tuple[int, ...], batch: str | None = None) -> NamedSharding:
    """Sharding of a step cache's array, [B, T, C] or [B, L, T, C] of L blocks: tokens as in a block, if `sp` divides them."""
    tokens = (*[None] * (len(shape) - 3), "sp") if sequence and len(shape) in (3, 4) else ()
    spec = PartitionSpec(batch, *tokens)
    return NamedSharding(mesh, fit(spec, shape, mesh))


def trace_program(
    function: tracing.PureFunction, placed: PlacedWeights, numbers: dict, call: Call, options: dict
) -> Program:
    """Trace the program of calls like this one from shapes alone: nothing is placed, and the mesh may be of chips elsewhere.

    `numbers`: adapters' scales, of which only the shapes count.
    """
    start, branches, name = time.perf_counter(), function.branches, type(function.module).__name__
    mesh, images = function.attention.mesh, call.images
    everywhere, by_batch = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("dp"))
    cached = functools.partial(cached_sharding, mesh, function.plan.activation_spec is not None)
    split = images is not None and (branches * images) % mesh.shape["dp"] == 0
    batched = call.batched
    if not any(batched) and mesh.shape["dp"] > 1:  # of a model that takes one call at a time
        batched = tuple(t.shape[:1] == (images,) for t in call.inputs)
    found = []

    def join(arrays: tuple[jax.Array, ...], batched: bool, where: NamedSharding) -> jax.Array:
        joined = jnp.concatenate(arrays) if batched and len(arrays) > 1 else arrays[0]
        return jax.lax.with_sharding_constraint(joined, where) if batched and split else joined

    def program(weights, numbers, inputs):
        at = [by_batch] * len(call.tensors) + [cached(t.shape, "dp") for t in call.step.tensors]
        outputs, result = function(weights, [join(*one) for one in zip(zip(*inputs), batched, at)], numbers)
        found.append(result)
        own = len(outputs) - result.results
        at = [everywhere] * own + [cached(x.shape) for x in outputs[own:]]
        outputs = [jax.lax.with_sharding_constraint(*output) for output in zip(outputs, at)]
        if branches == 1:
            return [outputs]
        if any(x.shape[:1] != (branches * call.batch,) for x in outputs[:own]):
            error = ValueError if function.plan.batched else tracing.NoProgram  # the calls then run alone
            raise error(
                f"expected outputs of {name}.{call.entry} that lead with the batch {branches * call.batch}, got"
                f" {[x.shape for x in outputs]}: this model cannot pair guidance calls, use a mesh with dp 1"
            )
        each = [jnp.split(x, branches) for x in outputs]
        each[own:] = [[jax.lax.with_sharding_constraint(x, cached(x.shape)) for x in some] for some in each[own:]]
        return [[x[branch] for x in each] for branch in range(branches)]

    numbers = {key: jax.ShapeDtypeStruct(n.shape, n.dtype, sharding=everywhere) for key, n in numbers.items()}
    given = [(t, everywhere) for t in call.tensors] + [(t, cached(t.shape)) for t in call.step.tensors]
    inputs = [jax.ShapeDtypeStruct(t.shape, bridge.numpy_dtype(t.dtype), sharding=where) for t, where in given]
    jitted = jax.jit(program, **({"out_shardings": everywhere} if function.kept is None else {}))
    traced = jitted.trace(placed.avals, numbers, [inputs] * branches)
    avals, seconds = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in traced.out_info[0]], time.perf_counter() - start
    of = name, call.entry, call.shapes, branches, mesh, options, traced, found[-1], seconds
    return Program(*of, avals=avals, given=(placed.avals, numbers, inputs))
