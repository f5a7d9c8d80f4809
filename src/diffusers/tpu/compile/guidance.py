"""Guidance branches: calls that follow each other and run as one program, their batches side by side on `dp`.

Upstream's pipelines and guiders call the denoiser once per branch (two for classifier-free guidance, three and more for
perturbed attention and layer skip) and combine the results afterwards. A call whose batch `dp` does not divide answers with
tensors that wait; once as many wait as `dp` holds, they run. What waits holds values (`calls.Values`) and its own program: what
upstream's code changes meanwhile, in its tensors or in the module, is the next call's. If a waiting value is needed before, or
another kind of call comes, those that wait run at once, the program filled with the last of them: chips of `dp` would idle otherwise.
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
    """A call that has answered with deferred tensors and has not run."""

    call: Call
    program: Program
    outputs: list = field(default_factory=list)


class _OfThread(threading.local):
    def __init__(self):
        self.calls: list[Waiting] = []


class GuidanceBatcher:
    """The waiting calls of one module, of each thread its own. `execute(program, calls)` gives the flat outputs of each call."""

    def __init__(self, dp: int, execute):
        self.dp, self.execute = dp, execute
        self._of_thread = _OfThread()

    @property
    def waiting(self) -> list[Waiting]:
        """Those of the calling thread."""
        return self._of_thread.calls

    def side_by_side(self, call: Call) -> int:
        """How many calls like this one fill `dp`; 1: each runs alone, on all chips."""
        return 1 if not call.batch else self.dp // math.gcd(self.dp, call.batch)

    def run(self, call: Call, program: Program) -> list:
        """The call's flat outputs: arrays, or tensors that wait for the calls to come."""
        if self.waiting and not self.waiting[0].call.pairs_with(call):
            self.finish()
        if len(self.waiting) + 1 < program.branches and bridge.environment().active:
            return self._defer(call, program)
        waiting = _taken(self.waiting)
        *before, mine = self.execute(program, [*(one.call for one in waiting), call])
        self._settle(waiting, before)
        return mine

    def finish(self, calls: list[Waiting] | None = None):
        """Run what waits: a value of it is needed, or a call of another kind comes. `calls`: another thread's perhaps."""
        with exclusive.pinned():
            waiting = _taken(self.waiting if calls is None else calls)
            if waiting:
                self._settle(waiting, self.execute(waiting[0].program, [one.call for one in waiting]))

    def forget(self):
        """What waits is not run: who would have asked for it has failed."""
        self.waiting.clear()

    def _defer(self, call: Call, program: Program) -> list:
        waiting = Waiting(call, program)
        compute = functools.partial(self._needed, waiting, self.waiting)
        waiting.outputs = [bridge.deferred(aval, compute) for aval in program.avals]
        self.waiting.append(waiting)
        return waiting.outputs

    def _needed(self, waiting: Waiting, beside: list[Waiting]):
        with exclusive:
            if any(one is waiting for one in beside):
                self.finish(beside)
            elif waiting.outputs[0].waits:
                raise RuntimeError(f"expected a value of {waiting.program.name}, got none: its run has failed before")

    @staticmethod
    def _settle(waiting: list[Waiting], results: list):
        for one, arrays in zip(waiting, results):
            for output, array in zip(one.outputs, arrays):
                output.settle(array)


def _taken(waiting: list[Waiting]) -> list[Waiting]:
    taken = [*waiting]
    waiting.clear()
    return taken
