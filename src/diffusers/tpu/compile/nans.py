"""NaN and infinities in what models give: found at the end of a call, and traced to the first submodule that gives one.

`debugging()` looks at the answer of every model, and where one is not finite runs that call again, upstream's lines one by one on
the chips, with a look at what each submodule gives: a submodule that gives NaN and took none is the first.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import torch
from torch.utils._pytree import tree_leaves

from .. import bridge


_debugging = contextvars.ContextVar("diffusers_tpu_debug_nans", default=False)
_noted = contextvars.ContextVar("diffusers_tpu_nans_noted", default=None)


@contextlib.contextmanager
def debugging() -> Iterator[None]:
    """Every model's answer is looked at, which waits for the chips. Raises NotFinite that names the submodule."""
    token = _debugging.set(True)
    try:
        yield
    finally:
        _debugging.reset(token)


def is_debugging() -> bool:
    return _debugging.get()


@contextlib.contextmanager
def noting() -> Iterator[dict[object, list]]:
    """Flags of what models give while this is open, by runner: whether each tensor is finite. Outside none are kept."""
    token = _noted.set({})
    try:
        yield _noted.get()
    finally:
        _noted.reset(token)


def note(runner, answer):
    """Of the call that is open, if one is: whether what this runner gives is finite; nothing waits."""
    noted = _noted.get()
    if noted is not None:
        noted.setdefault(runner, []).extend(_flags(answer))


def are_finite(tree) -> bool:
    """Whether every value of the tensors among the leaves is a number; waits for them."""
    return all(bool(_flag(leaf)) for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _flags(tree) -> list:
    """For every tensor whether it is finite, where it is: nothing waits."""
    return [_flag(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _flag(tensor: torch.Tensor):
    if bridge.on_device(tensor):
        return _all_finite(tensor.jax()) if tensor.is_floating_point() else True
    return bool(torch.isfinite(tensor).all()) if tensor.is_floating_point() else True


@jax.jit
def _all_finite(array: jax.Array) -> jax.Array:
    return jnp.isfinite(array).all()


def first_not_finite(model: torch.nn.Module, run: Callable[[], object]) -> str | None:
    """The submodule that first gives NaN or an infinity of finite inputs while `run` runs the model's lines; None: none does."""
    found: list[str] = []
    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            if name:
                handle = module.register_forward_hook(_look(name, found), with_kwargs=True)
                stack.callback(handle.remove)
        run()
    return next(iter(found), None)


def _look(name: str, found: list[str]):
    def look(module, args, kwargs, answer):
        if not found and not are_finite(answer) and are_finite((args, kwargs)):
            found.append(name)

    return look


def message(component: str, name: str | None, entry: str) -> str:
    first = (
        f"the first submodule that gives one is {name}"
        if name
        else "no submodule by itself gives one, its own lines do"
    )
    return (
        f"expected finite values from {component}.{entry}, got NaN or an infinity: {first}. Load the model in bfloat16 or float32"
        " (float16 overflows), or compare it with upstream: diffusers-tpu compare MODEL --component NAME --debug-nans"
    )
