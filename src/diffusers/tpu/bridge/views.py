"""Views: tensors that share storage in torch. Arrays share none here, so a view keeps its base and the operators between the two.

Its array is computed when it is made, and anew where the base was written to since. What is written to a view is written to the base.
"""

import contextlib
import functools
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torchax.tensor import Tensor


aten = torch.ops.aten
WRITES_TO_FIRST = re.compile(r"__(set|i)\w+__|\w*[a-z]_(\.\w+)?")  # `__setitem__`, `__iadd__`, `copy_`, `add_.Tensor`


@contextlib.contextmanager
def plain():
    """torch's own operators on host tensors, inside of the environment too."""
    with torch.utils._mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
        yield


@contextlib.contextmanager
def decomposing():
    """No gradients, and torch takes its composite operators apart before torchax sees them, in inference mode too."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def has_values(x) -> bool:
    """Whether x is an array, and none of a trace."""
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


@dataclass(frozen=True)
class Step:
    """A view operator of torch's: `of(t)` of a host or device tensor t."""

    func: Any
    args: tuple
    kwargs: dict
    index: int | None = None  # of an operator that makes several views

    def of(self, t: torch.Tensor) -> torch.Tensor:
        made = self.func(t, *self.args, **self.kwargs)
        return made if self.index is None else made[self.index]


class Shared:
    """Where the values of a view are.

    Attributes:
        base: the tensor that holds them, no view itself.
        steps: the view operators that make the view of it.
    """

    def __init__(self, base: Tensor, steps: tuple[Step, ...], array: jax.Array):
        self.base, self.steps, self.laid = base, steps, None
        self._source, self._array = base.jax(), array

    def read(self) -> jax.Array:
        source = self.base.jax()
        if source is self._source:
            return self._array
        return functools.reduce(self._through, self.steps, source)

    def write(self, array: jax.Array):
        array = jnp.broadcast_to(array, self._array.shape)
        self.base._elem = self._written(self.steps, self.base.jax(), array)
        self._source, self._array = self.base.jax(), array

    def _through(self, array: jax.Array, step: Step) -> jax.Array:
        with self.base._env, decomposing():
            return step.of(Tensor(array, self.base._env)).jax()

    def _written(self, steps: tuple[Step, ...], whole: jax.Array, part: jax.Array) -> jax.Array:
        """`whole` with `part` in the places that the steps view."""
        if not steps:
            return part
        first, *rest = steps
        view = functools.partial(self._through, step=first)
        part = self._written(rest, view(whole), part) if rest else part
        if jnp.iscomplexobj(whole) != jnp.iscomplexobj(part):  # `view_as_real`, `view_as_complex`
            to_real = jnp.stack([part.real, part.imag], -1)
            return to_real if part.ndim < whole.ndim else jax.lax.complex(*jnp.moveaxis(part, -1, 0))
        if not jnp.issubdtype(whole.dtype, jnp.inexact):
            places = view(jnp.arange(whole.size).reshape(whole.shape))
            return whole.reshape(-1).at[places.reshape(-1)].set(part.reshape(-1)).reshape(whole.shape)
        placed = jax.linear_transpose(view, jax.typeof(whole))
        (back,) = placed(part)
        return back if part.size == whole.size else jnp.where(placed(jnp.ones_like(part))[0] != 0, back, whole)


def storage(t: Tensor) -> jax.Array | None:
    """The array that holds a tensor's values, of a view its base's; None of one that is not computed yet."""
    shared = vars(t).get("_shared")
    return vars(t if shared is None else shared.base).get("_array")


def parts(t: Tensor) -> str | None:
    """Which parts of its base a view is of; None of what is no view. Equal parts have equal texts."""
    shared = vars(t).get("_shared")
    return None if shared is None else str(shared.steps)


