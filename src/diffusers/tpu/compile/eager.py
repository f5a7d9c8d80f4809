"""What no program can stand for, and why: such calls run eagerly, upstream's Python operation by operation on the chips."""

import contextlib
from collections.abc import Callable, Iterable

import jax
import torch
from jax.sharding import Mesh, PartitionSpec
from torch.utils._pytree import tree_map_only

from .. import bridge, notices
from ..chips.sharding import named
from ..weights.checkpoint import settled
from . import tracing
from .call import Call
from .guards import MOST_RUN_ONCE
from .recent import Recent
from .state import State, Trace


NO_PROGRAM = (
    tracing.WeightWritten,
    bridge.OperatorNotFound,
    tracing.Entangled,
    tracing.Opaque,
    tracing.NotOnce,
    *bridge.READS,
)
LEAVES = "a call sees what the one before left in {}"
KEEPS = "hooks, processors or counters keep something from call to call"
DRAWS = "it draws random numbers"


class EagerFallback:
    """The calls of one module that no program stands for. `most`: kinds of them that are kept; `forget` is called for each that
    is not any more.

    Attributes:
        reasons: why, by call and state.
        on_host: why others run on the host.
        kept: what hooks, processors or counters change in each call, or attributes that a call reads and writes.
        unread: what the module has that no key can be made of, and why.
        fickle: why each call had a program of its own, once so many had that another one is not worth it.
    """

    def __init__(self, name: str, most: int, forget: Callable[[], None]):
        self.name = name
        self.reasons: dict[tuple, str] = Recent(most, then=forget)
        self.on_host: dict[str, None] = {}
        self.kept: list = []
        self.unread: dict[str, str] = {}
        self.fickle: str | None = None
        self._last: tuple | None = None
        self._repeats = False
        self._once: list = []

    def look_at(self, state: State):
        """What the module no longer has keeps nothing."""
        held = state.holds() if self.kept else ()
        self.kept = [container for container in self.kept if id(container) in held]
        self.unread = state.unread

    @property
    def lasting(self) -> bool:
        """Whether no call is traced while the module has what it has."""
        return bool(self.kept or self.unread or self.fickle)

    def is_fickle(self, call: Call, programs: Iterable) -> bool:
        """Whether the last programs for shapes like this call's ran once each, so that this one would too."""
        last = [one for one in programs if (one.entry, one.shapes) == (call.entry, call.shapes)][-MOST_RUN_ONCE:]
        if not self._repeats and len(last) == MOST_RUN_ONCE and all(one.calls == 1 for one in last):
            self.fickle = "its Python state, or what it is given beside tensors, is another in each call"
            self.say(call, self.fickle)
        return self.fickle is not None

    def steadies(self, key: tuple) -> bool:
        """Whether a module that was another in each call is now what it was in the last one."""
        self._repeats, self._last = key == self._last, key
        was, self.fickle = self.fickle, None if self._repeats else self.fickle
        return was is not self.fickle

    def because_of(self, effects: Trace, call: Call, key: tuple) -> bool:
        """Whether a trace with these effects is of no use, and the call runs eagerly.

        What it changed for good may be a constant that the first call makes: only what a second trace changes again is
        kept from call to call.
        """
        if effects.draws:
            self.add(call, key, DRAWS)
        elif effects.certain or any(one is other for one in effects.persistent for other in self._once):
            self.kept += effects.persistent
            self.add(call, key, LEAVES.format(", ".join(effects.names)) if effects.names else KEEPS)
        self._met(effects.persistent)
        return bool(effects.persistent or effects.draws)

    def _met(self, containers: list):
        met = {*map(id, self._once)}
        self._once += [container for container in containers if id(container) not in met]

    def fails(self, error: Exception, effects: Trace, call: Call, key: tuple) -> str | None:
        """The trace ended in this error. Why the module comes apart; None: it does not, calls like this one run eagerly.

        Where each such call changes the state too, none is traced any more.
        """
        changed = effects.persistent + effects.temporary
        if any(one is other for one in changed for other in self._once):
            self.kept += changed
        self._met(changed)
        reason = reason_of(error)
        if isinstance(error, tracing.WeightWritten):
            return self.add(call, key, reason)
        self.say(call, reason)
        return reason

    def add(self, call: Call, key: tuple, reason: str):
        self.reasons[key] = reason
        self.say(call, reason)

    def cannot_read(self) -> str:
        """Why no key can be made of the module; said."""
        name, why = next(iter(self.unread.items()))
        reason = f"{name}: {why}".lstrip(": ")
        notices.warn_once(
            f"unread {self.name} {reason}",
            f"{self.name} is not compiled as it is now, its own lines run on the chips one by one: what it reads can be no part"
            f" of a program's key ({reason})",
        )
        return reason

    def put_on_host(self, call: Call, reason: str):
        name = f"{self.name}.{call.entry}"
        self.on_host[reason] = None
        notices.warn_once(
            f"host {name} {reason}", f"{name} runs on the host where it goes on from what it kept: {reason}"
        )

    def say(self, call: Call, reason: str):
        name = f"{self.name}.{call.entry}"
        notices.warn_once(
            f"eager {name} {reason}",
            f"{name} is not compiled as it is now, its own lines run on the chips one by one: {reason}",
        )


def from_libraries(error: Exception) -> bool:
    """Whether torch on our tensors, torchax or JAX could not do what upstream's code asked of them.

    A program that fails when it runs is another thing. So is what torch refuses on the host too: upstream's own error, unless
    it was asked by what stands in the place of upstream's lines.
    """
    if bridge.is_refused(error):
        return bridge.asked_by_ours(error)
    theirs = isinstance(error, bridge.OperatorNotFound) or bridge.raised_inside(error)
    return theirs and not isinstance(error, jax.errors.JaxRuntimeError)


def run_on_host(module: torch.nn.Module, method: Callable, args: tuple, kwargs: dict, mesh: Mesh):
    """What the module's method answers in plain torch; on the chips again where glue handles device tensors."""
    env = bridge.environment()
    settled(list(module.parameters()), list(module.buffers()))
    args, kwargs = tree_map_only(bridge.DEVICE_TENSORS, env.host, (args, kwargs))
    with env.left(), torch.inference_mode(False), torch.no_grad():
        output = method(*args, **kwargs)
    if not env.active:
        return output
    everywhere = named(mesh, PartitionSpec())
    return tree_map_only(torch.Tensor, lambda t: bridge.to_torch(bridge.to_jax(t, everywhere)), output)


def reason_of(error: Exception) -> str:
    """In words, why a trace that ended so makes no program."""
    if isinstance(error, tracing.WeightWritten):
        return f"it writes into {error}"
    if isinstance(error, tracing.Opaque):
        return "it answers with more than tensors and plain values"
    if isinstance(error, tracing.Entangled):
        return str(error)
    if isinstance(error, bridge.OperatorNotFound):
        return f"torchax lacks an operator ({bridge.line_of(error)})"
    if not isinstance(error, bridge.READS):
        return f"{type(error).__name__} in a trace ({bridge.line_of(error)})"
    return f"it decides by a value ({bridge.line_of(error)})"


@contextlib.contextmanager
def random_state_kept(call: Call):
    """What a trace draws is drawn again by the call itself."""
    generators = [torch.default_generator, *(leaf for leaf in call.leaves if isinstance(leaf, torch._C.Generator))]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states):
            generator.set_state(state)
