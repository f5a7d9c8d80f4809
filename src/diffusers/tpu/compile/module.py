"""A module's methods as compiled programs: one executable per shape, static arguments and state of the module.

Weights are arguments, placed once for all methods of a module. Before each call the module is looked at (`state`): what the user
changed since makes another program, or is an argument of the same one. What a call's small inputs decide is a part of its
program's key (`decided`). A module whose lines ask for other values, or for what torchax lacks, comes apart (`parts`): its own lines run one
by one, its submodules are programs; if that fails too, it runs on the host. What leaves something for the next call (caches, counters, hooks
that keep values) runs eagerly whole: upstream's Python, operation by operation on the chips. The result is the same each time.
"""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Iterator

import jax
import torch
from jax.sharding import Mesh, PartitionSpec

from ...utils.peft_utils import unscale_lora_layers
from .. import bridge
from ..chips.devices import compiler_options
from ..chips.figures import generation_of
from ..chips.locks import exclusive
from ..chips.sharding import ModelPlan, named
from ..config import TPUConfig
from ..errors import NotFinite, within_hbm
from ..idioms.refusing import without_gradients
from ..kernels.attention.softmax_modes import ModeCounter
from ..kernels.settings import Settings
from ..weights.hbm import HbmManager, room_for_programs
from . import nans, tracing
from .call import Call, Values, flatten_call, goes_on_from, values_of, version_of
from .eager import NO_PROGRAM, EagerFallback, from_libraries, random_state_kept, run_on_host
from .executables import ALONE, NUMBERS_ARE_READ, Executables
from .graph_breaks import GraphBreaks
from .guards import Guards
from .guidance import GuidanceBatcher
from .programs import Program, announce, forget_operations, kept_at, trace_program
from .recent import Recent
from .state import State, Trace, is_entry, process_key, read, write_back
from .state.adapters import scaled_by, take_scale
from .weights import PlacedWeights, place_numbers, plan_placement, stack_numbers


LASTING = "lasting"  # of a module that each call changes, what stands for its state
_looked = contextvars.ContextVar("diffusers_tpu_looked", default=False)


@contextlib.contextmanager
def one_call(runners):
    """Around a pipeline's call: its models are looked at for writes through `.data` now, and not before each step.

    Of a call that fails nothing waits for the next one.
    """
    for runner in runners:
        runner.look()
    token = _looked.set(True)
    try:
        yield
    except BaseException:
        for runner in runners:
            runner.branches.forget()
        raise
    finally:
        _looked.reset(token)
        for runner in runners:
            runner.executables.forget_expected()


