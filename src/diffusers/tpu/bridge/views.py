"""Views: tensors that share storage in torch. JAX arrays share none, so a view keeps its base and the operators between the two.

Its array is computed when it is made, and again after a write to the base. A write to a view goes to the base.
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
    """A context of torch's own operators on host tensors, inside of the environment too."""
    with torch.utils._mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
        yield


@contextlib.contextmanager
def decomposing():
    """A context without gradients in which torch decomposes composite operators before torchax gets them, in inference mode too."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def has_values(x) -> bool:
    """Whether x is an array with values, not a tracer."""
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


@dataclass(frozen=True)
class Step:
    """A view operator of torch; `of(t)` applies it to a host or device tensor."""

    func: Any
    args: tuple
    kwargs: dict
    index: int | None = None  # which result, of an operator that makes several views

    def of(self, t: torch.Tensor) -> torch.Tensor:
        made = self.func(t, *self.args, **self.kwargs)
        return made if self.index is None else made[self.index]


class Shared:
    """A view's base and how to compute the view from it.

    Attributes:
        base: the tensor that holds the values, no view itself.
        steps: the view operators from the base to the view.
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
        """`whole` with `part` written to the entries that the steps select."""
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


def base_of(t: Tensor) -> Tensor:
    """The tensor that holds the values of a view; the tensor itself if it is no view."""
    shared = vars(t).get("_shared")
    return t if shared is None else shared.base


def storage(t: Tensor) -> jax.Array | None:
    """The array that holds a tensor's values, for a view its base's; None where it is not computed yet."""
    return vars(base_of(t)).get("_array")


def parts(t: Tensor) -> str | None:
    """A text for the part of its base that a view is, equal for equal parts; None for a tensor that is no view."""
    shared = vars(t).get("_shared")
    return None if shared is None else str(shared.steps)


def part_of_base(t: Tensor) -> tuple[Tensor, int] | None:
    """(base, index) of a view that is one of equal parts of the base's last axis; None for other tensors."""
    if (shared := vars(t).get("_shared")) is None:
        return None
    laid, whole = _laid(t), _laid(shared.base)
    if not laid.ndim or not laid.numel() or laid.shape[:-1] != whole.shape[:-1] or laid.stride() != whole.stride():
        return None
    number, rest = divmod(laid.storage_offset(), laid.shape[-1])
    return None if rest or whole.shape[-1] % laid.shape[-1] else (shared.base, number)


def as_view(base: Tensor, view: Tensor, step: Step) -> Tensor:
    """Make `view`, which `step` computed from `base`, a view of it; returns `view`."""
    of, array = vars(base).get("_shared"), view.jax()
    owner, steps = (base, (step,)) if of is None else (of.base, (*of.steps, step))
    vars(view)["_array"], vars(view)["_shared"], vars(owner)["_viewed"] = None, Shared(owner, steps, array), True
    return view


def shaped_in_place(operator, x: Tensor, *args) -> Tensor:
    """`unsqueeze_`, `squeeze_`, `transpose_` and `t_`: x gets the shape of the view that `operator` makes of it; returns x.

    Raises NotImplementedError for a tensor that other tensors view, as their operators are those from its former shape.
    """
    if vars(x).get("_viewed"):
        raise NotImplementedError(
            f"expected {operator}(x) where x was changed in place: other tensors are views of it. Assign the result, or clone x first"
        )
    view = operator(x, *args)
    if "_shared" in vars(x):
        vars(x)["_shared"] = vars(view)["_shared"]
    else:
        array, laid = view.jax(), _laid(view)
        vars(x).pop("_viewed", None)
        x._elem, vars(x)["_laid"] = array, laid
    return x


# torch's strides decide whether `reshape` and `contiguous` copy; they are computed when needed. A tensor that is neither a view nor
# contiguous has a meta tensor with its strides as `_laid`: an elementwise operator's result has the strides of its argument.


def follow(func, args: tuple, kwargs: dict, result):
    """Called after every operator: make a view operator's results views, and record the strides of other results."""
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
    """A meta tensor with the tensor's strides in torch; `made`: those of an elementwise operator's result, of this dtype."""
    if (shared := vars(t).get("_shared")) is None:
        return vars(t).get("_laid", torch.empty(tuple(t.shape), dtype=t.dtype, device="meta")).to(made or t.dtype)
    if shared.laid is None:
        try:
            shared.laid = functools.reduce(lambda meta, step: step.of(meta), shared.steps, _laid(shared.base))
        except RuntimeError:  # no such view in torch: the base's strides are not tracked through every operator
            shared.laid = torch.empty(shared._array.shape, dtype=_laid(shared.base).dtype, device="meta")
    return shared.laid if made is None else torch.empty_like(shared.laid, dtype=made)


@plain()
def _is_viewed(t: Tensor, shape) -> bool:
    """Whether torch's `reshape` to this shape is a view."""
    if not _may_be_strided(t):
        return True
    return _laid(t).reshape(shape).untyped_storage()._cdata == _laid(t).untyped_storage()._cdata


def contiguous(x: Tensor, memory_format=torch.contiguous_format) -> Tensor:
    """torch's `contiguous`: a copy of a tensor that is not contiguous, else the tensor itself."""
    same = memory_format in (torch.contiguous_format, torch.preserve_format)
    if same and (not _may_be_strided(x) or _laid(x).is_contiguous()):
        return x
    copy = Tensor(x.jax(), x._env)
    vars(copy)["_made"] = vars(x).get("_made", (None, None, None))
    return copy
