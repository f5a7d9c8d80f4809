"""Caches of modules' results that decide by counting calls: `PyramidAttentionBroadcastConfig`, `TaylorSeerCacheConfig`.

Upstream's hooks count calls, and run their module or replace its result. Here they count on the host, before a program is looked
up: which modules run is the step's kind. In a trace, modules that run also return what is kept; the others' results are made of it.
"""

import contextlib
import functools
import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import jax.numpy as jnp
import torch

from ....bridge import Tensor, environment
from ...state.watch import replaced
from ..blocks import BlockRuns, cut
from ..functional import Elapsed
from ..results import NoProgram
from ..scan import Group
from .step_cache import Results, Step, StepCache


@dataclass(frozen=True)
class Place:
    """Modules whose hooks decide alike: the one at `path` in each block of the group `label`, with tensors stacked [B, L, ...].

    Without a label, one module of the model.
    """

    label: str
    path: str
    hooks: list


@dataclass(frozen=True)
class Part:
    """The static part of a place's step: whether its modules run, and `form` and `fills` of the tensors that it is given (`Held`).

    `timed`: one more tensor has the steps since these were made, [B].
    """

    runs: bool
    form: Hashable = None
    fills: tuple[int, ...] = ()
    timed: bool = False


@dataclass
class Held:
    """What is kept of a place: tensors, the batch first, and their static form. Upstream's states store it.

    `fills`: how many of each tensor's tokens are padding (`BlockRuns`). In a trace, for one module, also the steps `elapsed` since
    the tensors were made, and how many `branches` are side by side.
    """

    tensors: list[torch.Tensor]
    form: Hashable
    fills: tuple[int, ...] = ()
    elapsed: Elapsed | None = None
    branches: int = 1


class _Trace:
    """A trace of one step. `forms`: by place, the static form of what it returns; `outputs`: of modules outside of blocks.

    `scopes`: of the model, then of the block that runs: what is kept of its places, by path; what they return; and of a block's
    padded stream how many tokens it has, and how many of them are padding.
    """

    def __init__(self, cache: "Modules", branches: int, kept: dict[str, list]):
        self.cache, self.branches, self.scopes = cache, branches, [(kept, {}, None)]
        self.forms, self.outputs = {}, {}

    @contextlib.contextmanager
    def keeping(self, kept: dict[str, list], filled: tuple[int, int] | None):
        kept, gives = {path: [Tensor(x, environment()) for x in arrays] for path, arrays in kept.items()}, {}
        self.scopes.append((kept, gives, filled))
        try:
            yield gives
        finally:
            self.scopes.pop()

    def forward(self, place: Place, part: Part, hook, elapsed: Elapsed | None, *args, **kwargs):
        """Replaces a hooked module's forward."""
        kept, gives, filled = self.scopes[-1 if place.label else 0]
        if place.path in gives:
            raise NoProgram(f"{place.path} is called more than once, its cache counts each")
        tensors, gives[place.path] = kept[place.path], []
        if filled is None:  # a block outside of a scan, or a trace for its outputs
            tensors = [*map(cut, tensors, part.fills)]
        held = Held(tensors, part.form, part.fills, elapsed, self.branches)
        if not part.runs:
            self.forms[id(place)] = (), part.form
            return self.cache._output_of(hook, held)
        output = hook.fn_ref.original_forward(*args, **kwargs)
        if place.label:
            made, form = self.cache._run(hook, held, output)
            self.forms[id(place)] = tuple(_fill(x, filled) for x in made), form
            gives[place.path] = [t.jax() for t in made]
        else:
            self.outputs[id(place)] = held, output
        return output