class CompiledModule:
    """The compiled form of one module, shared by its entry methods and by the pipelines that share the module.

    Where no program can be, because the module's lines ask for values or for what torchax lacks, it is in `parts` for as long as
    it stays in that state. `part`: the module is itself one of another's.

    It takes host and device tensors. It answers with device tensors where those can be worked with (the environment is
    active: resident glue), else with host tensors.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        plan: ModelPlan,
        mesh: Mesh,
        config: TPUConfig,
        hbm_manager: HbmManager | None = None,
        part: bool = False,
    ):
        self.part = part
        self.parts: GraphBreaks | None = None
        self._in_parts: dict[object, GraphBreaks] = Recent(config.programs)
        self.module, self.plan, self.mesh, self.config = module, plan, mesh, config
        self.hbm_manager = hbm_manager
        room = room_for_programs(hbm_manager and hbm_manager.hbm, config)
        forget = functools.partial(forget_operations, config.programs)
        self.traced: dict[tuple, Program] = Recent(
            config.programs, room, lambda one: one.compiled and one.code_bytes or 0, forget
        )
        self.branches = GuidanceBatcher(1 if mesh is None else mesh.shape["dp"], self._execute)
        self._placed: PlacedWeights | None = None
        self._signatures: dict[str, inspect.Signature] = {}
        self._entries: dict[str, object] = {}  # what stood there on the instance; None: the class's
        self._state: State | None = None
        self._states: dict[object, int] = Recent(config.programs)
        self._numbers_of_states = itertools.count()
        self._key: tuple | None = None
        self._cache: tracing.StepCache | None = None
        self._numbers: tuple[float, dict[str, jax.Array]] | None = None
        self._numbers_are_read = False
        self.eager_fallback = EagerFallback(type(module).__name__, config.programs, forget)
        self.guards = Guards(type(module).__name__, config.programs)
        self.executables = Executables(self)
        self.traces = self.compiled = 0  # how often
        self.tally = ModeCounter() if config.attention_tally else None

    def attach(self):
        """Take the module's entry methods over; the module says where it runs by an attribute."""
        self.take_over()
        self.module._tpu_runner = self
        self.module._hf_hook = bridge.ExecutionDevice()

    def detach(self):
        """Give the entry methods back and let go of the arrays; what the user has put in their place stays."""
        self.give_back()
        vars(self.module).pop("_tpu_runner", None)
        vars(self.module).pop("_hf_hook", None)
        self._placed, self._state = None, None
        self.branches.forget()
        if self._cache is not None:
            self._cache.reset()  # what it keeps is on the chips
        if self.hbm_manager is not None:
            self.hbm_manager.forget(self)
        self._signatures.clear()
        self._entries.clear()
        self.traced.clear()
        self.parts = None
        self._in_parts.clear()

    def take_over(self):
        """Calls of the module's entry methods are this runner's."""
        for name in self.plan.entries:
            self._signatures[name] = inspect.signature(getattr(self.module, name))
            self._entries[name] = vars(self.module).get(name)
            setattr(self.module, name, self._way_in(name))

    def give_back(self):
        """They are the module's again."""
        for name, own in self._entries.items():
            if is_entry(vars(self.module).get(name)):
                delattr(self.module, name)
                if own is not None:
                    setattr(self.module, name, own)

    def _way_in(self, name: str):
        original = functools.partial(self._method, name, self._entries[name])

        @functools.wraps(original())
        def run(*args, **kwargs):
            if tracing.tracing() or (self.parts is not None and self.parts.are_answering):
                return original()(*args, **kwargs)
            with exclusive.pinned():
                return without_gradients(self.module, (args, kwargs), self.run(name, args, kwargs))

        run.__signature__ = self._signatures[name]
        run.tpu_own = self._entries[name]
        return run

    def _method(self, name: str, own):
        """Upstream's method, also where the class's was replaced since; or what was on the instance before."""
        return getattr(type(self.module), name).__get__(self.module) if own is None else own

    def original(self, name: str):
        """What runs when the entry of this name is called."""
        return self._method(name, self._entries[name])

    # Where the weights are

    def plan_weights(self) -> PlacedWeights:
        """Where the weights lie or will lie; moves nothing."""
        if self._placed is None:
            scan = self.config.scan and not self.eager_fallback.lasting
            parts = () if self.parts is None else self.parts.names
            self._placed = plan_placement(self.module, self.plan, self.mesh, scan, parts)
        return self._placed

    def current(self) -> PlacedWeights:
        """Where the weights lie or will lie, as the module's host tensors are now; moves nothing."""
        self._look_at_state()
        if self.plan_weights().refresh(self._tensors, place=False):
            self._plan_anew()
        return self.plan_weights()

    def place(self) -> PlacedWeights:
        """The weights on the mesh, up to date with the module's host tensors."""
        self._look_at_state()
        if self.plan_weights().refresh(self._tensors):
            self._plan_anew()
            self.plan_weights().refresh(self._tensors)
        return self._placed

    def look(self):
        """Look for writes to the host's tensors that torch does not count; they are placed before the next call."""
        for _, runner in self.with_parts():
            if runner._placed is not None:
                runner._placed.sampled_changes()

    def _plan_anew(self):
        former, self._placed = self._placed, None
        self._key = self._numbers = None
        if former is not None:
            self.plan_weights().take_over(former)

    def drop(self):
        """The weights leave the chips."""
        for _, runner in self.with_parts():
            if runner._placed is not None:
                runner._placed.drop()

    @property
    def bytes_per_chip(self) -> int:
        """What the weights take of a chip, as they are planned."""
        placed = (runner._placed for _, runner in self.with_parts())
        return sum(one.coverage.bytes_per_chip for one in placed if one is not None)

    def with_parts(self, name: str = "") -> Iterator[tuple[str, "CompiledModule"]]:
        """This runner and those of its parts, of their parts too, with their names in the model."""
        yield name, self
        for path, runner in self.parts.runners.items() if self.parts is not None else ():
            yield from runner.with_parts(f"{name}.{path}".lstrip("."))

    def _look_at_state(self):
        """Read the module's state again if it is not as it was."""
        if self._state is not None and self._state.same():
            return
        if not self.part:  # whose model has left it to upstream's hooks
            self._cache = tracing.kept_by(self.module, self.plan_weights().groups, self._cache)
        self._state = read(self.module, () if self.kept is None else self.kept.apart)
        self._key = self._numbers = None
        kept = self.eager_fallback.lasting
        self.eager_fallback.look_at(self._state)
        parts = self._in_parts.get(LASTING if self.eager_fallback.lasting else self._state.key)
        if parts is not None and not parts.are_of(self.module):
            self._take_apart(parts.reason)
        elif parts is None and self._state.unread:
            self._take_apart(self.eager_fallback.cannot_read())
        else:
            self._come_apart(parts)
        if kept and not self.eager_fallback.lasting:
            self._plan_anew()  # what kept something is gone: blocks are stacked again

    @property
    def kept(self) -> tracing.StepCache | None:
        """The cache of the module whose steps programs stand for."""
        return None if self._cache is None or self._cache.left else self._cache

    def _leave_cache(self):
        """Upstream's hooks themselves go on with the cache; where they do for good they are read as any others."""
        if self.kept is not None:
            self._cache.leave()
            self._state = None if self._cache.left else self._state

    def _come_apart(self, parts: GraphBreaks | None):
        """In these parts from here on, or whole."""
        if parts is not self.parts:
            self.parts = parts
            self._plan_anew()
        self._tensors = self._state.tensors if parts is None else parts.own(self._state.tensors)

    @property
    def read_state(self) -> tuple:
        """What a trace reads of the module's Python as it is now."""
        return self._state.key, tuple(self._state.numbers.items()) if self._numbers_are_read else ()

    @property
    def state_key(self) -> tuple:
        """What a program of now is keyed by, beside its call."""
        if self._key is None:
            state, numbers = self.read_state
            weights = tuple((key, a.shape, a.dtype) for key, a in self.plan_weights().avals.items())
            key = (state, numbers, weights)
            if key not in self._states:
                self._states[key] = next(self._numbers_of_states)
            self._key = (self._states[key],)
        return (*self._key, *process_key())

    # Calls

    def run(self, entry: str, args: tuple, kwargs: dict):
        """Upstream's return value of the module's `entry(*args, **kwargs)`, computed on the mesh."""
        with torch.inference_mode(False), torch.no_grad():
            call = self._scaled(entry, args, kwargs)
            if not _looked.get():
                self.look()
            self.current()
            held = None if self.part else next(filter(goes_on_from, call.others), None)
            if held is not None:
                return self._go_on_from(held, call, args, kwargs)
            if self.eager_fallback.steadies((call.key, self._state.key)):
                self._in_parts.pop(LASTING, None)
                self._come_apart(self._in_parts.get(self._state.key))
            whole = not (self.parts or self.eager_fallback.lasting or self._opaque(call))
            if call.unread is not None:
                self.eager_fallback.add(
                    call, ("given", call.unread), f"what it is given can be no part of a key ({call.unread})"
                )
                whole = False
            if self.kept is not None and entry == "forward":
                if whole:
                    call.keeps(self.kept.step())
                else:
                    self._leave_cache()
            with contextlib.nullcontext() if call.step is None else call.step.undone_on_error():
                return self._looked_at(self._run_call(call, args, kwargs, whole), entry, args, kwargs)

    def _looked_at(self, answer, entry: str, args: tuple, kwargs: dict):
        """The answer. Raises NotFinite where NaN is looked for and is there; of pictures it is told at the end of the call."""
        if nans.is_debugging() and not self.part:
            if not nans.are_finite(answer):
                self.branches.finish()
                call = self.flatten_call(entry, args, kwargs)
                self.current()
                self.take_values(call)
                name = nans.first_not_finite(self.module, lambda: self._line_by_line(call, args, kwargs))
                raise NotFinite(nans.message(type(self.module).__name__, name, entry))
        elif entry == "decode":
            nans.note(self, answer)
        return answer

    def _run_call(self, call: Call, args: tuple, kwargs: dict, whole: bool):
        program = self.program(call) if whole else None
        if program is None or (self._numbers_are_read and call.scale != 1.0):
            if call.step is not None:
                call.step.undo()
            if program is not None:
                return self.run(call.entry, args, kwargs)
            self._leave_cache()
            return self._run_eagerly(self.flatten_call(call.entry, args, kwargs), args, kwargs)
        self.take_values(call)
        if self._compile(program):
            self._look_at_state()  # of what other threads have called meanwhile
            if self.state_key != call.state:
                if call.step is not None:
                    call.step.undo()
                return self.run(call.entry, args, kwargs)
            self.take_values(call)
        outputs = self.branches.run(call, program)
        if bridge.environment().waits:
            jax.block_until_ready(outputs)
        if call.step is not None:
            own = len(outputs) - program.result.results
            kept = [x if bridge.on_device(x) else bridge.to_torch(x) for x in outputs[own:]]
            call.step.keep(kept, program.result.form)
            outputs = outputs[:own]
        answer = self._answer(program.result, outputs, call)
        if call.scale == 0:
            unscale_lora_layers(self.module, 0)  # as upstream's forward ends: scales are those of the files again
        return answer

    def _scaled(self, entry: str, args: tuple, kwargs: dict) -> Call:
        """A call whose scale of LoRA layers, upstream's `attention_kwargs={"scale": ...}`, is no argument but multiplies numbers."""
        name = None if self._numbers_are_read else scaled_by(self.original(entry))
        kwargs, scale = take_scale(kwargs, name)
        call = self.flatten_call(entry, args, kwargs)
        call.scale = scale
        return call

    def flatten_call(self, entry: str, args: tuple, kwargs: dict) -> Call:
        """A call of the module's `entry(*args, **kwargs)` as tensors and what is static."""
        return flatten_call(entry, self._signatures[entry], self.plan, args, kwargs)

    def take_values(self, call: Call):
        """Give the call what its program computes with: weights where they lie, numbers, its tensors' values."""
        self._bring()
        everywhere = named(self.mesh, PartitionSpec())
        if self._numbers is None or self._numbers[0] != call.scale:
            self._numbers = call.scale, place_numbers(self.number_arguments(call.scale), self.mesh)
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
        if self.hbm_manager is None:
            return self.place()
        with within_hbm(lambda: f"for the weights of {self._said}", self._question):
            self.hbm_manager.load(self)

    @property
    def _said(self) -> str:
        return type(self.module).__name__

    def _question(self) -> str:
        return "diffusers-tpu plan" if self.hbm_manager is None else self.hbm_manager.question(self)

    def _execute(self, program: Program, some: list[Call]) -> list[list[jax.Array]]:
        with self._within_hbm(program):
            outputs = program.run(some)
        if self.hbm_manager is not None:
            self.hbm_manager.prefetch(self, some if program.calls == 1 else None)
        return outputs

    def _within_hbm(self, program: Program):
        return within_hbm(lambda: f"to run {self._said}.{program.entry} for {program.shapes}", self._question)

    def _answer(self, result: tracing.TraceResult, outputs: list, call: Call):
        """Upstream's return value; what the call leaves in its arguments is in the caller's own."""
        if bridge.environment().active:
            outputs = [x if bridge.on_device(x) else bridge.to_torch(x) for x in outputs]
        else:
            outputs = [bridge.from_numpy(x) for x in outputs]
        own, written = len(outputs) - result.written.arrays, result.written
        if written.holders or written.tensors:
            write_back(written, call.given, call.tensors, outputs[own:], bridge.write)
        return result.output(outputs[:own])

    def _opaque(self, call: Call) -> bool:
        """Whether a part is given what may hide tensors, which its program would neither see nor write to."""
        hides = call.others[0] if self.part and call.others else None
        if hides is not None:
            self._take_apart(f"it is given a {type(hides).__name__}")
        return hides is not None

    def _go_on_from(self, held, call: Call, args: tuple, kwargs: dict):
        """On the host: each call finds more in what it is given, a language model's keys and values, so that no shape comes twice."""
        self.branches.finish()
        self.eager_fallback.put_on_host(call, f"each call finds more in the {type(held).__name__} that it is given")
        return self._run_on_host(call, args, kwargs)

    def _take_apart(self, reason: str):
        """The module is in parts while it is in this state, or changes with each call."""
        parts = GraphBreaks(self.module, self._part, reason)
        self._in_parts[LASTING if self.eager_fallback.lasting else self._state.key] = parts
        self._come_apart(parts)

    def _part(self, module: torch.nn.Module) -> "CompiledModule":
        plan = ModelPlan(processors=self.plan.processors, methods=self.plan.methods, spread=self.plan.by_slabs)
        runner = CompiledModule(module, plan, self.mesh, self.config, part=True)
        runner.tally, runner.traced.most_bytes = self.tally, self.traced.most_bytes
        return runner

    def _run_eagerly(self, call: Call, args: tuple, kwargs: dict):
        """The module's own lines one by one, those of its parts too where it has none; on the host if they fail on the chips."""
        self.branches.finish()
        if self.parts is not None and self.parts.host is not None:
            return self._run_on_host(call, args, kwargs)
        self.current()
        self.take_values(call)
        if self.parts is None:
            return self._line_by_line(call, args, kwargs)
        try:
            with self.parts.answering(), self.parts.noting_missing(), bridge.whole_tracebacks():
                answer = self._line_by_line(call, args, kwargs)
            self.parts.answered = True
            return answer
        except Exception as error:
            if not from_libraries(error):
                self._whole_if_unanswered()
                raise
            self._state.restore()
            failed = error
        try:
            answer = self._run_on_host(call, args, kwargs)
        except Exception:
            self._whole_if_unanswered()
            raise
        self.parts.put_on_host(f"{type(self.module).__name__}.{call.entry}", failed)
        return answer

    def _whole_if_unanswered(self):
        """The call ends in upstream's own error, of what it was given: a module that never answered in parts is whole again."""
        if not self.parts.answered:
            for key in [key for key, parts in self._in_parts.items() if parts is self.parts]:
                del self._in_parts[key]
            self._come_apart(None)

    def _line_by_line(self, call: Call, args: tuple, kwargs: dict):
        weights, specs = self._placed.one_by_one()
        function, in_parts = dataclasses.replace(self.function(call), groups=[], specs=specs), self.parts is not None
        if self.part:  # the caller may look at what it gave, and at what of that it is given back
            return function.line_by_line(weights, args, kwargs, in_parts)
        outputs, result = function.eagerly(weights, call.values.inputs, in_parts)
        return self._answer(result, outputs, call)

    def _run_on_host(self, call: Call, args: tuple, kwargs: dict):
        return run_on_host(self.module, self.original(call.entry), args, kwargs, self.mesh)

    # Programs

    @property
    def programs(self) -> dict[tuple, Program]:
        """What was compiled, by call and state."""
        return {key: program for key, program in [*self.traced.items()] if program.compiled is not None}

    @property
    def evicted(self) -> int:
        """How many programs of this module and its parts were let go of, as others were used."""
        return sum(runner.traced.evicted for _, runner in self.with_parts())

    @property
    def compilations(self) -> int:
        """How many programs were compiled here for this module and its parts."""
        return sum(runner.compiled for _, runner in self.with_parts())

    @property
    def eager(self) -> list[str]:
        """Why calls of this module run eagerly, if any do."""
        reasons = [reason for _, runner in self.with_parts() for reason in runner._reasons()]
        return [*dict.fromkeys(reasons)]

    def _reasons(self) -> Iterator[str]:
        yield from self.eager_fallback.reasons.values()
        yield from self.eager_fallback.on_host
        if self.parts is not None:
            yield from filter(None, (self.parts.reason, *self.parts.missing, self.parts.host))

    def program(self, call: Call) -> Program | None:
        """The program of calls like this one, traced if it is new; None if none can stand for it."""
        call.state = self.state_key
        branches = self.branches.side_by_side(call) if bridge.environment().active else 1
        key = (call.key, branches, call.state)
        if branches > 1 and self.guards.alone.get(key):
            key = (call.key, branches := 1, call.state)
        call.guards = self.guards.answers(key, call)
        key = (*key, call.guards)
        if key in self.eager_fallback.reasons:
            return None
        if key in self.traced:
            return self.traced[key]
        fickle = self.guards.fickle(key, self.traced)
        if fickle is not None:
            return self._take_apart(f"its answers are others in each call ({fickle})")
        found = self._recalled(call, branches, key)
        if found is None and self.eager_fallback.is_fickle(call, self.traced.values()):
            return self._take_apart(self.eager_fallback.fickle)
        return found or self._new_program(call, branches, key)

    def _recalled(self, call: Call, branches: int, key: tuple) -> Program | None:
        """The program that another process has left for calls like this one; None where there is none."""
        found = self.executables.recall(self.executables.key(call, branches, call.guards), call, branches)
        if found is None or isinstance(found, Program):
            if found is not None:
                self.traced[key] = found
            return found
        if found == NUMBERS_ARE_READ:
            self._numbers_are_read, self._key = True, None
        elif found == ALONE:
            self.guards.alone[key[:-1]] = True
        else:
            self.guards.know(key[:-1], call.guards, found)
        return self.program(call)

    def _new_program(self, call: Call, branches: int, key: tuple) -> Program | None:
        function, effects = self.function(call), Trace()
        if branches == 1:
            function.values = lambda number: values_of(call.tensors[number])
        try:
            with random_state_kept(call), bridge.whole_tracebacks():
                with tracing.undone_trace(self.module) as effects:
                    program = self._trace(call, branches, function)
                if effects.temporary and not (effects.persistent or effects.draws):
                    tracing.depends_on_previous_call(function, program.result.avals, effects)
        except tracing.NumberRead:
            self._found_out(NUMBERS_ARE_READ, call, branches)
            self._numbers_are_read, self._key = True, None
            return self.program(call)
        except Exception as error:
            if not isinstance(error, NO_PROGRAM) and not from_libraries(error):
                raise
            if branches > 1:
                self._found_out(ALONE, call, branches)
                self.guards.alone[key[:-1]] = True
                return self.program(call)
            program, reason = None, self.eager_fallback.fails(error, effects, call, key)
            if reason is not None:
                return self._take_apart(reason)
        else:
            program = None if self.eager_fallback.because_of(effects, call, key) else program
        if program is not None:
            decisions, program.result.decisions = program.result.decisions, None  # of this trace
            for answers, question in self.guards.asked(decisions):
                self.executables.keep_question(self.executables.key(call, branches, answers), question, call)
            call.guards = self.guards.learn(key[:-1], decisions)
            self.traced[*key[:-1], call.guards] = program
            program.key = self.executables.key(call, branches, call.guards)
        elif self.eager_fallback.lasting:
            self._plan_anew()
        return program

    def _found_out(self, what: str, call: Call, branches: int):
        self.executables.keep_mark(self.executables.key(call, branches, call.guards), what)

    def prepare(self, some: list[Call]):
        """Compile what calls like these will need; nothing is placed."""
        self.current()
        if some[0].step is not None or self.kept is not None:
            return  # which step of its cache the first one is shows when it comes
        whole = not (self.parts or self.eager_fallback.lasting)
        program = self.program(dataclasses.replace(some[0], values=None)) if whole else None
        if program is not None:
            self._compile(program)

    def trace(self, call: Call, branches: int = 1) -> Program:
        """The program of calls like this one, `branches` side by side, as the module is now; nothing is placed."""
        self._look_at_state()
        with tracing.undone_trace(self.module):
            return self._trace(call, branches, self.function(call))

    def _trace(self, call: Call, branches: int, function: tracing.PureFunction) -> Program:
        self.traces += 1
        name = type(self.module).__name__
        function.branches, spread = branches, self.plan.carry is not None
        return trace_program(
            function, self._placed, self.number_arguments(), call, branches, name, self.compiler_options, spread
        )

    def _compile(self, program: Program) -> bool:
        """Compile it where that is not done; whether other threads may have run meanwhile."""
        if program.compiled is not None:
            return False
        former = [one for one in self.programs.values() if one.entry == program.entry]
        if former and not self.part:
            announce(program, former[-1])
        share = self.part or (self.hbm_manager is not None and len(self.hbm_manager.kind(self)) > 1)
        with self._within_hbm(program), exclusive.released(pins=1) as released:
            first = program.compile(share)
        if first:
            self.compiled += 1
            self.traced.fit()
            self.executables.keep(program)
        return released

    def number_arguments(self, scale: float = 1.0) -> dict:
        numbers = {} if self._numbers_are_read else {n: x * scale for n, x in self._state.numbers.items()}
        return stack_numbers(numbers, self.plan_weights().groups)

    @property
    def compiler_options(self) -> dict[str, bool | str]:
        return compiler_options(self.mesh.devices.flat[0], self.config.sparse_cores)

    @property
    def _denoises(self) -> bool:
        """Whether this is a model of the denoising loop, as upstream's are by the argument that says where in it they are."""
        parameters = inspect.signature(type(self.module).forward).parameters
        return any(name in parameters for name in ("timestep", "timesteps", "timestep_ratio", "t", "r"))

    @property
    def settings(self) -> Settings:
        """How the operations of this module's traces run."""
        return Settings(
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
        )

    def function(self, call: Call) -> tracing.PureFunction:
        placed = self.plan_weights()
        return tracing.PureFunction(
            module=self.module,
            call=self.original(call.entry),
            spec=call.spec,
            leaves=[tracing.INPUT if isinstance(leaf, torch.Tensor) else leaf for leaf in call.leaves],
            groups=placed.groups,
            specs=placed.specs,
            mesh=self.mesh,
            carry=self.plan.carry,
            attention=self.settings,
            matmul_precision=self.config.matmul_precision,
            part=self.part,
            processors={} if self.config.layers == "xla" else self.plan.processors,
            whole=self.plan.whole,
            by_slabs=self.plan.by_slabs,
            methods=self.plan.methods if self.plan.axes in (None, call.axes) else {},
            kept=None if call.step is None else self.kept,
            kind="" if call.step is None else call.step.kind,
        )
