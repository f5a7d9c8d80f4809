"""torch's own operators, run on the host instead of on the chips: random draws, and calls that torch refuses as well.

Draws come from torch's CPU generators, wherever the tensors are, so that a seed gives the same noise as on a CPU. An operator that
fails on the chips is run again on the host, to raise torch's own error at upstream's line.
"""

import functools
import re

import jax
import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from torchax.tensor import Tensor

from ..weights.convert import from_numpy
from .host_values import HOST, plain
from .lines import raised_inside


META = torch.device("meta")  # which computes shapes and dtypes alone
# torch tags the operators that draw. It also tags attention and layers that draw in training only, by other operators.
_NOT_A_DRAW = "attention|sdp|^_cudnn|^_lstm|^lstm$|^gru$|_rnn|^rnn_|^rrelu$|^(feature_)?(alpha_)?dropout_?$"


class NotTaken(Exception):
    """An operator of ours got shapes or dtypes that torch's refuses; `refusal` finds torch's error."""


@functools.cache
def is_draw(func) -> bool:
    """Whether a function or operator of torch's draws random numbers."""
    if isinstance(func, torch._ops.OpOverload):
        name = func._schema.name.removeprefix("aten::")
        return torch.Tag.nondeterministic_seeded in func.tags and not re.search(_NOT_A_DRAW, name)
    packet = getattr(torch.ops.aten, getattr(func, "__name__", "?"), None)
    overloads = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ()
    return any(is_draw(getattr(packet, name)) for name in overloads)


def drawn(env, func: torch._ops.OpOverload, args, kwargs, on_host):
    """The operator's result, drawn or otherwise computed on the host. A device tensor that it writes to is updated and returned.

    `on_host(func, args, kwargs)` runs torch's own. Traced tensors have no values, and zeros replace them: the code that traces
    checks `env.draws` afterwards, and does not keep such a program.
    """
    owners: dict[int, torch.Tensor] = {}

    def lowered(t):
        array = t.jax()
        with plain():
            empty = isinstance(array, jax.core.Tracer)
            host = torch.zeros(array.shape, dtype=t.dtype) if empty else from_numpy(array)
        owners[id(host)] = t
        return host

    device = kwargs.get("device")
    args, kwargs = tree_map_only(Tensor, lowered, (args, kwargs))
    if device is not None:
        kwargs["device"] = HOST
    result = on_host(func, args, kwargs)
    stays = not owners or (device is not None and not env._should_use_torchax_tensor(device))

    def raised(t):
        if (owner := owners.get(id(t))) is None:
            return t if stays else Tensor(env.t2j_copy(t), env)
        owner._elem = env.t2j_copy(t)
        return owner

    return tree_map_only(torch.Tensor, raised, result)


def refusal(func, args, kwargs, failed: Exception) -> Exception | None:
    """torch's own error for these arguments of `func`, which raised `failed`; None: torch accepts them, or cannot be tried.

    Traced tensors have no values, and zeros replace them. Then torch's error counts only if its meta device, which computes
    nothing, refuses their shapes and dtypes too, or if an operator of ours did.
    """
    # An operator of ours fails this way for an argument that is no device tensor.
    another_type = isinstance(failed, AttributeError) and failed.name in ("jax", "_env")
    asks = another_type or isinstance(failed, NotTaken) or is_refused(failed) or raised_inside(failed)
    if not asks or is_draw(func):
        return None
    arrays = [t.jax() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    by_value = any(isinstance(array, jax.core.Tracer) for array in arrays) and not isinstance(failed, NotTaken)
    error = None
    for device in (META, HOST) if by_value else (HOST,):
        try:
            with plain():
                given, named = tree_map_only(torch.Tensor, functools.partial(stand_in, device), (args, kwargs))
                func(*given, **({**named, "device": device} if named.get("device") is not None else named))
        except NotImplementedError:  # depends on values
            return None
        except Exception as refused:
            error = refused
        else:
            return None
    error.refused_by_torch = True
    return error


def stand_in(device: torch.device, t: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, dtype and, where it has them, values, on the host or on the meta device."""
    ours = isinstance(t, Tensor)
    dtype = torch.int64 if ours and t.dtype == torch.int32 else t.dtype  # as upstream has it
    if device == META or (not ours and t.is_meta):
        return torch.empty(tuple(t.shape), dtype=dtype, device=META)
    array = t.jax() if ours else None
    if isinstance(array, jax.core.Tracer):
        return torch.zeros(array.shape, dtype=dtype)
    return from_numpy(array).to(dtype) if ours else t.clone()


def is_refused(error: BaseException) -> bool:
    """Whether this is an error that `refusal` returned."""
    return getattr(error, "refused_by_torch", False)