def part_of_base(t: Tensor) -> tuple[Tensor, int] | None:
    """The base of a view that is one of equal parts of its last axis, and which; None of other tensors."""
    if (shared := vars(t).get("_shared")) is None:
        return None
    laid, whole = _laid(t), _laid(shared.base)
    if not laid.ndim or not laid.numel() or laid.shape[:-1] != whole.shape[:-1] or laid.stride() != whole.stride():
        return None
    number, rest = divmod(laid.storage_offset(), laid.shape[-1])
    return None if rest or whole.shape[-1] % laid.shape[-1] else (shared.base, number)


def as_view(base: Tensor, view: Tensor, step: Step) -> Tensor:
    """`view`, which the step made of `base`, as a view of it."""
    of, array = vars(base).get("_shared"), view.jax()
    owner, steps = (base, (step,)) if of is None else (of.base, (*of.steps, step))
    vars(view)["_array"], vars(view)["_shared"] = None, Shared(owner, steps, array)
    return view


# torch's strides decide whether `reshape` and `contiguous` copy; they are found where that is asked. `_laid` of a tensor that is no view
# and not contiguous is a meta tensor with its strides: an elementwise operator's result lies as its argument does.


def follow(func, args: tuple, kwargs: dict, result):
    """Make views of what a view operator gave, and remember as what other results are laid. Of every operator that ran."""
    base = args[0] if args else None
    if isinstance(base, Tensor) and _makes_views(func):
        if func is not aten.view.default or _is_viewed(base, args[1]):
            several = isinstance(result, (tuple, list))
            for index, view in enumerate(result if several else (result,)):
                as_view(base, view, Step(func, args[1:], kwargs, index if several else None))
    elif type(result) is Tensor and not any(result is t for t in args):
        alike = (t for t in args if isinstance(t, Tensor) and _may_be_strided(t) and t.shape == result.shape)
        if (t := next(alike, None)) is not None and not (laid := _laid(t, result.dtype)).is_contiguous():
            vars(result)["_laid"] = laid


@functools.cache
def _makes_views(func) -> bool:
    if not isinstance(func, torch._ops.OpOverload) or not func._schema.arguments:
        return False
    given, made = func._schema.arguments[0].alias_info, [r.alias_info for r in func._schema.returns]
    return given is not None and not given.is_write and bool(made) and None not in made


def _may_be_strided(t: Tensor) -> bool:
    return "_shared" in vars(t) or "_laid" in vars(t)


@plain()
def _laid(t: Tensor, made: torch.dtype | None = None) -> torch.Tensor:
    """A meta tensor that lies as torch has this one; `made`: as what an elementwise operator makes of it, of this dtype."""
    if (shared := vars(t).get("_shared")) is None:
        return vars(t).get("_laid", torch.empty(tuple(t.shape), dtype=t.dtype, device="meta")).to(made or t.dtype)
    if shared.laid is None:
        try:
            shared.laid = functools.reduce(lambda meta, step: step.of(meta), shared.steps, _laid(shared.base))
        except RuntimeError:  # torch would not have this view: strides of the base are not known of every operator
            shared.laid = torch.empty(shared._array.shape, dtype=_laid(shared.base).dtype, device="meta")
    return shared.laid if made is None else torch.empty_like(shared.laid, dtype=made)


@plain()
def _is_viewed(t: Tensor, shape) -> bool:
    """Whether torch's `reshape` to this shape is a view."""
    if not _may_be_strided(t):
        return True
    return _laid(t).reshape(shape).untyped_storage()._cdata == _laid(t).untyped_storage()._cdata


def contiguous(x: Tensor, memory_format=torch.contiguous_format) -> Tensor:
    """torch's: a copy of what is not contiguous."""
    same = memory_format in (torch.contiguous_format, torch.preserve_format)
    if same and (not _may_be_strided(x) or _laid(x).is_contiguous()):
        return x
    copy = Tensor(x.jax(), x._env)
    vars(copy)["_made"] = vars(x).get("_made", (None, None, None))
    return copy
