"""Objects that a trace reads and that may change: what they held, whether they still do, and how they are restored.

Values are compared by identity; plain ones also by type and value, so that 1, 1.0 and True differ, as do 0.0 and -0.0.
"""

import array
import contextlib
import operator
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from ...bridge import storage


PLAIN = (bool, int, str, bytes, type(None))
ABSENT = object()  # stands for a missing value
ON_DEMAND = frozenset(("__slotnames__", "__annotations__", "__annotations_cache__", "__annotate_func__"))  # of a class


def alike(now, before) -> bool:
    """Whether a trace cannot tell the two apart."""
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    return repr(now) == repr(before) if isinstance(now, (float, complex)) else type(now) in PLAIN and now == before


def all_alike(now: tuple | list, before: tuple | list) -> bool:
    return len(now) == len(before) and (all(map(operator.is_, now, before)) or all(map(alike, now, before)))


def dicts_differ(now: dict, before: dict) -> bool:
    return now.keys() != before.keys() or not all(alike(now[name], value) for name, value in before.items())


@dataclass(eq=False)
class Watch:
    """An object that was read: a container, an instance, a variable. `read(thing)` returns its content, as objects in a fixed
    order, or as a dict if the order does not matter; `write(thing, before)` restores that.

    Attributes:
        owner: the module or class whose attributes it holds; None: neither.
        foreign: it belongs to something other than a module of the model: a hook, a processor, a script.
    """

    thing: object
    read: Callable[[object], tuple | list | dict]
    write: Callable[[object, tuple | list | dict], object]
    owner: object = None
    foreign: bool = False
    name: str = ""
    before: tuple | list | dict = field(init=False)

    def __post_init__(self):
        self.before = self.read(self.thing)

    def changed(self) -> bool:
        now = self.read(self.thing)
        return dicts_differ(now, self.before) if isinstance(now, dict) else not all_alike(now, self.before)

    def restore(self):
        self.write(self.thing, self.before)

    @property
    def now(self):
        return self.thing if isinstance(self.thing, (dict, list, set, deque)) else [*self.read(self.thing)]

    def rewritten(self) -> bool:
        """Whether a number, flag or name has another value, such as a counter. New entries do not count.

        An attribute of a module that hides one of its class counts too.
        """
        now, before = self.now, self.before
        if isinstance(now, list):
            return any(map(_other, now, before))
        if not isinstance(now, dict):
            return False
        before = before if isinstance(before, dict) else _as_dict(before)
        shadowed = type(self.owner) if isinstance(self.owner, torch.nn.Module) else None
        return any(_other(x, before.get(name, getattr(shadowed, str(name), None))) for name, x in now.items())


def _other(now, before) -> bool:
    plain = (bool, int, float, str)
    return isinstance(now, plain) and isinstance(before, plain) and not alike(now, before)


def put_back(container: dict, before: dict):
    """Restore a dict from its copy, with the base class's methods: a class of dicts may forbid it, a frozen one say."""
    base = OrderedDict if isinstance(container, OrderedDict) else dict
    for name in container.keys() - before.keys():
        base.__delitem__(container, name)
    for name, value in before.items():
        if name not in container or container[name] is not value:
            base.__setitem__(container, name, value)


@contextlib.contextmanager
def replaced(places: Iterable[tuple[dict, Hashable, object]]):
    """While this is open, each of the dicts has a value under a key, or no entry (ABSENT)."""
    with contextlib.ExitStack() as stack:
        for held, key, value in places:
            stack.callback(_put, held, key, held.get(key, ABSENT))
            _put(held, key, value)
        yield


def _put(held: dict, key: Hashable, value):
    if value is ABSENT:
        held.pop(key, None)
    else:
        held[key] = value


def _pairs(x) -> list:
    return [*x, *x.values()]


def _as_dict(pairs: list) -> dict:
    half = len(pairs) // 2
    return dict(zip(pairs[:half], pairs[half:]))


