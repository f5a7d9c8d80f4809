"""torch's own errors, at upstream's line, for what torch does not take either: an operator that fails is asked again on the host."""

import functools

import jax
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ..weights.convert import from_numpy
from .draws import is_draw
from .host_twin import HOST
from .host_values import DEVICE_TENSORS, plain
from .lines import raised_inside


def refusal(func, args, kwargs, failed: Exception) -> Exception | None:
    """torch's own error for these arguments of `func`, which has `failed`; None: torch takes them, or cannot be asked.

    Tensors of a trace have no values. Zeros stand for them, and only if torch's meta device, which computes nothing, refuses
    their shapes and dtypes too.
    """
    # An operator of ours that took for a tensor what is none fails at its array.
    another_type = isinstance(failed, AttributeError) and failed.name in ("jax", "_env")
    if not (is_refused(failed) or raised_inside(failed) or another_type) or is_draw(func):
        return None
    arrays = [t.jax() for t in tree_leaves((args, kwargs)) if isinstance(t, DEVICE_TENSORS)]
    traced = any(isinstance(array, jax.core.Tracer) for array in arrays)
    error = None
    for device in (torch.device("meta"), HOST) if traced else (HOST,):
        try:
            with plain():
                given, named = tree_map_only(torch.Tensor, functools.partial(_like, device), (args, kwargs))
                func(*given, **({**named, "device": device} if named.get("device") is not None else named))
        except NotImplementedError:  # by its values
            return None
        except Exception as refused:
            error = refused
        else:
            return None
    error.refused_by_torch = True
    return error


def _like(device: torch.device, t: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, dtype and, where it has them, values, on the host or on the meta device."""
    array = t.jax() if isinstance(t, DEVICE_TENSORS) else None
    dtype = torch.int64 if array is not None and t.dtype == torch.int32 else t.dtype  # as upstream has it
    if device.type == "meta" or (array is None and t.is_meta):
        return torch.empty(tuple(t.shape), dtype=dtype, device="meta")
    if isinstance(array, jax.core.Tracer):
        return torch.zeros(array.shape, dtype=dtype)
    return t.clone() if array is None else from_numpy(array).to(dtype)


def is_refused(error: BaseException) -> bool:
    """Whether this is an error that `refusal` gave."""
    return getattr(error, "refused_by_torch", False)
