"""A torch module's method as a pure function of (weights, inputs, numbers), all JAX arrays."""

import contextlib
import contextvars
import enum
import functools
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import jax
import torch
from jax.sharding import Mesh, PartitionSpec
from torch.utils._pytree import (
    TreeSpec,
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    treespec_leaf,
)

from ....models.autoencoders.vae import DiagonalGaussianDistribution
from ... import notices
from ...bridge import Tensor, View
from ...bridge.decisions import Decisions, deciding
from ...bridge.environment import decomposing, environment, on_device, quiet_integers
from ...chips.sharding import gathered, named
from ...kernels.linear import LANES
from ...kernels.settings import Settings, current, using
from ...video.slabs import NotOnSlabs
from ...weights.convert import from_numpy, numpy_dtype
from ..state import Arguments, Trace, Written, opened, read, undone, without_caches
from ..state.adapters import Adapters
from .blocks import BlockRuns, Method, WeightWritten, numbered, written
from .caches import Results, StepCache
from .hooked import is_watched_inside
from .scan import Group
from .scopes import module_scopes
from .scripted import scripted


MOST_FILL = 0.02  # of the tokens, for whole tiles of them on every chip

INPUT = object()
_tracing = contextvars.ContextVar("diffusers_tpu_tracing", default=False)


def tracing() -> bool:
    """Whether a module is being traced: what it calls then runs as upstream wrote it, as a part of the trace."""
    return _tracing.get()


@contextlib.contextmanager
def _marked():
    token = _tracing.set(True)
    try:
        yield
    finally:
        _tracing.reset(token)


class _Output(enum.Enum):
    TENSOR = enum.auto()


@dataclass(eq=False)
class TraceResult:
    """What a trace found out beside its arrays: these are of the return value, of what is written to arguments, of the step cache.

    Attributes:
        spec, leaves: the flattened return value; `_Output.TENSOR` stands for an array.
        written: what the call leaves in its arguments.
        results, form: how many of the last arrays the step cache keeps, and what is static of them.
        decisions: branches by values, with the values of this call. avals: shapes and dtypes of what was given.
    """

    spec: TreeSpec
    leaves: list
    written: Written = field(default_factory=Written)
    results: int = 0
    form: Hashable = None
    decisions: Decisions | None = None
    avals: tuple = ()

    def output(self, tensors: list):
        """Upstream's return value with these tensors in the places of the traced ones."""
        tensors = iter(tensors)
        return tree_unflatten([next(tensors) if x is _Output.TENSOR else x for x in self.leaves], self.spec)

    def __reduce__(self):
        """For a process that has the program and no trace."""
        return _result_of, (_in_parts(self.spec), self.leaves, self.written, self.results, self.form)


def _result_of(spec: tuple | None, *rest) -> TraceResult:
    return TraceResult(_of_parts(spec), *rest)


@contextlib.contextmanager
def undone_trace(module: torch.nn.Module) -> Iterator[Trace]:
    """Around a trace: what it does to the module is undone. Gives what could not be, filled at the end: then no program stands for
    the call."""
    drawn = environment().draws
    with undone(read(module)) as effects:
        yield effects
    effects.draws += environment().draws - drawn