def class_attributes(cls: type) -> dict:
    """A class's attributes, without those that Python adds when an object is copied or annotations are read."""
    return {name: x for name, x in vars(cls).items() if name not in ON_DEMAND}


def _write_class(cls: type, before: list):
    held, now = _as_dict(before), class_attributes(cls)
    for name in now.keys() - held.keys():
        delattr(cls, name)
    for name, value in held.items():
        if now.get(name, ABSENT) is not value:
            setattr(cls, name, value)


def content(cell: types.CellType) -> tuple:
    """The variable's value, in a tuple of one; an empty tuple while it is not bound."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _write_cell(x: types.CellType, before: tuple):
    if before:
        (x.cell_contents,) = before
    else:
        del x.cell_contents


def _fixed(*_):
    """A `write` for what cannot be restored."""


OF_MODULE = dict, put_back
DICT = _pairs, lambda x, before: put_back(x, _as_dict(before))
SEQUENCE = list, lambda x, before: (x.clear(), (x.update if isinstance(x, set) else x.extend)(before))
CLASS = lambda cls: _pairs(class_attributes(cls)), _write_class
CELL = content, _write_cell
VARIABLE = lambda x: (x.get(ABSENT),), lambda x, before: before[0] is ABSENT or x.set(before[0])
BYTEARRAY = lambda x: (bytes(x),), lambda x, before: x.__setitem__(slice(None), before[0])
ARRAY = lambda x: (bytes(x),), lambda x, before: x.__setitem__(slice(None), array.array(x.typecode, before[0]))
VERSION = lambda x: (x._version,), _fixed
ON_CHIPS = lambda x: (storage(x),), _fixed
OBJECTS = lambda x: [*x.flat], lambda x, before: x.flat.__setitem__(slice(None), before)
MAPPING = _pairs, _fixed
FLAGS = {n: (lambda x, n=n: (getattr(x, n)(),), _fixed) for n in ("is_set", "locked", "is_alive")}
CODE = lambda f: (f.__code__, f.__defaults__, f.__kwdefaults__), _fixed


def of_names(names: tuple[str, ...]) -> tuple[Callable, Callable]:
    """(read, write) for some names of a module or of an object's attributes; they may be missing."""

    def write(namespace: dict, before: list):
        for name, value in zip(names, before):
            _put(namespace, name, value)

    return lambda namespace: [namespace.get(name, ABSENT) for name in names], write


def of_object(slots: tuple[str, ...]) -> tuple[Callable, Callable]:
    """(read, write) for an object's class, its slots, and its dict if it has one."""

    def read(x) -> list:
        return [type(x), *(getattr(x, name, ABSENT) for name in slots), *_pairs(getattr(x, "__dict__", {}))]

    def write(x, before: list):
        if type(x) is not before[0]:
            object.__setattr__(x, "__class__", before[0])
        for name, value in zip(slots, before[1:]):
            if value is not ABSENT:
                object.__setattr__(x, name, value)
            elif hasattr(x, name):
                object.__delattr__(x, name)
        put_back(getattr(x, "__dict__", {}), _as_dict(before[1 + len(slots) :]))

    return read, write


def of_memory(values: np.ndarray, place: Callable[[], object]) -> tuple[Callable, Callable]:
    """(read, write) for an array, or a host tensor with these values; `place`: address and shape. Contiguous: compared in place."""
    at, copy, flat = place(), values.copy(), np.ascontiguousarray(values)
    by_bytes = values.dtype.hasobject or not (flat is values or flat.base is values)

    def same() -> bool:
        if by_bytes or place() != at:
            return place() == at and values.tobytes() == copy.tobytes()
        return bool(np.array_equal(values.reshape(-1).view(np.uint8), copy.reshape(-1).view(np.uint8)))

    def write(_, before):
        if place() == at:
            values[...] = copy

    return lambda _: (same(),), write