class Modules(StepCache):
    """A cache whose hooks count calls. Beside those of `StepCache`, its classes have:

    KEPT: the attribute of upstream's states that stores tensors; here it stores a `Held`.
    _state(hook), _states(hook): upstream's state for the present calls, and those for all kinds of calls.
    _decide(hook): counts a call; returns whether the module runs.
    _part(hook, runs): the step of a place, by its first hook, and the tensors that it is given.
    _run(hook, held, output): in a trace, what is kept of a module's output, and its form.
    _output_of(hook, held): in a trace, what replaces the output of a module that does not run.
    _give_back(state, form, tensors): sets the state as upstream's hook leaves it, with the tensors of one module.
    """

    def __init__(self, places: list[Place]):
        super().__init__([hook for place in places for hook in place.hooks])
        self.places = places

    @classmethod
    def found(cls, model: torch.nn.Module, hooked: list[tuple], groups: list[Group]) -> "Modules | None":
        """None for hooks inside hooked modules, which do not count while those do not run, and for equal hooks in some blocks
        only."""
        names = {id(module): name for name, module in model.named_modules()}
        hooks = [(names[id(module)], hook) for module, hook in hooked]
        if any(one.startswith(f"{other}.") for (one, _), (other, _) in itertools.permutations(hooks, 2)):
            return None
        places: dict[tuple[str, str, str], list] = {}
        for name, hook in hooks:
            within = [place for group in groups if (place := group.place_of(name)) and place[1]]
            if len(within) > 1:
                return None
            settings = {n: x for n, x in vars(hook).items() if n not in ("fn_ref", "state", "state_manager")}
            settings = repr((settings, getattr(getattr(hook, "state_manager", None), "_init_kwargs", None)))
            places.setdefault((*(within[0] if within else ("", name)), settings), []).append(hook)
        blocks = {group.label: group.stop - group.start for group in groups}
        if any(label and len(some) != blocks[label] for (label, *_), some in places.items()):
            return None
        return cls([Place(label, path, some) for (label, path, _), some in places.items()])

    @property
    def apart(self) -> tuple:
        return (*self.hooks,)

    def step(self) -> Step:
        before = {id(hook): (state := self._state(hook), dict(vars(state))) for hook in self.hooks}
        parts, tensors = [], []
        for place in self.places:
            runs, *_ = [self._decide(hook) for hook in place.hooks]
            part, given = self._part(place.hooks[0], runs)
            parts.append(part)
            tensors += given

        def keep(results: list[torch.Tensor], form: tuple):
            results = iter(results)
            for place, part, of_place in zip(self.places, parts, form):
                held = None
                if part.runs and of_place is not None:
                    fills, what = of_place
                    held = Held([*itertools.islice(results, len(fills))], what, fills)
                for state, attributes in (before[id(hook)] for hook in place.hooks):
                    if of_place is None:  # the module was not called
                        vars(state).update(attributes)
                    elif held is not None:
                        self._keep(state, held)
            self.decided.append(any(part.runs for part in parts))

        return Step(tuple(parts), tensors, keep, [*before.values()])

    def _keep(self, state, held: Held):
        setattr(state, self.KEPT, held)

    @contextlib.contextmanager
    def traced(self, kind: tuple[Part, ...], tensors: list, runs: BlockRuns, branches: int) -> Iterator[Results]:
        results, rest, kept, stand_ins = Results(), iter(tensors), {}, []
        trace = _Trace(self, branches, kept)
        for place, part in zip(self.places, kind):
            given = [*itertools.islice(rest, len(part.fills))]
            elapsed = Elapsed(next(rest).jax()) if part.timed else None
            kept[place.path] = given
            if place.label:
                runs.stacks[place.label][2][place.path] = [jnp.moveaxis(t.jax(), 1, 0) for t in given]
            for hook in place.hooks:
                forward = functools.partial(trace.forward, place, part, hook, elapsed)
                stand_ins.append((vars(hook.fn_ref), "forward", forward))
        runs.keeping = trace.keeping
        with replaced(stand_ins):
            yield results
        runs.flush()
        for place in self.places:
            if id(place) in trace.outputs:  # outside of blocks: its output has a value now
                made, form = self._run(place.hooks[0], *trace.outputs[id(place)])
                trace.forms[id(place)] = (0,) * len(made), form
                results += made
            elif place.label:
                results += _joined(runs.gives[place.label], place)
        results.form = tuple(trace.forms.get(id(place)) for place in self.places)

    def leave(self):
        if self.left:
            return
        self.left = True
        for place in self.places:
            for number, hook in enumerate(place.hooks):
                for state in self._states(hook):
                    held = getattr(state, self.KEPT)
                    if isinstance(held, Held):
                        tensors = [t[:, number] for t in held.tensors] if place.label else held.tensors
                        self._give_back(state, held.form, [*map(cut, tensors, held.fills)])


def _fill(x: torch.Tensor, filled: tuple[int, int] | None) -> int:
    """How many tokens of x [B, T, C] are padding."""
    return filled[1] if filled is not None and x.ndim == 3 and x.shape[1] == filled[0] else 0


def _joined(pieces: list[tuple[int, dict[str, list]]], place: Place) -> list[Tensor]:
    """What the runs of blocks returned of a place, joined: [B, L, ...]."""
    lists = [given[place.path] for _, given in sorted(pieces, key=lambda piece: piece[0]) if place.path in given]
    blocks = sum(arrays[0].shape[0] for arrays in lists if arrays)
    if blocks not in (0, len(place.hooks)):
        times = f"{blocks} of {len(place.hooks)} blocks"
        raise NoProgram(f"{place.path} is called in {times}, its cache counts them alike")
    return [Tensor(jnp.moveaxis(jnp.concatenate(arrays), 0, 1), environment()) for arrays in zip(*lists)]
