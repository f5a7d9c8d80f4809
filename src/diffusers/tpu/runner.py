"""A module's methods as compiled programs: one executable per shape, static arguments and state of the module.

Weights are arguments, placed once for all methods of a module. Two guidance calls that `dp` can hold side by side run
as one program: the first answers with tensors whose values are computed when the second call, or a use of them, comes.
"""

import functools
import hashlib
import inspect
import time
import weakref
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, PartitionSpec
from torch.utils._pytree import tree_flatten, tree_leaves

from ..utils import logging
from . import bridge
from .attention.api import Settings
from .config import TPUConfig
from .devices import GENERATION_OF_DEVICE_KIND, compile_lowered, compiler_options
from .idioms.refusing import without_gradients
from .residency import Residency
from .scan import plain_attributes
from .sharding import ModelPlan, named
from .weights import PlacedWeights, plan_placement


logger = logging.get_logger(__name__)


@dataclass
class Call:
    """One call taken apart. `key` tells calls apart; `batched` flags the tensors whose first axis is the batch."""

    entry: str
    leaves: list
    spec: object
    tensors: list[torch.Tensor]
    key: tuple
    batched: tuple[bool, ...]
    batch: int | None

    def pairs_with(self, other: "Call") -> bool:
        """Whether both can run as one call of twice the batch: alike, and the same objects where not batched."""
        shared = zip(self.tensors, other.tensors, self.batched)
        return (self.key, self.batched) == (other.key, other.batched) and all(f or a is b for a, b, f in shared)


@dataclass
class Waiting:
    """A call that has answered with deferred tensors and has not run."""

    call: Call
    outputs: list = field(default_factory=list)


@dataclass
class Program:
    """One executable: what it was compiled for, and how its arrays make up upstream's return value."""

    entry: str
    shapes: tuple
    branches: int
    compiled: jax.stages.Compiled
    function: bridge.PureFunction
    compile_seconds: float
    calls: int = 0


