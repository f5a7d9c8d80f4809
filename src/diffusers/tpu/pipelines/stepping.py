"""A scheduler's step as one program: upstream's own lines, traced once for each step of a schedule, and found again.

`step` reads its scheduler (counters, tables, what it keeps of steps before) and writes to it. What the host knows of that is the key,
also of tables and timesteps that are on the chips; other tensors there are arguments; what it leaves on the scheduler is written
down and put there again each time. Numbers that differ from step to step (sigmas of the schedule) are arguments of the executable:
all steps that compute alike are one.

A step that draws noise, asks for values on the chips, or writes into what it is given runs operation by operation, as upstream's
does everywhere else.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ...configuration_utils import FrozenDict
from .. import bridge
from ..chips.locks import exclusive
from ..compile.lru import LRUCache
from ..compile.state import InputRef, OutputRef
from .step_program import program_of


LARGEST_TABLE = 1 << 16  # entries of a host tensor that a key holds
MOST_SIZES = 64  # of what one scheduler steps
MOST_KEPT = 4096  # steps of one size
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class Unlike(Exception):
    """A step that no program stands for."""


@dataclass
class Recorded:
    """One step, as its key says it is.

    Attributes:
        run: its executable, with the numbers of this step bound.
        output: upstream's return value, flattened; of arrays `InputRef` and `OutputRef`.
        changed: attributes of the scheduler that are others after it, the same way; `gone`: names of those that are no more.
    """

    run: Callable[[list[jax.Array]], list[jax.Array]]
    output: tuple[list, object]
    changed: dict[str, tuple[list, object]]
    gone: list[str]


class Steps:
    """The steps of one scheduler. `original`: its own `step`."""

    def __init__(self, scheduler):
        self.scheduler = weakref.ref(scheduler)
        self.recorded: dict[tuple, dict[tuple, Recorded | None]] = LRUCache(MOST_SIZES)
        self.traces = 0

    def run(self, original: Callable, args: tuple, kwargs: dict):
        """What `original(*args, **kwargs)` returns and does."""
        scheduler = self.scheduler()
        try:
            key, tensors, arrays = _read((args, kwargs), vars(scheduler))
        except Unlike:
            return original(*args, **kwargs)
        steps = self.recorded.setdefault(frozenset(x.shape for x in arrays.values()), LRUCache(MOST_KEPT))
        if key not in steps:
            steps[key] = self._record(original, args, kwargs, tensors, arrays)
        recorded = steps[key]
        if recorded is None:
            return original(*args, **kwargs)
        given = [bridge.to_torch(x) for x in recorded.run([*arrays.values()])]
        with torch.utils._mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
            own, copies = vars(scheduler), {}
            for name in recorded.gone:
                own.pop(name, None)
            for name, tree in recorded.changed.items():
                _put(own, name, _made(tree, tensors, given, copies))
            return _made(recorded.output, tensors, given, {})

    def _record(self, original, args, kwargs, tensors, arrays) -> Recorded | None:
        scheduler, self.traces = self.scheduler(), self.traces + 1
        own, env = vars(scheduler), bridge.environment()
        before = {name: tree_flatten(value) for name, value in own.items()}
        drawn, found = env.draws, {}
        numbers = {id(t): n for n, t in enumerate(tensors)}

        def step(values):
            there = {n: bridge.to_torch(x) for n, x in zip(arrays, values)}
            there |= {n: bridge.known_apart(t) for n, t in enumerate(tensors) if n not in arrays}
            held = {n: t.jax() for n, t in there.items()}

            def mine(tree):
                leaves, spec = tree
                return tree_unflatten([there[numbers[id(x)]] if bridge.on_device(x) else x for x in leaves], spec)

            for name, tree in before.items():
                own[name] = mine(tree)
            args_there, kwargs_there = mine(tree_flatten((args, kwargs)))
            output = original(*args_there, **kwargs_there)
            if any(there[n].jax() is not x for n, x in held.items()):
                raise Unlike("it writes into what it is given")
            leave = _Leaving(held)
            found["output"] = leave.tree(tree_flatten(output))
            after = {name: leave.tree(tree_flatten(value)) for name, value in own.items()}
            was = {name: _as_taken(tree, numbers) for name, tree in before.items()}
            found["changed"] = {
                name: tree for name, tree in after.items() if name not in was or not _same(tree, was[name])
            }
            found["gone"] = [*(before.keys() - own.keys())]
            return leave.outputs

        try:
            with exclusive.pinned(), _random_state_kept((args, kwargs)):
                closed = jax.make_jaxpr(step)([*arrays.values()])
        except Exception:  # whatever it is, the operations one by one say it themselves
            return None
        finally:
            for name in [*own]:
                own.pop(name)
            own.update((name, tree_unflatten(*tree)) for name, tree in before.items())
        if env.draws != drawn:
            env.draws = drawn
            return None
        return Recorded(program_of(closed, [*arrays.values()]), **found)


@contextlib.contextmanager
def _random_state_kept(call: tuple) -> Iterator[None]:
    generators = [leaf for leaf in tree_leaves(call) if isinstance(leaf, torch.Generator)]
    before = torch.get_rng_state(), [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        for generator, state in zip(generators, before[1]):
            generator.set_state(state)


_steps: "weakref.WeakKeyDictionary[object, Steps]" = weakref.WeakKeyDictionary()


def steps_of(scheduler) -> Steps:
    """The steps that were recorded of this scheduler."""
    if scheduler not in _steps:
        _steps[scheduler] = Steps(scheduler)
    return _steps[scheduler]


@contextlib.contextmanager
def as_programs(schedulers: list) -> Iterator[None]:
    """Inside, steps of these schedulers are programs. One whose `step` the user has replaced keeps that.

    By their class: a copy that a pipeline makes of its scheduler steps for itself. One that pipelines of several threads share is
    upstream's again when the first of them is done.
    """
    for scheduler in schedulers:
        scheduler.__class__ = stepping_class(_upstreams(type(scheduler)))
    try:
        yield
    finally:
        for scheduler in schedulers:
            scheduler.__class__ = _upstreams(type(scheduler))


def _upstreams(cls: type) -> type:
    return getattr(vars(cls).get("step"), "stepping", cls)


@functools.cache
def stepping_class(cls: type) -> type:
    """`cls` under its own name, whose steps are programs where device tensors work."""

    @functools.wraps(cls.step)
    def step(self, *args, **kwargs):
        original = cls.step.__get__(self)
        return steps_of(self).run(original, args, kwargs) if bridge.environment().active else original(*args, **kwargs)

    step.stepping = cls
    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "step": step}
    return type(cls.__name__, (cls,), namespace)


# What a step reads


def _read(call: tuple, attributes: dict) -> tuple[tuple, list[torch.Tensor], dict[int, jax.Array]]:
    """(the key, the tensors on the chips among the leaves, by their number arrays of those that are arguments). Raises Unlike."""
    tensors, arrays, numbers, words = [], {}, {}, {}
    leaves, specs = [], []
    for tree in (call, attributes):
        some, spec = tree_flatten(tree)
        leaves += some
        specs.append(_spec(spec))
    for leaf in leaves:
        if bridge.on_device(leaf) and id(leaf) not in numbers:
            number = numbers[id(leaf)] = len(tensors)
            tensors.append(leaf)
            values = bridge.known_values(leaf) if leaf.ndim <= 1 else None  # of a schedule, no latents
            array = arrays[number] = leaf.jax()
            words[number] = array.shape, array.dtype, array.sharding
            if values is not None:
                words[number] += (values.tobytes(),)
                del arrays[number]
    if not arrays:
        raise Unlike("nothing of it is on the chips")
    with torch._C.DisableTorchFunction():
        key = [numbers[id(leaf)] if id(leaf) in numbers else _static(leaf) for leaf in leaves]
    return (*specs, *words.values(), *key), tensors, arrays


def _spec(spec):
    try:
        hash(spec)
    except TypeError:
        return repr(spec)
    return spec


def _static(leaf):
    if isinstance(leaf, torch.Tensor):
        if leaf.numel() > LARGEST_TABLE or leaf.is_meta:
            raise Unlike("a large tensor of the host's")
        return leaf.dtype, leaf.shape, _bytes(leaf)
    if isinstance(leaf, np.ndarray):
        if leaf.size > LARGEST_TABLE or leaf.dtype == object:
            raise Unlike("a large array of the host's")
        return leaf.dtype.str, leaf.shape, leaf.tobytes()
    if type(leaf) is float:
        return float, repr(leaf)
    if isinstance(leaf, _PLAIN):
        return type(leaf), leaf
    if isinstance(leaf, FrozenDict):  # its configuration
        return repr(leaf)
    if isinstance(leaf, torch.Generator):
        return type(leaf)  # one that is drawn from has no program
    try:
        hash(leaf)
    except TypeError as error:
        raise Unlike(f"a {type(leaf).__name__}") from error
    return type(leaf), leaf


def _bytes(tensor: torch.Tensor) -> bytes:
    """As it is now: numpy may have written to its memory, which torch does not count."""
    return bridge.as_numpy(tensor).tobytes()


# What it leaves


class _Leaving:
    """What a traced step leaves. `outputs`: those of its arrays that it has made."""

    def __init__(self, held: dict[int, jax.Array]):
        self.taken = {id(x): n for n, x in held.items()}
        self.outputs: list[jax.Array] = []

    def tree(self, tree: tuple[list, object]) -> tuple[list, object]:
        return [self._leaf(leaf) for leaf in tree[0]], tree[1]

    def _leaf(self, leaf):
        if not bridge.on_device(leaf):
            return leaf
        array = leaf.jax()
        if id(array) in self.taken:
            return InputRef(self.taken[id(array)])
        self.outputs.append(array)
        return OutputRef(len(self.outputs) - 1)


def _as_taken(tree: tuple[list, object], numbers: dict[int, int]) -> tuple[list, object]:
    """What the step was given, in the form of what it leaves."""
    return [InputRef(numbers[id(leaf)]) if bridge.on_device(leaf) else leaf for leaf in tree[0]], tree[1]


def _same(one: tuple[list, object], other: tuple[list, object]) -> bool:
    """Whether two trees hold the same objects; numbers need only be equal."""
    if len(one[0]) != len(other[0]) or one[1] != other[1]:
        return False
    return all(
        x is y or (type(x) is type(y) and isinstance(x, (*_PLAIN, InputRef)) and x == y)
        for x, y in zip(one[0], other[0])
    )


def _made(tree: tuple[list, object], tensors: list, given: list, copies: dict):
    """A tree with tensors in it; those of the host are the scheduler's own from here on: it may write to them."""
    leaves = []
    for leaf in tree[0]:
        if isinstance(leaf, (InputRef, OutputRef)):
            leaf = (tensors if isinstance(leaf, InputRef) else given)[leaf.index]
        elif isinstance(leaf, (torch.Tensor, np.ndarray)):
            leaf = copies.setdefault(id(leaf), _copy(leaf))
        leaves.append(leaf)
    return tree_unflatten(leaves, tree[1])


def _copy(leaf: torch.Tensor | np.ndarray):
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf.detach().clone()


def _put(own: dict, name: str, value):
    """A list that the scheduler has stays itself."""
    if type(value) is list and type(own.get(name)) is list:
        own[name][:] = value
    else:
        own[name] = value
