"""One of upstream's caches as programs see it: a step for each call, whose tensors are arguments and results."""

import dataclasses
from collections import deque
from collections.abc import Callable, Hashable

import torch


REMEMBERED = 1000  # decisions of the last calls


class Results(list):
    """Tensors that a program returns for a cache to keep. `form`: their static form."""

    form: Hashable = None


@dataclasses.dataclass
class Step:
    """What a call does with a cache.

    Attributes:
        kind: static, part of the program's key.
        tensors: kept from earlier calls, the batch first; arguments of the program.
        keeping: called with the program's results, in the order of `StepCache.traced`'s, and their form.
        before: states of upstream's hooks, and their former attributes.
        over: whether `keep` or `undo` has been called.
    """

    kind: Hashable
    tensors: list[torch.Tensor]
    keeping: Callable[[list[torch.Tensor], Hashable], None]
    before: list[tuple[object, dict]] = dataclasses.field(default_factory=list)
    over: bool = False

    def keep(self, results: list[torch.Tensor], form: Hashable):
        """The call has run, and its program returned these."""
        self.over = True
        self.keeping(results, form)

    def undo(self):
        """Restore the states, as the call runs otherwise or has failed; does nothing once it is `over`."""
        if not self.over:
            self.over = True
            for state, attributes in self.before:
                vars(state).update(attributes)


class StepCache:
    """A cache on a model, by upstream's hooks. Its classes have, beside what is here:

    HOOKS: names of the hooks' classes.
    apart: objects that programs do not depend on: what is kept, and what decisions on the host are made by.
    found(model, hooked, groups): the cache of these (module, hook); None if its steps cannot be compiled.
    step(): the `Step` of the call that begins now, as upstream's hooks decide; those that decide on the host do it then.
    traced(kind, tensors, runs, branches): around the model's forward in a trace: yields `Results`, filled at its end.

    Attributes:
        hooks: all of them.
        decided: for each of the last calls, whether the part that the cache can skip ran: a bool, or a tensor [B].
        left: whether upstream's hooks decide and keep by themselves, for good: no step is compiled.
    """

    def __init__(self, hooks: list):
        self.hooks, self.decided, self.left = hooks, deque(maxlen=REMEMBERED), False

    def leave(self):
        """A call runs in another mode: upstream's hooks themselves continue from what is kept."""

    def reset(self):
        """Forget what is kept."""
        for hook in self.hooks:
            hook.reset_state(None)
