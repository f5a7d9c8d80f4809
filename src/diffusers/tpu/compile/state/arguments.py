"""Objects in a call's arguments and results, as pytrees: tensors in them are arguments, numbers part of the call's key.

A trace gets a copy of every list, dict and object among the arguments, a key-value cache say. What it leaves in them is described
(`Written`), and written to the caller's own after each run.
"""

import copyreg
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils._pytree import TreeSpec, register_pytree_node, tree_flatten, tree_map, tree_unflatten, treespec_leaf

from ...bridge import write
from .key import Unread
from .libraries import is_library
from .values import attributes, slots_of
from .watch import alike, put_back


DEEPEST = 50  # objects within objects
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, np.ndarray)
_UPSTREAMS = ("diffusers.models.", "diffusers.pipelines.", "diffusers.modular_pipelines.", "diffusers.hooks.")
_CODE = (torch.Tensor, torch.nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType)


def is_data(x) -> bool:
    """Whether x is an object of upstream's or the user's that holds its data in attributes."""
    cls = type(x)
    if isinstance(x, (*_CODE, dict, list, tuple)) or callable(x) or cls.__module__.startswith("diffusers.tpu."):
        return False
    if is_library(cls) and not cls.__module__.startswith(_UPSTREAMS):
        return False
    return hasattr(x, "__dict__") or bool(slots_of(cls))


class Opened:
    """An object in a flattened tree: its attributes are its children."""

    def __init__(self, held, parts: dict):
        self.type, self.parts = type(held), parts


def _closed(values, structure: tuple):
    cls, names = structure
    held = object.__new__(cls)
    for name, value in zip(names, values):
        object.__setattr__(held, name, value)
    return held


# A tree's spec pickles as it is, but torch warns of the constructor of a leaf's.
copyreg.pickle(type(treespec_leaf()), lambda leaf: (treespec_leaf, ()))

register_pytree_node(Opened, lambda held: ([*held.parts.values()], (held.type, tuple(held.parts))), _closed)


def opened(tree, classes: set[type] | None = None, closed: Callable = lambda x: False):
    """The tree with an `Opened` for every object; `classes` collects their classes. Raises Unread for one that it has twice.

    `closed`: whether a part of the tree stays as it is.
    """
    met: set[int] = set()

    def open_(leaf, depth=0):
        if closed(leaf) or not is_data(leaf):
            return leaf
        if id(leaf) in met or depth > DEEPEST:
            raise Unread(f"a {type(leaf).__qualname__} that it has more than once, or that holds itself")
        met.add(id(leaf))
        if classes is not None:
            classes.add(type(leaf))
        deeper = functools.partial(open_, depth=depth + 1)
        return Opened(leaf, {n: tree_map(deeper, value, is_leaf=closed) for n, value in _content(leaf).items()})

    return tree_map(open_, tree, is_leaf=closed)


def _content(x) -> dict:
    """The content of a list, a dict or an object, by position, key or name."""
    return dict(enumerate(x)) if isinstance(x, list) else dict(x) if isinstance(x, dict) else attributes(x)


@dataclass(frozen=True)
class _Ref:
    index: int


class InputRef(_Ref):
    """The call's tensor of this number."""


class OutputRef(_Ref):
    """The array of this number among those that a program returns beside its return value."""


class HolderRef(_Ref):
    """The list, dict or object of this number among a call's arguments."""


@dataclass
class Written:
    """What a call leaves in its arguments.

    Attributes:
        holders: (number, spec, leaves) of the new content of lists, dicts and objects that it changed.
        tensors: numbers of tensors with other values; these are the first of the arrays.
        arrays: how many arrays it takes.
    """

    holders: list[tuple[int, TreeSpec, list]] = field(default_factory=list)
    tensors: list[int] = field(default_factory=list)
    arrays: int = 0


def holders(tree, around: tuple = ()) -> Iterator:
    """The mutable lists, dicts and objects in a tree, in one order for equal trees. `around`: ids of the containers around it."""
    if isinstance(tree, tuple):
        for item in tree:
            yield from holders(item, around)
    elif id(tree) not in around and (isinstance(tree, (list, dict)) or is_data(tree)):
        yield tree
        for item in _content(tree).values():
            yield from holders(item, (*around, id(tree)))


class Arguments:
    """The arguments that a call is run with: a copy of the caller's, with `tensors` in the places of its tensors."""

    def __init__(self, tree, tensors: list):
        self.tensors = tensors
        self.holders = [*holders(tree)]
        self.before = [*map(_content, self.holders)]

    def written(self, changed: list[int], refused: Callable) -> tuple[Written, list[torch.Tensor]]:
        """What the call left in them, and the tensors needed for it. `changed`: tensors written to. `refused`: for other leaves."""
        found, outputs = Written(tensors=changed), [self.tensors[n] for n in changed]
        known = {id(t): InputRef(n) for n, t in enumerate(self.tensors)}
        known |= {id(x): HolderRef(n) for n, x in enumerate(self.holders)}

        def described(x):
            if id(x) in known:
                return known[id(x)]
            if isinstance(x, torch.Tensor):
                outputs.append(x)
                return OutputRef(len(outputs) - 1)
            return x if isinstance(x, PLAIN) else refused(x)

        def is_known(x) -> bool:
            return id(x) in known

        for number, (x, before) in enumerate(zip(self.holders, self.before)):
            now = _content(x)
            if [*now] != [*before] or not all(map(alike, now.values(), before.values())):
                try:
                    leaves, spec = tree_flatten(opened(now, closed=is_known), is_known)
                except Unread:
                    leaves, spec = tree_flatten(now, is_known)
                found.holders.append((number, spec, [*map(described, leaves)]))
        found.arrays = len(outputs)
        return found, outputs

    def put_back(self):
        """Restore what the lists, dicts and objects held."""
        [*map(_fill, self.holders, self.before)]


def write_back(written: Written, tree, tensors: list[torch.Tensor], outputs: list[torch.Tensor]):
    """Write what a call left in its arguments to the caller's own."""
    own = [*holders(tree)]
    sources = {InputRef: tensors, OutputRef: outputs, HolderRef: own}
    for number, value in zip(written.tensors, outputs):
        write(tensors[number], value)
    for number, spec, leaves in written.holders:
        leaves = [sources[type(x)][x.index] if type(x) in sources else x for x in leaves]
        _fill(own[number], tree_unflatten(leaves, spec))


def _fill(x, content: dict):
    """Set the content of a list, dict or object."""
    if isinstance(x, list):
        x[:] = content.values()
    elif isinstance(x, dict):
        put_back(x, content)
    else:
        for name in _content(x).keys() - content.keys():
            object.__delattr__(x, name)
        for name, value in content.items():
            object.__setattr__(x, name, value)