@dataclass(eq=False)
class PureFunction:
    """`call` of `module` with everything but tensors fixed.

    Args:
        call: the bound method, upstream's own.
        spec, leaves: the flattened (args, kwargs); INPUT stands for a tensor, the rest is static.
        specs: storage spec of each weight by its key; groups' keys start with the group's label.
        carry: spec of what repeated blocks hand on.
        processors, whole, methods, by_slabs: as in `ModelPlan`.
        kept, kind: a cache that the module has, and the kind of step that the call is: its tensors are the last inputs, what it
            gives the last outputs.
        branches: how many calls are side by side in the batch.
        part: of a model whose own lines run one by one: it must not share memory with them.
        values: number of a tensor of the call -> its values, by which a trace decides (`TraceResult.decisions`); None: it cannot.
        settings: of each block, read once.

    """

    module: torch.nn.Module
    call: Callable
    spec: object
    leaves: list
    groups: list[Group]
    specs: dict
    mesh: Mesh
    carry: object
    attention: Settings
    matmul_precision: str
    processors: dict
    methods: dict
    whole: tuple[str, ...] = ()
    by_slabs: bool = False
    kept: StepCache | None = None
    kind: Hashable = ""
    branches: int = 1
    part: bool = False
    values: Callable | None = None
    settings: dict = field(default_factory=dict)

    def __call__(
        self, weights: dict[str, jax.Array], inputs: list[jax.Array], numbers: dict[str, jax.Array] | None = None
    ) -> tuple[list[jax.Array], TraceResult]:
        """Flat output arrays, and what they are. What the module's own Python does to its state stays: see `undone_trace`.

        Args:
            numbers: LoRA scales by `str(Number)`; groups' stacked, under keys that start with the group's label.
        """
        if not (self.methods and self.by_slabs):
            return self._traced(weights, inputs, numbers or {})
        state, reason = read(self.module), scripted(self.module)
        if reason is None:
            try:
                return self._traced(weights, inputs, numbers or {})
            except NotOnSlabs as error:
                state.restore()
                reason = str(error)
        name = type(self.module).__name__
        if self.mesh.size > 1:
            notices.warn_once(
                f"whole {name} {reason}",
                f"every chip computes all of {name}, whose maps are split over the chips else: {reason}",
            )
        return replace(self, methods={})._traced(weights, inputs, numbers or {})

    def _traced(
        self, weights: dict[str, jax.Array], inputs: list[jax.Array], numbers: dict[str, jax.Array]
    ) -> tuple[list[jax.Array], TraceResult]:
        env = environment()
        stacked, single = self._split(weights)
        stacked_numbers, single_numbers = self._split(numbers)
        decisions = Decisions(self.values, inputs)
        apart = () if self.kept is None else self.kept.apart
        with contextlib.ExitStack() as stack:
            runs = BlockRuns(
                self.module,
                self.groups,
                stacked,
                stacked_numbers,
                env,
                self._pin_block_weight,
                self._pin_carry,
                self._fill,
                self.settings,
                apart,
            )
            for context in (
                without_caches(self.module),
                _marked(),
                self._one_at_a_time(False),
                deciding(decisions),
                _processors_of(self.module, self.processors, apart),
                _methods_of(self.module, self.methods, apart),
                _whole_of(self.module, self.whole),
                numbered(self.module, single_numbers, Adapters(self.module)),
                self._computing(),
                module_scopes(self.module, self.groups),
                runs.installed(),
            ):
                stack.enter_context(context)
            given = sum(leaf is INPUT for leaf in self.leaves)
            with contextlib.ExitStack() as keeping:
                results = Results()
                if self.kept is not None:
                    tensors = [Tensor(x, env) for x in inputs[given:]]
                    results = keeping.enter_context(self.kept.traced(self.kind, tensors, runs, self.branches))
                arrays, found, changed = self._run(single, inputs[:given])
            if changed:
                raise WeightWritten(", ".join(changed))
            found.results, found.form, found.decisions = len(results), results.form, decisions
            found.avals = jax.tree.map(jax.typeof, (weights, inputs, numbers))
            return arrays + [x.jax() for x in results], found

    def eagerly(
        self, weights: dict[str, jax.Array], inputs: list[jax.Array], in_parts: bool = False
    ) -> tuple[list[jax.Array], TraceResult]:
        """As a trace, operation by operation: upstream's Python runs, hooks see values, what it keeps stays.

        `in_parts`: submodules that have a runner answer through it, on weights of their own.
        """
        given = [Tensor(array, environment()) for array in inputs]
        args, kwargs = self._arguments(given)
        held = Arguments((args, kwargs), given)
        with self._computing(), self._one_at_a_time():
            flat, found = _flat(self.line_by_line(weights, args, kwargs, in_parts), plain=lambda leaf: leaf)
            found.written, left = _left(held, inputs, lambda leaf: leaf)
            return flat + left, found

    def line_by_line(self, weights: dict[str, jax.Array], args, kwargs, in_parts: bool = False):
        """Upstream's return value for the caller's own tensors, as `eagerly`, where device tensors work already."""
        with contextlib.nullcontext() if in_parts else _marked():
            output, changed = written(Method(self.module, self.call), self._swapped(weights), args, kwargs)
        for name, weight in changed.items():
            _put(self.module, name, weight)
        return output

    @contextlib.contextmanager
    def _one_at_a_time(self, wanted: bool = True):
        env = environment()
        before, env.one_at_a_time = env.one_at_a_time, wanted and self.attention.platform == "cpu"
        try:
            yield
        finally:
            env.one_at_a_time = before

    @contextlib.contextmanager
    def _computing(self):
        with jax.default_matmul_precision(self.matmul_precision), using(self.attention), quiet_integers():
            with decomposing(), environment().override_property(mesh=self.mesh), environment():
                yield

    def _run(
        self, weights: dict[str, jax.Array], inputs: list[jax.Array]
    ) -> tuple[list[jax.Array], TraceResult, dict]:
        """Flat output arrays, what they are, and the weights that were written to."""
        given = [Tensor(array, environment()) for array in inputs]
        args, kwargs = self._arguments(given)
        held = Arguments((args, kwargs), given)
        output, changed = written(Method(self.module, self.call), self._swapped(weights), args, kwargs)
        if self.part:
            _apart(given, inputs, output)
        flat, found = _flat(output, _plain)
        found.written, left = _left(held, inputs, _plain)
        if self.part and found.written.holders:
            raise Entangled("it writes into an argument")
        if left and self.branches > 1:
            raise Entangled("it writes into an argument, and its guidance branches are one call")
        return flat + left, found, changed

    def _arguments(self, tensors: list[Tensor]) -> tuple[tuple, dict]:
        tensors = iter(tensors)
        return tree_unflatten([next(tensors) if x is INPUT else x for x in self.leaves], self.spec)

    def _swapped(self, weights: dict[str, jax.Array]) -> dict[str, Tensor]:
        names, env = Adapters(self.module).tensors(self.module), environment()
        return {f"module.{names.get(key, key)}": Tensor(self._gather(key, w), env) for key, w in weights.items()}

    def _split(self, weights: dict):
        stacked = {group.label: {} for group in self.groups}
        single = {}
        for key, array in weights.items():
            label = next((label for label in stacked if key.startswith(label + ".")), None)
            if label is None:
                single[key] = array
            else:
                stacked[label][key[len(label) + 1 :]] = array
        return stacked, single

    def _gather(self, key: str, array):
        whole = jax.lax.with_sharding_constraint(array, named(self.mesh, gathered(self.specs[key])))
        return jax.block_until_ready(whole) if environment().waits else whole

    def _pin_block_weight(self, group: Group, name: str, array):
        return self._gather(f"{group.label}.{name}", array)

    def _carry_spec(self, axes: int, number: int, name: str) -> PartitionSpec | None:
        """Of output `number` of a block, of so many axes, which is the argument `name` of the next one."""
        spec = self.carry
        if isinstance(spec, Mapping):
            spec = spec.get(name)
        elif isinstance(spec, tuple) and not isinstance(spec, PartitionSpec):
            spec = spec[number] if number < len(spec) else None
        return None if spec is None or axes != len(spec) else spec

    def _pin_carry(self, array, number: int, name: str):
        spec = self._carry_spec(array.ndim, number, name)
        return array if spec is None else jax.lax.with_sharding_constraint(array, named(self.mesh, spec))

    def _fill(self, shape: tuple[int, ...], number: int, name: str) -> int:
        """Tokens behind those of an output [B, T, C], so that the chips of `sp` have equally many; whole tiles of them if that is little.

        Whole tiles also where a chip has several sequences: it would move every one to where the one before ends.
        """
        spec, (dp, sp) = self._carry_spec(len(shape), number, name), (self.mesh.shape[axis] for axis in ("dp", "sp"))
        if spec is None or len(spec) != 3 or spec[1] != "sp":
            return 0
        rest, tiles = -shape[1] % sp, -shape[1] % (sp * LANES)
        several = shape[0] > (dp if spec[0] == "dp" else 1)
        return tiles if (rest or several) and tiles <= MOST_FILL * shape[1] else rest


