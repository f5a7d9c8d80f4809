"""Module names in compiled programs: every operation that is traced in a module's forward carries the module's name.

A profile, and the planner, then read `[blocks.*]/[attn1]/[to_q]` in an operation's name: upstream's module names in brackets, each
relative to the one before (a name with a dot in front is whole); `*` is a scanned block.
"""

import contextlib
import itertools
from collections.abc import Callable

import jax
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from .scan import Group


@contextlib.contextmanager
def around_forwards(enter: Callable, leave: Callable, **how):
    """While this is open, every module's forward runs between `enter(module, args)` and `leave(module, args, output)`."""
    with register_module_forward_hook(leave, **how), register_module_forward_pre_hook(enter):
        yield


def watching(name_of: Callable, seen: Callable) -> contextlib.AbstractContextManager:
    """While this is open, call `seen(name, number of the call, (args, kwargs), output)` after each call of a named module."""
    open_calls, calls = [], itertools.count()

    def enter(module, args):
        if name_of(module) is not None:
            open_calls.append(next(calls))

    def leave(module, args, kwargs, output):
        if (name := name_of(module)) is not None:
            seen(name, open_calls.pop(), (args, kwargs), output)

    return around_forwards(enter, leave, with_kwargs=True)


def module_scopes(model: torch.nn.Module, groups: list[Group]) -> contextlib.AbstractContextManager:
    """While this is open, forwards of the model's submodules are traced under their names."""
    names = {}
    for name, module in model.named_modules():
        # `blocks.0.attn1` as `blocks.*.attn1`: one scanned block represents its group
        place = next(filter(None, (group.place_of(name) for group in groups)), (name,))
        names[id(module)] = ".".join(filter(None, place)) or None
    open_scopes: list[tuple[str, object]] = []

    def enter(module, args):
        if (name := names.get(id(module))) is not None:
            outer = open_scopes[-1][0] + "." if open_scopes else ""
            inside = name.startswith(outer)  # not if an operation of the module computes deferred blocks
            scope = jax.named_scope(f"[{name.removeprefix(outer)}]" if inside else f"[.{name}]")
            scope.__enter__()
            open_scopes.append((name, scope))

    def leave(module, args, output):
        if names.get(id(module)) is not None:
            open_scopes.pop()[1].__exit__(None, None, None)

    return around_forwards(enter, leave, always_call=True)
