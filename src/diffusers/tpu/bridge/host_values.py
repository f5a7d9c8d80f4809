"""Device tensors as host code sees them: values that are known on the host, and host twins outside of the environment.

Known values: a schedule is made on the host, and upstream's loops read it in every step (`float(sigmas[i])`, `t >= boundary`).
Reading it from a chip would block until the step before is done. JAX arrays are never written to, so the values that one was made
of stay valid. Results of operators on known values are known too, in a trace as well, where host and chips compute the same bits.

Twins: a callback may keep device tensors and use them after the call. torch's operators run on their host twins, made at first
use, and return host tensors. A write to a twin, or to a view of it, reaches the device tensor when that is next used inside.
"""

import contextlib
import copy
import functools
import sys
import traceback
import weakref

import jax
import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary
from torchax.tensor import Tensor

from ..chips.hosts import put, whole
from ..idioms.devices import inside
from ..weights.convert import as_numpy, from_numpy
from .decisions import decided
from .views import Step, as_view, contiguous, plain


HOST = torch.device("cpu")
OURS = tuple(f"{__package__.rpartition('.')[0]}.{name}." for name in ("bridge", "compile.tracing"))
MOST_ENTRIES = 1 << 12

aten = torch.ops.aten
ASKING = {
    *(torch.Tensor.__bool__, torch.Tensor.__float__, torch.Tensor.__index__, torch.Tensor.__int__, torch.Tensor.item),
    *(aten._local_scalar_dense.default, aten.is_nonzero.default, aten.item.default),
}
PARTS = {
    *(aten.unbind, aten.select, aten.slice, aten.squeeze, aten.unsqueeze, aten.expand, aten.view, aten.reshape),
    *(aten.cat, aten.stack, aten.clone, aten.detach, aten.alias, torch.cat, torch.stack, torch.Tensor.__getitem__),
}
ARITHMETIC = {
    *(aten.add, aten.sub, aten.mul, aten.neg, aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge),
    *(aten.logical_not, aten.bitwise_not),
}
CONSTRUCTORS = {torch.zeros, torch.ones, torch.full, torch.tensor}
MOVES = {torch.Tensor.to, aten._to_copy.default}

_known: dict[int, tuple[weakref.ref, np.ndarray]] = {}  # by the id of a live array


def remember(array: jax.Array, values: np.ndarray):
    """Record that the array holds these values, cast to its dtype; only up to MOST_ENTRIES of them."""
    if values.size <= MOST_ENTRIES:
        with np.errstate(over="ignore"):  # infinity, as on the device
            key, values = id(array), np.array(values, array.dtype)
            _known[key] = weakref.ref(array, lambda _: _known.pop(key, None)), values


def of_array(array: jax.Array) -> np.ndarray | None:
    """The known values of an array, or None."""
    _, values = _known.get(id(array), (None, None))
    return values


def of_tensor(t: torch.Tensor) -> np.ndarray | None:
    """The known values of a device tensor's current array, or None."""
    return of_array(t.jax())


def apart(t: torch.Tensor) -> Tensor:
    """A new tensor with the known values of `t`; a write to it does not change `t`."""
    array = t.jax()
    remember(array, of_tensor(t))
    return Tensor(array, t._env)


def asked(t: torch.Tensor) -> torch.Tensor | None:
    """A host tensor of a device tensor's known values, to read in its place; None where they are not known."""
    values = of_tensor(t) if isinstance(t, Tensor) else None
    return None if values is None else from_numpy(values)


