"""Caches of what modules give, decided by counting: `PyramidAttentionBroadcastConfig`, `TaylorSeerCacheConfig`.

Upstream puts a hook on each attention (or on the last layer and the blocks), which counts calls and runs its module or answers in
its place. Here the hooks count on the host, before a program is looked for: which modules run is the kind of the step. In a trace
modules that run give what is kept beside their answer, the others' answers are made of what they are given.

A module that every block of a scanned group has is one `Place`: what its modules keep travels stacked, [B, L, ...].
"""

import contextlib
import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ....bridge import Tensor, View
from ....bridge.environment import DEVICE, environment
from ....weights.convert import numpy_dtype
from ..scan import Group
from .step_cache import Results, Step, StepCache


class NotOnce(Exception):
    """A trace called a module that a cache counts more than once, or not in every block."""


@dataclass(frozen=True)
class Place:
    """Modules whose hooks decide alike.

    Attributes:
        path: in a block of the group called `label`, or in the model, where that is "".
        hooks: of each block, or one.
    """

    path: str
    label: str
    hooks: list


@dataclass(frozen=True)
class Part:
    """What a step is of one place.

    Attributes:
        runs: whether its modules run.
        form: what is static of the tensors that it is given.
        fills: of each of them, as of `Held`. `timed`: one more says the steps since they were made, [B].
    """

    runs: bool
    form: Hashable = None
    fills: tuple[int, ...] = ()
    timed: bool = False


@dataclass
class Held:
    """What is kept of a place: tensors, the batch first, and what is static of them. Stands in upstream's states.

    Attributes:
        fills: of each tensor, how many of its tokens are none of the model's (`BlockRuns`).
    """

    tensors: list[torch.Tensor]
    form: Hashable
    fills: tuple[int, ...] = ()

    def of_block(self, number: int) -> list[torch.Tensor]:
        """What one block's module of the place gave: of [B, L, T, C] or [B, L, ...]."""
        return [*map(_cut, (t[:, number] for t in self.tensors), self.fills)]


@dataclass
class Here:
    """Where a module is traced: what is kept of its places, by path, and what they give.

    Attributes:
        filled: tokens of the block's stream that has some beyond the model's, and how many of them are.
    """

    given: dict[str, list]
    filled: tuple[int, int] | None = None
    gives: dict[str, list] = field(default_factory=dict)

    def fill(self, x: torch.Tensor) -> int:
        """How many of the tokens of x [B, T, C] are none of the model's."""
        return self.filled[1] if self.filled is not None and x.ndim == 3 and x.shape[1] == self.filled[0] else 0


