"""NaN and infinities in models' results: noted for the end of a call, or traced to the first submodule that returns one.

`debugging()` checks the result of every model. A call whose result is not finite runs again, eagerly, with a check of every
submodule's result: the first that returns NaN for finite inputs is named.
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
    """Check every model's result, which waits for the chips. A call then raises NotFinite, which names the submodule."""
    return bound(_debugging, True)


def noting() -> contextlib.AbstractContextManager[dict[object, list]]:
    """While this is open, collect by runner whether each tensor that a model returns is finite."""
    return bound(_noted, {})


def note(runner, result):
    """For `noting`, if it is open: note whether this runner's result is finite; nothing waits."""
    if (noted := _noted.get()) is not None:
        noted.setdefault(runner, []).extend(_flags(result))


def are_finite(tree) -> bool:
    """Whether all values of floating-point tensors among the leaves are finite; waits for them."""
    return all(map(bool, _flags(tree)))


def _flags(tree) -> list:
    """For every floating-point tensor whether it is finite, computed on its own device."""
    tensors = [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return [_all_finite(x.jax()) if bridge.on_device(x) else bool(torch.isfinite(x).all()) for x in tensors]


@jax.jit
def _all_finite(array: jax.Array) -> jax.Array:
    return jnp.isfinite(array).all()


def first_not_finite(model: torch.nn.Module, run: Callable[[], object]) -> str | None:
    """The first submodule that returns NaN or an infinity for finite inputs while `run` runs the model's lines; None: none does."""
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
