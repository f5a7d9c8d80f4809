"""Steps of torch's optimizers on the chips, for weights whose gradients are there.

The step of one number of a weight is traced from torch's own lines and mapped over all of them. Weights, gradients and states are
sharded alike and stay where they are. What differs from step to step are numbers, arguments of one executable. Torch does the rest:
gradients on the host, optimizers of other packages, states for which there is no room.
"""

import collections
import copy
import functools
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch.optim.optimizer import (
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_map_only

from .. import bridge
from ..chips.hosts import put
from ..chips.locks import exclusive
from ..common import notices
from ..idioms import optimizing
from ..weights.checkpoint import FileTensor
from .chip_arrays import ChipArray, Number, OnChips, brought, complete, stand, together
from .lru import LRUCache
from .module_programs import ModulePrograms
from .numbers import Lifted
from .weights import PlacedWeights


MOST_TRACES = 64  # per optimizer
STATES = 2  # of AdamW, in sizes of the weights that it steps
# They step each number of a weight by itself.
ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")
PLAIN = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}
NO_ROOM = (
    "some weights of {} are stepped on the host: on the chips there is no room for what {} keeps of them, beside weights and gradients."
    " More chips, or an optimizer that keeps less, make steps faster"
)
ALONE = 2  # references to memory that only one tensor uses: its own, and the caller's


@dataclass
class Traced:
    """A traced step.

    Attributes:
        numbers: arguments of its program beside the weight, its gradient and states.
        made: states that are on the chips after it, with their dtypes; `left`: those on the host.
    """

    lifted: Lifted
    numbers: list[jax.Array]
    made: dict[str, torch.dtype]
    left: dict[str, object]


@dataclass(eq=False)
class Programs:
    """The programs of one optimizer. `stepped`: weights that were stepped, with their gradients, hidden from torch's own step."""

    traced: dict[tuple, Traced | None] = field(default_factory=lambda: LRUCache(MOST_TRACES))
    programs: dict[tuple, jax.stages.Compiled] = field(default_factory=dict)
    stepped: list[tuple[torch.Tensor, OnChips]] = field(default_factory=list)

    def step(
        self, optimizer, options: dict, of_host: dict, names: list[str], dtypes: list, mesh: Mesh
    ) -> Traced | None:
        """The step of weights with states of these names on the chips; None: torch's lines need values. `dtypes`: of weight,
        gradient and those states."""
        asked = _values(options), _values(of_host), *names, *dtypes, mesh
        if asked not in self.traced:
            self.traced[asked] = _trace(optimizer, options, of_host, names, dtypes, mesh)
        return self.traced[asked]

    def program(self, traced: Traced, like: jax.Array) -> jax.stages.Compiled:
        """The executable of a step, for weights of this one's shape and sharding."""
        key = traced.lifted.text, like.shape, like.sharding
        if key not in self.programs:
            function, scalars = traced.lifted, traced.lifted.jaxpr.invars
            for _ in like.shape:
                function = jax.vmap(function, (None, 0, 0))
            function = jax.jit(function, out_shardings=(like.sharding,) * (1 + len(traced.made)), donate_argnums=2)
            given = [jax.ShapeDtypeStruct(like.shape, x.aval.dtype, sharding=like.sharding) for x in scalars]
            self.programs[key] = function.lower(traced.numbers, given[:2], given[2:]).compile()
        return self.programs[key]


_known: "weakref.WeakKeyDictionary[torch.optim.Optimizer, Programs]" = weakref.WeakKeyDictionary()


def _before(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict):
    """Step on the chips what can be; torch's own step, which follows, skips weights without a gradient."""
    cls, known = type(optimizer), _known.setdefault(optimizer, Programs())
    known.stepped.clear()  # if torch's own step raised, `_after` did not run: what it would put back is out of date
    is_torchs = cls.__module__.startswith("torch.optim.") and cls.__name__ in ELEMENTWISE
    makes_gradients = len(args) > 1 or kwargs.get("closure") is not None
    others = len(_global_optimizer_pre_hooks) > 1 or optimizer._optimizer_step_pre_hooks  # they may change gradients
    if not is_torchs or makes_gradients or others:
        return
    with torch.inference_mode(False), torch.no_grad(), exclusive.pinned():
        loaded: dict[torch.nn.Module, tuple | None] = {}
        for group in optimizer.param_groups:
            for gradient, params in _whole(group["params"]):
                module = gradient.placed.module
                if module not in loaded:
                    loaded[module] = _loaded(module)
                if loaded[module] is None:
                    continue
                with loaded[module][0].within_hbm(lambda name=type(module).__name__: f"to step the weights of {name}"):
                    if _step(optimizer, known, group, gradient, params, *loaded[module]):
                        known.stepped += ((p, p.grad) for p in params)
        for p, _ in known.stepped:
            p.grad = None