class Modules(StepCache):
    """A cache whose hooks count. How one decides and what it keeps are its class's."""

    def __init__(self, places: list[Place]):
        super().__init__([hook for place in places for hook in place.hooks])
        self.places = places

    @classmethod
    def found(cls, model: torch.nn.Module, hooked: list[tuple], groups: list[Group]) -> "Modules | None":
        """None for hooks inside of hooked modules, which do not count where those do not run, and for some blocks of a group only."""
        names = {id(module): name for name, module in model.named_modules()}
        hooks = [(names[id(module)], hook) for module, hook in hooked]
        if any(one.startswith(f"{other}.") for (one, _), (other, _) in itertools.permutations(hooks, 2)):
            return None
        places: dict[tuple[str, str], list] = {}
        for name, hook in hooks:
            within = [found for group in groups if (found := _in_block(name, group))]
            if len(within) > 1:
                return None
            places.setdefault(within[0] if within else ("", name), []).append(hook)
        blocks = {group.label: group.stop - group.start for group in groups}
        if any(label and len(some) != blocks[label] for (label, _), some in places.items()):
            return None
        return cls([Place(path, label, some) for (label, path), some in places.items()])

    @property
    def apart(self) -> tuple:
        return (*self.hooks,)

    def _state(self, hook):
        """Upstream's state of the hook, of the calls of now."""
        raise NotImplementedError

    def _decide(self, hook) -> bool:
        """Count a call: whether the module runs."""
        raise NotImplementedError

    def _part(self, hook, runs: bool) -> tuple[Part, list[torch.Tensor]]:
        """What the step is of a place, by the first of its hooks, and the tensors that it is given."""
        raise NotImplementedError

    def _keep(self, state, held: Held):
        """What the modules of a place gave is the state's."""
        raise NotImplementedError

    def _held(self, state) -> Held | None:
        """What `_keep` has put there."""
        raise NotImplementedError

    def _give_back(self, state, form: Hashable, tensors: list[torch.Tensor]):
        """The state is as upstream's hook leaves it: with the tensors of one module."""
        raise NotImplementedError

    def _states(self, hook) -> list:
        """Its states, of all kinds of calls."""
        raise NotImplementedError

    def _run(self, hook, part: Part, output, given: list, elapsed, branches: int) -> tuple[list, Hashable]:
        """In a trace: what is kept of a module's answer, and its form."""
        raise NotImplementedError

    def _answer(self, hook, part: Part, given: list, elapsed, branches: int):
        """In a trace: what stands for the answer of a module that does not run."""
        raise NotImplementedError

    def step(self) -> Step:
        states = {id(hook): self._state(hook) for hook in self.hooks}
        before = {key: dict(vars(state)) for key, state in states.items()}
        parts, tensors = [], []
        for place in self.places:
            runs, *_ = [self._decide(hook) for hook in place.hooks]
            part, given = self._part(place.hooks[0], runs)
            parts.append(part)
            tensors += given

        def undo(hooks=self.hooks):
            for hook in hooks:
                vars(states[id(hook)]).update(before[id(hook)])

        def keep(results: list[torch.Tensor], form: tuple):
            results = iter(results)
            for place, part, of_place in zip(self.places, parts, form):
                if of_place is None:  # nobody called it
                    undo(place.hooks)
                elif part.runs:
                    fills, what = of_place
                    held = Held([*itertools.islice(results, len(fills))], what, fills)
                    for hook in place.hooks:
                        self._keep(states[id(hook)], held)
            self.decided.append(any(part.runs for part in parts))

        return Step(tuple(parts), tensors, keep, undo)

    @contextlib.contextmanager
    def traced(self, kind: tuple[Part, ...], tensors: list[Tensor], runs, branches: int) -> Iterator[Results]:
        results, forms, inner, rest = Results(), {}, [], iter(tensors)
        outer, answers, before = Here({}), {}, []

        @contextlib.contextmanager
        def keeping(kept: dict[str, list], filled: tuple[int, int] | None):
            given = {path: [Tensor(x, environment()) for x in arrays] for path, arrays in kept.items()}
            inner.append(Here(given, filled))
            try:
                yield inner[-1].gives
            finally:
                inner.pop()

        runs.keeping = keeping
        try:
            for place, part in zip(self.places, kind):
                given = [*itertools.islice(rest, len(part.fills))]
                elapsed = Elapsed(next(rest).jax()) if part.timed else None
                if place.label:
                    _, _, kept = runs.stacks[place.label]
                    kept[place.path] = [jnp.moveaxis(t.jax(), 1, 0) for t in given]
                outer.given[place.path] = given
                for hook in place.hooks:
                    before.append((hook.fn_ref, hook.fn_ref.forward))
                    hook.fn_ref.forward = self._stand_in(
                        place, part, hook, elapsed, branches, inner, outer, forms, answers
                    )
            yield results
        finally:
            for reference, forward in before:
                reference.forward = forward
        runs.flush()
        form = []
        for place, part in zip(self.places, kind):
            if part.runs and id(place) in answers:  # outside of blocks: its answer has a value now
                given, elapsed, output = answers[id(place)]
                made, what = self._run(place.hooks[0], part, output, given, elapsed, branches)
                outer.gives[place.path], forms[id(place)] = made, ((0,) * len(made), what)
            made = _joined(runs.gives[place.label], place) if place.label else outer.gives.get(place.path, [])
            results += made
            form.append(forms.get(id(place)))
        results.form = tuple(form)

    def _stand_in(self, place: Place, part: Part, hook, elapsed, branches: int, inner, outer, forms, answers):
        def forward(*args, **kwargs):
            here = inner[-1] if place.label else outer
            if place.path in here.gives:
                raise NotOnce(f"{place.path} is called more than once, its cache counts each")
            given, here.gives[place.path] = here.given[place.path], []
            if here.filled is None:  # a block by itself, or to see what it gives
                given = [*map(_cut, given, part.fills)]
            if not part.runs:
                forms[id(place)] = (), part.form
                return self._answer(hook, part, given, elapsed, branches)
            output = hook.fn_ref.original_forward(*args, **kwargs)
            if place.label:
                made, what = self._run(hook, part, output, given, elapsed, branches)
                forms[id(place)] = tuple(map(here.fill, made)), what
                here.gives[place.path] = [t.jax() for t in made]
            else:
                answers[id(place)] = given, elapsed, output
            return output

        return forward

    def leave(self):
        if self.left:
            return
        self.left = True
        for place in self.places:
            for number, hook in enumerate(place.hooks):
                for state in self._states(hook):
                    held = self._held(state)
                    if held is not None:
                        self._give_back(state, held.form, held.of_block(number) if place.label else held.tensors)


