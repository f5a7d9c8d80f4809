"""Guidance branches: consecutive calls that run as one program, with their batches side by side on `dp`.

Upstream's pipelines and guiders call the denoiser once per branch and combine the results afterwards. If `dp` does not divide a
call's batch, the call returns deferred tensors; the call that fills `dp` runs them all. A deferred call holds its values and its
program, so later changes by upstream's code affect only the next call. If a deferred value is needed earlier, or a call of another
kind comes, each deferred call runs alone, on all chips. Calls like them then also run alone, until the pipeline's call ends.
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
    """The deferred calls of one module, kept per thread. `execute(program, calls)` returns the flat outputs of each call."""

    def __init__(self, dp: int, execute):
        self.dp, self.execute = dp, execute
        self.alone: set[tuple] = set()  # key and state of calls that run alone: no second one followed
        self._of_thread = threading.local()

    @property
    def waiting(self) -> list[Waiting]:
        """The deferred calls of the calling thread."""
        return vars(self._of_thread).setdefault("calls", [])

    def side_by_side(self, call: Call) -> int:
        """The number of calls like this one that fill `dp`; 1: each runs alone, on all chips."""
        alone = not call.batch or (call.key, call.state) in self.alone
        return 1 if alone else self.dp // math.gcd(self.dp, call.batch)

    def waits(self, call: Call, program: Program) -> bool:
        """Whether `run` would defer the call until further calls fill `dp`."""
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
        """Run the deferred calls, as a value is needed or a call of another kind came. `waiting`: may be another thread's list."""
        waiting = self.waiting if waiting is None else waiting
        with exclusive.pinned():
            if waiting:
                self.alone.add((waiting[0].call.key, waiting[0].call.state))
                self._execute(waiting[0].program, waiting)

    def forget(self):
        """Discard the deferred calls without running them: the pipeline's call that would use them has failed or ended."""
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
