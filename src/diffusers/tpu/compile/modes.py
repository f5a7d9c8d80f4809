"""In which mode the calls of a module run, and why.

COMPILED   one program per call, or one for each value of its guards
SPLIT      its own lines run eagerly on the chips, its submodules each in a mode of their own (`GraphBreaks`)
EAGER      all of it runs operation by operation on the chips: it draws random numbers, keeps state or writes weights
HOST       it runs on the host
"""

import contextlib
import contextvars
import enum
from collections import Counter
from collections.abc import Callable, Iterator

import jax
import torch

from .. import bridge
from ..common import notices
from ..kernels.settings import bound
from . import tracing
from .call import Call, goes_on_from
from .lru import LRUCache
from .state import State, Trace


MOST_RUN_ONCE = 8
ANY_STATE = "any state"  # replaces the state's key, for a module that each call changes
LEAVES = "a call sees what the one before left in {}"
KEEPS = "hooks, processors or counters keep something from call to call"
DRAWS = "it draws random numbers"
NO_PROGRAM = (tracing.NoProgram, bridge.OperatorNotFound, *bridge.READS)
_running: contextvars.ContextVar[tuple["GraphBreaks", ...]] = contextvars.ContextVar("diffusers_tpu_split", default=())
Mode = enum.Enum("Mode", "COMPILED SPLIT EAGER HOST")


class GraphBreaks:
    """A module that cannot be traced for a `reason`, split at its submodules. Its own lines run eagerly; meanwhile `runners`, made
    by `make`, replace its submodules' `forward`. A submodule that cannot be traced is split in turn.

    Attributes:
        missing: operators that its own lines run on the host, as torchax lacks them.
        host: why the module runs on the host as a whole; None: it does not.
        ran: a call of the split module has returned.
    """

    def __init__(self, module: torch.nn.Module, make: Callable, reason: str):
        self.runners = {name: make(submodule) for name, submodule in submodules(module)}
        self.reason, self.host, self.ran = reason, None, False
        self.missing: dict[str, None] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While this is open, calls of the submodules go to their runners. Operators that run on the host are noted."""
        missing = bridge.environment().missing
        before = Counter(missing)
        with bound(_running, (*_running.get(), self)), contextlib.ExitStack() as stack:
            for runner in self.runners.values():
                stack.callback(runner.put_back)
                runner.replace()
            try:
                yield
            finally:
                theirs = {what for runner in self.runners.values() if runner.split for what in runner.split.missing}
                self.missing |= dict.fromkeys(what for what in missing - before if what not in theirs)

    @property
    def is_running(self) -> bool:
        """Whether the module's own lines are running: a method of the module that they call is part of that call."""
        return self in _running.get()

    def move_to_host(self, name: str, error: Exception):
        """The module runs on the host from here on, as its own lines failed on the chips."""
        self.host = f"{type(error).__name__} ({bridge.line_of(error)}): {error}".splitlines()[0]
        words = f"{name} runs on the host: on the chips its own lines end in {self.host}"
        notices.warn_once(f"host {name} {self.host}", words)

    def is_of(self, module: torch.nn.Module) -> bool:
        """Whether the module's submodules are still those that the runners were made for."""
        now = {name: id(submodule) for name, submodule in submodules(module)}
        return now == {name: id(runner.module) for name, runner in self.runners.items()}


