"""Objects among a call's arguments and results, taken apart: tensors in them are arguments, numbers a part of the call's key.

A key-value cache, a context of a user's: what is in it is given to the program like any tensor. A trace gets a copy of every list,
dict and object among the arguments; what it leaves in them is written down (`Written`), and put into the caller's own after each run.
"""

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils._pytree import register_pytree_node, tree_map

from .instances import slots_of
from .key import Unread
from .trust import is_library
from .watch import alike, put_back


DEEPEST = 50  # objects within objects
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, np.ndarray)
_UPSTREAMS = ("diffusers.models.", "diffusers.pipelines.", "diffusers.modular_pipelines.", "diffusers.hooks.")
_CODE = (
    torch.Tensor,
    torch.nn.Module,
    type,
    types.FunctionType,
    types.MethodType,
    types.ModuleType,
    dict,
    list,
    tuple,
)


def is_data(x) -> bool:
    """Whether x is an object of upstream's or the user's that holds what it has in attributes."""
    cls = type(x)
    if isinstance(x, _CODE) or callable(x) or cls.__module__.startswith("diffusers.tpu."):
        return False
    if is_library(cls) and not cls.__module__.startswith(_UPSTREAMS):
        return False
    return hasattr(x, "__dict__") or bool(slots_of(cls))


class Opened:
    """In a flattened tree, an object: its attributes are its parts."""

    def __init__(self, held, parts: dict):
        self.type, self.parts = type(held), parts


def _closed(values, structure: tuple):
    cls, names = structure
    held = object.__new__(cls)
    for name, value in zip(names, values):
        object.__setattr__(held, name, value)
    return held


register_pytree_node(Opened, lambda held: ([*held.parts.values()], (held.type, tuple(held.parts))), _closed)


def opened(tree, classes: set[type] | None = None):
    """The tree with every object in it open. Raises Unread for one that it has twice.

    Args:
        classes: filled with theirs.
    """
    met: set[int] = set()

    def open_(leaf, depth=0):
        if not is_data(leaf):
            return leaf
        if id(leaf) in met or depth > DEEPEST:
            raise Unread(f"it is given a {type(leaf).__name__} twice, or one within itself")
        met.add(id(leaf))
        if classes is not None:
            classes.add(type(leaf))
        return Opened(leaf, {n: tree_map(lambda x: open_(x, depth + 1), value) for n, value in _held(leaf).items()})

    return tree_map(open_, tree)


def _held(x) -> dict:
    """What an object has in attributes, by name."""
    return {n: getattr(x, n) for n in slots_of(type(x)) if hasattr(x, n)} | dict(getattr(x, "__dict__", {}))


# What a call leaves in what it was given


@dataclass(frozen=True)
class InputRef:
    """The tensor number `index` of a call's."""

    index: int


@dataclass(frozen=True)
class OutputRef:
    """The array number `index` of those that a program gives beside its answer."""

    index: int


@dataclass(frozen=True)
class HolderRef:
    """The list, dict or object number `index` among a call's arguments."""

    index: int


@dataclass(frozen=True)
class New:
    """A list, tuple, dict or object that the call has made: its class, and its parts."""

    cls: type
    parts: tuple


@dataclass
class Written:
    """What a call leaves in its arguments.

    Attributes:
        holders: (number, content) of lists, dicts and objects that hold something else than before.
        tensors: numbers of tensors that have other values, which are the first of `arrays`.
        arrays: how many arrays it takes.
    """

    holders: list[tuple[int, object]] = field(default_factory=list)
    tensors: list[int] = field(default_factory=list)
    arrays: int = 0


def holders(tree) -> Iterator:
    """The lists, dicts and objects of a tree that can change, in one order for equal trees."""
    if isinstance(tree, tuple):
        for item in tree:
            yield from holders(item)
    elif isinstance(tree, (list, dict)) or is_data(tree):
        yield tree
        for item in _content(tree).values():
            yield from holders(item)


def _content(x) -> dict:
    return dict(enumerate(x)) if isinstance(x, list) else dict(x) if isinstance(x, dict) else _held(x)


class Arguments:
    """The arguments that a call is run with: a copy of the caller's, with `tensors` in the places of its tensors."""

    def __init__(self, tree, tensors: list):
        self.tensors = tensors
        self.holders = [*holders(tree)]
        self.before = [*map(_content, self.holders)]

    def written(self, changed: list[int], refused: Callable) -> tuple[Written, list[torch.Tensor]]:
        """What the call left in them, and the tensors whose values that takes. `changed`: tensors that it wrote to."""
        found, outputs = Written(tensors=changed), [self.tensors[n] for n in changed]
        inputs = {id(t): InputRef(n) for n, t in enumerate(self.tensors)}
        own = {id(x): HolderRef(n) for n, x in enumerate(self.holders)}

        def described(x):
            if isinstance(x, torch.Tensor):
                if id(x) in inputs:
                    return inputs[id(x)]
                outputs.append(x)
                return OutputRef(len(outputs) - 1)
            if id(x) in own:
                return own[id(x)]
            if isinstance(x, tuple):
                return New(type(x), tuple(map(described, x)))
            if isinstance(x, (list, dict)) or is_data(x):
                return New(type(x), tuple((name, described(item)) for name, item in _content(x).items()))
            return x if isinstance(x, PLAIN) else refused(x)

        for number, (x, before) in enumerate(zip(self.holders, self.before)):
            now = _content(x)
            if [*now] != [*before] or not all(map(alike, now.values(), before.values())):
                found.holders.append((number, tuple((name, described(item)) for name, item in now.items())))
        found.arrays = len(outputs)
        return found, outputs


def write_back(written: Written, tree, tensors: list[torch.Tensor], outputs: list[torch.Tensor], write: Callable):
    """What a call left in its arguments is in the caller's own. `write(tensor, value)` gives a tensor other values."""
    own = [*holders(tree)]
    for number, value in zip(written.tensors, outputs):
        write(tensors[number], value)

    def made(x):
        if isinstance(x, InputRef):
            return tensors[x.index]
        if isinstance(x, OutputRef):
            return outputs[x.index]
        if isinstance(x, HolderRef):
            return own[x.index]
        if not isinstance(x, New):
            return x
        if issubclass(x.cls, tuple):
            parts = map(made, x.parts)
            return x.cls(*parts) if hasattr(x.cls, "_fields") else x.cls(parts)
        parts = {name: made(item) for name, item in x.parts}
        if issubclass(x.cls, list):
            return x.cls(parts.values())
        return x.cls(parts) if issubclass(x.cls, dict) else _closed(parts.values(), (x.cls, tuple(parts)))

    for number, content in written.holders:
        x, now = own[number], {name: made(item) for name, item in content}
        if isinstance(x, list):
            x[:] = now.values()
        elif isinstance(x, dict):
            put_back(x, now)
        else:
            for name in _held(x).keys() - now.keys():
                object.__delattr__(x, name)
            for name, value in now.items():
                object.__setattr__(x, name, value)
