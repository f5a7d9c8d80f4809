"""Random draws: from torch's CPU generators, wherever the tensors lie, so that a seed gives the noise it gives everywhere."""

import functools
import re

import jax
import torch
from torch.utils._pytree import tree_map_only
from torchax.tensor import Tensor
from torchax.view import View

from ..weights.convert import from_numpy
from .host_twin import HOST
from .host_values import DEVICE_TENSORS, plain


# torch marks its operators that draw; marked too are attention and layers that would in training, by other operators.
_NOT_A_DRAW = re.compile(
    "attention|sdp|^_cudnn|^_lstm|^lstm$|^gru$|_rnn|^rnn_|^rrelu$|^(alpha_|feature_|feature_alpha_)?dropout_?$"
)


def _draws(func: torch._ops.OpOverload) -> bool:
    name = func._schema.name.removeprefix("aten::")
    return torch.Tag.nondeterministic_seeded in func.tags and not _NOT_A_DRAW.search(name)


@functools.cache
def is_draw(func) -> bool:
    """Whether a function or operator of torch's draws random numbers."""
    if isinstance(func, torch._ops.OpOverload):
        return _draws(func)
    packet = getattr(torch.ops.aten, getattr(func, "__name__", "?"), None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    return any(_draws(getattr(packet, name)) for name in packet.overloads())


def drawn(env, func: torch._ops.OpOverload, args, kwargs, on_host):
    """What the operator gives, drawn or otherwise computed on the host; in the place of a tensor that it writes to, that tensor.

    `on_host(func, args, kwargs)` runs torch's own. While a model is traced its tensors have no values, and zeros stand for
    them: who traces looks at `env.draws` afterwards, and does not keep such a program.
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
    args, kwargs = tree_map_only(DEVICE_TENSORS, lowered, (args, kwargs))
    if device is not None:
        kwargs["device"] = HOST
    result = on_host(func, args, kwargs)
    stays = not owners or (device is not None and not env._should_use_torchax_tensor(device))

    def raised(t):
        owner = owners.get(id(t))
        if owner is None:
            return t if stays else Tensor(env.t2j_copy(t), env)
        if isinstance(owner, View):
            owner.update(env.t2j_copy(t))
        else:
            owner._elem = env.t2j_copy(t)
        return owner

    return tree_map_only(torch.Tensor, raised, result)
