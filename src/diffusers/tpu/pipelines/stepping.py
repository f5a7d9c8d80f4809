"""A scheduler's step as one program: upstream's own code, traced once for each step of a schedule, and cached.

The cache key is what the host has of the scheduler (counters, tables, values kept from earlier steps) and of the call. Other
tensors are arguments. Attributes that `step` sets on the scheduler are set again in each run. Numbers that differ from step to
step are arguments of the executable. A step that draws noise, reads values on the chips, writes to its arguments, or calls code
of the script runs operation by operation.
"""

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ...configuration_utils import FrozenDict
from .. import bridge
from ..chips import hosts
from ..chips.locks import exclusive
from ..compile.lru import Key, LRUCache
from ..compile.module_programs import random_state_kept
from ..compile.numbers import Lifted
from ..compile.state import InputRef, OutputRef
from ..compile.state.watch import replaced
from ..compile.tracing.user_code import has_own_code, is_own


LARGEST_TABLE = 1 << 16  # entries of a host tensor that a key holds
MOST_SIZES = 64  # sets of argument shapes of one scheduler
MOST_KEPT = 4096  # steps of one size
Tree = tuple[list, object]  # leaves and tree definition
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class Unlike(Exception):
    """A step that cannot run as one program."""


@dataclass
class Recorded:
    """The program of one step, for one cache key."""

    run: Callable[[list[jax.Array]], list[jax.Array]]  # its executable, with the numbers of this step bound
    output: Tree  # upstream's return value; arrays in it are `InputRef` and `OutputRef`
    changed: dict[str, Tree]  # attributes of the scheduler that it changes
    gone: list[str]  # names of those that it deletes


class Steps:
    """The recorded steps of one scheduler. `original`: its own `step`."""

    def __init__(self, scheduler):
        self.scheduler = weakref.ref(scheduler)
        self.recorded: dict[tuple, dict[tuple, Recorded | None]] = LRUCache(MOST_SIZES)
        self.traces = 0

    def run(self, original: Callable, args: tuple, kwargs: dict):
        """What `original(*args, **kwargs)` returns and does."""
        scheduler = self.scheduler()
        try:
            key, tensors, arrays = _read((args, kwargs), scheduler)
        except Unlike:
            return original(*args, **kwargs)
        steps = self.recorded.setdefault(frozenset(x.shape for x in arrays.values()), LRUCache(MOST_KEPT))
        if key not in steps:
            steps[key] = self._record(original, args, kwargs, tensors, arrays)
        if (recorded := steps[key]) is None:
            return original(*args, **kwargs)
        given = [bridge.to_torch(x) for x in recorded.run([*arrays.values()])]
        with torch.utils._mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
            own, copies = vars(scheduler), {}
            for name in recorded.gone:
                own.pop(name, None)
            for name, tree in recorded.changed.items():
                value = _made(tree, tensors, given, copies)
                if type(value) is list and type(own.get(name)) is list:
                    own[name][:] = value  # the scheduler keeps its list object
                else:
                    own[name] = value
            return _made(recorded.output, tensors, given, {})

    def _record(self, original, args, kwargs, tensors, arrays) -> Recorded | None:
        scheduler, self.traces = self.scheduler(), self.traces + 1
        own, env = vars(scheduler), bridge.environment()
        before = {name: tree_flatten(value) for name, value in own.items()}
        drawn, found = env.draws, []
        numbers = {id(t): n for n, t in enumerate(tensors)}

        def step(values):
            there = {n: bridge.to_torch(x) for n, x in zip(arrays, values)}
            there |= {n: bridge.known_apart(t) for n, t in enumerate(tensors) if n not in arrays}
            outputs, *left = _stepped(original, (args, kwargs), own, before, numbers, there)
            found.extend(left)
            return outputs

        with exclusive.pinned(), random_state_kept(tree_leaves((args, kwargs))):
            try:
                closed = jax.make_jaxpr(step)([*arrays.values()])
            except Exception:  # the step then runs operation by operation, and raises any error itself
                return None
            finally:
                own.clear()
                own.update((name, tree_unflatten(*tree)) for name, tree in before.items())
        if env.draws != drawn:
            env.draws = drawn
            return None
        lifted, where = Lifted(closed), next(iter(arrays.values())).sharding
        everywhere = NamedSharding(where.mesh, PartitionSpec()) if isinstance(where, NamedSharding) else where
        numbers = [hosts.put(x, everywhere) if where.is_fully_replicated else jnp.asarray(x) for x in lifted.numbers]
        return Recorded(functools.partial(lifted.jitted(), numbers), *found)


