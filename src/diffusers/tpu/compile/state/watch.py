"""What a trace reads and anything may change: what it held, whether it still does, and how it is put back.

Values are compared by identity, plain ones also by type and value: 1, 1.0 and True are three, as are 0.0 and -0.0.
"""

import operator
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

import numpy as np
import torch


PLAIN = (bool, int, str, bytes, type(None))
_ABSENT = object()


def alike(now, before) -> bool:
    """Whether a trace cannot tell one from the other."""
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    return repr(now) == repr(before) if isinstance(now, (float, complex)) else type(now) in PLAIN and now == before


def all_alike(now: tuple | list, before: tuple | list) -> bool:
    return len(now) == len(before) and (all(map(operator.is_, now, before)) or all(map(alike, now, before)))


@dataclass(eq=False)
class Watch:
    """One thing that was read.

    Attributes:
        thing: what is watched: a container, an object, a variable.
        read: what it holds now, as objects in a fixed order.
        write: puts back what `read` gave.
        owner: the module or class whose attributes it holds; None: neither.
        foreign: it belongs to something else than a module of the model: to a hook, a processor, a script.
        name: where it was met.
    """

    thing: object
    read: Callable[[], tuple | list]
    write: Callable[[tuple | list], None]
    owner: object = None
    foreign: bool = False
    name: str = ""
    before: tuple | list = field(init=False)

    def __post_init__(self):
        self.before = self.read()

    def changed(self) -> bool:
        return not all_alike(self.read(), self.before)

    def restore(self):
        self.write(self.before)


# What can be watched, and how


def of_dict(x: dict) -> tuple[Callable, Callable]:
    def write(before: list):
        names, values = before[: len(before) // 2], before[len(before) // 2 :]
        put_back(x, dict(zip(names, values)))

    return lambda: [*x, *x.values()], write


def of_class(cls: type) -> tuple[Callable, Callable]:
    def write(before: list):
        names, values = before[: len(before) // 2], before[len(before) // 2 :]
        held, now = dict(zip(names, values)), vars(cls)
        for name in [name for name in now if name not in held]:
            delattr(cls, name)
        for name, value in held.items():
            if now.get(name, _ABSENT) is not value:
                setattr(cls, name, value)

    return lambda: [*vars(cls), *vars(cls).values()], write


def of_list(x: list | deque) -> tuple[Callable, Callable]:
    def write(before: list):
        x.clear()
        x.extend(before)

    return lambda: [*x], write


def of_set(x: set) -> tuple[Callable, Callable]:
    def write(before: list):
        x.clear()
        x.update(before)

    return lambda: [*x], write


def of_cell(x: types.CellType) -> tuple[Callable, Callable]:
    def write(before: tuple):
        if before:
            (x.cell_contents,) = before
        else:
            del x.cell_contents

    return lambda: content(x), write


def of_names(namespace: dict, names: tuple[str, ...]) -> tuple[Callable, Callable]:
    """Some names of a module, or of the attributes of an object; they may be missing."""

    def write(before: list):
        for name, value in zip(names, before):
            if value is not _ABSENT:
                namespace[name] = value
            else:
                namespace.pop(name, None)

    return lambda: [namespace.get(name, _ABSENT) for name in names], write


def of_object(x, slots: tuple[str, ...]) -> tuple[Callable, Callable]:
    """Its class, its slots, and its dict if it has one."""
    held = getattr(x, "__dict__", {})

    def read() -> list:
        return [type(x), *(getattr(x, name, _ABSENT) for name in slots), *held, *held.values()]

    def write(before: list):
        cls, own, rest = before[0], before[1 : 1 + len(slots)], before[1 + len(slots) :]
        if type(x) is not cls:
            object.__setattr__(x, "__class__", cls)
        for name, value in zip(slots, own):
            if value is not _ABSENT:
                object.__setattr__(x, name, value)
            elif hasattr(x, name):
                object.__delattr__(x, name)
        put_back(held, dict(zip(rest[: len(rest) // 2], rest[len(rest) // 2 :])))

    return read, write


def of_bytes(x) -> tuple[Callable, Callable]:
    """A bytearray, or an array of Python's."""

    def write(before: tuple):
        x[:] = type(x)(before[0]) if isinstance(x, bytearray) else type(x)(x.typecode, before[0])

    return lambda: (bytes(x),), write


def of_variable(x: ContextVar) -> tuple[Callable, Callable]:
    return lambda: (x.get(_ABSENT),), lambda before: x.set(before[0]) if before[0] is not _ABSENT else None


class Bytes:
    """The memory of an array or a host tensor: equal while nothing has written to it. Compared without a copy."""

    def __init__(self, array: np.ndarray, place: Callable[[], int]):
        self.array, self.place = array, place
        self.at, self.copy = place(), array.copy()
        flat = np.ascontiguousarray(array)
        self.contiguous = flat is array or flat.base is array

    def now(self) -> bool:
        """Whether it holds what it held; True is the one answer that counts as no change."""
        if self.place() != self.at:
            return False
        now, before = self.array, self.copy
        if now.dtype.hasobject or not self.contiguous:
            return bool(now.tobytes() == before.tobytes())
        return bool(np.array_equal(now.reshape(-1).view(np.uint8), before.reshape(-1).view(np.uint8)))

    def write(self, before):
        if self.place() == self.at:
            self.array[...] = self.copy


def of_array(x: np.ndarray) -> tuple[Callable, Callable]:
    memory = Bytes(x, lambda: x.__array_interface__["data"][0])
    return lambda: (memory.now(), f"{x.shape} {x.dtype.str}"), memory.write


def of_tensor(x: torch.Tensor, array: np.ndarray) -> tuple[Callable, Callable]:
    """A host tensor whose values are those of `array`, in the same memory."""

    def place() -> tuple[int, int]:
        with torch._C.DisableTorchFunction():
            return x.data_ptr()

    memory = Bytes(array, place)
    return lambda: (memory.now(),), memory.write


def content(cell: types.CellType) -> tuple:
    """What the variable holds, in a tuple of one; none while it is not bound."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def put_back(container: dict, before: dict):
    """The dict holds what its copy does. Past what a class of dicts, a frozen one say, allows its users."""
    base = OrderedDict if isinstance(container, OrderedDict) else dict
    for name in container.keys() - before.keys():
        base.__delitem__(container, name)
    for name, value in before.items():
        if name not in container or container[name] is not value:
            base.__setitem__(container, name, value)


def dicts_differ(now: dict, before: dict) -> bool:
    return now.keys() != before.keys() or not all(alike(now[name], value) for name, value in before.items())


def rewritten(now, before: dict | list, shadowed: type | None = None) -> bool:
    """Whether a number, flag or name that was there has another value: a counter, say. What is merely new does not count.

    `shadowed`: the class whose attributes an instance's may hide: a number that takes the place of the class's counts too.
    """
    if isinstance(now, list):
        return any(_other(x, y) for x, y in zip(now, before))
    if not isinstance(now, dict):
        return False
    return any(
        _other(value, before[name] if name in before else getattr(shadowed, name, None))
        for name, value in now.items()
        if name in before or (shadowed is not None and hasattr(shadowed, name))
    )


def _other(now, before) -> bool:
    plain = (bool, int, float, str)
    return isinstance(now, plain) and isinstance(before, plain) and not alike(now, before)