def _flat(output, plain: Callable) -> tuple[list[jax.Array], TraceResult]:
    """The return value's arrays. `plain`: what becomes of a part of it that is no tensor; of a trace it must be static."""
    flat, spec = tree_flatten(opened(output))
    tensors = [isinstance(x, (Tensor, View)) for x in flat]
    leaves = [_Output.TENSOR if tensor else plain(x) for x, tensor in zip(flat, tensors)]
    return [x.jax() for x, tensor in zip(flat, tensors) if tensor], TraceResult(spec, leaves)


def _left(held: Arguments, inputs: list[jax.Array], refused: Callable) -> tuple[Written, list[jax.Array]]:
    """What the call leaves in its arguments, and its arrays."""
    changed = [n for n, (t, array) in enumerate(zip(held.tensors, inputs)) if t.jax() is not array]
    written, tensors = held.written(changed, refused)
    return written, [x.jax() if on_device(x) else environment().moved(x).jax() for x in tensors]


def _in_parts(spec: TreeSpec) -> tuple | None:
    """A spec as what pickles without a warning of torch's; None: of a leaf."""
    return None if spec.is_leaf() else (spec.type, spec.context, [*map(_in_parts, spec.children())])


def _of_parts(parts: tuple | None) -> TreeSpec:
    return treespec_leaf() if parts is None else TreeSpec(parts[0], parts[1], [*map(_of_parts, parts[2])])


