"""The programs of one module: looked up in memory or on disk, else traced and compiled; with the module's state and weights."""

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Iterator

import jax
import numpy as np
import torch
from jax.sharding import Mesh

from .. import bridge
from ..chips.devices import compiler_options
from ..chips.figures import generation_of
from ..chips.locks import exclusive
from ..chips.mesh import regrouped, slices_of
from ..chips.sharding import INFERRED, ModelPlan
from ..common import notices
from ..common.config import TPUConfig
from ..common.errors import within_hbm
from ..kernels.attention.softmax_modes import ModeCounter
from ..kernels.settings import Settings
from ..weights.hbm import HbmManager, room_for_programs
from . import tracing
from .call import Call, values_of
from .executables import ALONE, NUMBERS_ARE_READ, Executables
from .guidance import GuidanceBatcher
from .host import EntryMethods
from .lru import LRUCache
from .modes import NO_PROGRAM, Modes, from_libraries
from .module_state import ModuleState
from .programs import Program, announce, clear_jax_caches, trace_program
from .sparsity import looked_for
from .state import Trace
from .weights import PlacedWeights, plan_placement


MOST_GUARDS = 8  # entries of `known` per program that may be in memory


@contextlib.contextmanager
def random_state_kept(leaves: list):
    """Restore torch's random state after a trace, so that the call itself draws the same numbers. `leaves`: of its arguments."""
    generators = [torch.default_generator, *(leaf for leaf in leaves if isinstance(leaf, torch._C.Generator))]
    with contextlib.ExitStack() as stack:
        for generator in generators:
            stack.callback(generator.set_state, generator.get_state())
        yield


