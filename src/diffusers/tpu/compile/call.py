"""One call of a module's method, flattened into tensors and static arguments; and its values at the time of the call."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import numpy as np
import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from .. import bridge
from ..chips import hosts
from ..chips.sharding import INFERRED, ModelPlan
from . import tracing
from .lru import Key, LRUCache
from .state import Unread, is_data, of_object, opened


MOST_COMPARED = 1 << 16  # values; larger tensors are compared by identity. Each branch makes its own position ids
STRENGTH = "conditioning_scale"  # of a ControlNet's residuals: a new value needs no new program
LATENTS, TIMESTEPS = ("hidden_states", "sample"), ("timestep", "timesteps", "t")  # of a denoiser's arguments
ONLY_BACKWARD = "expected first derivatives by backward(), got {}: for others call diffusers.tpu.uninstall(pipe) first"
_HASHABLE = frozenset((type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.Size))


@dataclass
class Values:
    """What a call computes with: immutable arrays, so that writes to the call's tensors do not affect a deferred call.

    `weights` are the module's by key; `placement` changes when they do. `numbers`: adapters' scales by key. `versions`: of the tensors
    that `inputs` were made from.
    """

    weights: dict[str, jax.Array]
    placement: int
    numbers: dict[str, jax.Array]
    inputs: list[jax.Array]
    versions: list


@dataclass
class Call:
    """One call.

    Attributes:
        leaves, spec: its flattened (args, kwargs); `tensors` are the leaves that are tensors.
        key: distinguishes calls by all but their tensors' values.
        batched: of each tensor, whether its first axis is the batch, if calls can run as one. `images`: the batch of any model.
        state, guards: the module's state when it was made, and values of guards; both are in its program's key too.
        scale: what the scales of LoRA layers are multiplied by.
        strengths: places among `tensors` of numbers, which are inputs of its program.
        step: its step of the module's step cache, if there is one.
        given: the caller's own args and kwargs; `unread`: why no key can be made of them.
        wanted: what its program is differentiated by (`gradients.Wanted`), if it is.
        autocast: the dtype that products are cast to, if they are.
        latents, timestep: of a denoiser's arguments.
        sparse: as in `Settings`.
    """

    entry: str
    leaves: list
    spec: object
    tensors: list[torch.Tensor]
    key: tuple
    batched: tuple[bool, ...]
    batch: int | None
    state: object = None
    scale: float = 1.0
    strengths: tuple[int, ...] = ()
    step: tracing.Step = field(default_factory=lambda: tracing.Step(None, [], lambda *_: None))
    guards: tuple = ()
    values: Values | None = None
    given: tuple = ((), {})
    unread: str | None = None
    images: int | None = None
    wanted: object = None
    autocast: torch.dtype | None = None
    latents: torch.Tensor | None = None
    timestep: torch.Tensor | float | None = None
    sparse: tuple[tuple[int, int, int], float] | None = None

    @property
    def shapes(self) -> tuple:
        return self.key[-1]

    @property
    def others(self) -> list:
        """The leaves in which tensors may be hidden: all but tensors and plain values."""
        return [leaf for leaf in self.leaves if not isinstance(leaf, tracing.PLAIN)]

    def become(self, step: tracing.Step):
        """Make the call this step of a step cache."""
        self.step = step
        cached = tuple((tuple(t.shape), t.dtype) for t in step.tensors)
        self.key = Key((*self.key[:-1], (step.kind, cached), self.key[-1]))
        self.batched += (any(self.batched),) * len(step.tensors)

    def become_sparse(self, sizes: tuple[int, int, int], sparsity: float):
        """Give the call sparse attention, for a video with latents of these frames, height and width."""
        self.sparse = sizes, sparsity
        self.key = Key((*self.key[:-1], self.sparse, self.key[-1]))

    @property
    def inputs(self) -> list[torch.Tensor]:
        """All tensors that its program takes: the call's, and the step cache's."""
        return [*self.tensors, *self.step.tensors]

    def pairs_with(self, other: "Call") -> bool:
        """Whether both can run as one call with both batches: they are alike, and unbatched tensors have the same values."""
        shared, mine, theirs = [n for n, batched in enumerate(self.batched) if not batched], self.values, other.values
        if any(getattr(self, name) != getattr(other, name) for name in ("key", "batched", "state", "guards", "scale")):
            return False
        if (mine is None) != (theirs is None):
            return False
        if mine is not None and (mine.placement != theirs.placement or mine.numbers is not theirs.numbers):
            return False
        return all(_are_same(*(call.tensors[n] for call in (self, other)), mine and mine.versions[n]) for n in shared)


def flatten_call(
    entry: str, signature: inspect.Signature, plan: ModelPlan, args: tuple, kwargs: dict, constants: bool = True
) -> Call:
    """A call of a module's `entry(*args, **kwargs)`. `constants`: all its numbers are part of its key.

    Raises NotImplementedError for tensors of torch.func or forward AD.
    """
    by_place = dict(zip(signature.parameters, args))
    if plan.decide is not None:
        decided = plan.decide(signature.bind(*args, **kwargs).arguments)
        if decided.keys() & by_place.keys():
            args, kwargs, by_place = (), by_place | kwargs, {}
        kwargs = kwargs | decided
    given, numbers = (args, kwargs), []

    def as_input(leaf):
        if type(leaf) is not float:
            return leaf
        numbers.append(torch.tensor(leaf, dtype=torch.float32, device="cpu"))
        return numbers[-1]

    if not constants and STRENGTH in kwargs:
        kwargs = {**kwargs, STRENGTH: tree_map(as_input, kwargs[STRENGTH])}
    unread, classes, bound = None, set(), by_place | kwargs
    leaves, spec = tree_flatten((args, kwargs))
    try:
        if any(map(is_data, leaves)):
            leaves, spec = tree_flatten(opened((args, kwargs), classes))
        static = tuple(_static(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor))
        static += tuple(of_object(cls) for cls in sorted(classes, key=lambda cls: cls.__qualname__))
    except Unread as error:
        leaves, spec = tree_flatten((args, kwargs))
        unread, static = str(error), ()
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if any(torch.func.debug_unwrap(t) is not t or forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError(ONLY_BACKWARD.format("a tensor of torch.func or torch.autograd.forward_ad"))
    autocast = bridge.autocast.dtype_now()
    static += () if autocast is None else ("autocast", autocast)
    strengths = tuple(n for n, t in enumerate(tensors) if any(t is number for number in numbers))
    static += (strengths,) if strengths else ()
    with torch._C.DisableTorchFunction():  # shapes need no dispatch to the environment
        key = Key((entry, spec, static, tuple((tuple(t.shape), t.dtype) for t in tensors)))
    batched, batch = (False,) * len(tensors), None
    latents = next((bound[name] for name in LATENTS if isinstance(bound.get(name), torch.Tensor)), None)
    images = latents.shape[0] if latents is not None and latents.ndim > 2 else None
    if plan.batched:
        named_batched = {id(t) for name in plan.batched for t in tree_leaves(bound.get(name))}
        batched = tuple(id(t) in named_batched and t.ndim > 0 for t in tensors)
        sizes = {t.shape[0] for t, flag in zip(tensors, batched) if flag}
        batch = images = sizes.pop() if len(sizes) == 1 else None
    elif plan.activation_spec == INFERRED and images is not None:  # tensors with as many rows count as batched
        batched, batch = tuple(t.shape[:1] == (images,) for t in tensors), images
    timestep = next((bound[name] for name in TIMESTEPS if name in bound), None)
    said = {"given": given, "strengths": strengths, "unread": unread, "images": images, "autocast": autocast}
    said |= {"latents": latents, "timestep": timestep}
    return Call(entry, leaves, spec, tensors, key, batched, batch, **said)


def version_of(tensor: torch.Tensor):
    """A value that changes when the tensor is written to: a host tensor's version counter, a device tensor's array."""
    return tensor.jax() if bridge.on_device(tensor) else tensor._version


def asked_once(question: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], object]:
    """`question`, with its results cached until the tensor is written to, as reading a device tensor waits for the device."""
    known = WeakIdKeyDictionary()

    def value(tensor: torch.Tensor):
        version = version_of(tensor)
        if tensor not in known or not _is_same(version, known[tensor][0]):
            known[tensor] = version, question(tensor)
        return known[tensor][1]

    return value


def values_of(tensor: torch.Tensor) -> np.ndarray:
    """The values that a program gets. A host tensor is read each time: torch does not count what numpy writes to its memory."""
    values = _of_device(tensor) if bridge.on_device(tensor) else bridge.as_numpy(tensor)
    return values.astype(bridge.numpy_dtype(tensor.dtype))


_of_device = asked_once(lambda tensor: np.asarray(hosts.whole(tensor.jax())))


class SentInputs:
    """Arrays of host tensors that every step gets, such as texts, cached for a pipeline's call; made again if values change."""

    MOST, MOST_BYTES = 16, 1 << 26

    def __init__(self):
        self._sent = LRUCache(self.MOST, self.MOST_BYTES, lambda one: len(one[1]))

    def array(self, tensor: torch.Tensor, sharding: jax.sharding.Sharding) -> jax.Array:
        if bridge.on_device(tensor):
            return bridge.to_jax(tensor, sharding)
        host = bridge.as_numpy(tensor)
        values = host.tobytes()  # read each time, as by `values_of`
        key = id(tensor), host.dtype, host.shape, sharding
        former, before, array = self._sent.get(key, (None, None, None))
        if former is not tensor or before != values:
            array = hosts.put(np.frombuffer(values, host.dtype).reshape(host.shape), sharding)
            self._sent[key] = tensor, values, array
        return array


def goes_on_from(x) -> bool:
    """Whether x is the key-value cache of a transformers language model, which grows with each call."""
    return any(f"{base.__module__}.{base.__name__}" == "transformers.cache_utils.Cache" for base in type(x).__mro__)


def _is_same(version, other) -> bool:
    return version is other or (isinstance(version, int) and version == other)


def _are_same(mine: torch.Tensor, theirs: torch.Tensor, version) -> bool:
    """Whether two tensors have the same values, the first one still at this version, if any; large ones must be one object."""
    if version is not None and not _is_same(version, version_of(mine)):
        return False
    return mine is theirs or (mine.numel() <= MOST_COMPARED and np.array_equal(values_of(mine), values_of(theirs)))


def _static(leaf):
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        return leaf.shape, leaf.dtype.str, leaf.tobytes()
    if isinstance(leaf, torch.Generator):  # code that draws from it is not compiled; the rest ignores it
        return type(leaf), leaf.device
    if goes_on_from(leaf):
        return type(leaf)
    return (type(leaf), leaf) if type(leaf) in _HASHABLE else of_object(leaf)