def _after(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict):
    known = _known[optimizer]
    while known.stepped:
        p, p.grad = known.stepped.pop()


def _whole(params: list[torch.Tensor]) -> list[tuple[ChipArray, list[torch.Tensor]]]:
    """The gradients on the chips whose weights are all among these, with those weights."""
    with torch._C.DisableTorchFunctionSubclass():
        found = complete([p.grad for p in params])
    return [(held, [params[n] for n in numbers]) for held, numbers in found.items()]


def _loaded(module: torch.nn.Module) -> tuple[ModulePrograms, dict[str, torch.Tensor]] | None:
    """The module's runner, its weights on the chips, and its tensors; None: it has no runner any more."""
    if (runner := vars(module).get(ModulePrograms.NAME)) is None:
        return None
    runner.look()
    runner.current()
    runner.load()
    return runner, runner.state.now.tensors


def _step(optimizer, known: Programs, group: dict, gradient: ChipArray, params: list, runner, tensors: dict) -> bool:
    """Step these weights, whose gradients are on the chips. False: nothing was done, and torch has to step them."""
    key, placed, states = gradient.key, gradient.placed, [optimizer.state.get(p, {}) for p in params]
    are_its = [id(tensors.get(name)) for name in placed.sources[key]] == [*map(id, params)]
    if placed is not runner.plan_weights() or gradient.array is None or not are_its:
        return False
    names = [name for name, x in states[0].items() if isinstance(x, torch.Tensor) and x.ndim]
    of_host = [{name: x for name, x in state.items() if name not in names} for state in states]
    if any(one.keys() != states[0].keys() for one in states) or len({*map(_values, of_host)}) > 1:
        return False
    if any(state[name].shape != p.shape for p, state in zip(params, states) for name in names):
        return False
    options, weight = {name: x for name, x in group.items() if name != "params"} | PLAIN, placed.arrays[key]
    dtypes = [t.dtype for t in (params[0], params[0], *(states[0][name] for name in names))]
    traced = known.step(optimizer, options, of_host[0], names, dtypes, placed.mesh)
    if traced is None:
        return False
    given = {name: [state.get(name) for state in states] for name in traced.made}
    away = [name for name, some in given.items() if name not in names or together(some) is None]
    if away and not runner.has_room(len(away) * gradient.bytes_per_chip):
        notices.warn_once(f"no room {runner.name}", NO_ROOM.format(runner.name, type(optimizer).__name__))
        return False
    held = {name: brought(given[name], gradient) for name in names}
    run = known.program(traced, weight)
    if away:  # compile the program of the next step now
        dtypes = [*dtypes[:2], *traced.made.values()]
        after = known.step(optimizer, options, traced.left, [*traced.made], dtypes, placed.mesh)
        after and known.program(after, weight)
    weight, *arrays = run(traced.numbers, [weight, gradient.array], [held[name].array for name in names])
    for (name, dtype), array in zip(traced.made.items(), arrays):
        if name not in held:
            held[name] = ChipArray(placed, key, array)
        held[name].become(array)
        if name in away:
            for p, t in zip(params, stand(held[name], given[name], dtype)):
                optimizer.state[p][name] = t
    for p in params:
        _leave(optimizer.state[p], traced.left)
    _become(placed, key, weight, params)
    placed.changed(key, tensors)
    return True


def _trace(optimizer, options: dict, of_host: dict, names: list[str], dtypes: list, mesh: Mesh) -> Traced | None:
    """Trace the step of a weight of one number; None: torch's lines need its value, change the gradient, or fail in a trace."""
    env, made, left = bridge.environment(), {}, {}

    def step(weight, gradient, *states):
        p, given = bridge.to_torch(weight), dict(zip(names, map(bridge.to_torch, states)))
        p.grad = bridge.to_torch(gradient)
        one = object.__new__(type(optimizer))
        state = collections.defaultdict(dict, {p: given | copy.deepcopy(of_host)})
        vars(one).update(vars(optimizer), param_groups=[copy.deepcopy(options) | {"params": [p]}], state=state)
        with env, bridge.autocast.without():
            inspect.unwrap(type(optimizer).step)(one)
        after = state[p]
        made.update((name, x.dtype) for name, x in after.items() if bridge.on_device(x))
        left.update((name, x) for name, x in after.items() if name not in made)
        if p.grad.jax() is not gradient:
            raise ValueError("it changes the gradient")
        return [p.jax(), *(after[name].jax() for name in made)]

    try:
        closed = jax.make_jaxpr(step)(*(jax.ShapeDtypeStruct((), bridge.numpy_dtype(dtype)) for dtype in dtypes))
    except Exception:  # torch's own step raises its errors itself
        return None
    lifted, everywhere = Lifted(closed), NamedSharding(mesh, PartitionSpec())
    return Traced(lifted, [put(x, everywhere) for x in lifted.numbers], made, left)


