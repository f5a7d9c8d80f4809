"""Values of small device tensors that the host knows: who asks for them waits for no chip.

A schedule comes from the host, and upstream's loops ask for its entries in every step (`float(sigmas[i])`, `t >= boundary`). A chip
answers when it is done with all that it was given before, which is the step before. A JAX array is never written to: what it was made
of stays its value. Known too is what operators make of known values that are everywhere the same to the last bit, in a trace of its constants.
"""

import contextlib

import jax
import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary
from torchax.tensor import Tensor
from torchax.view import NarrowInfo, View

from ..weights.convert import as_numpy, from_numpy


MOST_ENTRIES = 1 << 12
DEVICE_TENSORS = (Tensor, View)

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

_known: "WeakIdKeyDictionary" = WeakIdKeyDictionary()


@contextlib.contextmanager
def plain():
    """torch's own operators on host tensors, inside of the environment too."""
    with torch.utils._mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
        yield


def remember(array: jax.Array, values: np.ndarray):
    """The array was made of these values of the host's, or of what is alike in its dtype."""
    if values.size <= MOST_ENTRIES:
        with np.errstate(over="ignore"):  # infinity, as on the device
            _known[array] = np.array(values, array.dtype)


def of_array(array: jax.Array) -> np.ndarray | None:
    """Its values, where the host knows them."""
    return _known.get(array)


def of_tensor(t: torch.Tensor) -> np.ndarray | None:
    """A device tensor's values as they are now, where the host knows them."""
    if not isinstance(t, View):
        return of_array(t.jax())
    slices = t.view_info.slices if isinstance(t.view_info, NarrowInfo) else None
    parts = slices if isinstance(slices, tuple) else (slices,)
    if slices is None or not all(type(part) in (int, slice, type(None), type(...)) for part in parts):
        return None
    values = of_tensor(t.parent)
    return None if values is None else np.asarray(values[slices])


def apart(t: torch.Tensor) -> Tensor:
    """A tensor of its own with the values of one whose values are known: who writes into it leaves that one alone."""
    array = t.jax()
    remember(array, of_tensor(t))
    return Tensor(array, t._env)


def asked(func, args: tuple):
    """The host tensor of which `func` answers in place of the device tensor, where the host knows its values; None else."""
    if func not in ASKING or not isinstance(args[0], DEVICE_TENSORS):
        return None
    values = of_tensor(args[0])
    return None if values is None else from_numpy(values)


def follow(func, args: tuple, kwargs: dict, result):
    """Remember the values of an exact operator's result where those of all that it was given are known."""
    operator = getattr(func, "overloadpacket", func)
    kind = next((k for k in (PARTS, ARITHMETIC, CONSTRUCTORS, MOVES) if operator in k or func in k), None)
    if kind is None:
        return
    results = [t for t in tree_leaves(result) if type(t) is Tensor and t.shape.numel() <= MOST_ENTRIES]
    if not results:
        return
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    given = {id(t): of_tensor(t) for t in tensors if isinstance(t, DEVICE_TENSORS)}
    if any(values is None for values in given.values()):
        return
    if kind is MOVES:
        values = given.get(id(args[0]))
        # Numbers outside of an integer's range become what they become: something else on each device.
        to_integer = not (result.dtype.is_floating_point or result.dtype == torch.bool)
        if values is not None and (values.dtype.kind in "iub" or not to_integer):
            remember(result.jax(), values)
    elif _is_exact(kind, tensors, given, kwargs, results):
        args, kwargs = tree_map_only(DEVICE_TENSORS, lambda t: from_numpy(given[id(t)]), (args, kwargs))
        kwargs = {**kwargs, "device": "cpu"} if "device" in kwargs else kwargs
        with contextlib.suppress(RuntimeError, TypeError, ValueError), plain():  # then the chips alone know
            made = tree_leaves(func(*args, **kwargs))
            if [tuple(t.shape) for t in results] == [tuple(t.shape) for t in made]:
                for t, values in zip(results, made):
                    remember(t.jax(), as_numpy(values))


def _is_exact(kind: set, tensors: list, given: dict, kwargs: dict, results: list) -> bool:
    """Whether torch on the host gives the chips' bits: numbers beside tensors of 16 bits are rounded differently, 64-bit ones there only."""
    if kind is CONSTRUCTORS:
        return not given and all(t.dtype.itemsize == 4 or not t.dtype.is_floating_point for t in results)
    if not given or any(t.dtype == torch.float64 for t in tensors if id(t) not in given):
        return False
    return kind is PARTS or (
        not kwargs and all(v.dtype.kind in "iub" or v.dtype == np.float32 for v in given.values())
    )
