"""A module's methods as compiled programs: one executable per shape, static arguments and state of the module.

Weights are arguments, placed once for all methods. Before each call the module's Python state is compared with the last one
(`state`): a change leads to another program, or is an argument of the same one. Calls that cannot be compiled run in another mode
(`modes`), with the same values.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable

import jax
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...utils.peft_utils import unscale_lora_layers
from .. import bridge
from ..chips import hosts
from ..chips.locks import exclusive
from ..chips.sharding import ModelPlan
from ..common import notices
from ..common.errors import NotFinite, OutOfHBM
from ..idioms.refusing import asking, without_gradients
from ..kernels.settings import bound
from . import nans, tracing
from .call import Call, SentInputs, Values, flatten_call, version_of
from .gradients import DifferentiatedCall
from .modes import Mode, from_libraries
from .module_programs import ModulePrograms
from .programs import Program, cached_sharding
from .sparsity import thin_out
from .state import Arguments, write_back
from .state.adapters import scaled_by, take_scale
from .weights import PlacedWeights


_of_pipeline = contextvars.ContextVar("diffusers_tpu_of_pipeline", default=None)  # its `SentInputs`


@contextlib.contextmanager
def one_call(runners):
    """Around a pipeline's call: host texts are sent to the chips once. Writes through `.data` are searched for before it (`look`).

    At the end deferred branches are discarded, so that a failed call leaves none for the next one.
    """
    try:
        with bound(_of_pipeline, SentInputs()):
            yield
    finally:
        for runner in runners:
            runner.branches.forget()
            runner.executables.ahead.clear()


class CompiledModule(ModulePrograms):
    """The compiled form of one module, shared by its entry methods and by the pipelines that share the module.

    It takes host and device tensors. It returns device tensors while the environment is active (resident glue), else host tensors.
    `within`: the module is a submodule of a split one.
    """

    def _submodule(self, module: torch.nn.Module) -> "CompiledModule":
        plan = ModelPlan(parallel=self.plan.by_width)
        if not self.plan.together:
            plan = dataclasses.replace(plan, processors=self.plan.processors, methods=self.plan.methods)
        runner = CompiledModule(module, plan, self.mesh, self.config, within=True)
        runner.tally, runner.traced.most_bytes = self.tally, self.traced.most_bytes
        return runner

    def detach(self):
        """Restore the entry methods and free the arrays; methods that the user has set since stay."""
        super().detach()
        self.drop()
        self._placed = None
        self.branches.forget()
        self.state.forget()
        if self.hbm_manager is not None:
            self.hbm_manager.forget(self)
        self.traced.clear()
        self.modes.forget()

    def called(self, name: str, args: tuple, kwargs: dict):
        if tracing.tracing() or (self.split is not None and self.split.is_running):
            return self.original(name)(*args, **kwargs)
        with exclusive.pinned():
            asked = asking(self.module, (args, kwargs))
            back = bool(asked) and not (self.within or bridge.environment().active)
            return without_gradients(asked, self.run(name, args, kwargs, back))

    def _all_placed(self) -> list[PlacedWeights]:
        return [runner._placed for _, runner in self.nested() if runner._placed is not None]

    def look(self):
        """Search for writes to host tensors that torch's version counter misses; these tensors are placed before the next call."""
        for placed in self._all_placed():
            placed.sampled_changes()

    def drop(self):
        """Remove the weights from the chips."""
        for placed in self._all_placed():
            placed.drop()

    @property
    def bytes_per_chip(self) -> int:
        """Bytes of a chip that the weights take, as planned."""
        return sum(placed.coverage.bytes_per_chip for placed in self._all_placed())

    @property
    def held_per_chip(self) -> int:
        """Bytes of a chip that training keeps beside the weights."""
        return sum(held.bytes_per_chip for placed in self._all_placed() for held in placed.beside())

    def run(self, entry: str, args: tuple, kwargs: dict, back: bool = False):
        """Upstream's return value of the module's `entry(*args, **kwargs)`. `back`: torch will ask for gradients through it.

        Flatten the call -> mode -> key, guards, look up or trace -> place weights, compile -> batch guidance branches and execute
        -> unflatten. Calls without a program run split, eagerly or on the host.
        """
        with torch.inference_mode(False), torch.no_grad():
            if _of_pipeline.get() is None:
                self.look()
            self.current()
            # Gradients flow through what `ModelPlan.decide` computes too.
            with torch.enable_grad() if back else contextlib.nullcontext():
                call = self._scaled_call(entry, args, kwargs, constants=back)
            mode = self.modes.of(call, self.within)
            owners = (torch.nn.modules.module if m is self.module else m for m in self.module.modules())
            if back and any(tracing.hooks_of(owner, "backward") for owner in owners):
                self.modes.host["a submodule has hooks on gradients"] = None
                return self._trained_on_host(entry, args, kwargs)
            if back and mode is Mode.COMPILED and self.step_cache is None:
                differentiated = DifferentiatedCall(self, call)
                if differentiated.find() is None:
                    if call.strengths and self.state.numbers_are_static:
                        return self.run(entry, args, kwargs, back)
                    mode = self.modes.fallback
                elif differentiated.ready():
                    return self._finite(differentiated.output(), entry, args, kwargs)
                else:
                    return self.run(entry, args, kwargs, back)
            if back and self.module.training:
                return self._trained_on_host(entry, args, kwargs)
            if mode is Mode.COMPILED and entry == "forward" and self.step_cache is not None:
                call.become(self.step_cache.step())
            try:
                program = self.find_program(call) if mode is Mode.COMPILED else None
                if call.strengths and self.state.numbers_are_static:
                    call.step.undo()
                    return self.run(entry, args, kwargs)
                if program is None:
                    mode = self.modes.fallback if mode is Mode.COMPILED else mode
                    call.step.undo()
                    self.state.leave_step_cache()
                    result = self._run_uncompiled(mode, entry, args, kwargs)
                elif self.make_ready(call, program):
                    result = self._unflatten(call, program, self.branches.run(call, program))
                else:
                    call.step.undo()
                    return self.run(entry, args, kwargs)
            finally:
                call.step.undo()  # of a call that has failed
            return self._finite(result, entry, args, kwargs)

    def _trained_on_host(self, entry: str, args: tuple, kwargs: dict):
        words = f"{self.name}.{entry} is trained on the host: it is not compiled as it is now (diffusers.tpu.report says why)"
        notices.warn_once(f"trains on host {self.name}.{entry}", words)
        with torch.enable_grad():
            return self.on_host(entry, args, kwargs)

    def flatten_call(self, entry: str, args: tuple, kwargs: dict, constants: bool = True) -> Call:
        """A call of the module's `entry(*args, **kwargs)`, flattened into tensors and static arguments; `constants`: as there."""
        constants = constants or self.state.numbers_are_static
        call = flatten_call(entry, self._signatures[entry], self.plan_of_calls, args, kwargs, constants)
        if self.config.attention_sparsity and entry == "forward" and self.denoises and not self.within:
            thin_out(call, self.config, self.module)
        return call

    def _scaled_call(self, entry: str, args: tuple, kwargs: dict, constants: bool) -> Call:
        """A call whose LoRA scale (`attention_kwargs={"scale": ...}`) is no argument, but multiplies the layers' scales."""
        name = None if self.state.numbers_are_static else scaled_by(self.original(entry))
        kwargs, scale = take_scale(kwargs, name)
        call = self.flatten_call(entry, args, kwargs, constants)
        call.scale = scale
        return call

    def make_ready(self, call: Call, program: Program, compile: Callable[[Program], bool] | None = None) -> bool:
        """Place the weights, and compile the program by `compile` or else `_compile`. False: the call's key has changed by a trace
        or by another thread, or weights that each chip stored whole were sharded to make room for the program."""
        if self.state.numbers_are_static and call.scale != 1.0:
            return False
        self.take_values(call)
        try:
            released = not self.branches.waits(call, program) and (compile or self._compile)(program)
        except OutOfHBM:
            if not self.split_weights():
                raise
            self._give_anew([waiting.call for waiting in self.branches.waiting])
            return False
        if released:
            self._read_state()  # other threads may have run meanwhile
            if self.state_key != call.state:
                return False
            self.take_values(call)
        return True

    def load(self):
        """Place the weights on the chips, for the module as last read."""
        with self.within_hbm(lambda: f"for the weights of {self.name}"):
            self.place(read=False) if self.hbm_manager is None else self.hbm_manager.load(self)

    def has_room(self, nbytes: int) -> bool:
        """Whether a chip has room for so many more bytes that stay there."""
        return self.hbm_manager is None or self.hbm_manager.free() >= nbytes

    def take_values(self, call: Call):
        """Give the call what its program computes with: placed weights, numbers and input values, for the module as last read."""
        self.load()
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        of = self.state.now, self._placed, self.state.numbers_are_static, call.scale
        if self._numbers[0] != of:
            numbers = self.state.numbers(self._placed, call.scale)
            self._numbers = of, {key: hosts.put(x, everywhere) for key, x in numbers.items()}
        sent = _of_pipeline.get() or SentInputs()
        call.values = Values(
            weights=dict(self._placed.arrays),
            placement=self._placed.placement,
            numbers=self._numbers[1],
            inputs=[sent.array(t, everywhere) for t in call.tensors],
            versions=[version_of(t) for t in call.inputs],
        )

    def _give_anew(self, calls: list[Call]):
        """Replace the weights of deferred calls by those placed now; the calls keep their input values."""
        self.current()
        for call in calls:
            given = call.values
            self.take_values(call)
            call.values = dataclasses.replace(call.values, inputs=given.inputs, versions=given.versions)
            call.state = self.state_key

    def execute(self, program: Program, calls: list[Call]) -> list[list[jax.Array]]:
        """Flat output arrays of each call."""
        if len(calls) < program.branches and (alone := self._alone(calls[0])) is not None:
            return [self.execute(alone, [call])[0] for call in calls]
        self._compile(program)
        with self.within_hbm(lambda: f"to run {self.name}.{program.entry} for {program.shapes}"):
            outputs = program.run(calls, [self._cached(call, program.mesh) for call in calls])
        if self.hbm_manager is not None:
            self.hbm_manager.prefetch(self, calls if program.calls == 1 else None)
        return outputs

    def _cached(self, call: Call, mesh: Mesh) -> list[jax.Array]:
        """The step cache's tensors of a call, as a program on this mesh takes them."""
        sequence = self.plan.activation_spec is not None
        return [bridge.to_jax(t, cached_sharding(mesh, sequence, t.shape)) for t in call.step.tensors]

    def _alone(self, call: Call) -> Program | None:
        """The program that runs a deferred call alone; None: the module has changed, and the call's own program is filled up."""
        self._read_state()
        return self.find_program(call, 1) if self.state_key == call.state else None

    def _unflatten(self, call: Call, program: Program, outputs: list):
        if bridge.environment().waits:
            jax.block_until_ready(outputs)
        own = len(outputs) - program.result.results
        cached = [x if bridge.on_device(x) else bridge.to_torch(x) for x in outputs[own:]]
        call.step.keep(cached, program.result.form)
        return self.output_of(program.result, outputs[:own], call)

    def output_of(self, result: tracing.TraceResult, outputs: list, call: Call):
        """Upstream's return value. What the call wrote to its arguments is written to the caller's own."""
        if bridge.environment().active:
            outputs = [x if bridge.on_device(x) else bridge.to_torch(x) for x in outputs]
        else:
            outputs = [x if torch.is_tensor(x) else bridge.from_numpy(x) for x in outputs]
        own, written = len(outputs) - result.written.arrays, result.written
        if written.holders or written.tensors:
            write_back(written, call.given, call.tensors, outputs[own:])
        if call.scale == 0:
            unscale_lora_layers(self.module, 0)  # as upstream's forward ends: scales are those of the files
        return result.output(outputs[:own])

    def _run_uncompiled(self, mode: Mode, entry: str, args: tuple, kwargs: dict):
        """Run the call in another mode. A split module whose own lines fail on the chips runs on the host from then on."""
        self.branches.finish()
        if mode is Mode.HOST:
            return self.on_host(entry, args, kwargs)
        self.current()  # leaving a step cache changes the state
        call, split = self.flatten_call(entry, args, kwargs), self.split
        self.take_values(call)
        if split is None:
            return self._run_eagerly(call, args, kwargs)
        held = Arguments((args, kwargs), [])
        with self.modes.whole_on_error():
            try:
                with split.running(), bridge.whole_tracebacks():
                    result = self._run_eagerly(call, args, kwargs)
                split.ran = True
                return result
            except Exception as error:
                if not from_libraries(error):
                    raise
                failed = error
            self.state.now.restore()
            held.put_back()
            for t, value, version in zip(call.tensors, call.values.inputs, call.values.versions):
                if version_of(t) is not version:
                    bridge.write(t, bridge.to_torch(value))
            result = self.on_host(entry, args, kwargs)
        split.move_to_host(f"{self.name}.{entry}", failed)
        return result

    def _run_eagerly(self, call: Call, args: tuple, kwargs: dict):
        weights, specs = self._placed.one_by_one()
        function = dataclasses.replace(self.function(call), groups=[], specs=specs, settled=frozenset(), packed={})
        split = self.split is not None
        if self.within:  # the caller may use its arguments afterwards, and may get them back
            return function.line_by_line(weights, args, kwargs, split)
        outputs, result = function.eagerly(weights, call.values.inputs, split)
        return self.output_of(result, outputs, call)

    def _finite(self, result, entry: str, args: tuple, kwargs: dict):
        """The result. In debugging mode raises NotFinite if a value is NaN or infinite; else notes that of `decode`'s results."""
        if nans.is_debugging() and not self.within:
            if not nans.are_finite(result):
                self.branches.finish()
                self.current()
                call = self.flatten_call(entry, args, kwargs)
                self.take_values(call)
                name = nans.first_not_finite(self.module, lambda: self._run_eagerly(call, args, kwargs))
                raise NotFinite(nans.message(self.name, name, entry))
        elif entry == "decode":
            nans.note(self, result)
        return result
