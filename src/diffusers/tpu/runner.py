"""A module's methods as compiled programs: one executable per shape, static arguments and state of the module.

Weights are arguments, placed once for all methods of a module. Before each call the module is looked at (`state`): what the user
changed since makes another program, or is an argument of the same one. What no program can stand for, because each call
leaves something for the next (caches, counters, hooks that keep values) or reads a value to decide, runs eagerly: upstream's
Python, operation by operation on the chips, with the same result.
"""

import contextlib
import contextvars
import dataclasses
import functools
import inspect

import jax
import torch
from jax.sharding import Mesh, PartitionSpec

from ..utils.peft_utils import unscale_lora_layers
from . import bridge
from .adapters import scaled_by, take_scale
from .attention.ways import Tally
from .branches import Branches
from .call import Call, Values, take_apart, version_of
from .config import TPUConfig
from .devices import compiler_options, generation_of
from .eager import NO_PROGRAM, Uncompiled, random_state_kept
from .idioms.refusing import without_gradients
from .programs import Program, kept_at, trace_program
from .residency import Residency
from .settings import Settings
from .sharding import ModelPlan, named
from .state import Entry, State, is_entry, process_key, read
from .weights import PlacedWeights, place_numbers, plan_placement, stack_numbers


_looked = contextvars.ContextVar("diffusers_tpu_looked", default=False)


