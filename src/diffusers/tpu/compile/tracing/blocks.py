"""Blocks called one after another on each other's outputs, traced once and scanned.

While a model is traced, each block of a group (`scan.find_groups`) returns deferred outputs. The next
block's call joins the run if its settings are those of the block before, or make the same trace (a block's own number that it
does not compute with), and its arguments the previous block's outputs where they were before, and the very same values elsewhere. Anything else - another argument, an operation on an output, a
hook inside of one block - ends the run, which is then computed: as a scan over its blocks' stacked weights. So a model that
does more between its blocks is right by construction.
What blocks inside of a run gave and the model still holds then (hidden states it collects) the scan gives too, stacked.
"""

import contextlib
import contextvars
import functools
import inspect
import re
import weakref
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ...bridge import Tensor, View
from ...bridge.deferred import Deferred
from ...kernels.settings import current, using
from ..state import Number, own_forward, read, signature, undone
from ..state.adapters import Adapters
from .scale import Scale
from .scan import Group, scan_blocks


_TENSOR = object()  # in a flat return value, where a tensor was
_scanned = contextvars.ContextVar("diffusers_tpu_scanned", default=None)
_PLAIN = (torch.Tensor, type(None), bool, int, float, str, torch.dtype, torch.device)


def scanned() -> tuple[int, int] | None:
    """First of the blocks that are traced as one here, and behind the last; None outside of a scan of blocks."""
    return _scanned.get()


class Method(torch.nn.Module):
    """`call`, any bound method of `module`, as a forward, so that functional_call can swap the module's weights."""

    def __init__(self, module: torch.nn.Module, call: Callable):
        super().__init__()
        self.module = module
        self.__dict__["call"] = call

    def forward(self, *args, **kwargs):
        return self.call(*args, **kwargs)


class WeightWritten(Exception):
    """A trace wrote into a parameter or buffer: its message names which."""


def written(method: Method, weights: dict[str, torch.Tensor], args, kwargs) -> tuple[object, dict[str, torch.Tensor]]:
    """What the method returns with these weights, by `module.NAME`; and those of them that it wrote into, or replaced."""
    before = {name: weight.jax() for name, weight in weights.items()}
    output = torch.func.functional_call(method, weights, args, kwargs)  # puts what is there afterwards into `weights`
    after = {name: w for name, w in weights.items() if not isinstance(w, Tensor) or w.jax() is not before[name]}
    return output, {name.removeprefix("module."): weight for name, weight in after.items()}


@contextlib.contextmanager
def numbered(module: torch.nn.Module, numbers: dict[str, jax.Array], adapters: Adapters):
    """The module's numbers are those that the program is given, by `str(Number)`."""
    before = []
    for key, array in numbers.items():
        number = Number.parse(key)
        holder, adapter = number.holder(module), adapters.order[number.adapter]
        before.append((holder, adapter, holder[adapter]))
        holder[adapter] = Scale(array)
    try:
        yield
    finally:
        for holder, adapter, value in before:
            holder[adapter] = value