class PyramidAttentionBroadcast(Modules):
    """StepCache: each attention's answer. Its state is of all calls, whatever their branch, as upstream's."""

    HOOKS = frozenset({"PyramidAttentionBroadcastHook"})

    @property
    def apart(self) -> tuple:
        """Also what says the timestep, which the model's configuration of the cache holds too."""
        return (*self.hooks, *(hook.current_timestep_callback for hook in self.hooks))

    def _state(self, hook):
        return hook.state

    def _decide(self, hook) -> bool:
        reference, ran = hook.fn_ref, object()
        original, reference.original_forward = reference.original_forward, lambda: ran
        try:
            return hook.new_forward(None) is ran
        finally:
            reference.original_forward = original

    def _part(self, hook, runs: bool) -> tuple[Part, list[torch.Tensor]]:
        if runs:
            return Part(True), []
        held = hook.state.cache
        return Part(False, held.form, held.fills), held.tensors

    def _states(self, hook) -> list:
        return [hook.state]

    def _keep(self, state, held: Held):
        state.cache = held

    def _held(self, state) -> Held | None:
        return state.cache

    def _give_back(self, state, form: Hashable, tensors: list[torch.Tensor]):
        state.cache = _built(form, tensors)

    def _run(self, hook, part: Part, output, given: list, elapsed, branches: int) -> tuple[list, Hashable]:
        leaves, spec = tree_flatten(output)
        return [x for x in leaves if _is_tensor(x)], (spec, tuple(None if _is_tensor(x) else (x,) for x in leaves))

    def _answer(self, hook, part: Part, given: list, elapsed, branches: int):
        return _built(part.form, given)