@contextlib.contextmanager
def one_call(runners):
    """Around a pipeline's call: its models are looked at for writes through `.data` now, and not before each step."""
    for runner in runners:
        runner.look()
    token = _looked.set(True)
    try:
        yield
    finally:
        _looked.reset(token)


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
        self.traced: dict[tuple, Program] = {}
        self.branches = Branches(1 if mesh is None else mesh.shape["dp"], self._execute)
        self._placed: PlacedWeights | None = None
        self._signatures: dict[str, inspect.Signature] = {}
        self._entries: dict[str, Entry] = {}
        self._state: State | None = None
        self._states: dict[object, int] = {}
        self._key: tuple | None = None
        self.kept: bridge.Kept | None = None
        self._numbers: tuple[float, dict[str, jax.Array]] | None = None
        self._numbers_are_read = False
        self.uncompiled = Uncompiled(type(module).__name__)
        self.tally = Tally() if config.attention_tally else None

    def attach(self):
        """Take the module's entry methods over; the module says where it runs by an attribute."""
        for name in self.plan.entries:
            self._signatures[name] = inspect.signature(getattr(self.module, name))
            self._entries[name] = Entry(self, vars(self.module).get(name))
            setattr(self.module, name, self._way_in(name))
        self.module._tpu_runner = self
        self.module._hf_hook = bridge.ExecutionDevice()

    def detach(self):
        """Give the entry methods back and let go of the arrays; what the user has put in their place stays."""
        for name, entry in self._entries.items():
            if is_entry(vars(self.module).get(name)):
                delattr(self.module, name)
                if entry.own is not None:
                    setattr(self.module, name, entry.own)
        vars(self.module).pop("_tpu_runner", None)
        vars(self.module).pop("_hf_hook", None)
        self._placed, self._state, self.branches.waiting = None, None, []
        if self.kept is not None:
            self.kept.manager.reset()  # what it keeps is on the chips
        if self.residency is not None:
            self.residency.forget(self)
        self._signatures.clear()
        self._entries.clear()
        self.traced.clear()

    def _way_in(self, name: str):
        original = functools.partial(self._method, name, self._entries[name])

        @functools.wraps(original())
        def run(*args, **kwargs):
            if bridge.tracing():
                return original()(*args, **kwargs)
            return without_gradients(self.module, (args, kwargs), self.run(name, args, kwargs))

        run.__signature__ = self._signatures[name]
        run.tpu_entry = self._entries[name]
        return run

    def _method(self, name: str, entry: Entry):
        """Upstream's method, also where the class's was replaced since; or what was on the instance before."""
        return getattr(type(self.module), name).__get__(self.module) if entry.own is None else entry.own

    def original(self, name: str):
        """What runs when the entry of this name is called."""
        return self._method(name, self._entries[name])

    # Where the weights are

    def plan_weights(self) -> PlacedWeights:
        """Where the weights lie or will lie; moves nothing."""
        if self._placed is None:
            self._placed = plan_placement(
                self.module, self.plan, self.mesh, self.config.scan and not self.uncompiled.lasting
            )
        return self._placed

    def current(self) -> PlacedWeights:
        """Where the weights lie or will lie, as the module's host tensors are now; moves nothing."""
        self._look_at_state()
        if self.plan_weights().refresh(self._state.tensors, place=False):
            self._plan_anew()
        return self.plan_weights()

    def place(self) -> PlacedWeights:
        """The weights on the mesh, up to date with the module's host tensors."""
        self._look_at_state()
        if self.plan_weights().refresh(self._state.tensors):
            self._plan_anew()
            self.plan_weights().refresh(self._state.tensors)
        return self._placed

    def look(self):
        """Look for writes to the host's tensors that torch does not count; they are placed before the next call."""
        if self._placed is not None:
            self._placed.sampled_changes()

    def _plan_anew(self):
        former, self._placed = self._placed, None
        self._key = self._numbers = None
        if former is not None:
            self.plan_weights().take_over(former)

    def _look_at_state(self):
        """Read the module's state again if it is not as it was."""
        if self._state is not None and self._state.same():
            return
        self.kept = bridge.kept_by(self.module, self.plan_weights().groups, self.kept)
        self._state = read(self.module, () if self.kept is None else self.kept.apart)
        self._key = self._numbers = None
        kept = self.uncompiled.lasting
        self.uncompiled.look_at(self._state)
        if kept and not self.uncompiled.lasting:
            self._plan_anew()  # what kept something is gone: blocks are stacked again

    @property
    def state_key(self) -> tuple:
        """What a program of now is keyed by, beside its call."""
        if self._key is None:
            numbers = tuple(self._state.numbers.items()) if self._numbers_are_read else ()
            weights = tuple((key, a.shape, a.dtype) for key, a in self.plan_weights().avals.items())
            key = (self._state.key, numbers, weights)
            self._key = (self._states.setdefault(key, len(self._states)),)
        return (*self._key, *process_key())

    # Calls

    def run(self, entry: str, args: tuple, kwargs: dict):
        """Upstream's return value of the module's `entry(*args, **kwargs)`, computed on the mesh."""
        with torch.inference_mode(False), torch.no_grad():
            call = self._scaled(entry, args, kwargs)
            if not _looked.get():
                self.look()
            self.current()
            if self.kept is not None and entry == "forward" and not self.uncompiled.lasting:
                call.keeps(self.kept.step())
            program = None if self.uncompiled.lasting else self.program(call)
            if program is None or (self._numbers_are_read and call.scale != 1.0):
                if call.step is not None:
                    call.step.undo()
                if program is not None:
                    return self.run(entry, args, kwargs)
                return self._run_eagerly(self.take_apart(entry, args, kwargs))
            self.take_values(call)
            outputs = self.branches.run(call, program)
            if call.step is not None:
                own = len(outputs) - program.function.results
                call.step.keep([x if bridge.on_device(x) else bridge.to_torch(x) for x in outputs[own:]])
                outputs = outputs[:own]
            answer = self._answer(program.function, outputs)
            if call.scale == 0:
                unscale_lora_layers(self.module, 0)  # as upstream's forward ends: scales are those of the files again
            return answer

    def _scaled(self, entry: str, args: tuple, kwargs: dict) -> Call:
        """A call whose scale of LoRA layers, upstream's `attention_kwargs={"scale": ...}`, is no argument but multiplies numbers."""
        name = None if self._numbers_are_read else scaled_by(self.original(entry))
        kwargs, scale = take_scale(kwargs, name)
        call = self.take_apart(entry, args, kwargs)
        call.scale = scale
        return call

    def take_apart(self, entry: str, args: tuple, kwargs: dict) -> Call:
        """A call of the module's `entry(*args, **kwargs)` as tensors and what is static."""
        return take_apart(entry, self._signatures[entry], self.plan, args, kwargs)

    def take_values(self, call: Call):
        """Give the call what its program computes with: weights where they lie, numbers, its tensors' values."""
        self._bring()
        everywhere = named(self.mesh, PartitionSpec())
        if self._numbers is None or self._numbers[0] != call.scale:
            self._numbers = call.scale, place_numbers(self._number_arguments(call.scale), self.mesh)
        call.values = Values(
            weights=dict(self._placed.arrays),
            placement=self._placed.placement,
            numbers=self._numbers[1],
            inputs=[bridge.to_jax(t, everywhere) for t in call.tensors] + self._kept_inputs(call),
            versions=[version_of(t) for t in call.inputs],
        )

    def _kept_inputs(self, call: Call) -> list[jax.Array]:
        tensors = [] if call.step is None else call.step.tensors
        return [bridge.to_jax(t, kept_at(self.mesh, self.plan.carry is not None, t.shape)) for t in tensors]

    def _bring(self):
        if self.residency is None:
            self.place()
        else:
            self.residency.bring(self)

    def _execute(self, program: Program, some: list[Call]) -> list[list[jax.Array]]:
        self._compile(program)
        outputs = program.run(some)
        if self.residency is not None:
            self.residency.ahead(self, some if program.calls == 1 else None)
        return outputs

    def _answer(self, function: bridge.PureFunction, outputs: list):
        if bridge.environment().active:
            return function.output([x if bridge.on_device(x) else bridge.to_torch(x) for x in outputs])
        return function.output([bridge.from_numpy(x) for x in outputs])

    def _run_eagerly(self, call: Call):
        self.branches.finish()
        self.take_values(call)
        weights, specs = self._placed.one_by_one()
        function = dataclasses.replace(self._function(call), groups=[], specs=specs)
        return self._answer(function, function.eagerly(weights, call.values.inputs))

    # Programs

    @property
    def programs(self) -> dict[tuple, Program]:
        """What was compiled, by call and state."""
        return {key: program for key, program in self.traced.items() if program.compiled is not None}

    @property
    def compilations(self) -> int:
        """How many executables were compiled for this module."""
        return len(self.programs)

    @property
    def eager(self) -> list[str]:
        """Why calls of this module run eagerly, if any do."""
        return [*dict.fromkeys(self.uncompiled.reasons.values())]

    def program(self, call: Call) -> Program | None:
        """The program of calls like this one, traced if it is new; None if none can stand for it."""
        call.state = self.state_key
        branches = self.branches.side_by_side(call) if bridge.environment().active else 1
        key = (call.key, branches, call.state)
        if key in self.uncompiled.reasons:
            return None
        if key in self.traced:
            return self.traced[key]
        function = self._function(call)
        try:
            with random_state_kept(call):
                program = self.trace(call, branches, function)
                effects = function.effects
                if effects.scratch and not (effects.lasting or effects.draws):
                    bridge.look_after(function)
        except bridge.NumberRead:
            self._numbers_are_read, self._key = True, None
            return self.program(call)
        except NO_PROGRAM as error:
            program = self.uncompiled.decides(error, function.effects, call, key)
        else:
            program = None if self.uncompiled.because_of(effects, call, key) else program
        if program is not None:
            self.traced[key] = program
        elif self.uncompiled.lasting:
            self._plan_anew()
        return program

    def prepare(self, some: list[Call]):
        """Compile what calls like these will need; nothing is placed."""
        self.current()
        if some[0].step is not None or self.kept is not None:
            return  # which step of its cache the first one is shows when it comes
        program = None if self.uncompiled.lasting else self.program(dataclasses.replace(some[0], values=None))
        if program is not None:
            self._compile(program)

    def trace(self, call: Call, branches: int = 1, function: bridge.PureFunction | None = None) -> Program:
        """The program of calls like this one, `branches` side by side, as the module is now; nothing is placed."""
        self._look_at_state()
        function, name = function or self._function(call), type(self.module).__name__
        function.branches, spread = branches, self.plan.carry is not None
        return trace_program(
            function, self._placed, self._number_arguments(), call, branches, name, self.compiler_options, spread
        )

    def _compile(self, program: Program):
        if program.compiled is None:
            program.compile(share=self.residency is not None and len(self.residency.kind(self)) > 1)

    def _number_arguments(self, scale: float = 1.0) -> dict:
        numbers = {} if self._numbers_are_read else {n: x * scale for n, x in self._state.numbers.items()}
        return stack_numbers(numbers, self.plan_weights().groups)

    @property
    def compiler_options(self) -> dict[str, bool]:
        return compiler_options(self.mesh.devices.flat[0], self.config.sparse_cores)

    @property
    def _denoises(self) -> bool:
        """Whether this is a model of the denoising loop, as upstream's are by the argument that says where in it they are."""
        parameters = inspect.signature(type(self.module).forward).parameters
        return any(name in parameters for name in ("timestep", "timesteps", "timestep_ratio"))

    def _function(self, call: Call) -> bridge.PureFunction:
        placed = self.plan_weights()
        return bridge.PureFunction(
            module=self.module,
            call=self.original(call.entry),
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
                window=self.config.attention_window if self._denoises else None,
                ring=self.config.attention_ring,
                tally=self.tally,
                layers=self.config.layers,
                convolutions=self.config.convolution_precision,
                platform=self.mesh.devices.flat[0].platform,
                generation=generation_of(self.mesh.devices.flat[0]),
            ),
            matmul_precision=self.config.matmul_precision,
            processors={} if self.config.layers == "xla" else self.plan.processors,
            whole=self.plan.whole,
            methods=self.plan.methods,
            kept=None if call.step is None else self.kept,
            kind="" if call.step is None else call.step.kind,
        )
