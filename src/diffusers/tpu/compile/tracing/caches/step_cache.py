"""What a cache of upstream's is to a runner: a step for each call, whose tensors are arguments and results of a program."""

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Hashable, Iterator

import torch

from ....bridge import Tensor
from ..scan import Group


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
        undoing: puts back what was decided.
        over: whether one of them has been called.
    """

    kind: Hashable
    tensors: list[torch.Tensor]
    keeping: Callable[[list[torch.Tensor], Hashable], None]
    undoing: Callable[[], None]
    over: bool = False

    def keep(self, results: list[torch.Tensor], form: Hashable):
        """The call has run, and its program gave these."""
        self.over = True
        self.keeping(results, form)

    def undo(self):
        """The call runs otherwise, or has failed."""
        if not self.over:
            self.over = True
            self.undoing()

    @contextlib.contextmanager
    def undone_on_error(self):
        """A call that fails has not been: upstream's hooks count those that came to them only."""
        try:
            yield
        except BaseException:
            self.undo()
            raise


class StepCache:
    """A cache on a model, by hooks of upstream's.

    Attributes:
        HOOKS: names of the hooks' classes.
        hooks: all of them.
        decided: of each of the last calls whether what the cache can spare ran: a bool, or a tensor of them [B].
        left: whether upstream's hooks decide and keep by themselves, for good: no program stands for a step.
    """

    HOOKS: frozenset[str]

    def __init__(self, hooks: list):
        self.hooks, self.decided, self.left = hooks, deque(maxlen=REMEMBERED), False

    @classmethod
    def found(cls, model: torch.nn.Module, hooked: list[tuple], groups: list[Group]) -> "StepCache | None":
        """The cache of these (module, hook) of the model's; None where programs cannot stand for its steps."""
        raise NotImplementedError

    @property
    def apart(self) -> tuple:
        """Objects that programs do not depend on: what is kept, and what is decided by on the host."""
        raise NotImplementedError

    def step(self) -> Step:
        """The step that the call that begins now is, as upstream's hooks would decide it; on the host that is decided then."""
        raise NotImplementedError

    def traced(self, kind: Hashable, tensors: list[Tensor], runs, branches: int) -> Iterator[Results]:
        """Around the model's forward in a trace: gives a list that is filled, at its end, with what the program shall give."""
        raise NotImplementedError

    def leave(self):
        """A call runs otherwise: upstream's hooks themselves go on from what is kept."""

    def reset(self):
        """Nothing is kept any more."""
        for hook in self.hooks:
            hook.reset_state(None)