def _become(placed: PlacedWeights, key: str, array: jax.Array, params: list[torch.Tensor]):
    """Set weights to an array on the chips: the tensors represent it, or get its values if something else uses their memory."""
    placed.arrays[key] = array
    if (held := together(params)) is not None:
        return held.become(array)
    held = ChipArray(placed, key, array)
    for n, p in enumerate(params):
        part = held.part(n, p.shape, p.dtype)
        if type(p) is FileTensor and p.source.values is not None:
            p.source.values, p.source.dtypes = part, ()
        elif _references(p) <= ALONE:
            FileTensor.stand_in(p, part)
        else:
            with torch.utils._mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
                p.copy_(part[...])


def _references(tensor: torch.Tensor) -> int:
    """How many references its memory has."""
    with torch._C.DisableTorchFunction():
        return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _leave(state: dict, left: dict):
    """Write the host states that a step leaves to an optimizer's state of a weight; tensors there are written in place."""
    for name, x in left.items():
        if isinstance(x, torch.Tensor) and isinstance(state.get(name), torch.Tensor):
            state[name].copy_(x)
        else:
            state[name] = copy.deepcopy(x)


def _values(given: dict) -> tuple:
    """Values on the host, as a key."""
    return tuple((name, repr(tree_map_only(torch.Tensor, torch.Tensor.tolist, x))) for name, x in given.items())


# Clipping


def clip(params: list[torch.Tensor], most: float) -> torch.Tensor | None:
    """`torch.nn.utils.clip_grad_norm_` by the total norm, if gradients are on the chips; None: none is, or meshes differ."""
    with torch.inference_mode(False), torch.no_grad(), exclusive.pinned():
        held = dict(_whole(params))
        there = {id(p) for those in held.values() for p in those}
        rest = [p.grad for p in params if p.grad is not None and id(p) not in there]
        if len({one.placed.mesh for one in held}) != 1:
            return None
        everywhere = NamedSharding(next(iter(held)).placed.mesh, PartitionSpec())
        squares = sum(g.float().square().sum().item() for g in rest)
        arrays = [one.array for one in held]
        total, factor = _norm(arrays, put(jnp.float32(squares), everywhere), put(jnp.float32(most), everywhere))
        for one, array in zip(held, _scaled(arrays, factor)):
            one.become(array)
        for g in rest:
            g.mul_(bridge.from_numpy(factor).to(g.dtype))
        return OnChips(Number(total, next(iter(held.values()))[0].dtype))


@jax.jit
def _norm(arrays: list[jax.Array], others: jax.Array, most: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The norm of all, and the factor that limits it to `most`. `others`: the sum of squares of further gradients."""
    total = jnp.sqrt(others + sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in arrays))
    return total, jnp.minimum(most / (total + 1e-6), 1.0)


@functools.partial(jax.jit, donate_argnums=0)
def _scaled(arrays: list[jax.Array], factor: jax.Array) -> list[jax.Array]:
    return [x * factor.astype(x.dtype) for x in arrays]


# Averages


def averages(params: list[torch.Tensor], shadows: list[torch.Tensor]) -> dict[int, Callable]:
    """Moving averages on the chips, of weights that are there: number of a weight -> the function that applies a decay."""
    with torch._C.DisableTorchFunctionSubclass():
        alike = (p.requires_grad and (p.shape, p.dtype) == (s.shape, s.dtype) for p, s in zip(params, shadows))
        found = complete([p if is_alike else None for p, is_alike in zip(params, alike)])
    jobs, new = {}, 0
    for held, numbers in found.items():
        runner = vars(held.placed.module).get(ModulePrograms.NAME)
        own = 0 if together([shadows[n] for n in numbers]) else held.bytes_per_chip
        if runner is not None and runner.has_room(new + own):
            new += own
            jobs |= dict.fromkeys(numbers, functools.partial(_average, held, shadows, numbers))
    return jobs


def _average(weights: ChipArray, shadows: list[torch.Tensor], numbers: list[int], decay: float):
    with torch.inference_mode(False), torch.no_grad(), exclusive.pinned():
        some = [shadows[n] for n in numbers]
        held = brought(some, weights)
        factor = put(jnp.float32(1 - decay), NamedSharding(weights.placed.mesh, PartitionSpec()))
        held.become(_averaged(held.array, weights.array, factor))
        for n, t in zip(numbers, stand(held, some, some[0].dtype)):
            shadows[n] = t


@functools.partial(jax.jit, donate_argnums=0)
def _averaged(shadow: jax.Array, weight: jax.Array, factor: jax.Array) -> jax.Array:
    return shadow - factor.astype(shadow.dtype) * (shadow - weight)


@functools.cache
def serve():
    """Register the hooks: from now on gradients may be on the chips."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)
    optimizing.clip, optimizing.averages = clip, averages
