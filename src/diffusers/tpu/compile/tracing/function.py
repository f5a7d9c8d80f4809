"""A torch module's method as a pure function of (weights, inputs, numbers), all JAX arrays."""

import contextlib
import contextvars
import functools
import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import jax
import torch
from jax.sharding import NamedSharding, PartitionSpec

from ...bridge import (
    Decisions,
    Tensor,
    autocast,
    by_output,
    deciding,
    decomposing,
    environment,
    lying,
    quiet_integers,
    unpacked,
    whole_on_chips,
)
from ...chips.sharding import INFERRED, STORAGE_AXES, TOKENS, ModelPlan, Packed, axes_of
from ...common import notices
from ...kernels.linear import LANES
from ...kernels.narrow import Narrow, is_wide, narrowed
from ...kernels.settings import Settings, bound, current, using
from ...kernels.video.halo import NotByShards, halo_shards
from ..state import Arguments, opened, read, without_caches
from ..state.adapters import Adapters
from ..state.watch import replaced
from .blocks import BlockRuns
from .caches import Results, StepCache
from .functional import Scale, numbered, put, written
from .results import TENSOR, Entangled, TraceResult, WeightWritten, flattened, plain, refuse_shared, unflattened
from .scan import Group
from .scopes import module_scopes
from .user_code import is_watched_inside, replaced_parts, scripted


MOST_FILL = 0.02  # of the tokens may be added, for whole tiles on every chip

Arrays = dict[str, jax.Array]
Traced = tuple[list[jax.Array], TraceResult]
_tracing = contextvars.ContextVar("diffusers_tpu_tracing", default=False)
# Whether a module is being traced: modules that it calls then run as upstream wrote them, as part of the trace.
tracing = _tracing.get


