"""Guidance branches: calls that follow each other and run as one program, their batches side by side on `dp`.

Upstream's pipelines and guiders call the denoiser once per branch and combine the results afterwards. A call whose batch `dp` does not
divide returns deferred tensors; once as many calls are deferred as `dp` holds, they run. A deferred call holds values and its program:
what upstream's code changes meanwhile is the next call's. If a deferred value is needed before, or a call of another kind comes, the
deferred ones run each by itself, on all chips, as do those like them until the pipeline's call ends.
"""

import functools
import math
import threading
from dataclasses import dataclass, field

from .. import bridge
from ..chips.locks import exclusive
from .call import Call
from .programs import Program


@dataclass
class Waiting:
    """A call that has returned deferred tensors and has not run."""

    call: Call
    program: Program
    outputs: list = field(default_factory=list)


class GuidanceBatcher:
    """The deferred calls of one module, of each thread its own. `execute(program, calls)` gives the flat outputs of each call."""

    def __init__(self, dp: int, execute):
        self.dp, self.execute = dp, execute
        self.alone: set[tuple] = set()  # key and state of calls that nothing came beside
        self._of_thread = threading.local()

    @property
    def waiting(self) -> list[Waiting]:
        """Those of the calling thread."""
        return vars(self._of_thread).setdefault("calls", [])

    def side_by_side(self, call: Call) -> int:
        """How many calls like this one fill `dp`; 1: each runs alone, on all chips."""
        alone = not call.batch or (call.key, call.state) in self.alone
        return 1 if alone else self.dp // math.gcd(self.dp, call.batch)

    def waits(self, call: Call, program: Program) -> bool:
        """Whether the call will be deferred until others come."""
        if program.branches == 1 or not bridge.environment().active:
            return False
        beside = len(self.waiting) if self.waiting and self.waiting[0].call.pairs_with(call) else 0
        return beside + 1 < program.branches

    def run(self, call: Call, program: Program) -> list:
        """The call's flat outputs: arrays, or deferred tensors."""
        if self.waiting and not self.waiting[0].call.pairs_with(call):
            self.finish()
        if len(self.waiting) + 1 >= program.branches or not bridge.environment().active:
            return self._execute(program, self.waiting, call)[-1]
        one = Waiting(call, program)
        compute = functools.partial(self._needed, one, self.waiting)
        one.outputs = [bridge.Deferred(aval, compute) for aval in program.avals]
        self.waiting.append(one)
        return one.outputs

    def finish(self, waiting: list[Waiting] | None = None):
        """Run what is deferred: a value of it is needed, or a call of another kind comes. `waiting`: another thread's perhaps."""
        waiting = self.waiting if waiting is None else waiting
        with exclusive.pinned():
            if waiting:
                self.alone.add((waiting[0].call.key, waiting[0].call.state))
                self._execute(waiting[0].program, waiting)

    def forget(self):
        """What is deferred is not run: who would have asked for it has failed, or has ended."""
        self.waiting.clear()
        self.alone.clear()

    def _needed(self, one: Waiting, beside: list[Waiting]):
        with exclusive:
            if any(other is one for other in beside):
                self.finish(beside)
            elif one.outputs[0].waits:
                raise RuntimeError(f"expected a value of {one.program.name}, got none: its run has failed before")

    def _execute(self, program: Program, waiting: list[Waiting], *calls: Call) -> list[list]:
        taken, waiting[:] = [*waiting], []
        results = self.execute(program, [*(one.call for one in taken), *calls])
        for one, arrays in zip(taken, results):
            for output, array in zip(one.outputs, arrays):
                output.settle(array)
        return results
