"""NaN and infinities in what models give: noted for the end of a call, or traced to the first submodule that gives one.

`debugging()` checks the result of every model, and where one is not finite runs that call again, eagerly, with a check of what each
submodule gives: a submodule that gives NaN and took none is the first.
"""

import contextlib
import contextvars
from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch
from torch.utils._pytree import tree_leaves

from .. import bridge
from ..kernels.settings import bound
from .tracing.scopes import watching


_debugging = contextvars.ContextVar("diffusers_tpu_debug_nans", default=False)
_noted = contextvars.ContextVar("diffusers_tpu_nans_noted", default=None)
is_debugging = _debugging.get


def debugging() -> contextlib.AbstractContextManager:
    """Every model's result is checked, which waits for the chips. Raises NotFinite that names the submodule."""
    return bound(_debugging, True)


def noting() -> contextlib.AbstractContextManager[dict[object, list]]:
    """Flags of what models give while this is open, by runner: whether each tensor is finite."""
    return bound(_noted, {})


def note(runner, result):
    """For `noting`, if it is open: whether what this runner gives is finite; nothing waits."""
    if (noted := _noted.get()) is not None:
        noted.setdefault(runner, []).extend(_flags(result))


def are_finite(tree) -> bool:
    """Whether every value of the tensors among the leaves is a number; waits for them."""
    return all(map(bool, _flags(tree)))


def _flags(tree) -> list:
    """For every tensor of floating point whether it is finite, where it is."""
    tensors = [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return [_all_finite(x.jax()) if bridge.on_device(x) else bool(torch.isfinite(x).all()) for x in tensors]


@jax.jit
def _all_finite(array: jax.Array) -> jax.Array:
    return jnp.isfinite(array).all()


def first_not_finite(model: torch.nn.Module, run: Callable[[], object]) -> str | None:
    """The submodule that first gives NaN or an infinity of finite inputs while `run` runs the model's lines; None: none does."""
    names, found = {id(module): name for name, module in model.named_modules() if name}, []

    def check(name: str, call: int, given: tuple, result):
        if not found and not are_finite(result) and are_finite(given):
            found.append(name)

    with watching(lambda module: names.get(id(module)), check):
        run()
    return next(iter(found), None)


def message(component: str, name: str | None, entry: str) -> str:
    first = f"the first submodule that gives one is {name}" if name else "its own lines give one, no submodule does"
    return (
        f"expected finite values from {component}.{entry}, got NaN or an infinity: {first}. Load the model in bfloat16 or float32"
        " (float16 overflows), or compare it with upstream: diffusers-tpu compare MODEL --component NAME --debug-nans"
    )