@dataclass(eq=False)
class PureFunction:
    """`call`, a bound method of `module`, with everything but tensors fixed.

    Args:
        spec, leaves: the flattened (args, kwargs); TENSOR stands for a tensor, the rest is static.
        specs: spec of each weight while it computes, by key; groups' keys start with the label.
        settled, packed: as in `PlacedWeights`. attention: settings of the trace, with the mesh. settings: of each block, read once.
        kept, kind: the module's step cache and the call's kind of step: its tensors are the last inputs, its results last outputs.
        branches: how many calls are side by side in the batch. strengths: as in `Call`.
        part: it is part of a model whose own lines run eagerly: it must not share memory with them.
        room: bytes of a chip for what blocks keep for the backward pass, if the call will be differentiated.
        autocast: the dtype that products are cast to.
        values: number of a tensor of the call -> its values, for branches (`TraceResult.decisions`); None: a trace cannot branch.
    """

    module: torch.nn.Module
    call: Callable
    spec: object
    leaves: list
    groups: list[Group]
    specs: dict
    plan: ModelPlan
    attention: Settings
    matmul_precision: str
    kept: StepCache | None = None
    kind: Hashable = ""
    branches: int = 1
    strengths: tuple[int, ...] = ()
    part: bool = False
    values: Callable | None = None
    room: float = math.inf
    autocast: torch.dtype | None = None
    settled: frozenset[str] = frozenset()
    packed: dict[str, Packed] = field(default_factory=dict)
    settings: dict = field(default_factory=dict)

    def __call__(self, weights: Arrays, inputs: list[jax.Array], numbers: Arrays) -> Traced:
        """Flat output arrays, and what they are. What the module's own Python does to its state stays: see `undone_trace`.

        `numbers`: scales as in `State.numbers`; groups' stacked, under keys that start with the group's label.
        """
        if not (self.plan.methods and self.plan.by_width):
            return self._traced(weights, inputs, numbers)
        state, reason = read(self.module), scripted(self.module)
        if reason is None:
            try:
                return self._traced(weights, inputs, numbers)
            except NotByShards as error:
                state.restore()
                reason = str(error)
        name = type(self.module).__name__
        if self.attention.mesh.size > 1:
            words = f"every chip computes all of {name}, whose maps are split over the chips else: {reason}"
            notices.warn_once(f"whole {name} {reason}", words)
        return replace(self, plan=replace(self.plan, methods={}))._traced(weights, inputs, numbers)

    def _traced(self, weights: Arrays, inputs: list[jax.Array], numbers: Arrays) -> Traced:
        env = environment()
        stacked, single = self._split(weights)
        stacked_numbers, single_numbers = self._split(numbers)
        decisions = Decisions(self.values, inputs)
        runs, given = BlockRuns(self, stacked, stacked_numbers), sum(leaf is TENSOR for leaf in self.leaves)
        kept = [Tensor(x, env) for x in inputs[given:]]
        with (
            without_caches(self.module),
            bound(_tracing, True),
            replaced([(vars(env), "one_at_a_time", False)]),
            deciding(decisions),
            replaced(self._by_plan()),
            numbered(self.module, single_numbers, Adapters(self.module)),
            self._computing(),
            module_scopes(self.module, self.groups),
            runs.installed(),
        ):
            cache = self.kept and self.kept.traced(self.kind, kept, runs, self.branches)
            with cache or contextlib.nullcontext(Results()) as results:
                arrays, found = self._run(inputs[:given], functools.partial(self._forward, single), plain)
            found.results, found.form, found.decisions = len(results), results.form, decisions
            found.avals = jax.tree.map(jax.typeof, (weights, inputs, numbers))
            return arrays + [x.jax() for x in results], found

    @property
    def apart(self) -> tuple:
        """Objects that the trace does not depend on."""
        return () if self.kept is None else self.kept.apart

    def _by_plan(self) -> Iterator[tuple]:
        """Replacements by the plan's processors, methods and replicated parts, but not of what the user or a hook has set."""
        plan = self.plan
        for m, kind, methods in replaced_parts(self.module, plan, self.apart):
            if not is_watched_inside(m, self.apart):
                if kind in plan.processors:
                    yield vars(m), "processor", plan.processors[kind](m.processor)
                for cls, name in methods:
                    if name not in vars(m):
                        yield vars(m), name, functools.partial(plan.methods[cls, name], m)
        for name, m in self.module.named_modules():
            if any(re.search(pattern, name) for pattern in plan.replicated):
                yield vars(m), "forward", on_every_chip()(m.forward)

    def eagerly(self, weights: Arrays, inputs: list[jax.Array], in_parts: bool = False) -> Traced:
        """As a trace, but operation by operation: upstream's Python runs, hooks see values, and what it stores stays.

        `in_parts`: submodules that have a runner run by it, with weights of their own.
        """
        waits = vars(environment()), "one_at_a_time", self.attention.platform == "cpu"
        with self._computing(), replaced([waits]):
            forward = functools.partial(self.line_by_line, weights, in_parts=in_parts)
            return self._run(inputs, forward, lambda leaf: leaf)

    def line_by_line(self, weights: Arrays, args, kwargs, in_parts: bool = False):
        """Upstream's return value for the caller's own tensors, as `eagerly`, where the environment is active already."""
        with contextlib.nullcontext() if in_parts else bound(_tracing, True):
            output, changed = written(self.module, self._swapped(weights), self.call, args, kwargs)
        for name, weight in changed.items():
            put(self.module, name, weight)
        return output

    @contextlib.contextmanager
    def _computing(self):
        with jax.default_matmul_precision(self.matmul_precision), using(self.attention), quiet_integers():
            with decomposing(), environment().override_property(mesh=self.attention.mesh), environment():
                with autocast.computing_in(self.autocast):
                    yield

    def _forward(self, weights: Arrays, args, kwargs):
        cls, call, name = type(self.module), self.call, getattr(self.call, "__name__", "")
        method = self.plan.methods.get((cls, name)) if self.attention.mesh.size > 1 else None
        if method is not None and getattr(call, "__func__", None) is getattr(cls, name):
            call = functools.partial(method, self.module)
        output, changed = written(self.module, self._swapped(weights), call, args, kwargs)
        if changed:
            raise WeightWritten(f"it writes into {', '.join(changed)}")
        return output

    def _run(self, inputs: list[jax.Array], forward: Callable, plain: Callable) -> Traced:
        """Flat output arrays of `forward(args, kwargs)`, and what they are. `plain`: called on static parts of the return value."""
        given = [Tensor(array, environment()) for array in inputs]
        values = [Scale(inputs[n]) if n in self.strengths else t for n, t in enumerate(given)]
        args, kwargs = unflattened(self.spec, self.leaves, values)
        held = Arguments((args, kwargs), given)
        output = forward(args, kwargs)
        if self.part:
            refuse_shared(given, inputs, output)
        tensors, *form = flattened(opened(output), plain)
        left, written_to = held.written([n for n, x in enumerate(given) if x.jax() is not inputs[n]], plain)
        if self.part and left.holders:
            raise Entangled("it writes into an argument")
        if written_to and self.branches > 1:
            raise Entangled("it writes into an argument, and its guidance branches are one call")
        arrays = [environment().moved(x).jax() for x in written_to]
        return [x.jax() for x in tensors] + arrays, TraceResult(*form, left)

    def _swapped(self, weights: dict[str, jax.Array]) -> dict[str, Tensor]:
        names = Adapters(self.module).tensors(self.module)
        return {names.get(key, key): self.gathered(key, w) for key, w in weights.items()}

    def _split(self, weights: dict):
        single, stacked = dict(weights), {group.label: {} for group in self.groups}
        for label, own in stacked.items():
            names = [key for key in single if key.startswith(f"{label}.")]
            own.update((name.removeprefix(f"{label}."), single.pop(name)) for name in names)
        return stacked, single

    def gathered(self, key: str, array, layers: tuple | None = None) -> Tensor:
        """A weight, whole on every chip but for axes sharded in computing. `layers`: the stack that it is a layer of, and which."""
        there = NamedSharding(self.attention.mesh, self.specs[key])
        whole = array if halo_shards() is not None else jax.lax.with_sharding_constraint(array, there)
        whole = jax.block_until_ready(whole) if environment().waits else whole
        weight, spec = Tensor(whole, environment()), self.specs[key]
        if any(axis in STORAGE_AXES for entry in spec[:1] for axis in axes_of(entry)):
            return by_output(weight, NamedSharding(self.attention.mesh, PartitionSpec()))
        axis = next((n for n, entry in enumerate(spec) if "tp" in axes_of(entry)), None)
        narrow = self._narrow(array, spec) if layers is None else None
        if axis is not None or layers is not None or narrow is not None:
            weight = lying(weight, axis, layers, narrow)
        elif halo_shards() is None:
            weight = whole_on_chips(weight, there)
        return unpacked(weight, self.packed[key]) if key in self.packed else weight

    def _narrow(self, array, spec: PartitionSpec) -> Narrow | None:
        """A weight in 8 bits, converted by the chips that store its parts, then gathered: half the exchange; None: it stays."""
        settings = self.attention
        if settings.linear == "bfloat16" or settings.differentiable or not is_wide(array):
            return None
        narrow, rows = narrowed(array, settings.linear), PartitionSpec(*spec[:1])
        there = Narrow(*(NamedSharding(settings.mesh, one) for one in (spec, rows)))
        # Without the barrier the compiler gathers 32-bit numbers, and rounds them afterwards.
        return jax.lax.with_sharding_constraint(jax.lax.optimization_barrier(narrow), there)

    def layout(self, shapes: list[tuple[int, ...]], names: dict[int, str]) -> list[PartitionSpec | None]:
        """The spec of each output of a block between blocks; None: any. `names`: output -> argument of the next block."""
        spec = self.plan.activation_spec
        if spec == INFERRED:
            lengths = {n: shapes[n][1] for n in names if len(shapes[n]) == 3}
            longest = max(lengths.values(), default=0)
            return [TOKENS if lengths.get(n) == longest else None for n in range(len(shapes))]
        if isinstance(spec, Mapping):
            specs = [spec.get(names.get(n, "")) for n in range(len(shapes))]
        elif isinstance(spec, tuple) and not isinstance(spec, PartitionSpec):
            specs = [*spec, *[None] * len(shapes)][: len(shapes)]
        else:
            specs = [spec] * len(shapes)
        return [one if one is not None and len(one) == len(shape) else None for one, shape in zip(specs, shapes)]

    def padding(self, shape: tuple[int, ...], spec: PartitionSpec | None) -> int:
        """Tokens to append to an output [B, T, C], so that chips of `sp` have equally many; whole tiles if that takes few.

        Whole tiles also if a chip has several sequences, each of which would else be moved to where the one before ends; and for
        sparse attention, whose tokens are exchanged in order.
        """
        lengths = self.attention.mesh.shape
        dp, sp = lengths["dp"], lengths["sp"]
        if spec is None or len(spec) != 3 or spec[1] != "sp":
            return 0
        rest, tiles = -shape[1] % sp, -shape[1] % (sp * LANES)
        several = shape[0] > (dp if spec[0] == "dp" else 1)
        return tiles if (rest or several or self.attention.sparse) and tiles <= MOST_FILL * shape[1] else rest


@contextlib.contextmanager
def on_every_chip():
    """While this is open, what is computed is whole on every chip: sequences are not sharded."""
    with using(replace(current(), sequence=False, replicated=True, pad_tokens=0)):
        yield