def follow(func, args: tuple, kwargs: dict, result):
    """Record an operator's result where all its device tensors have known values and the host computes the same bits."""
    if (kind := _kind(func)) is None:
        return
    results = [t for t in jax.tree.leaves(result) if type(t) is Tensor and t.shape.numel() <= MOST_ENTRIES]
    if not results:
        return
    tensors = [t for t in jax.tree.leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    given = {id(t): of_tensor(t) for t in tensors if isinstance(t, Tensor)}
    if any(values is None for values in given.values()):
        return
    if kind is MOVES:
        values = given.get(id(args[0]))
        # Casting floats outside of an integer's range gives different numbers on each device.
        to_integer = not (result.dtype.is_floating_point or result.dtype == torch.bool)
        if values is not None and (values.dtype.kind in "iub" or not to_integer):
            remember(result.jax(), values)
    elif _is_exact(kind, tensors, given, kwargs, results):
        args, kwargs = tree_map_only(Tensor, lambda t: from_numpy(given[id(t)]), (args, kwargs))
        kwargs = {**kwargs, "device": "cpu"} if "device" in kwargs else kwargs
        with contextlib.suppress(RuntimeError, TypeError, ValueError), plain():  # then they stay unknown
            made = tree_leaves(func(*args, **kwargs))
            if [tuple(t.shape) for t in results] == [tuple(t.shape) for t in made]:
                for t, values in zip(results, made):
                    remember(t.jax(), as_numpy(values))


@functools.cache
def _kind(func) -> set | None:
    operator = getattr(func, "overloadpacket", func)
    return next((k for k in (PARTS, ARITHMETIC, CONSTRUCTORS, MOVES) if operator in k or func in k), None)


def _is_exact(kind: set, tensors: list, given: dict, kwargs: dict, results: list) -> bool:
    """Whether torch on the host computes the chips' bits: not for arithmetic of 16-bit floats, nor beside float64 of the host."""
    if kind is CONSTRUCTORS:
        return not given and all(t.dtype.itemsize == 4 or not t.dtype.is_floating_point for t in results)
    if not given or any(t.dtype == torch.float64 for t in tensors if id(t) not in given):
        return False
    exact = all(values.dtype.kind in "iub" or values.dtype == np.float32 for values in given.values())
    return kind is PARTS or (not kwargs and exact)


# Twins


class ValueRead(RuntimeError):
    """The value of a traced tensor was read: it has none while its model is compiled."""


READS = (
    ValueRead,
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


def as_host(t: torch.Tensor) -> torch.Tensor:
    """A device tensor's host twin, the same one each time; the twin of a view is a view of its base's twin."""
    if (shared := vars(t).get("_shared")) is not None:
        with plain():
            host = functools.reduce(lambda host, step: step.of(host), shared.steps, as_host(shared.base))
        shared.base._twin[1].setdefault(t, t._version)
        return host
    array = _valued(t)
    if vars(t).get("_twin") is None:
        twin = from_numpy(array)
        t._twin = twin, WeakIdKeyDictionary({t: t._version, twin: twin._version})
    return t._twin[0]


def _valued(t: torch.Tensor) -> jax.Array:
    """The tensor's array, or its values by a guard or known ones. Raises ValueRead for a traced tensor without either."""
    array = t.jax()
    for values in (decided(array), of_array(array)):
        if values is not None:
            return values
    if isinstance(array, jax.core.Tracer):
        raise ValueRead(
            f"expected a tensor with values, got {array.aval.str_short()} of a model while it is compiled: values exist when"
            " it has run. Take what leaves the model, or register the hook before its first call"
        )
    return array


def _written(t: Tensor, array: jax.Array) -> jax.Array:
    """`array`, or a new array of the twin's values where the twin was written to since; see `_Array`."""
    twin, versions = vars(t)["_twin"]
    with torch._C.DisableTorchFunction():
        if all(tensor._version == version for tensor, version in versions.items()):
            return array
        for tensor in [*versions]:
            versions[tensor] = tensor._version
    t._elem = array = put(as_numpy(twin, own=True), array.sharding)
    t._twin = twin, versions  # the line above drops it; the script may hold views of it
    return array


class _Array:
    """`Tensor._elem`, which torchax reads and writes; that of a `Deferred` is computed at the first read."""

    def __get__(self, t, owner=None):
        if t is None:
            return self
        held = vars(t)
        if (shared := held.get("_shared")) is not None:
            return shared.read()
        if held["_array"] is None and (compute := held["_compute"]):  # None: settled by another thread meanwhile
            compute()
            return t._elem  # t may be a view now
        return held["_array"] if held.get("_twin") is None else _written(t, held["_array"])

    def __set__(self, t, array):
        if (shared := vars(t).get("_shared")) is not None:
            return shared.write(array)
        vars(t)["_array"], vars(t)["_twin"] = array, None


def _dispatched(cls, func, types, args=(), kwargs=None):
    """torch's operator on the twins. Results are host tensors; where it returns an argument, the device tensor itself."""
    owners: dict[int, torch.Tensor] = {}

    def twin(t):
        host = as_host(t)
        owners[id(host)] = t
        return host

    if func is torch.ops.prim.device.default:
        return torch.device("privateuseone", 0)
    args, kwargs = tree_map_only(Tensor, twin, (args, kwargs or {}))
    device = kwargs.get("device")
    if device is not None and device.type in ("meta", "privateuseone", "jax"):  # names for a device tensor's device
        kwargs["device"] = HOST
    result = func(*args, **kwargs)
    return tree_map_only(torch.Tensor, lambda t: owners.get(id(t), t), result)


def bounded(key):
    """An index key, with slice bounds that are tensors turned into numbers."""
    if isinstance(key, tuple):
        return tuple(map(bounded, key))
    if not isinstance(key, slice):
        return key
    return slice(*(int(x) if isinstance(x, torch.Tensor) else x for x in (key.start, key.stop, key.step)))


def _get_item(t, key, _upstream=Tensor.__getitem__):
    """`t[key]`; outside on the twin, as torch would make tensors of the key's lists on the device that t reports."""
    return _upstream(t, bounded(key)) if inside.depth else as_host(t)[tree_map_only(Tensor, as_host, key)]


def _formatted(t, spec):
    if isinstance(t.jax(), jax.core.Tracer):
        return _shown(t)
    with plain():
        return format(as_host(t).detach(), spec)


def _for_a_message() -> bool:
    """Whether diffusers or transformers formats the tensor: they do so only for messages, also of checks that do not fail."""
    names = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_stack(sys._getframe(1)))
    others = (n for n in names if n.partition(".")[0] not in ("torch", "torchax", "jax") and not n.startswith(OURS))
    return next(others, "").partition(".")[0] in ("transformers", "diffusers")


def _shown(t):
    array = t.jax()
    if isinstance(array, jax.core.Tracer) and _for_a_message():
        return f"tensor({array.aval.str_short()} of a model while it is compiled)"
    array = _valued(t)
    with plain():
        return f"{repr(from_numpy(array)).removesuffix(')')}, device='jax:0')"


def _given(t: Tensor, other: Tensor):
    """`t.data = other`, of another dtype too (`module.to(dtype)`); torchax sets only the array, and torch keeps the old dtype."""
    with plain():
        torch._C.TensorBase.data.__set__(t, other)
    vars(t).pop("_shared", None)
    t._elem = other.jax()
    t._made = vars(other).get("_made", (None, None, None))


def usable_outside():
    """Give torchax's `Tensor` the methods above, once."""
    Tensor._elem = _Array()
    Tensor.data = property(lambda t: t, _given)
    Tensor.detach = lambda t: as_view(
        t, Tensor(jax.lax.stop_gradient(t.jax()), t._env), Step(aten.alias.default, (), {})
    )
    Tensor.contiguous, Tensor.flatten = contiguous, torch.Tensor.flatten
    Tensor.__torch_dispatch__ = classmethod(_dispatched)
    Tensor.__getitem__ = _get_item
    Tensor.__format__ = _formatted
    Tensor.__repr__ = Tensor.__str__ = _shown
    # Arrays are never written to, so a copy shares the array.
    Tensor.__deepcopy__ = lambda t, memo: memo.setdefault(id(t), Tensor(t.jax(), t._env))
    Tensor.__reduce_ex__ = plain()(lambda t, protocol: from_numpy(t.jax()).__reduce_ex__(protocol))  # a host tensor
    Tensor.tolist = plain()(lambda t: as_host(t).tolist())
    # A copy, as `.cpu().numpy()` on other accelerators; bfloat16 is numpy's extension type of that name.
    Tensor.numpy = lambda t: copy.copy(jax.device_get(whole(_valued(t))))
    Tensor.__array__ = lambda t, dtype=None, copy=None: np.asarray(t.numpy(), dtype)
