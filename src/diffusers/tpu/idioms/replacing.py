"""Replaces attributes of torch while the idioms are on, and restores them."""

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from types import MethodType, ModuleType


_ABSENT = object()


class Replacements:
    """The replaced attributes, in order; `undo` restores every owner's own attributes."""

    def __init__(self):
        self._before: list[tuple[object, str, object]] = []
        self._finders: list[OnImport] = []

    def put(self, owner, attribute: str, value):
        self._before.append((owner, attribute, vars(owner).get(attribute, _ABSENT)))
        setattr(owner, attribute, value)

    def wrap(self, owner, attribute: str, call: Callable):
        """Replace the owner's function or class method by one that returns `call(original, *args, **kwargs)`."""
        own = vars(owner)[attribute]
        original = own.__func__ if isinstance(own, classmethod) else own

        @functools.wraps(original)
        def run(*args, **kwargs):
            return call(original, *args, **kwargs)

        self.put(owner, attribute, classmethod(run) if isinstance(own, classmethod) else run)

    def when_imported(self, name: str, then: Callable[[ModuleType], None]):
        """Call `then` with the module of this name: now if it is imported, else right after its import."""
        if name in sys.modules:
            return then(sys.modules[name])
        self._finders.append(OnImport(name, then))
        sys.meta_path.insert(0, self._finders[-1])

    def undo(self):
        while self._finders:
            sys.meta_path.remove(self._finders.pop())
        while self._before:
            owner, attribute, value = self._before.pop()
            delattr(owner, attribute) if value is _ABSENT else setattr(owner, attribute, value)


class OnImport(importlib.abc.MetaPathFinder):
    """An import hook: `then` is called with the module of this name right after it is executed."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]):
        self.name, self.then = name, then

    def find_spec(self, name: str, path, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name == self.name else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def run(module):
                execute(module)
                self.then(module)

            spec.loader.exec_module = run
        return spec


class StandingType(type):
    """The type of classes that replace one of torch's, `__wrapped__`, and equal it in sets and dicts. A call returns
    `make(original, ...)`, an object of torch's class. `isinstance` accepts those; the class has no instances of its own."""

    def __call__(cls, *args, **kwargs):
        return cls.make(cls.__wrapped__, *args, **kwargs)

    def __instancecheck__(cls, instance):
        return isinstance(instance, cls.__wrapped__)

    def __subclasscheck__(cls, subclass):
        return subclass is cls or issubclass(subclass, cls.__wrapped__)

    def __eq__(cls, other):
        return other is cls or other is cls.__wrapped__

    def __hash__(cls):
        return hash(cls.__wrapped__)


class Stand:
    """A callable that replaces one of torch's and equals it in sets and dicts.

    torch, torchax and others keep tables of torch's functions: a lookup with either callable succeeds, whenever the table was
    made. As an attribute of a class it is a method.
    """

    def __init__(self, owner: type | ModuleType, name: str, call: Callable):
        self.__wrapped__, self._call = getattr(owner, name), call
        self.__name__, self.__doc__ = self.__wrapped__.__name__, self.__wrapped__.__doc__
        if isinstance(owner, type):
            self.__module__, self.__qualname__ = owner.__module__, f"{owner.__qualname__}.{name}"
        else:
            self.__module__, self.__qualname__ = owner.__name__, name

    def __call__(self, *args, **kwargs):
        return self._call(self.__wrapped__, *args, **kwargs)

    def __get__(self, instance, owner=None):
        return self if instance is None else MethodType(self, instance)

    def __eq__(self, other):
        return other is self.__wrapped__ or (isinstance(other, Stand) and other.__wrapped__ is self.__wrapped__)

    def __hash__(self):
        return hash(self.__wrapped__)

    def __repr__(self):
        return repr(self.__wrapped__)

    def __reduce__(self):
        return self.__qualname__
