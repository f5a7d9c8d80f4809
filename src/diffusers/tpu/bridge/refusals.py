"""What torch itself refuses. Where an operator fails on device tensors it is asked again on the host's: what torch does not take
either ends in torch's own error, its class and words, at upstream's line, and not in one from inside of JAX.
"""

import jax
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ..weights.convert import from_numpy
from .draws import is_draw
from .host_twin import DEVICE_TENSORS, HOST, plain
from .lines import raised_inside


def refusal(func, args, kwargs, failed: Exception) -> Exception | None:
    """torch's own error for these arguments of `func`, which has `failed`; None: torch takes them, or cannot be asked.

    Tensors of a trace have no values. Zeros stand for them, and only if torch's meta device, which computes nothing, refuses
    their shapes and dtypes too.
    """
    if not (is_refused(failed) or raised_inside(failed) or _is_of_another_type(failed)) or is_draw(func):
        return None
    arrays = [t.jax() for t in tree_leaves((args, kwargs)) if isinstance(t, DEVICE_TENSORS)]
    traced = any(isinstance(array, jax.core.Tracer) for array in arrays)
    error = None
    for device in (torch.device("meta"), HOST) if traced else (HOST,):
        try:
            _asked(func, args, kwargs, device)
        except NotImplementedError:  # by its values
            return None
        except Exception as refused:
            error = refused
        else:
            return None
    error.refused_by_torch = True
    return error


def is_refused(error: BaseException) -> bool:
    """Whether this is an error that `refusal` gave."""
    return getattr(error, "refused_by_torch", False)


def _is_of_another_type(failed: Exception) -> bool:
    """Whether one of our operators took for a tensor what is none."""
    return isinstance(failed, AttributeError) and failed.name in ("jax", "_env")


def _asked(func, args, kwargs, device: torch.device):
    """`func` of like tensors on the host, or on the meta device; where it names a device, there."""

    def like(t: torch.Tensor) -> torch.Tensor:
        array = t.jax() if isinstance(t, DEVICE_TENSORS) else None
        dtype = torch.int64 if array is not None and t.dtype == torch.int32 else t.dtype  # as upstream has it
        if device.type == "meta" or (array is None and t.is_meta):
            return torch.empty(tuple(t.shape), dtype=dtype, device="meta")
        if isinstance(array, jax.core.Tracer):
            return torch.zeros(array.shape, dtype=dtype)
        return t.clone() if array is None else from_numpy(array).to(dtype)

    with plain():
        args, kwargs = tree_map_only(torch.Tensor, like, (args, kwargs))
        func(*args, **({**kwargs, "device": device} if kwargs.get("device") is not None else kwargs))