def _stepped(original, call: tuple, own: dict, before: dict[str, Tree], numbers: dict[int, int], there: dict) -> tuple:
    """(arrays that a step makes, `output`, `changed` and `gone` of `Recorded`). `there`: by number, tensors to replace its own."""
    held = {n: t.jax() for n, t in there.items()}
    taken, outputs = {id(x): n for n, x in held.items()}, []

    def mine(leaves, spec):
        return tree_unflatten([there[numbers[id(x)]] if bridge.on_device(x) else x for x in leaves], spec)

    def reference(array) -> InputRef | OutputRef:
        if id(array) in taken:
            return InputRef(taken[id(array)])
        outputs.append(array)
        return OutputRef(len(outputs) - 1)

    def left(value) -> Tree:
        leaves, spec = tree_flatten(value)
        return [reference(leaf.jax()) if bridge.on_device(leaf) else leaf for leaf in leaves], spec

    own.update((name, mine(*tree)) for name, tree in before.items())
    args, kwargs = mine(*tree_flatten(call))
    output = left(original(*args, **kwargs))
    if any(there[n].jax() is not x for n, x in held.items()):
        raise Unlike("it writes into what it is given")
    changed = {name: left(value) for name, value in own.items()}
    for name, (leaves, spec) in before.items():
        was = [InputRef(numbers[id(leaf)]) if bridge.on_device(leaf) else leaf for leaf in leaves], spec
        if name in own and _same(changed[name], was):
            del changed[name]
    return outputs, output, changed, [*(before.keys() - own.keys())]


_steps: "weakref.WeakKeyDictionary[object, Steps]" = weakref.WeakKeyDictionary()


def steps_of(scheduler) -> Steps:
    """The steps that were recorded for this scheduler."""
    return _steps.setdefault(scheduler, Steps(scheduler))


@contextlib.contextmanager
def as_programs(schedulers: list) -> Iterator[None]:
    """A context that changes these schedulers' class so that steps run as programs, except where the user replaced `step`. One that
    pipelines of several threads share is of upstream's class again when the first of them is done."""
    for scheduler in schedulers:
        scheduler.__class__ = stepping_class(_upstreams(type(scheduler)))
    try:
        yield
    finally:
        for scheduler in schedulers:
            scheduler.__class__ = _upstreams(type(scheduler))


@contextlib.contextmanager
def observed(scheduler, then: Callable[[object], None]) -> Iterator[None]:
    """Calls `then` with the result of each step of the scheduler, which runs as it does without."""
    own = vars(scheduler).get("step")  # a script's, or another observer's

    @functools.wraps(scheduler.step)  # upstream reads the signature of `step`
    def step(*args, **kwargs):
        result = own(*args, **kwargs) if own else type(scheduler).step(scheduler, *args, **kwargs)
        then(result)
        return result

    with replaced([(vars(scheduler), "step", step)]):
        yield


def _upstreams(cls: type) -> type:
    return getattr(vars(cls).get("step"), "stepping", cls)


@functools.cache
def stepping_class(cls: type) -> type:
    """A subclass of `cls`, under its name, whose steps run as programs inside of the environment."""

    @functools.wraps(cls.step)
    def step(self, *args, **kwargs):
        original = cls.step.__get__(self)
        return steps_of(self).run(original, args, kwargs) if bridge.environment().active else original(*args, **kwargs)

    def __reduce_ex__(self, protocol):
        """A copy or a pickle that the script makes is of upstream's class."""
        return object.__new__, (type(self) if bridge.environment().active else cls,), vars(self)

    step.stepping = cls
    return under_its_name(cls, (cls,), step=step, __reduce_ex__=__reduce_ex__)