class ModulePrograms(EntryMethods):
    """The programs of one module. `within`: the module is a submodule of a split one.

    Attributes:
        traced: programs, by kind of call (key, branches side by side, state) and the values of its guards.
        storage: kinds of weights that each chip stores whole (`weights.hbm.choose_storage`); None: not chosen, all are sharded.
        known: by kind of call and guard values so far: the next guard, or the mark that calls of this kind run alone.
    """

    NAME = "_tpu_runner"

    def __init__(
        self,
        module: torch.nn.Module,
        plan: ModelPlan,
        mesh: Mesh,
        config: TPUConfig,
        hbm_manager: HbmManager | None = None,
        within: bool = False,
    ):
        super().__init__(module, plan.entries, mesh)
        self.plan = self.plan_of_calls = plan
        self.config, self.hbm_manager, self.within = config, hbm_manager, within
        self.name = type(module).__name__
        room = room_for_programs(hbm_manager and hbm_manager.hbm, config)
        evicted = functools.partial(clear_jax_caches, config.programs)
        self.traced: dict[tuple, Program] = LRUCache(config.programs, room, lambda one: one.code_bytes, evicted)
        self.state = ModuleState(module, config.programs)
        self.modes = Modes(module, self._submodule, config.programs, evicted)
        self.known: dict[tuple, bridge.Guard | str] = LRUCache(MOST_GUARDS * config.programs)
        self.branches = GuidanceBatcher(1 if mesh is None else mesh.shape["dp"], self.execute)
        self.executables = Executables(self)
        self.storage: frozenset[str] | None = None
        self._placed: PlacedWeights | None = None
        self._numbers: tuple[tuple, dict[str, jax.Array]] = (), {}
        self.traces = self.compiled = 0  # counts
        self.tally = ModeCounter() if config.attention_tally else None
        self._unchanged = False  # `current` found the weights on the chips up to date

    @property
    def split(self):
        return self.modes.split

    @property
    def step_cache(self) -> tracing.StepCache | None:
        return self.state.step_cache

    # State and weights

    def plan_weights(self, anew: bool = False) -> PlacedWeights:
        """How the weights are laid out on the mesh; nothing is moved. `anew`: plan again in any case."""
        scan = self.config.scan and not self.modes.never_traced
        storage = self.storage or frozenset()
        planned_for = scan, () if self.split is None else tuple(self.split.runners), storage
        former = self._placed
        if anew or former is None or former.planned_for != planned_for:
            self._placed = plan_placement(self.module, self.plan, self.mesh, planned_for)
            if former is not None:
                self._placed.reuse(former)
        return self._placed

    def current(self) -> PlacedWeights:
        """How the weights are laid out, for the module's state as it is now; nothing is moved."""
        self._read_state()
        placed, tensors = self.plan_weights(), self.state.now.tensors
        self._unchanged = placed.unchanged(tensors)
        if not self._unchanged and placed.refresh(tensors, place=False):
            self.plan_weights(anew=True)
        return self._placed

    def place(self, read: bool = True) -> PlacedWeights:
        """Place the weights on the mesh, as the module's host tensors are now. `read`: False if `current` has just been called."""
        if read:
            self.current()
        placed, tensors, unchanged = self.plan_weights(), self.state.now.tensors, self._unchanged
        self._unchanged = False
        if not (unchanged and placed.watched is not None) and placed.refresh(tensors):
            self.plan_weights(anew=True).refresh(tensors)
        return self._placed

    def _read_state(self):
        if self.state.changed(None if self.within else self.config.scan):
            self.modes.follow(self.state.now)
            apart = () if self.step_cache is None else self.step_cache.apart
            as_upstreams = self.plan.together and not tracing.replaced_parts(self.module, self.plan, apart)
            self.plan_of_calls = dataclasses.replace(self.plan, decide=None) if as_upstreams else self.plan

    @property
    def state_key(self) -> tuple:
        """The part of a program's key that is of the module's current state; the call's key is the rest."""
        return self.state.key(self.plan_weights())

    def nested(self, name: str = "") -> Iterator[tuple[str, "ModulePrograms"]]:
        """This runner and the runners of a split module's submodules, each with its name in the model."""
        yield name, self
        for path, runner in self.split.runners.items() if self.split is not None else ():
            yield from runner.nested(f"{name}.{path}".lstrip("."))

    # Programs

    @property
    def programs(self) -> dict[tuple, Program]:
        """The programs that are compiled, by call and state."""
        return {key: program for key, program in [*self.traced.items()] if program.executables}

    @property
    def evicted(self) -> int:
        """How many programs of this module and its submodules were evicted."""
        return sum(runner.traced.evicted for _, runner in self.nested())

    @property
    def compilations(self) -> int:
        """How many programs this process compiled for this module and its submodules."""
        return sum(runner.compiled for _, runner in self.nested())

    @property
    def eager(self) -> list[str]:
        """The reasons why calls of this module are not compiled, if there are such calls."""
        return [*dict.fromkeys(reason for _, runner in self.nested() for reason in runner.modes.reasons())]

    def find_program(self, call: Call, branches: int = 0) -> Program | None:
        """The program of calls like this one: from memory, from disk, or traced now. None: the call runs in another mode.

        `branches`: how many calls run side by side; 0: as many as fill `dp`. The search may find a guard (a branch on small inputs,
        whose value joins the key) or a mark of an earlier trace. It then continues with the new key.
        """
        call.state, values = self.state_key, ()
        branches = branches or (self.branches.side_by_side(call) if bridge.environment().active else 1)
        while True:
            call.guards = values
            kind = (call.key, branches, call.state)
            key = (*kind, values)
            if key in self.modes.eager:
                return None
            if (program := self.traced.get(key)) is not None:
                return program
            found = self.known.get(key) or self.executables.recall(self.executables.key(call, branches, values), call)
            if found is None and self.modes.runs_once(kind, call, self.traced, self.known):
                return None
            if (found := found or self._new_program(call, branches, kind)) is None:
                return None
            if isinstance(found, Program):
                self.traced[*kind, call.guards] = found
                return found
            if found == NUMBERS_ARE_READ:
                self.state.numbers_are_static, values = True, ()
                if call.strengths:  # this call has them as inputs still
                    return None
            elif found == ALONE:
                self.known[key], branches, values = ALONE, 1, ()
            else:
                self._know(key, found)
                values += (_hashable(found.value(lambda number: values_of(call.tensors[number]))),)
            call.state = self.state_key

    def _know(self, key: tuple, guard: bridge.Guard):
        """Cache the guard that is evaluated after those whose values are in `key`."""
        if key not in self.known:
            self.known[key] = guard
            notices.warn_once(
                f"decided {self.name} {guard.line}",
                f"{self.name}.{key[0][0]} asks for values ({guard.line}): they are decided before each call, from its small"
                " inputs, and each answer has a program of its own",
            )

    def _new_program(self, call: Call, branches: int, kind: tuple) -> Program | str | None:
        """Trace the call: its program, or a mark of what the trace found; None: the call cannot be compiled."""
        function, effects, error = self.function(call, branches), Trace(), None
        try:
            with random_state_kept(call.leaves), bridge.whole_tracebacks():
                with tracing.undone_trace(self.module) as effects:
                    program = self._trace(call, function)
                if effects.temporary and not (effects.persistent or effects.draws):
                    tracing.depends_on_previous_call(function, program.result.avals, effects)
        except Exception as raised:
            if not isinstance(raised, (tracing.NumberRead, *NO_PROGRAM)) and not from_libraries(raised):
                raise
            error = raised
        if isinstance(error, tracing.NumberRead) or (error is not None and branches > 1):
            mark = NUMBERS_ARE_READ if isinstance(error, tracing.NumberRead) else ALONE
            self.executables.keep(self.executables.key(call, branches, call.guards), mark)
            return mark
        if not self.modes.has_program(error, effects, call, (*kind, call.guards)):
            return None
        self.keep_guards(program, call)
        return program

    def keep_guards(self, program: Program, call: Call):
        """Add the trace's guard values to the keys of the call and its program, and cache the guards for later calls."""
        decisions, program.result.decisions, call.guards = program.result.decisions, None, ()
        for guard, value in decisions.made.items():
            self._know((call.key, program.branches, call.state, call.guards), guard)
            self.executables.keep_guard(self.executables.key(call, program.branches, call.guards), guard, call)
            call.guards += (_hashable(value),)
        program.key = self.executables.key(call, program.branches, call.guards)

    def prepare(self, calls: list[Call]):
        """Compile the program of calls like the first of these; nothing is placed."""
        self.current()
        if calls[0].step.kind is not None or self.step_cache is not None:
            return  # the kind of its first step is decided when the call is made
        whole = self.split is None and not self.modes.never_traced
        program = self.find_program(dataclasses.replace(calls[0], values=None)) if whole else None
        if program is not None:
            self._compile(program)

    def trace(self, call: Call, branches: int = 1) -> Program:
        """Trace the program of calls like this one, `branches` side by side, for the module as it is now; nothing is placed."""
        self._read_state()
        with tracing.undone_trace(self.module):
            return self._trace(call, self.function(call, branches))

    def _trace(self, call: Call, function: tracing.PureFunction) -> Program:
        self.traces += 1
        with looked_for(call, self.name):
            return trace_program(function, self._placed, self.state.numbers(self._placed), call, self.compiler_options)

    def _compile(self, program: Program) -> bool:
        """Compile the program, unless that is done. Returns whether other threads may have run meanwhile."""
        if program.compiled is not None:
            return False
        former = [one for one in self.programs.values() if one.entry == program.entry]
        if former and not self.within:
            announce(program, former[-1])
        doing = f"to run {self.name}.{program.entry} for {program.shapes}"
        with self.within_hbm(lambda: doing), exclusive.released(pins=1) as released:
            first = program.compile()
        if first:
            self.compiled += 1
            self.traced.fit()
            self.executables.keep_program(program)
        return released

    def split_weights(self) -> bool:
        """Shard the weights stored whole on each chip, to make room for a program. False: there are none, or only one chip."""
        if not self.storage or self.mesh.size == 1:
            return False
        self.storage = frozenset()
        words = f"weights of {self.name} that each chip had whole are split over the chips from here on, and gathered in every step"
        notices.warn_once(f"split {id(self)}", f"{words}: a program has no room beside them")
        return True

    def within_hbm(self, doing):
        manager = self.hbm_manager
        return within_hbm(doing, lambda: "diffusers-tpu plan" if manager is None else manager.question(self))

    @property
    def compiler_options(self) -> dict[str, bool | str]:
        return compiler_options(self.mesh.devices.flat[0], self.config.sparse_cores)

    @property
    def denoises(self) -> bool:
        """Whether this is a denoiser: the forward of upstream's denoisers takes a timestep."""
        parameters = inspect.signature(type(self.module).forward).parameters
        return any(name in ("t", "r") or "timestep" in name for name in parameters)

    @property
    def settings(self) -> Settings:
        """The settings that this module's operations are traced with."""
        return Settings(
            mesh=self.mesh,
            sequence=self.plan.activation_spec not in (None, INFERRED),
            kernel=self.config.attention,
            blocks=self.config.attention_blocks,
            smoothing=self.config.attention_smoothing,
            window=self.config.attention_window if self.denoises else None,
            ring=self.config.attention_ring,
            tally=self.tally,
            layers=self.config.layers,
            linear=self.config.linear if self.denoises else "bfloat16",
            convolutions=self.config.convolution_precision,
            platform=self.mesh.devices.flat[0].platform,
            generation=generation_of(self.mesh.devices.flat[0]),
        )

    def mesh_of(self, call: Call, branches: int) -> Mesh:
        """The mesh of a program. If the user named no mesh, as much of a denoiser's batch as possible is on `dp`."""
        (dp, sp, _), config, images = self.mesh.devices.shape, self.config, call.images
        fixed = config.mesh is None or not config.regroup or config.attention_ring or self.within
        if fixed or images is None or slices_of(tuple(self.mesh.devices.flat)) > 1 or not self.denoises:
            return self.mesh
        return regrouped(self.mesh, math.gcd(branches * images, dp * sp))

    def function(self, call: Call, branches: int = 1) -> tracing.PureFunction:
        """The function that is traced for calls like this one. It can branch on tensor values only if the call runs alone."""
        placed, without = self.plan_weights(), {}
        if self.config.layers == "xla":
            without["processors"] = {}
        if self.plan.axes not in (None, *(t.ndim for t in call.tensors[:1])):
            without["methods"] = {}
        # JAX 0.10.2 cannot differentiate a scan over frames in a shard_map that closes over weights.
        if call.wanted is not None and self.plan.by_width and call.tensors[0].ndim == 5:
            without["methods"] = {}
        return tracing.PureFunction(
            module=self.module,
            call=self.original(call.entry),
            spec=call.spec,
            leaves=[tracing.TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in call.leaves],
            groups=placed.groups,
            specs=placed.specs,
            settled=placed.settled,
            packed=placed.packed,
            plan=dataclasses.replace(self.plan, **without),
            attention=dataclasses.replace(
                self.settings,
                mesh=self.mesh_of(call, branches),
                differentiable=call.wanted is not None,
                sparse=call.sparse if call.wanted is None else None,
            ),
            matmul_precision=self.config.matmul_precision,
            part=self.within,
            kept=None if call.step.kind is None else self.step_cache,
            kind=call.step.kind,
            branches=branches,
            strengths=call.strengths,
            values=(lambda number: values_of(call.tensors[number])) if branches == 1 else None,
            room=math.inf if call.wanted is None else call.wanted.room,
            autocast=call.autocast,
        )


def _hashable(value: np.ndarray) -> tuple:
    return value.shape, value.dtype.str, value.tobytes()
