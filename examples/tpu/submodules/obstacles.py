"""Finds all obstacles to tracing a module in one pass: `assuming` records each, substitutes a value and continues the trace.

An obstacle reads a value that a trace does not have, or is an operator that torchax lacks or that fails. Substitutes are the given truth
value, the number one, every entry of a boolean index, else zeros of the shape that torch's meta device computes.
"""

import contextlib
import functools
import traceback
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import jax
import jax.numpy as jnp
import torch
from torch.utils._pytree import tree_map_only
from torchax import view
from torchax.tensor import OperatorNotFound, Tensor

from diffusers.tpu.bridge.decisions import Decisions
from diffusers.tpu.bridge.environment import environment
from diffusers.tpu.bridge.host_values import ASKING, READS, plain
from diffusers.tpu.bridge.lines import Line, frames_to_asker, line_of_frame
from diffusers.tpu.bridge.on_host import META, is_draw, stand_in
from diffusers.tpu.weights.convert import numpy_dtype


aten = torch.ops.aten
IN_WORDS = {
    aten.nonzero.default: "the places of entries that are not zero (nonzero)",
    aten.masked_select.default: "the entries where a mask is true (masked_select)",
    aten._to_copy.default: "a copy to the host",
    **dict.fromkeys((aten.index.Tensor, torch.Tensor.__getitem__), "a boolean index"),
    **dict.fromkeys((aten.index_put.default, aten.index_put_.default), "a boolean index that is written to"),
    torch.Tensor.__setitem__: "a boolean index that is written to",
}
UNIQUE = {aten._unique2.default, aten.unique_consecutive.default}
WHOLE = {
    "tolist": ".tolist()",
    "numpy": ".numpy()",
    "__format__": "in a text",
    "__repr__": "a text",
    "__str__": "a text",
}
PATIENCE = 100  # answers at one line, after which they alternate: a loop waits for another one


@dataclass(frozen=True)
class Obstacle(Line):
    """What stops a trace, in words, and the line of the module's own code."""

    what: str


@contextlib.contextmanager
def assuming(answer: bool) -> Iterator["Obstacles"]:
    """A context in which traces continue past obstacles, with `answer` for truth values."""
    env = environment()
    obstacles = Obstacles(env, answer)
    with (
        # What a run would decide by a small input stops a trace too.
        mock.patch.object(Decisions, "decide", lambda self, array: None),
        mock.patch.object(env, "dispatch", obstacles.dispatch),
        mock.patch.multiple(Tensor, **{name: obstacles.read_whole(name, getattr(Tensor, name)) for name in WHOLE}),
    ):
        yield obstacles


class Obstacles:
    """The obstacles of one trace in order (`found`): replaces the environment's `dispatch` and substitutes results that it cannot compute."""

    def __init__(self, env, answer: bool):
        self.env, self.answer = env, answer
        self.found: dict[Obstacle, None] = {}
        self.asked: Counter = Counter()

    def add(self, what: str) -> int:
        """Records the obstacle at the line being traced; returns how often the trace has reached that line."""
        *inner, frame = frames_to_asker()
        line = line_of_frame(frame)
        if not any(map(_uses_a_view, inner)):
            self.found[Obstacle(**vars(line), what=what)] = None
        self.asked[line.file, line.line] += 1
        return self.asked[line.file, line.line]

    def dispatch(self, func, types, args, kwargs):
        if is_draw(func):
            self.add(f"random numbers ({_name(func)}), which a program would repeat in every call")
        try:
            return type(self.env).dispatch(self.env, func, types, args, kwargs)
        except READS as error:
            if any(_uses_a_view(frame) for frame, _ in traceback.walk_tb(error.__traceback__)):
                return self._zeros(func, args, kwargs or {})
            return self._unread(func, args, kwargs or {})
        except OperatorNotFound:
            if not isinstance(func, torch._ops.OpOverload):
                raise  # torch takes it apart
            self.add(f"an operator that torchax lacks ({func})")
            return self._zeros(func, args, kwargs or {})

    def read_whole(self, name: str, method):
        def read(t, *args, **kwargs):
            if not isinstance(t.jax(), jax.core.Tracer):
                return method(t, *args, **kwargs)
            self.add(f"all values of a tensor ({WHOLE[name]})")
            ones = torch.ones(tuple(t.shape), dtype=t.dtype)
            with plain():
                return getattr(ones, name)(*args, **kwargs)

        return read

    def _unread(self, func, args, kwargs):
        if func in ASKING:
            dtype = args[0].dtype
            if dtype == torch.bool:
                asked = self.add("a truth value of a tensor (a branch, .item())")
                return self.answer if asked <= PATIENCE else bool(asked % 2)
            self.add("a number of a tensor (.item(), int(), a bound of a slice or a range)")
            return 1.0 if dtype.is_floating_point else 1
        self.add(IN_WORDS.get(func) or f"a value that a trace does not have ({_name(func)})")
        if func is aten.nonzero.default:
            return self._filled(jnp.ones, (args[0].shape.numel(), args[0].ndim), torch.int64)
        if func is aten.masked_select.default:
            number = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
            return self._filled(jnp.ones, (number,), args[0].dtype)
        if func in UNIQUE:
            shape, number = args[0].shape, args[0].shape.numel()
            flat = self._filled(jnp.zeros, (number,), args[0].dtype)
            return flat, *(self._filled(jnp.ones, size, torch.int64) for size in (shape, (number,)))
        return None if func is torch.Tensor.__setitem__ else self._zeros(func, args, kwargs)

    def _zeros(self, func, args, kwargs):
        """Returns zeros of the shapes that torch's meta device computes, or the first tensor where it cannot.

        A boolean index takes every entry.
        """
        first = next((x for x in args if isinstance(x, torch.Tensor)), None)
        with plain():
            args, kwargs = tree_map_only(torch.Tensor, functools.partial(stand_in, META), (args, kwargs))
            if func is torch.Tensor.__getitem__:
                args = args[0], _whole(args[1])
            elif func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
                args = args[0], list(_whole(tuple(args[1]))), *args[2:]
            if "device" in kwargs:
                kwargs["device"] = META
            try:
                result = func(*args, **kwargs)
            except (NotImplementedError, RuntimeError):
                return first  # its shape depends on values
        return tree_map_only(torch.Tensor, lambda t: self._filled(jnp.zeros, t.shape, t.dtype), result)

    def _filled(self, make, shape, dtype):
        return Tensor(make(tuple(shape), numpy_dtype(dtype)), self.env)


def _uses_a_view(frame: types.FrameType) -> bool:
    """Whether the frame evaluates a view (`x[:, :n]`), which is done at each use, with bounds read at the view's own line."""
    return frame.f_code.co_filename == view.__file__ and frame.f_code.co_name in ("transform_tensor", "update_tensor")


def _whole(key):
    """Returns the key of an index, in which the positions of all entries replace a boolean mask."""
    keys = []
    for part in key if isinstance(key, tuple) else (key,):
        if isinstance(part, torch.Tensor) and part.dtype == torch.bool:
            keys += [torch.empty(part.shape.numel(), dtype=torch.int64, device=META)] * part.ndim
        else:
            keys.append(part)
    return tuple(keys)


def _name(func) -> str:
    return getattr(func, "__qualname__", None) or getattr(func, "__name__", None) or str(func)