def _put(module: torch.nn.Module, name: str, weight: torch.Tensor):
    """The module's own weight of this name is what a call on the chips made of it."""
    path, _, name = name.rpartition(".")
    owner, value = module.get_submodule(path), from_numpy(weight.jax()) if on_device(weight) else weight
    before = getattr(owner, name)
    if numpy_dtype(before.dtype) == numpy_dtype(value.dtype):
        value = value.to(before.dtype)  # 64 bits again
    setattr(owner, name, torch.nn.Parameter(value, before.requires_grad) if name in owner._parameters else value)


class Entangled(Exception):
    """A part of a model shares memory with who calls it: its message says how."""


def _apart(given: list[Tensor], arrays: list[jax.Array], output):
    """Raises Entangled where a call wrote into its arguments or answered with them: who made the call may look there."""
    if any(tensor.jax() is not array for tensor, array in zip(given, arrays)):
        raise Entangled("it writes into an argument")
    own = {id(array) for array in arrays}
    if any(
        id(x.source_jax() if isinstance(x, View) else x.jax()) in own
        for x in tree_leaves(opened(output))
        if on_device(x)
    ):
        raise Entangled("it answers with an argument")


class Opaque(NotImplementedError):
    """A model's answer has parts whose tensors nobody finds."""


def _plain(leaf):
    """A static part of a return value; an object that may hide tensors is refused, its values would be lost."""
    if leaf is None or isinstance(leaf, (bool, int, float, str)):
        return leaf
    raise Opaque(
        f"expected tensors, plain values or pytrees of them in a model's output, got {type(leaf).__name__}; register it with"
        " torch.utils._pytree"
    )


# A VAE's posterior is its parameters; mean, variance and samples follow from them where the value is used.
register_pytree_node(
    DiagonalGaussianDistribution,
    lambda posterior: ([posterior.parameters], posterior.deterministic),
    lambda leaves, deterministic: DiagonalGaussianDistribution(*leaves, deterministic=deterministic),
)


@contextlib.contextmanager
def _processors_of(module: torch.nn.Module, makers: dict, apart: tuple):
    """The model's attention processors are those of its plan; what the user set has another class and stays."""
    found = ((m, m.processor) for m in module.modules() if type(getattr(m, "processor", None)) in makers)
    replaced = [(m, processor) for m, processor in found if not is_watched_inside(m, apart)]
    for m, processor in replaced:
        m.processor = makers[type(processor)](processor)
    try:
        yield
    finally:
        for m, processor in replaced:
            m.processor = processor


@contextlib.contextmanager
def on_every_chip():
    """What is computed inside is whole on every chip: no sequence in it is split."""
    with using(replace(current(), sequence=False, whole=True, fill=0)):
        yield


@contextlib.contextmanager
def _whole_of(module: torch.nn.Module, names: tuple[str, ...]):
    """Parts of these names run `on_every_chip`."""
    before = []
    for name, m in module.named_modules():
        if any(re.search(pattern, name) for pattern in names):
            before.append((m, vars(m).get("forward")))
            m.forward = functools.partial(_run_whole, *before[-1])
    try:
        yield
    finally:
        for m, forward in before:
            if forward is None:
                del m.forward
            else:
                m.forward = forward


def _run_whole(module: torch.nn.Module, forward: Callable | None, *args, **kwargs):
    """`forward` of the instance, or its class's."""
    with on_every_chip():
        return type(module).forward(module, *args, **kwargs) if forward is None else forward(*args, **kwargs)


@contextlib.contextmanager
def _methods_of(module: torch.nn.Module, methods: dict, apart: tuple):
    """Methods of the model and its parts are those of its plan, but for what the user or a hook has put on an instance."""
    replaced = []
    for m in module.modules():
        for (cls, name), method in methods.items():
            if type(m) is cls and name not in vars(m) and not is_watched_inside(m, apart):
                vars(m)[name] = functools.partial(method, m)
                replaced.append((m, name))
    try:
        yield
    finally:
        for m, name in replaced:
            del vars(m)[name]