def under_its_name(cls: type, bases: tuple[type, ...], **attributes) -> type:
    """A class of these bases that has the name of `cls`, its module and its docstring."""
    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, bases, namespace | attributes)


# What a step reads


def _read(call: tuple, scheduler) -> tuple[tuple, list[torch.Tensor], dict[int, jax.Array]]:
    """(cache key, device tensors among the leaves, arrays of those that are arguments, by number). Raises Unlike."""
    if has_own_code(type(scheduler)):
        raise Unlike("its class has code of the script's")
    tensors, arrays, numbers, words = [], {}, {}, {}
    try:
        # Much faster than torch's. What replaces `step` has called this one.
        leaves, spec = jax.tree.flatten((call, {k: v for k, v in vars(scheduler).items() if k != "step"}))
    except (TypeError, ValueError) as error:
        raise Unlike("keys of a dict that have no order") from error
    for leaf in leaves:
        if bridge.on_device(leaf) and id(leaf) not in numbers:
            number = numbers[id(leaf)] = len(tensors)
            tensors.append(leaf)
            values = bridge.known_values(leaf) if leaf.ndim <= 1 else None  # of schedules, not of latents
            array = arrays[number] = leaf.jax()
            words[number] = array.shape, array.dtype, array.sharding
            if values is not None:
                words[number] += (values.tobytes(),)
                del arrays[number]
    if not arrays:
        raise Unlike("nothing of it is on the chips")
    with torch._C.DisableTorchFunction():
        key = [numbers[id(leaf)] if id(leaf) in numbers else _static(leaf) for leaf in leaves]
    return Key((spec, bridge.autocast.dtype_now(), *words.values(), *key)), tensors, arrays


def _static(leaf):
    if isinstance(leaf, (torch.Tensor, np.ndarray)):
        if math.prod(leaf.shape) > LARGEST_TABLE or leaf.dtype == object or getattr(leaf, "is_meta", False):
            raise Unlike("a large tensor or array of the host's")
        # The current values: numpy may have written to a tensor's memory, which its version does not count.
        values = bridge.as_numpy(leaf) if isinstance(leaf, torch.Tensor) else leaf
        return leaf.dtype, leaf.shape, values.tobytes()
    if isinstance(leaf, (float, FrozenDict)):  # its configuration
        return type(leaf), repr(leaf)
    if isinstance(leaf, torch.Generator):
        return type(leaf)  # a step that draws from it is not recorded
    if not isinstance(leaf, _PLAIN) and is_own(leaf):
        raise Unlike("code of the script's")
    try:
        hash(leaf)
    except TypeError as error:
        raise Unlike(f"a {type(leaf).__name__}") from error
    return type(leaf), leaf


# What it leaves


def _same(one: Tree, other: Tree) -> bool:
    """Whether two trees hold the same objects; numbers need only be equal."""

    def same(x, y) -> bool:
        return x is y or (type(x) is type(y) and isinstance(x, (*_PLAIN, InputRef)) and x == y)

    return len(one[0]) == len(other[0]) and one[1] == other[1] and all(map(same, one[0], other[0]))


def _made(tree: Tree, tensors: list, given: list, copies: dict):
    """A tree with tensors in place of references. Host tensors and arrays are copied, as the scheduler may write to them."""
    leaves = []
    for leaf in tree[0]:
        if isinstance(leaf, (InputRef, OutputRef)):
            leaf = (tensors if isinstance(leaf, InputRef) else given)[leaf.index]
        elif isinstance(leaf, (torch.Tensor, np.ndarray)):
            if id(leaf) not in copies:
                copies[id(leaf)] = leaf.copy() if isinstance(leaf, np.ndarray) else leaf.detach().clone()
            leaf = copies[id(leaf)]
        leaves.append(leaf)
    return tree_unflatten(leaves, tree[1])
