"""Inside of a pipeline's call: device tensors for upstream's code, host tensors for the user's callbacks.

A loop on the device ("resident") works on device tensors. Callbacks run as outside of the call, with host tensors, plain torch and
torch's random state. Tensors that they return or write to are copied back to the chips, weights that they write to placed again.
"""

import contextvars
import functools
from collections.abc import Callable

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ...callbacks import MultiPipelineCallbacks, PipelineCallback
from .. import bridge
from ..chips.hosts import whole
from ..chips.locks import exclusive
from ..kernels.settings import bound


ASKED = torch.device("cuda", 0)  # what torch says of a tensor that was moved by `.to("cuda")`
CALLBACKS = ("callback_on_step_end", "callback")
_inside = contextvars.ContextVar("diffusers_tpu_in_a_call", default=False)


def in_a_call() -> bool:
    """Whether upstream's code is running in an installed pipeline's call; False in the user's callbacks."""
    return _inside.get()


def inside(value: bool = True):
    """A context that marks a pipeline's call; False: the user's code within one."""
    return bound(_inside, value)


def on_host(tree):
    """Device tensors among the leaves of `tree` as host tensors."""
    return tree_map_only(bridge.Tensor, lambda t: bridge.from_numpy(t.jax()), tree)


def bring_attributes(*objects):
    """Copy the device tensors that objects (schedulers) keep as attributes to the host."""
    for owner in objects:
        for name, value in vars(owner).items():
            if any(bridge.on_device(leaf) for leaf in tree_leaves(value)):
                vars(owner)[name] = on_host(value)


def with_user_callbacks(kwargs: dict, after: Callable[[], None]) -> dict:
    """A call's arguments, with callbacks wrapped so that they run as outside of the call. `after` is called when one has returned
    that may have written to a tensor unknown to torch's version counter."""
    kwargs = dict(kwargs)
    for name in CALLBACKS:
        callback = kwargs.get(name)
        if isinstance(callback, (PipelineCallback, MultiPipelineCallbacks)):
            kwargs[name] = _UsersCallbacks(callback, after)
        elif callback is not None:
            kwargs[name] = functools.wraps(callback, updated=())(functools.partial(_call_outside, callback, after))
    return kwargs


class _UsersCallbacks(MultiPipelineCallbacks):
    """Wraps upstream's callback object, or several; pipelines check its class and read its `tensor_inputs`."""

    def __init__(self, callback: PipelineCallback | MultiPipelineCallbacks, after: Callable[[], None]):
        super().__init__([callback])
        self.after = after

    def __call__(self, *args, **kwargs):
        return _call_outside(self.callbacks[0], self.after, *args, **kwargs)


class _Data(TorchFunctionMode):
    """Notes whether code has reached the `.data` of a tensor."""

    reached = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.reached |= getattr(func, "__self__", None) is torch.Tensor.data
        return func(*args, **(kwargs or {}))


def _call_outside(callback, after, /, *args, **kwargs):
    env, shown = bridge.environment(), {}

    def show(tensor):
        if id(tensor) not in shown:
            shown[id(tensor)] = tensor, bridge.from_numpy(tensor.jax())
        return shown[id(tensor)][1]

    args, kwargs = tree_map_only(bridge.Tensor, show, (args, kwargs))
    with env.left(), inside(False), exclusive.released(), _Data() as data:
        answer = callback(*args, **kwargs)
    if data.reached:
        after()
    if not env.active:
        return answer
    back = {}
    for tensor, host in shown.values():
        if bridge.as_numpy(host).tobytes() != np.asarray(whole(tensor.jax())).tobytes():
            tensor.copy_(env.moved(host))
        back[id(host)] = tensor
    return tree_map_only(torch.Tensor, lambda t: back.get(id(t)) if id(t) in back else env.moved(t), answer)
