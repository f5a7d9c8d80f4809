"""Device tensors outside of the environment: a callback kept them, and works with them after the call.

Each has a twin on the host, made when it is first used there. torch's operators run on the twins and give host tensors; what is
written into a twin, through views of it too, the device tensor holds when it is next used inside (torch counts what is written).
"""

import copy
import sys

import jax
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary
from torchax.tensor import Tensor
from torchax.view import View

from ..chips.hosts import put, whole
from ..idioms.devices import inside
from ..weights.convert import as_numpy, from_numpy
from . import host_values
from .decisions import decided
from .host_values import DEVICE_TENSORS, plain


HOST = torch.device("cpu")
OURS = tuple(f"{__package__.rpartition('.')[0]}.{name}." for name in ("bridge", "compile.tracing"))


class ValueRead(RuntimeError):
    """A value was asked for of a tensor that has none yet: its model is being compiled."""


READS = (
    ValueRead,
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


def as_host(t: torch.Tensor) -> torch.Tensor:
    """The host tensor that stands for a device tensor outside: the same one each time, a view's is a view of it."""
    if isinstance(t, View):
        with plain():
            host = as_host(t.parent)[tree_map_only(jax.Array, from_numpy, t.view_info.slices)]
        root = t.parent
        while isinstance(root, View):
            root = root.parent
        root._twin[1].setdefault(t, t._version)
        return host
    array = _valued(t)
    if vars(t).get("_twin") is None:
        twin = from_numpy(array)
        t._twin = twin, WeakIdKeyDictionary({t: t._version, twin: twin._version})
    return t._twin[0]


def _valued(t: torch.Tensor) -> jax.Array:
    """The tensor's array, which has values, in a trace those that are decided; raises ValueRead where it has none yet."""
    array = t.jax()
    for values in (decided(array), host_values.of_array(array)):
        if values is not None:
            return values
    if isinstance(array, jax.core.Tracer):
        raise ValueRead(
            f"expected a tensor with values, got {array.aval.str_short()} of a model while it is compiled: values exist when"
            " it has run. Take what leaves the model, or register the hook before its first call"
        )
    return array


def written(t: Tensor, array: jax.Array) -> jax.Array:
    """The tensor's array: `array`, or a new one where its twin was written to since; see `_Array`."""
    twin, versions = vars(t)["_twin"]
    with torch._C.DisableTorchFunction():
        if all(tensor._version == version for tensor, version in versions.items()):
            return array
        for tensor in [*versions]:
            versions[tensor] = tensor._version
    t._elem = array = put(as_numpy(twin, own=True), array.sharding)
    t._twin = twin, versions  # views of it that are held are views of the tensor still
    return array


class _Array:
    """`Tensor._elem`, which torchax reads and writes."""

    def __get__(self, t, owner=None):
        if t is None:
            return self
        array = vars(t)["_array"]
        return array if vars(t).get("_twin") is None else written(t, array)

    def __set__(self, t, array):
        vars(t)["_array"], vars(t)["_twin"] = array, None


def _dispatched(cls, func, types, args=(), kwargs=None):
    """torch's operator on the twins. What it gives is a host tensor; a tensor that it wrote to is given itself."""
    owners: dict[int, torch.Tensor] = {}

    def twin(t):
        host = as_host(t)
        owners[id(host)] = t
        return host

    if func is torch.ops.prim.device.default:
        return torch.device("privateuseone", 0)
    args, kwargs = tree_map_only(DEVICE_TENSORS, twin, (args, kwargs or {}))
    device = kwargs.get("device")
    if device is not None and device.type in ("meta", "privateuseone", "jax"):  # what torch takes the tensors' own for
        kwargs["device"] = HOST
    result = func(*args, **kwargs)
    return tree_map_only(torch.Tensor, lambda t: owners.get(id(t), t), result)


def _bounded(key):
    """The key of an index; bounds of slices that are tensors as numbers."""
    if isinstance(key, tuple):
        return tuple(map(_bounded, key))
    if not isinstance(key, slice):
        return key
    return slice(*(int(x) if isinstance(x, torch.Tensor) else x for x in (key.start, key.stop, key.step)))


def _get(upstream):
    """`t[key]`; torch would make tensors of the lists in it on the device that it takes t's for."""

    def __getitem__(t, key):
        if inside.depth:
            return upstream(t, _bounded(key))
        return as_host(t)[tree_map_only(DEVICE_TENSORS, as_host, key)]

    return __getitem__


def _set(upstream):
    def __setitem__(t, key, value):
        if inside.depth:
            return upstream(t, _bounded(key), value)
        key, value = tree_map_only(DEVICE_TENSORS, as_host, (key, value))
        as_host(t)[key] = value

    return __setitem__


def _formatted(t, spec):
    if isinstance(t.jax(), jax.core.Tracer):
        return _shown(t)
    with plain():
        return format(as_host(t).detach(), spec)


def _for_a_message() -> bool:
    """Whether upstream's code asks for a text: it makes none but for messages, also of checks that do not fail."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        library, frame = name.partition(".")[0], frame.f_back
        if library not in ("torch", "torchax", "jax") and not name.startswith(OURS):
            return library in ("transformers", "diffusers")
    return False


def _shown(t):
    array = t.jax()
    if isinstance(array, jax.core.Tracer) and _for_a_message():
        return f"tensor({array.aval.str_short()} of a model while it is compiled)"
    array = _valued(t)
    with plain():
        return f"{repr(from_numpy(array)).removesuffix(')')}, device='jax:0')"


def _pickled(t, protocol):
    """A host tensor."""
    with plain():
        return from_numpy(t.jax()).__reduce_ex__(protocol)


def _listed(t):
    with plain():
        return as_host(t).tolist()


def _given(t: Tensor, other: Tensor):
    """`t.data = other`, of another dtype too (`module.to(dtype)`); torchax changes the array alone, and torch goes by its own."""
    with plain():
        torch._C.TensorBase.data.__set__(t, other)
    t._elem = other.jax()
    t._made = vars(other).get("_made", (None, None, None))


def usable_outside():
    """Teach torchax's tensors all that; once."""
    Tensor._elem = _Array()
    Tensor.data = property(lambda t: t, _given)
    View.data = property(lambda t: t)
    for cls in DEVICE_TENSORS:
        cls.__torch_dispatch__ = classmethod(_dispatched)
        cls.__getitem__ = _get(cls.__getitem__)
        cls.__setitem__ = _set(cls.__setitem__)
        cls.__format__ = _formatted
        cls.__repr__ = cls.__str__ = _shown
        # Arrays are never written to: a copy shares its tensor's.
        cls.__deepcopy__ = lambda t, memo: memo.setdefault(id(t), Tensor(t.jax(), t._env))
        cls.__reduce_ex__ = _pickled
        cls.tolist = _listed
        # An array of its own, as of a tensor on any accelerator after `.cpu()`; bfloat16 as numpy's extension of that name.
        cls.numpy = lambda t: copy.copy(jax.device_get(whole(_valued(t))))
        cls.__array__ = lambda t, dtype=None, copy=None: (
            t.numpy() if dtype is None else t.numpy().astype(dtype, copy=False)
        )