class TaylorSeer(Modules):
    """StepCache: of each tensor that a module gives its Taylor factors, lowest order first; upstream's state makes and sums them.

    A module that is called inactive gives zeros where it does not run; of it shapes are kept.
    """

    HOOKS = frozenset({"TaylorSeerCacheHook"})

    def _state(self, hook):
        return hook.state_manager.get_state()

    def _decide(self, hook) -> bool:
        runs, _ = hook._measure_should_compute()
        return runs

    def _part(self, hook, runs: bool) -> tuple[Part, list[torch.Tensor]]:
        state, settings = self._state(hook), tuple(hook.state_manager._init_kwargs.items())
        held = state.taylor_factors or Held([], None)
        if state.is_inactive or held.form is None:
            return Part(runs, (settings, None if runs else held.form)), []
        orders, *rest = held.form
        used = tuple(min(order, state.max_order) for order in orders) if runs else orders
        starts = [0, *itertools.accumulate(orders)]
        taken = [place for start, number in zip(starts, used) for place in range(start, start + number)]
        tensors, fills = [held.tensors[place] for place in taken], tuple(held.fills[place] for place in taken)
        elapsed = torch.full(tensors[0].shape[:1], float(state.current_step - state.last_update_step))
        return Part(runs, (settings, (used, *rest)), fills, True), [*tensors, elapsed]

    def _states(self, hook) -> list:
        return [*hook.state_manager._state_cache.values()]

    def _keep(self, state, held: Held):
        state.taylor_factors, state.last_update_step = held, state.current_step

    def _held(self, state) -> Held | None:
        return state.taylor_factors or None

    def _give_back(self, state, form: Hashable, tensors: list[torch.Tensor]):
        if state.is_inactive:
            state.inactive_shapes, state.module_dtypes = zip(*form)
            state.taylor_factors, state.device = {}, DEVICE
        else:
            orders, state.module_dtypes = form
            state.taylor_factors = _by_order(orders, tensors)

    def _run(self, hook, part: Part, output, given: list, elapsed, branches: int) -> tuple[list, Hashable]:
        state = self._traced(hook, part, given, elapsed)
        outputs = [output] if isinstance(output, torch.Tensor) else [*output]
        if state.is_inactive:
            return [], tuple(((x.shape[0] // branches, *x.shape[1:]), x.dtype) for x in outputs)
        state.update(tuple(outputs))
        factors = [[*state.taylor_factors[n].values()] for n in range(len(outputs))]
        return sum(factors, []), (tuple(map(len, factors)), state.module_dtypes)

    def _answer(self, hook, part: Part, given: list, elapsed, branches: int):
        _, form = part.form
        state = self._traced(hook, part, given, elapsed)
        if form is not None and state.is_inactive:
            zeros = [jnp.zeros((branches * rows, *shape), numpy_dtype(dtype)) for (rows, *shape), dtype in form]
            outputs = [Tensor(x, environment()) for x in zeros]
        else:  # upstream's error, where nothing is kept
            _, state.module_dtypes = form or ((), ())
            outputs = state.predict()
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _traced(self, hook, part: Part, given: list, elapsed):
        """A state of upstream's with what a program is given in it."""
        settings, form = part.form
        state = hook.state_manager._state_cls(**dict(settings))
        state.current_step = 0
        if elapsed is not None:
            state.taylor_factors = _by_order(form[0], given)
            state.current_step, state.last_update_step = elapsed, 0
        return state


class Elapsed:
    """Steps from one call to another, never none, of each of the batch [B]: stands where upstream's code has a Python number."""

    def __init__(self, array: jax.Array):
        self.array = array

    def __sub__(self, since: int):
        return Elapsed(self.array - since)

    def __eq__(self, other):
        return False

    __hash__ = None

    def __pow__(self, order: int):
        return Elapsed(self.array**order)

    def __truediv__(self, number: float):
        return Elapsed(self.array / number)

    def __rmul__(self, tensor: Tensor):
        return self._applied(jnp.multiply, tensor)

    def __rtruediv__(self, tensor: Tensor):
        return self._applied(jnp.divide, tensor)

    def _applied(self, operator, tensor: Tensor):
        """In float32, rounded once, as torch does it with a number."""
        x = tensor.jax()
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        number = self.array.reshape(-1, *[1] * (x.ndim - 1))
        return Tensor(operator(wide, number).astype(x.dtype), environment())


def _cut(x: torch.Tensor, fill: int) -> torch.Tensor:
    return x[:, : x.shape[1] - fill] if fill else x


def _built(form: tuple, tensors: list):
    """A module's answer with these tensors in it."""
    (spec, leaves), tensors = form, iter(tensors)
    return tree_unflatten([next(tensors) if leaf is None else leaf[0] for leaf in leaves], spec)


def _by_order(orders: tuple[int, ...], tensors: list) -> dict[int, dict[int, torch.Tensor]]:
    """Of each output its Taylor factors, so many."""
    tensors = iter(tensors)
    return {number: dict(enumerate(itertools.islice(tensors, some))) for number, some in enumerate(orders)}


def _in_block(name: str, group: Group) -> tuple[str, str] | None:
    """The group's label and the module's path in its block; None of what is in none of them."""
    if not name.startswith(f"{group.path}."):
        return None
    number, _, path = name.removeprefix(f"{group.path}.").partition(".")
    return (group.label, path) if path and group.start <= int(number) < group.stop else None


def _joined(pieces: list[tuple[int, dict[str, list]]], place: Place) -> list[Tensor]:
    """[B, L, ...] of what runs of blocks gave of a place."""
    lists = [given[place.path] for _, given in sorted(pieces, key=lambda piece: piece[0]) if place.path in given]
    blocks = sum(arrays[0].shape[0] for arrays in lists if arrays)
    if blocks not in (0, len(place.hooks)):
        raise NotOnce(f"{place.path} is called in {blocks} of {len(place.hooks)} blocks, its cache counts them alike")
    return [Tensor(jnp.moveaxis(jnp.concatenate(arrays), 0, 1), environment()) for arrays in zip(*lists)]


def _is_tensor(x) -> bool:
    return isinstance(x, (Tensor, View))