def submodules(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The outermost submodules that can be called, each once; a list of modules cannot, so its items are taken."""
    met = set()
    for name, child in module.named_children():
        inner = submodules(child) if type(child).forward is torch.nn.Module.forward else [("", child)]
        for path, submodule in inner:
            if id(submodule) not in met:
                met.add(id(submodule))
                yield f"{name}.{path}".rstrip("."), submodule


class Modes:
    """The modes of one module. `make`: submodule -> its runner. `most`: states and calls stored. `on_evict()`: per evicted call.

    Attributes:
        split: how the module is split in its current state; None: it is not.
        eager: why calls run eagerly, by program key.
        host: why calls run on the host.
        persistent: containers that each call changes, by hooks, processors or counters, or as attributes that it reads and writes.
        unsteady: why each call had a program of its own; set once this has happened too often.
    """

    def __init__(self, module: torch.nn.Module, make: Callable, most: int, on_evict: Callable[[], None]):
        self.module, self.name, self.make = module, type(module).__name__, make
        self.split: GraphBreaks | None = None
        self._splits: dict[object, GraphBreaks] = LRUCache(most)
        self.eager: dict[tuple, str] = LRUCache(most, on_evict=on_evict)
        self.host: dict[str, None] = {}
        self.persistent: list = []
        self.unsteady: str | None = None
        self._met: list = []  # containers that a trace has changed before
        self._state: State | None = None
        self._last, self._repeats = None, False

    @property
    def never_traced(self) -> bool:
        """Whether no call is traced in any state, as long as the module has its present hooks and attributes."""
        return bool(self.persistent or self.unsteady or (self._state is not None and self._state.unread))

    @property
    def fallback(self) -> Mode:
        """The mode of calls that are not compiled."""
        if self.split is None:
            return Mode.EAGER
        return Mode.HOST if self.split.host else Mode.SPLIT

    def reasons(self) -> Iterator[str]:
        """Why calls are not compiled."""
        yield from (*self.eager.values(), *self.host)
        if self.split is not None:
            yield from filter(None, (self.split.reason, *self.split.missing, self.split.host))

    def follow(self, state: State):
        """Set the mode for the module's new state."""
        self._state = state
        held = state.holds() if self.persistent else ()
        self.persistent = [container for container in self.persistent if id(container) in held]
        split = self._splits.get(self._split_key)
        if split is not None and not split.is_of(self.module):
            self.split_up(split.reason)
        elif split is None and state.unread:
            name, why = next(iter(state.unread.items()))
            reason = f"{name}: {why}".lstrip(": ")
            self._warn(self.name, f"what it reads can be no part of a program's key ({reason})")
            self.split_up(reason)
        else:
            self.split = split

    def of(self, call: Call, within: bool) -> Mode:
        """The mode of this call, before a program is looked for. `within`: the module is a submodule of a split one."""
        cache = None if within else next(filter(goes_on_from, call.others), None)
        if cache is not None:
            # A language model's cached keys and values grow with each call: no shape occurs twice.
            reason = f"each call finds more in the {type(cache).__name__} that it is given"
            self.host[reason] = None
            name = f"{self.name}.{call.entry}"
            words = f"{name} runs on the host where it goes on from what it kept: {reason}"
            notices.warn_once(f"host {name} {reason}", words)
            return Mode.HOST
        self._compare((call.key, self._state.key))
        if call.unread is not None:
            words = f"what it is given can be no part of a key ({call.unread})"
            self._run_eagerly(call, ("given", call.unread), words)
        if self.split is None and not self.never_traced and within and call.others:
            self.split_up(f"it is given a {type(call.others[0]).__name__}")  # its program would not see tensors in it
        unread = call.unread is not None or self.never_traced or self.split is not None
        return self.fallback if unread else Mode.COMPILED

    def _compare(self, key: tuple):
        """If each call had another key, and this one repeats the last call's, the module is traced again."""
        self._repeats, self._last = key == self._last, key
        if self._repeats and self.unsteady is not None:
            self.unsteady = None
            self._splits.pop(ANY_STATE, None)
            self.split = self._splits.get(self._split_key)

    def split_up(self, reason: str):
        """The module is split while it is in this state."""
        self.split = self._splits[self._split_key] = GraphBreaks(self.module, self.make, reason)

    @property
    def _split_key(self):
        return ANY_STATE if self.never_traced else self._state.key

    @contextlib.contextmanager
    def whole_on_error(self) -> Iterator[None]:
        """If a module fails before it ever ran split, the error is upstream's own, due to its arguments: it is split no longer."""
        try:
            yield
        except Exception:
            if not self.split.ran:
                for key in [key for key, split in self._splits.items() if split is self.split]:
                    del self._splits[key]
                self.split = None
            raise

    def runs_once(self, kind: tuple, call: Call, programs: dict, known: dict) -> bool:
        """Whether the last programs of calls like this one ran once each, so that this one would too; the module is then split."""
        alike = [one for (*other, values), one in programs.items() if values and tuple(other) == kind]
        guard = known.get((*kind, ()))
        if guard is not None and len(alike) >= MOST_RUN_ONCE and all(p.calls <= 1 for p in alike[-MOST_RUN_ONCE:]):
            self.split_up(f"its answers are others in each call ({guard.line})")
            return True
        last = [p for p in programs.values() if (p.entry, p.shapes) == (call.entry, call.shapes)][-MOST_RUN_ONCE:]
        if not self._repeats and len(last) == MOST_RUN_ONCE and all(p.calls == 1 for p in last):
            self.unsteady = "its Python state, or what it is given beside tensors, is another in each call"
            self._warn(f"{self.name}.{call.entry}", self.unsteady)
            self.split_up(self.unsteady)
        return self.unsteady is not None

    def has_program(self, error: Exception | None, effects: Trace, call: Call, key: tuple) -> bool:
        """Whether a trace with these effects, or with this error, makes a program; else the call runs in another mode.

        What it changed may be a constant that the first call creates: only what a second trace changes again is persistent. If each
        call changes the state, no call is traced any more.
        """
        changed = effects.persistent if error is None else effects.persistent + effects.temporary
        persists = effects.certain or any(one is other for one in changed for other in self._met)
        self.persistent += changed if persists else []
        self._met += [one for one in changed if not any(one is other for other in self._met)]
        if error is None:
            names = ", ".join(effects.names)
            if effects.draws or persists:
                self._run_eagerly(call, key, DRAWS if effects.draws else LEAVES.format(names) if names else KEEPS)
            return not (effects.persistent or effects.draws)
        reason = reason_of(error)
        if isinstance(error, tracing.WeightWritten):
            self._run_eagerly(call, key, reason)
        else:
            self._warn(f"{self.name}.{call.entry}", reason)
            self.split_up(reason)
        return False

    def _run_eagerly(self, call: Call, key: tuple, reason: str):
        self.eager[key] = reason
        self._warn(f"{self.name}.{call.entry}", reason)

    @staticmethod
    def _warn(name: str, reason: str):
        words = f"{name} is not compiled as it is now, its own lines run on the chips one by one: {reason}"
        notices.warn_once(f"eager {name} {reason}", words)

    def forget(self):
        self.split = None
        self._splits.clear()


def from_libraries(error: Exception) -> bool:
    """Whether torch on our tensors, torchax or JAX could not do what upstream's code asked for.

    An error of a running program does not count. Nor does an error that torch raises on the host too: that is upstream's own,
    unless code that replaces upstream's lines caused it.
    """
    if bridge.is_refused(error):
        return bridge.asked_by_ours(error)
    theirs = isinstance(error, bridge.OperatorNotFound) or bridge.raised_inside(error)
    return theirs and not isinstance(error, jax.errors.JaxRuntimeError)


def reason_of(error: Exception) -> str:
    """Why a trace that ended in this error makes no program."""
    if isinstance(error, tracing.NoProgram):
        return str(error)
    if isinstance(error, bridge.OperatorNotFound):
        return f"torchax lacks an operator ({bridge.line_of(error)})"
    if not isinstance(error, bridge.READS):
        return f"{type(error).__name__} in a trace ({bridge.line_of(error)})"
    return f"it decides by a value ({bridge.line_of(error)})"