class Run:
    """Blocks `start` to `stop` of a group, their common arguments, and which outputs feed which arguments.

    `arrays` are the values of the first block's tensors when it was called: upstream's code may write to them afterwards.
    `answer` makes a block's return value of its output tensors; `outputs` are the last block's, `passed` weak references to
    those of the blocks before it. `traced` is the first block's trace.
    """

    def __init__(
        self,
        group: Group,
        start: int,
        leaves: list,
        arrays: list,
        spec,
        outputs: list[Deferred],
        answer: Callable,
        traced: jax.extend.core.ClosedJaxpr,
    ):
        self.traced = traced
        self.group, self.start, self.stop = group, start, start + 1
        self.leaves, self.arrays, self.spec = leaves, arrays, spec
        self.outputs, self.answer = outputs, answer
        self.passed: list[list[weakref.ref]] = []
        self.feeds: dict[int, int] | None = None

    def extend(self, feeds: dict[int, int], outputs: list[Deferred]):
        """One block more, that gives these outputs."""
        self.feeds, self.stop = feeds, self.stop + 1
        self.passed.append([weakref.ref(output) for output in self.outputs])
        self.outputs = outputs

    @functools.cached_property
    def words(self) -> tuple:
        """The first block's trace as something to compare."""
        return _words(self.traced)

    @property
    def slots(self) -> dict[int, int]:
        """Number of the tensor among a block's arguments -> output that it is in the next one; of a single block none."""
        tensors = [p for p, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        return {tensors.index(position): number for position, number in (self.feeds or {}).items()}

    def names(self, model: torch.nn.Module) -> dict[int, str]:
        """Output -> the name of the argument that it is in the next block; "" where the block's forward names none."""
        block = model.get_submodule(f"{self.group.path}.{self.start}")
        args, kwargs = tree_unflatten([*range(len(self.leaves))], self.spec)
        parameters = [*inspect.signature(type(block).forward).parameters][1:]
        given = (*zip(parameters, args), *kwargs.items())
        name_of = {position: name for name, value in given for position in tree_leaves(value)}
        return {number: name_of.get(position, "") for position, number in (self.feeds or {}).items()}

    def still_held(self) -> list[tuple[int, int, Deferred]]:
        """(block of the run, number, output) of those passed on that someone else holds too."""
        found = ((k, n, ref()) for k, refs in enumerate(self.passed) for n, ref in enumerate(refs))
        return [(k, n, output) for k, n, output in found if output is not None]

    def continued_by(self, leaves: list, spec) -> dict[int, int] | None:
        """Argument position -> output number if a call with these leaves goes on with this run, else None."""
        if spec != self.spec:
            return None
        number = {id(output): n for n, output in enumerate(self.outputs)}
        values, feeds, started = iter(self.arrays), {}, {}
        for position, (leaf, first) in enumerate(zip(leaves, self.leaves)):
            value = next(values) if isinstance(first, Tensor) else None
            if id(leaf) in number:
                if value is None or (first.shape, first.dtype) != (leaf.shape, leaf.dtype):
                    return None
                if started.setdefault(number[id(leaf)], value) is not value:
                    return None  # two arguments that were two values are one from here on
                feeds[position] = number[id(leaf)]
            elif leaf is not first and (isinstance(leaf, torch.Tensor) or leaf != first):
                return None
            elif value is not None and leaf.jax() is not value:
                return None  # written to since
        return feeds if feeds and self.feeds in (None, feeds) else None


class BlockRuns:
    """The runs of one trace. `weights` and `numbers` are the stacked arrays by group label; `pin` fixes layouts inside the scan.

    Where `condition` is set, runs are computed only if it holds: else nothing of what they give may be used. `keeping` is
    entered around each block's call, with what a cache keeps of the block by the names in the third of its group's `stacks`
    and the tokens of its stream that is filled (all, those beyond its own), and gives a dict of what it shall keep: `gives` has
    it of each run, by group, with the first block's place.

    Args:
        pin_weights: (name in the group, array of one block) -> array, where a block's weights are gathered.
        pin_carry: (array, number of the output, name of the argument that it is in the next block) -> array, applied to what is
            carried between blocks.
        fill: (shape, number, name) -> tokens that it is carried with beyond its own.
        settings: of each block by its group's path and its number; filled here where they are not known.
        apart: objects in them that a trace does not depend on.
    """

    def __init__(
        self,
        model,
        groups: list[Group],
        weights: dict,
        numbers: dict,
        env,
        pin_weights: Callable,
        pin_carry: Callable,
        fill: Callable,
        settings: dict,
        apart: tuple = (),
    ):
        self.model, self.groups, self.env = model, groups, env
        self.adapters = Adapters(model)
        self.stacks = {group.label: (weights[group.label], numbers[group.label], {}) for group in groups}
        self.keeping: Callable = lambda kept, filled: contextlib.nullcontext({})
        self.gives: dict[str, list[tuple[int, dict]]] = {group.label: [] for group in groups}
        self.pin_weights, self.pin_carry, self.fill = pin_weights, pin_carry, fill
        self.run: Run | None = None
        self.condition: jax.Array | None = None
        self.forwards, self.settings, self.apart = {}, settings, apart

    @contextlib.contextmanager
    def installed(self):
        """Blocks of all groups answer through `call` while this is open."""
        blocks = []
        for group in self.groups:
            for index in range(group.start, group.stop):
                block = self.model.get_submodule(f"{group.path}.{index}")
                if (group.path, index) not in self.settings:
                    with group.lent(self.model, block):
                        self.settings[group.path, index] = signature(block, self.adapters, self.apart)
                self._stand_in(block, self._answer(group, index))
                blocks.append(block)
        try:
            yield
            self.flush()
        finally:
            self.run = None
            for block in blocks:
                self._restore(block)

    def _stand_in(self, block, forward: Callable):
        """`forward` answers for the block's own; hooks of upstream's on the block see its answers."""
        reference = own_forward(block)
        if reference is None:
            self.forwards[id(block)] = vars(block), "forward", vars(block).get("forward")
        else:
            self.forwards[id(block)] = vars(reference), "original_forward", reference.original_forward
        where, name, _ = self.forwards[id(block)]
        where[name] = forward

    def _restore(self, block):
        where, name, own = self.forwards[id(block)]
        if own is None:
            where.pop(name, None)
        else:
            where[name] = own

    def _answer(self, group: Group, index: int):
        def forward(*args, **kwargs):
            leaves, spec = tree_flatten((args, kwargs))
            leaves = [leaf.torch() if isinstance(leaf, View) else leaf for leaf in leaves]
            run = self.run
            if run is not None and run.group is group and run.stop == index:
                feeds = run.continued_by(leaves, spec)
                if feeds is not None and self._alike(run, index):
                    run.extend(feeds, [self._deferred(output._aval) for output in run.outputs])
                    return run.answer(run.outputs)
            self.flush()
            if all(isinstance(leaf, _PLAIN) for leaf in leaves):
                return self._begin(group, index, leaves, spec)
            # An object among the arguments (a key-value cache) may be written to: this block runs here and once.
            arrays = [leaf.jax() for leaf in leaves if isinstance(leaf, Tensor)]
            arrays, gives, answer = self._call(group, index, leaves, spec, arrays, self._weights_of(group, index))
            self._give(group, index, _stacked(gives))
            return answer([Tensor(x, self.env) for x in arrays])

        return forward

    def _alike(self, run: Run, index: int) -> bool:
        """Whether the trace of the run's first block stands for this one of its group too."""
        path = run.group.path
        if self.settings[path, run.start] == self.settings[path, index]:
            return True
        if self.stacks[run.group.label][2]:
            return False  # what a cache keeps of each is beside its trace
        traced, _, answer, effects = self._traced(run.group, index, run.leaves, run.spec, run.arrays)
        if effects.persistent or effects.temporary or effects.draws:
            return False  # what it does to its own Python no other block does
        return answer.form == run.answer.form and _words(traced) == run.words

    def _begin(self, group: Group, index: int, leaves: list, spec):
        arrays = [leaf.jax() for leaf in leaves if isinstance(leaf, Tensor)]
        traced, avals, answer, _ = self._traced(group, index, leaves, spec, arrays)
        outputs = [self._deferred(aval) for aval in avals]
        self.run = Run(group, index, leaves, arrays, spec, outputs, answer, traced)
        return self.run.answer(outputs)

    def _traced(self, group: Group, index: int, leaves: list, spec, arrays: list) -> tuple:
        """One block's trace, what it gives, what makes its return value, and its effects; nothing of it is in the trace around it."""
        found, drawn = {}, self.env.draws

        def block(weights):  # not of the arrays: what they come from stays known
            outputs, _, found["answer"] = self._call(group, index, leaves, spec, arrays, weights)
            return outputs

        module = self.model.get_submodule(f"{group.path}.{index}")
        with undone(read(module)) as effects:  # it runs again when the run is computed
            traced, avals = jax.make_jaxpr(block, return_shape=True)(self._weights_of(group, index))
        effects.draws += self.env.draws - drawn
        return traced, avals, found["answer"], effects

    def _deferred(self, aval):
        return Deferred(jax.ShapeDtypeStruct(aval.shape, aval.dtype), self.env, self.flush)

    def _give(self, group: Group, start: int, gives: dict):
        if gives:
            self.gives[group.label].append((start, gives))

    def _weights_of(self, group: Group, index: int) -> tuple[dict, dict, dict]:
        """Weights and numbers of one block, and what is kept of it."""
        return jax.tree.map(lambda array: array[index - group.start], self.stacks[group.label])

    def _call(
        self, group: Group, index: int, leaves: list, spec, arrays: list, own: tuple[dict, dict, dict], filled=None
    ):
        """One block's own forward on arrays: (flat output arrays, what it gives to keep, what makes its return value of tensors)."""
        weights, numbers, kept = own
        block = self.model.get_submodule(f"{group.path}.{index}")
        tensors = iter(arrays)
        args, kwargs = tree_unflatten(
            [Tensor(next(tensors), self.env) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
        )
        weights = {name: Tensor(self.pin_weights(group, name, w), self.env) for name, w in weights.items()}
        where, place, _ = self.forwards[id(block)]
        stand_in = where[place]
        self._restore(block)
        try:
            with (
                self.env,
                group.lent(self.model, block),
                numbered(block, numbers, self.adapters),
                self.keeping(kept, filled) as gives,
            ):
                names = Adapters(block, self.adapters.order).tensors(block)
                weights = {f"module.{names[name]}": w for name, w in weights.items()}
                # its forward alone: hooks of the block have seen its call by the model
                output, changed = written(Method(block, where.get(place) or block.forward), weights, args, kwargs)
        finally:
            where[place] = stand_in
        if changed:
            raise WeightWritten(", ".join(f"{group.path}.{index}.{name}" for name in changed))
        flat, output_spec = tree_flatten(output)
        plain = [_TENSOR if isinstance(x, (Tensor, View)) else x for x in flat]

        def answer(tensors: list):
            tensors = iter(tensors)
            return tree_unflatten([next(tensors) if x is _TENSOR else x for x in plain], output_spec)

        answer.form = output_spec, plain
        return [x.jax() for x in flat if isinstance(x, (Tensor, View))], gives, answer

    def flush(self):
        """Compute the run that is open, if any, and give those of its outputs that are held their values."""
        run, self.run = self.run, None
        if run is None:
            return
        held = run.still_held()
        outputs = [*run.outputs, *(output for *_, output in held)]
        if self.condition is None:
            values, gives = self._values(run, held)
            self._give(run.group, run.start, gives)
        else:
            values = lax.cond(self.condition, lambda: self._values(run, held)[0], lambda: _unchanged(run, outputs))
        for output, value in zip(outputs, values):
            output.settle(value)

    def _values(self, run: Run, held: list) -> tuple[list[jax.Array], dict]:
        """Of the last block's outputs, and of those that are held; what all of them give to keep, stacked."""
        if run.stop - run.start > 1:
            return self._scan(run, run.arrays, held)
        own = self._weights_of(run.group, run.start)
        values, gives, _ = self._call(run.group, run.start, run.leaves, run.spec, run.arrays, own)
        return values, _stacked(gives)

    def _scan(self, run: Run, arrays: list, held: list) -> tuple[list, dict]:
        slots, names = run.slots, run.names(self.model)
        source = {number: slot for slot, number in slots.items()}
        fills = self._fills(run, names)
        settings = replace(current(), fill=max(fills))
        filled = next(((run.outputs[n]._aval.shape[1] + fill, fill) for n, fill in enumerate(fills) if fill), None)

        def pinned(array, number: int):
            return self.pin_carry(array, number, names.get(number, ""))

        carry = [
            pinned(_filled(arrays[source[n]], fills[n]), n) if n in source else jnp.zeros(o.shape, o.dtype)
            for n, o in enumerate(output._aval for output in run.outputs)
        ]

        def step(carry, own):
            inputs = [carry[slots[s]] if s in slots else array for s, array in enumerate(arrays)]
            with using(settings), _as_all_of(run):
                flat, gives, _ = self._call(run.group, run.start, run.leaves, run.spec, inputs, own, filled)
            flat = [pinned(x, n) for n, x in enumerate(flat)]
            return flat, ({n: flat[n] for n in numbers}, gives)

        numbers = sorted({n for _, n, _ in held})
        first, last = run.start - run.group.start, run.stop - run.group.start
        stacked = self.stacks[run.group.label]
        if (first, last) != (0, run.group.stop - run.group.start):
            stacked = jax.tree.map(lambda array: lax.slice_in_dim(array, first, last), stacked)
        last, (passed, gives) = scan_blocks(step, carry, stacked)
        values = [
            *(_cut(array, fill) for array, fill in zip(last, fills)),
            *(_cut(passed[n][k], fills[n]) for k, n, _ in held),
        ]
        return values, gives

    def _fills(self, run: Run, carried: dict[int, str]) -> list[int]:
        """Tokens beyond its own with which each output is carried, one of them at most: of blocks whose attention tells those apart."""
        block = self.model.get_submodule(f"{run.group.path}.{run.start}")
        processors = [(m, m.processor) for m in block.modules() if hasattr(m, "processor")]
        known = processors and all(getattr(p, "tells_fill", lambda attn: False)(m) for m, p in processors)
        fills = [
            self.fill(o._aval.shape, n, carried[n]) if known and n in carried else 0 for n, o in enumerate(run.outputs)
        ]
        return fills if sum(map(bool, fills)) == 1 else [0] * len(fills)


def _words(traced: jax.extend.core.ClosedJaxpr) -> tuple:
    """Equal for two traces of the same operations on the same values; addresses of functions that JAX made on the way left out."""
    constants = ((id(x),) if isinstance(x, jax.core.Tracer) else _bits(np.asarray(x)) for x in traced.consts)
    return re.sub(r" at 0x[0-9a-f]+", "", str(traced.jaxpr)), tuple(constants)


def _bits(x: np.ndarray) -> tuple:
    return x.shape, x.dtype.str, x.tobytes()


def _stacked(gives: dict) -> dict:
    """What one block gives, as of a scan of one."""
    return jax.tree.map(lambda array: array[None], gives)


def _unchanged(run: Run, outputs: list[Deferred]) -> list[jax.Array]:
    """In the place of outputs of blocks that do not run: what they were given, zeros where nothing was."""
    given = {number: run.arrays[slot] for slot, number in run.slots.items()}
    found = [given.get(number) for number in range(len(run.outputs))]
    return [
        jnp.zeros(o._aval.shape, o._aval.dtype) if x is None else x
        for o, x in zip(outputs, [*found, *[None] * (len(outputs) - len(found))])
    ]


@contextlib.contextmanager
def _as_all_of(run: Run):
    token = _scanned.set((run.start, run.stop))
    try:
        yield
    finally:
        _scanned.reset(token)


def _filled(array, fill: int):
    """[B, T, C] with so many tokens of zeros behind it."""
    return jnp.pad(array, ((0, 0), (0, fill), (0, 0))) if fill else array


def _cut(array, fill: int):
    return array[:, : array.shape[1] - fill] if fill else array