class Runner:
    """The compiled form of one module, shared by its entry methods and by the pipelines that share the module.

    It takes host and device tensors. It answers with device tensors where those can be worked with (the environment is
    active: resident glue), else with host tensors.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        plan: ModelPlan,
        mesh: Mesh,
        config: TPUConfig,
        residency: Residency | None = None,
    ):
        self.module, self.plan, self.mesh, self.config = module, plan, mesh, config
        self.residency = residency
        self.programs: dict[tuple, Program] = {}
        self._placed: PlacedWeights | None = None
        self._waiting: Waiting | None = None
        self._originals: dict[str, tuple] = {}
        self._signatures: dict[str, inspect.Signature] = {}
        self._avals: dict[tuple, tuple] = {}

    def attach(self):
        """Take the module's entry methods over; the module says where it runs by an attribute."""
        for entry in self.plan.entries:
            self._originals[entry] = (getattr(self.module, entry), vars(self.module).get(entry))
            self._signatures[entry] = inspect.signature(self._originals[entry][0])
            setattr(self.module, entry, self._entry(entry))
        self.module._tpu_runner = self
        self.module._hf_hook = bridge.ExecutionDevice()

    def detach(self):
        """Give the entry methods back and let go of the arrays."""
        for entry, (_, own) in self._originals.items():
            vars(self.module).pop(entry, None)
            if own is not None:
                setattr(self.module, entry, own)
        vars(self.module).pop("_tpu_runner", None)
        vars(self.module).pop("_hf_hook", None)
        self._placed, self._waiting = None, None
        if self.residency is not None:
            self.residency.forget(self)
        self._originals.clear()
        self.programs.clear()

    def _entry(self, entry: str):
        original = self._originals[entry][0]

        @functools.wraps(original)
        def run(*args, **kwargs):
            if bridge.tracing():
                return original(*args, **kwargs)
            return without_gradients(self.module, (args, kwargs), self.run(entry, args, kwargs))

        run.__signature__ = self._signatures[entry]
        return run

    def plan_weights(self) -> PlacedWeights:
        """Where the weights lie or will lie; moves nothing."""
        if self._placed is None:
            self._placed = plan_placement(self.module, self.plan, self.mesh, self.config.scan)
        return self._placed

    def current(self) -> PlacedWeights:
        """Where the weights lie or will lie, as the module's host tensors are now; moves nothing."""
        if self.plan_weights().refresh(place=False):
            self._placed = None
        return self.plan_weights()

    def place(self) -> PlacedWeights:
        """The weights on the mesh, up to date with the module's host tensors."""
        if self.plan_weights().refresh():
            self._placed = None
            self.plan_weights().refresh()
        return self._placed

    def run(self, entry: str, args: tuple, kwargs: dict):
        """Upstream's return value of the module's `entry(*args, **kwargs)`, computed on the mesh."""
        call = self.take_apart(entry, args, kwargs)
        waiting, self._waiting = self._waiting, None
        if waiting is not None and waiting.call.pairs_with(call):
            first, second, program = self._execute(waiting.call, call)
            self._settle(waiting, first)
            return self._answer(program.function, second)
        if waiting is not None:
            self._finish(waiting)
        if self._may_wait(call):
            return self._defer(call)
        arrays, program = self._execute(call)
        return self._answer(program.function, arrays)

    def take_apart(self, entry: str, args: tuple, kwargs: dict) -> Call:
        """A call of the module's `entry(*args, **kwargs)` as tensors and what is static."""
        signature = self._signatures[entry]
        if self.plan.decide is not None:
            kwargs = {**kwargs, **self.plan.decide(signature.bind(*args, **kwargs).arguments)}
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        static = tuple(_static(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor))
        key = (entry, spec, static, tuple((tuple(t.shape), t.dtype) for t in tensors))
        batched, batch = (False,) * len(tensors), None
        if self.plan.batched:
            bound = signature.bind(*args, **kwargs).arguments
            named_batched = {id(t) for name in self.plan.batched for t in tree_leaves(bound.get(name))}
            batched = tuple(id(t) in named_batched for t in tensors)
            sizes = {t.shape[0] for t, flag in zip(tensors, batched) if flag}
            batch = sizes.pop() if len(sizes) == 1 else None
        return Call(entry, leaves, spec, tensors, key, batched, batch)

    # Guidance branches side by side on dp

    def _may_wait(self, call: Call) -> bool:
        dp = self.mesh.shape["dp"]
        may_pair = call.batch is not None and call.batch % dp != 0 and 2 * call.batch % dp == 0
        return may_pair and bridge.environment().active

    def _defer(self, call: Call):
        self.current()
        key = (call.key, self._state())
        if key not in self._avals:
            self._avals[key] = self._output_avals(call)
        avals, function = self._avals[key]
        if any(aval.shape[:1] != (call.batch,) for aval in avals):
            raise ValueError(
                f"expected outputs of {type(self.module).__name__}.{call.entry} that lead with the batch {call.batch}, got"
                f" {[a.shape for a in avals]}: this model cannot pair guidance calls, use a mesh with dp 1"
            )
        waiting = self._waiting = Waiting(call)
        waiting.outputs = [bridge.deferred(a, functools.partial(self._finish, waiting)) for a in avals]
        return function.output(waiting.outputs)

    def _output_avals(self, call: Call) -> tuple[list, bridge.PureFunction]:
        function = self._function(call)
        return jax.eval_shape(function, self.plan_weights().avals, self._input_avals(call)), function

    def _finish(self, waiting: Waiting):
        """Run a waiting call alone: its values are needed, or the next call is another one."""
        if self._waiting is waiting:
            self._waiting = None
        arrays, _ = self._execute(waiting.call)
        self._settle(waiting, arrays)

    @staticmethod
    def _settle(waiting: Waiting, arrays: list):
        for output, array in zip(waiting.outputs, arrays):
            output.settle(array)

    # Programs

    def _execute(self, *calls: Call) -> tuple:
        """Flat output arrays of each call, and the program that gave them."""
        self.current()
        program = self._program(calls)
        if self.residency is None:
            self.place()
        else:
            self.residency.bring(self)
        outputs = program.compiled(self._placed.arrays, [self._inputs(call) for call in calls])
        program.calls += 1
        if self.residency is not None:
            self.residency.ahead(self, calls if program.calls == 1 else None)
        return (*outputs, program)

    def prepare(self, calls: tuple[Call, ...]):
        """Compile what calls like these will need; nothing is placed."""
        self.current()
        self._program(calls)

    def _inputs(self, call: Call) -> list[jax.Array]:
        return [bridge.to_jax(t, self._named()) for t in call.tensors]

    def _input_avals(self, call: Call) -> list[jax.ShapeDtypeStruct]:
        return [
            jax.ShapeDtypeStruct(t.shape, bridge.numpy_dtype(t.dtype), sharding=self._named()) for t in call.tensors
        ]

    def _answer(self, function: bridge.PureFunction, arrays: list):
        convert = bridge.to_torch if bridge.environment().active else bridge.from_numpy
        return function.output([convert(array) for array in arrays])

    def _program(self, calls: tuple[Call, ...]) -> Program:
        key = (calls[0].key, len(calls), self._state())
        if key not in self.programs:
            self.programs[key] = self._compile(*calls)
        return self.programs[key]

    def _compile(self, *calls: Call) -> Program:
        start = time.perf_counter()
        traced, function = self.trace(*calls)
        has_twin = self.residency is not None and len(self.residency.kind(self)) > 1
        lowered = traced.lower()
        compiled = _shared(lowered, self) if has_twin else compile_lowered(lowered, self.compiler_options)
        seconds = time.perf_counter() - start
        logger.info(f"compiled {type(self.module).__name__}.{calls[0].entry} in {seconds:.1f} s")
        return Program(calls[0].entry, calls[0].key[-1], len(calls), compiled, function, seconds)

    def trace(self, *calls: Call) -> tuple[jax.stages.Traced, bridge.PureFunction]:
        """JAX's trace of the program for these calls (two: side by side on dp), and the function traced for it.

        From shapes alone: nothing is placed, and the mesh may be one of chips that are not here.
        """
        placed, function = self.plan_weights(), self._function(calls[0])
        call = calls[0]
        split = call.batch is not None and (len(calls) * call.batch) % self.mesh.shape["dp"] == 0

        def join(parts: tuple[jax.Array, ...], batched: bool) -> jax.Array:
            joined = jnp.concatenate(parts) if batched and len(parts) > 1 else parts[0]
            return jax.lax.with_sharding_constraint(joined, self._named("dp")) if batched and split else joined

        def program(weights, inputs):
            outputs = function(weights, [join(parts, flag) for parts, flag in zip(zip(*inputs), call.batched)])
            outputs = [jax.lax.with_sharding_constraint(x, self._named()) for x in outputs]
            parts = [jnp.split(x, len(calls)) if len(calls) > 1 else [x] for x in outputs]
            return [[part[branch] for part in parts] for branch in range(len(calls))]

        jitted = jax.jit(program, out_shardings=self._named())
        return jitted.trace(placed.avals, [self._input_avals(c) for c in calls]), function

    def _named(self, *spec):
        return named(self.mesh, PartitionSpec(*spec))

    def _function(self, call: Call) -> bridge.PureFunction:
        placed = self.plan_weights()
        return bridge.PureFunction(
            module=self.module,
            call=self._originals[call.entry][0],
            spec=call.spec,
            leaves=[bridge.INPUT if isinstance(leaf, torch.Tensor) else leaf for leaf in call.leaves],
            groups=placed.groups,
            specs=placed.specs,
            mesh=self.mesh,
            carry=self.plan.carry,
            attention=Settings(
                mesh=self.mesh,
                sequence=self.plan.carry is not None,
                kernel=self.config.attention,
                blocks=self.config.attention_blocks,
                smoothing=self.config.attention_smoothing,
                window=self.config.attention_window,
                ring=self.config.attention_ring,
                layers=self.config.layers,
                convolutions=self.config.convolution_precision,
                platform=self.mesh.devices.flat[0].platform,
                generation=GENERATION_OF_DEVICE_KIND.get(self.mesh.devices.flat[0].device_kind),
            ),
            matmul_precision=self.config.matmul_precision,
            processors={} if self.config.layers == "xla" else self.plan.processors,
            methods=self.plan.methods,
        )

    def _state(self) -> tuple:
        """What else a trace depends on: the module's own settings, its processors, its weights' names and dtypes."""
        module = self.module
        processors = tuple(
            (type(p), getattr(p, "_attention_backend", None))
            for p in (getattr(m, "processor", None) for m in module.modules())
            if p is not None
        )
        weights = tuple((key, a.shape, a.dtype) for key, a in self._placed.avals.items())
        return plain_attributes(module), processors, weights

    @property
    def compiler_options(self) -> dict[str, bool]:
        return compiler_options(self.mesh.devices.flat[0], self.config.sparse_cores)

    @property
    def compilations(self) -> int:
        """How many executables were compiled for this module."""
        return len(self.programs)


_executables = weakref.WeakValueDictionary()


def _shared(lowered: jax.stages.Lowered, runner: Runner) -> jax.stages.Compiled:
    """The executable; the one there is if the program is the same, as two experts' are: weights are arguments."""
    options = runner.compiler_options
    key = (hashlib.sha256(lowered.as_text().encode()).digest(), runner.mesh, *options.items())
    compiled = _executables.get(key)
    if compiled is None:
        compiled = _executables[key] = compile_lowered(lowered, options)
    return compiled


def _static(leaf):
    if isinstance(leaf, np.ndarray):
        return leaf.shape, leaf.dtype.str, leaf.tobytes()
    try:
        hash(leaf)
    except TypeError:
        return repr(leaf)
    return type(leaf), leaf
