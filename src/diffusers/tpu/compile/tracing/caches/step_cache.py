"""One of upstream's caches as a program sees it: a step for each call, whose tensors are arguments and results."""

import dataclasses
from collections import deque
from collections.abc import Callable, Hashable

import torch


REMEMBERED = 1000  # decisions, of the last calls


class Results(list):
    """Tensors that a program gives for a cache to keep. `form`: what is static of them."""

    form: Hashable = None


@dataclasses.dataclass
class Step:
    """What a call does of a cache.

    Attributes:
        kind: static, part of the program's key.
        tensors: kept from calls before, the batch first, that the program is given.
        keeping: takes what the program gives, in the order of `StepCache.traced`'s results, and their form.
        before: states of upstream's hooks, and what their attributes were.
        over: whether `keep` or `undo` has been called.
    """

    kind: Hashable
    tensors: list[torch.Tensor]
    keeping: Callable[[list[torch.Tensor], Hashable], None]
    before: list[tuple[object, dict]] = dataclasses.field(default_factory=list)
    over: bool = False

    def keep(self, results: list[torch.Tensor], form: Hashable):
        """The call has run, and its program gave these."""
        self.over = True
        self.keeping(results, form)

    def undo(self):
        """The states are what they were, if the call runs otherwise or has failed; nothing once it is `over`."""
        if not self.over:
            self.over = True
            for state, attributes in self.before:
                vars(state).update(attributes)


class StepCache:
    """A cache on a model, by hooks of upstream's. Its classes have, beside what is here:

    HOOKS: names of the hooks' classes.
    apart: objects that programs do not depend on: what is kept, and what is decided by on the host.
    found(model, hooked, groups): the cache of these (module, hook); None where programs cannot stand for its steps.
    step(): the `Step` of the call that begins now, as upstream's hooks decide it; on the host that is decided then.
    traced(kind, tensors, runs, branches): around the model's forward in a trace: yields `Results`, filled at its end.

    Attributes:
        hooks: all of them.
        decided: of each of the last calls whether what the cache can spare ran: a bool, or a tensor of them [B].
        left: whether upstream's hooks decide and keep by themselves, for good: no program stands for a step.
    """

    def __init__(self, hooks: list):
        self.hooks, self.decided, self.left = hooks, deque(maxlen=REMEMBERED), False

    def leave(self):
        """A call runs otherwise: upstream's hooks themselves go on from what is kept."""

    def reset(self):
        """Nothing is kept any more."""
        for hook in self.hooks:
            hook.reset_state(None)
