"""Blocks called one after another on each other's outputs, traced once and scanned.

While a model is traced, each block of a group (`scan.find_groups`) returns deferred outputs. The next block joins the run if its
trace is the same and its arguments fit. Some are the previous block's outputs, or the same operations on them (`between`), where
they were before. The others are the very same values, or floating tensors of one shape, which are stacked beside the weights.
Anything else (an output's value, a hook inside a block) ends the run, which is then computed as a scan.
"""

import contextlib
import contextvars
import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...bridge import Tensor, autocast, environment, parts, storage
from ...kernels.kept import numbered_anew
from ...kernels.settings import bound, current, using
from ..state import own_forward, signature
from ..state.adapters import Adapters
from ..state.watch import ABSENT, replaced
from .functional import numbered, undone_trace, written
from .keeping import kept_by_blocks
from .results import PLAIN, Entangled, WeightWritten, flattened, unflattened
from .run import Run, text_of
from .scan import Group, of_one


# Start and stop of the run of blocks that is traced as one block; None outside of a scan of blocks.
scanned = contextvars.ContextVar("diffusers_tpu_scanned", default=None)
_stack = contextvars.ContextVar("diffusers_tpu_stack", default=None)  # weights of all layers, and the one that runs


class BlockRuns:
    """The runs of one trace of `function`, a `PureFunction`. `weights` and `numbers`: the stacked arrays by group label.

    Attributes:
        stacks: by group label the stacked weights, numbers, and what a cache keeps of the blocks.
        condition: if set, runs are computed only if it holds; else nothing that they return may be used.
        room: bytes of a chip that blocks may still keep for the backward pass.
        keeping: (what a cache keeps of a block, tokens of its padded stream: all, padding) -> a context with what it shall keep.
        gives: by group label, for each run the first block's number and what its blocks shall keep.
    """

    def __init__(self, function, weights: dict, numbers: dict):
        self.function, self.model, self.adapters = function, function.module, Adapters(function.module)
        self.stacks = {group.label: (weights[group.label], numbers[group.label], {}) for group in function.groups}
        self.keeping: Callable = lambda kept, filled: contextlib.nullcontext({})
        self.gives: dict[str, list[tuple[int, dict]]] = {label: [] for label in self.stacks}
        self.run: Run | None = None
        self.condition: jax.Array | None = None
        self.room = function.room
        self.writing: set[str] = set()  # labels of groups whose blocks write to their arguments
        self.views: dict[tuple, tuple[jax.Array, Tensor]] = {}  # (array's id, parts) -> array, first tensor
        self.own: dict[int, tuple] = {}  # block's id -> where its forward is, its name there, the former one

    @contextlib.contextmanager
    def installed(self):
        """While this is open, blocks of all groups return deferred outputs."""
        stand_ins, settings, apart = [], self.function.settings, self.function.apart
        for group in self.function.groups:
            for index, block in enumerate(group.blocks(self.model), group.start):
                if (group.path, index) not in settings:
                    with group.lent(self.model, block):
                        settings[group.path, index] = signature(block, self.adapters, apart)
                # upstream's hooks on a block stay around what replaces its forward
                reference = own_forward(block)
                held, name = (vars(block), "forward") if reference is None else (vars(reference), "original_forward")
                self.own[id(block)] = held, name, held.get(name, ABSENT)
                stand_ins.append((held, name, functools.partial(self._called, group, index)))
        with replaced(stand_ins):
            try:
                yield
                self.flush()
            finally:
                self.run = None

    def _called(self, group: Group, index: int, *args, **kwargs):
        """Replaces a block's forward."""
        leaves, spec = tree_flatten((args, kwargs))
        leaves = [self._taken(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        run = self.run
        if run is not None and (run.group, run.stop, run.autocast) == (group, index, autocast.dtype_now()):
            goes_on = run.continued_by(leaves, spec)
            if goes_on is not None and self._alike(run, index):
                run.extend(*goes_on)
                return run.make_output(run.outputs)
        self.flush()
        run = Run(group, index, leaves, [leaf.jax() for leaf in leaves if isinstance(leaf, Tensor)], spec)
        if group.label not in self.writing and all(isinstance(leaf, PLAIN) for leaf in leaves):
            try:
                run.traced, avals, run.make_output, _ = self._traced(run, index)
            except Entangled:
                self.writing.add(group.label)
            else:
                run.begin(avals, self.flush)
                self.run = run
                return run.make_output(run.outputs)
        # A block that writes to its arguments, to a key-value cache say, runs now, outside of a scan.
        with self._of_stack(group, index):
            output, gives = self._run_block(group, index, args, kwargs, self._stacked_at(group, index))
        self.gives[group.label].append((index, of_one(gives)))
        return output

    def _taken(self, t: Tensor) -> Tensor:
        """The tensor; for a view, the first one of the same parts of the same array, so that the next block gets that one too."""
        named = parts(t)
        return t if named is None else self.views.setdefault((id(storage(t)), named), (storage(t), t))[1]

    def _alike(self, run: Run, index: int) -> bool:
        """Whether the trace of the run's first block also represents this block of its group."""
        path, settings = run.group.path, self.function.settings
        if settings[path, run.start] == settings[path, index]:
            return True
        if self.stacks[run.group.label][2]:
            return False  # what a cache keeps of each block is not in its trace
        try:
            traced, _, make_output, effects = self._traced(run, index)
        except Entangled:
            return False
        if effects.persistent or effects.temporary or effects.draws:
            return False  # these would happen to its own Python state only
        return make_output.args == run.make_output.args and text_of(traced) == run.text

    def _traced(self, run: Run, index: int) -> tuple:
        """Trace block `index`, apart from the trace around it: (trace, its outputs' avals, what builds its output, effects)."""
        found = {}

        def block(stacked):  # closes over the arrays, whose provenance stays known
            outputs, _, found["make_output"] = self._call(run, index, run.arrays, stacked)
            return outputs

        with undone_trace(run.group.block(self.model, index)) as effects:  # it runs again when the run is computed
            traced, avals = jax.make_jaxpr(block, return_shape=True)(self._stacked_at(run.group, index))
        return traced, avals, found["make_output"], effects

    def _stacked_at(self, group: Group, index: int) -> tuple[dict, dict, dict]:
        """Weights and numbers of one block, and what a cache keeps of it."""
        return jax.tree.map(lambda array: array[index - group.start], self.stacks[group.label])

    def _not_gathered(self, group: Group) -> dict[str, jax.Array]:
        """Stacks from which a kernel reads its layer without the copy of a slice; none if gradients would be added up by layer."""
        settled, (weights, *_) = () if current().differentiable else self.function.settled, self.stacks[group.label]
        return {name: stack for name, stack in weights.items() if f"{group.label}.{name}" in settled}

    def _of_stack(self, group: Group, index: int):
        """A context for one block that runs outside of a scan."""
        return bound(_stack, (self._not_gathered(group), np.int32(index - group.start)))

    def _call(self, run: Run, index: int, arrays: list, own: tuple, filled=None) -> tuple[list, dict, Callable]:
        """Run a block on arrays: flat output arrays, what it keeps for a cache, and the function that builds its return value."""
        env, tensors = environment(), iter(arrays)
        leaves = [Tensor(next(tensors), env) if isinstance(leaf, Tensor) else leaf for leaf in run.leaves]
        args, kwargs = tree_unflatten(leaves, run.spec)
        output, gives = self._run_block(run.group, index, args, kwargs, own, filled)
        now, spec = tree_flatten((args, kwargs))
        given = (leaf for leaf in leaves if isinstance(leaf, Tensor))
        if spec != run.spec or any(map(operator.is_not, [*now, *(x.jax() for x in given)], [*leaves, *arrays])):
            raise Entangled("it writes into an argument")
        tensors, *form = flattened(output)
        return [x.jax() for x in tensors], gives, functools.partial(unflattened, *form)

    def _run_block(self, group: Group, index: int, args, kwargs, own: tuple[dict, dict, dict], filled=None) -> tuple:
        """What a block's own forward returns, and what it keeps for a cache."""
        (weights, numbers, kept), env, block = own, environment(), group.block(self.model, index)
        stack, layer = _stack.get() or ({}, None)
        layers = {name: (stack[name], layer) for name in stack}
        weights = {n: self.function.gathered(f"{group.label}.{n}", w, layers.get(n)) for n, w in weights.items()}
        held, name, forward = self.own[id(block)]
        with (
            replaced([(held, name, forward)]),
            env,
            group.lent(self.model, block),
            numbered(block, numbers, self.adapters),
            self.keeping(kept, filled) as gives,
        ):
            names = Adapters(block, self.adapters.order).tensors(block)
            weights = {names[name]: w for name, w in weights.items()}
            # its forward without hooks, which ran when the model called it
            call = block.forward if forward is ABSENT else forward
            output, changed = written(block, weights, call, args, kwargs)
        if changed:
            names = (f"{group.path}.{index}.{name}" for name in changed)
            raise WeightWritten(f"it writes into {', '.join(names)}")
        return output, gives

    def flush(self):
        """Compute the open run, if any, and set the values of its outputs that are still referenced."""
        run, self.run = self.run, None
        if run is None:
            return
        held = run.still_held()
        outputs = [*run.outputs, *(output for *_, output in held)]
        if self.condition is None:
            values, gives = self._values(run, held)
            self.gives[run.group.label].append((run.start, gives))
        else:
            values = lax.cond(self.condition, lambda: self._values(run, held)[0], lambda: run.unchanged(outputs))
        for output, value in zip(outputs, values):
            output.settle(value)
        for operation in filter(None, (ref() for ref in run.operations + run.between.operations)):
            operation.settle()

    def _values(self, run: Run, held: list) -> tuple[list[jax.Array], dict]:
        """Values of the last block's outputs and of those still referenced; and what all blocks keep for a cache, stacked."""
        with autocast.computing_in(run.autocast):
            if run.stop - run.start > 1:
                return self._scan(run, held)
            own = self._stacked_at(run.group, run.start)
            with self._of_stack(run.group, run.start):
                values, gives, _ = self._call(run, run.start, run.arrays, own)
            return values, of_one(gives)

    def _scan(self, run: Run, held: list) -> tuple[list, dict]:
        feeds, avals, names = run.feeds, [output._aval for output in run.outputs], run.names(self.model)
        specs = self.function.layout([aval.shape for aval in avals], names)
        source = {place.number: slot for slot, place in feeds.items() if place.kind == "output"}
        made = {slot: run.alike(slot) for slot, place in feeds.items() if place.kind == "made"}
        fills = self._fills(run, specs, () if None in made.values() else names)
        sequence = current().sequence or any(spec is not None for spec in specs)
        settings = replace(current(), pad_tokens=max(fills), sequence=sequence)
        filled = next(((aval.shape[1] + fill, fill) for aval, fill in zip(avals, fills) if fill), None)

        def pinned(array, number: int):
            there = specs[number] and NamedSharding(settings.mesh, specs[number])
            return array if there is None else lax.with_sharding_constraint(array, there)

        def carried(array, number: int | None):
            return array if number is None else pinned(_filled(array, fills[number]), number)

        first = [run.arrays[source[n]] if n in source else jnp.zeros(x.shape, x.dtype) for n, x in enumerate(avals)]
        carry = [carried(array, n) for n, array in enumerate(first)]
        carry += (carried(run.arrays[slot], number) for slot, number in made.items())

        def step(carry, of_block):
            own, given, beside, layer = of_block
            of_layer = {name: lax.dynamic_index_in_dim(array, layer, keepdims=False) for name, array in whole.items()}
            own = own[0] | of_layer, *own[1:]
            fed = dict(zip(made, carry[len(avals) :]))
            fed |= {slot: carry[place.number] for slot, place in feeds.items() if slot not in made}
            inputs = [(given | fed).get(slot, array) for slot, array in enumerate(run.arrays)]
            with (
                using(settings),
                numbered_anew(),
                bound(scanned, (run.start, run.stop)),
                bound(_stack, (whole, layer)),
            ):
                flat, gives, _ = self._call(run, run.start, inputs, own, filled)
            flat = [pinned(x, n) for n, x in enumerate(flat)]
            values = run.repeated.values([*map(cut, flat, fills)], beside) if made else {}
            following = [carried(values[feeds[slot]], number) for slot, number in made.items()]
            return flat + following, ({n: flat[n] for n in numbers}, gives)

        numbers, group = sorted({n for _, n, _ in held}), run.group
        (weights, *rest), part = self.stacks[group.label], (run.start - group.start, run.stop - group.start)
        whole = self._not_gathered(group)
        stacked = {name: array for name, array in weights.items() if name not in whole}, *rest
        if part != (0, group.stop - group.start):
            stacked = jax.tree.map(lambda array: lax.slice_in_dim(array, *part), stacked)
        given = {slot: jnp.stack(arrays) for slot, arrays in run.own.items() if slot not in feeds}
        beside = run.beside() if made else []
        layer = jnp.arange(*part) if whole else None
        xs = stacked, given, beside, layer
        if current().differentiable:
            first = jax.tree.map(lambda x: x[0], xs)
            policy, taken = kept_by_blocks(step, carry, first, run.stop - run.start, settings, self.room)
            step, self.room = jax.checkpoint(step, policy=policy), self.room - taken
        # XLA's CPU backend (jaxlib 0.10.2) may start a loop with exchanges before an earlier exchange that the loop does not
        # read: simulated chips deadlock.
        straight = current().differentiable and settings.platform == "cpu" and settings.chips > 1
        last, (passed, gives) = lax.scan(step, carry, xs, unroll=straight or 1)
        return [*map(cut, last[: len(avals)], fills), *(cut(passed[n][k], fills[n]) for k, n, _ in held)], gives

    def _fills(self, run: Run, specs: list, carried: Iterable[int]) -> list[int]:
        """Tokens of padding that each output is carried with, one output at most: for blocks whose attention ignores them."""
        modules = run.group.block(self.model, run.start).modules()
        processors = [(m, m.processor) for m in modules if hasattr(m, "processor")]
        known = processors and all(getattr(p, "covers", lambda attn: False)(m) for m, p in processors)
        fills = [0] * len(run.outputs)
        for number in carried if known else ():
            fills[number] = self.function.padding(run.outputs[number]._aval.shape, specs[number])
        return fills if sum(map(bool, fills)) == 1 else [0] * len(fills)


def _filled(array, fill: int):
    """[B, T, C] with so many tokens of zeros at its end."""
    return jnp.pad(array, ((0, 0), (0, fill), (0, 0))) if fill else array


def cut(x, fill: int):
    """x [B, T, C], an array or a tensor, without so many tokens at its end."""
    return x[:, : x.shape[1] - fill] if fill else x
