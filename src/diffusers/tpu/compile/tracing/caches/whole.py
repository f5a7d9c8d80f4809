"""Caches whose first block decides for all others: `FirstBlockCacheConfig` by values, `MagCacheConfig` by known ratios.

In a trace upstream's hooks run as they are, around the blocks of a run; their states are filled before, and read after. Each branch
that a program has side by side decides for itself: blocks run if one branch needs them.
"""

import contextlib
import functools
import math
import sys
from collections.abc import Iterator
from itertools import repeat
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import torch

from ....bridge import Tensor, environment
from ...state import own_forward
from ...state.watch import replaced
from ..results import NoProgram
from ..scan import Group
from .step_cache import Results, Step, StepCache


class Blocks(StepCache):
    """A cache on a model whose blocks have its `hooks`: the first one's, `head`, decides, and the last one's, `tail`, keeps."""

    def __init__(self, head, tail, hooks: list):
        super().__init__([head, tail])
        self.head, self.tail, self.hooks_of_blocks = head, tail, hooks
        self.manager, self.metadata = head.state_manager, head._metadata
        for hook in (head, tail):  # upstream looks up where a block's arguments are when a hook first runs
            hook._metadata._get_parameter_from_args_kwargs(hook._metadata.hidden_states_argument_name, [None] * 100)

    @classmethod
    def found(cls, model: torch.nn.Module, hooked: list[tuple], groups: list[Group]) -> "Blocks | None":
        """None for a cache that calibrates, and for blocks that are not scanned (`groups`): blocks under a condition must be."""
        scanned = {id(block) for group in groups for block in group.blocks(model)}
        if any(id(module) not in scanned or own_forward(module) is None for module, _ in hooked):
            return None
        if any(getattr(getattr(hook, "config", None), "calibrate", False) for _, hook in hooked):
            return None
        heads = [pair for pair in hooked if pair[1]._is_stateful]
        tails = [pair for pair in hooked if getattr(pair[1], "is_tail", False)]
        if len(heads) != 1 or len(tails) != 1 or heads[0][0] is tails[0][0]:
            return None
        (_, head), (_, tail) = *heads, *tails
        return cls(head, tail, [hook for _, hook in hooked])

    @property
    def apart(self) -> tuple:
        return (self.manager,)

    @property
    def _places(self) -> list[int]:
        """Indices of the hidden states in a block's output, and of the text's if it returns these."""
        places = (self.metadata.return_hidden_states_index, self.metadata.return_encoder_hidden_states_index)
        return [place for place in places if place is not None]

    def _parts(self, output) -> list[torch.Tensor]:
        return [output[place] for place in self._places] if isinstance(output, (tuple, list)) else [output]

    def _with_parts(self, output, parts: list[torch.Tensor]):
        """The block's output with these parts in their places."""
        if not isinstance(output, (tuple, list)):
            return parts[0]
        found = dict(enumerate(output)) | dict(zip(self._places, parts))
        return tuple(found.values())

    def _state(self, state) -> list[tuple]:
        """Replacements by which the manager has this state, whatever the context."""
        context = self.manager._context or SimpleNamespace(name="inference")
        held = vars(self.manager)
        return [(held, "_state_cache", {context.name: state}), (held, "_context", context)]


class FirstBlockCache(Blocks):
    """StepCache: residuals of the first block, and of all others together. The last result says whether the blocks ran, [B]."""

    HOOKS = frozenset({"FBCHeadBlockHook", "FBCBlockHook"})

    def step(self) -> Step:
        state = self.manager.get_state()
        known = state.head_block_residual is not None and state.tail_block_residuals is not None
        tensors = [state.head_block_residual, *state.tail_block_residuals] if known else []

        def keep(results: list[torch.Tensor], form):
            state.head_block_residual, *tails, computed = results
            state.tail_block_residuals = (*tails, None)[:2]
            self.decided.append(computed if known else True)

        tensors = [tensor for tensor in tensors if tensor is not None]
        return Step("later" if known else "first", tensors, keep)

    @contextlib.contextmanager
    def traced(self, kind: str, tensors: list[Tensor], runs, branches: int) -> Iterator[Results]:
        state, results, found = self.manager._state_cls(), Results(), {}
        if kind == "later":
            state.head_block_residual, state.tail_block_residuals = tensors[0], tensors[1:]

        def decide(residual: torch.Tensor) -> bool:
            if kind == "later":
                found["computed"] = self._differs(residual, tensors[0], branches)
                runs.condition = jnp.any(found["computed"])
            return True

        def last(*args, **kwargs):
            output = forward(*args, **kwargs)
            runs.flush()
            runs.condition = None
            head, tails = state.head_block_residual, [t for t in state.tail_block_residuals if t is not None]
            computed = jnp.ones(branches, bool)
            if kind == "later":
                computed, rows = found["computed"], head.shape[0] // branches
                ran = Tensor(jnp.repeat(computed, rows)[:, None, None], environment())
                given = state.head_block_output  # latents, then text, whatever the order of a block's output
                given = [t for t in given if t is not None] if isinstance(given, list) else [given]
                skipped = [before + there for before, there in zip(tensors[1:], given)]
                output = self._with_parts(output, [*map(torch.where, repeat(ran), self._parts(output), skipped)])
                head, *tails = map(torch.where, repeat(ran), [head, *tails], tensors)
            results.extend([head, *tails, Tensor(jnp.repeat(computed, head.shape[0] // branches), environment())])
            return output

        forward = self.tail.fn_ref.forward
        head = vars(self.head), "_should_compute_remaining_blocks", decide
        stand_ins = [head, (vars(self.tail.fn_ref), "forward", last), *self._handed_on()]
        with replaced(stand_ins + self._state(state)):
            yield results

    def _handed_on(self) -> Iterator[tuple]:
        """Replacements of the blocks' forwards that raise NoProgram where a block is not given what the one before it returned: a
        ControlNet's residuals, for one, upstream adds also where blocks are skipped."""
        returned = []

        def checked(hook, forward, *args, **kwargs):
            metadata = hook._metadata
            given = metadata._get_parameter_from_args_kwargs(metadata.hidden_states_argument_name, args, kwargs)
            if returned and not any(given is x for x in returned):
                raise NoProgram("code between blocks changes what they hand on, also where the cache skips them")
            output = forward(*args, **kwargs)
            returned[:] = output if isinstance(output, (tuple, list)) else [output]
            return output

        for hook in self.hooks_of_blocks:
            forward = functools.partial(checked, hook, hook.fn_ref.original_forward)
            yield vars(hook.fn_ref), "original_forward", forward

    def _differs(self, residual: torch.Tensor, before: torch.Tensor, branches: int):
        """For each branch, whether upstream's comparison of a float32 with a float64 finds a difference above the threshold."""
        limit = np.float32(self.head.threshold)
        if float(limit) > self.head.threshold:
            limit = np.nextafter(limit, np.float32(-math.inf))
        pairs = zip(residual.chunk(branches), before.chunk(branches))
        quotients = [(one - other).abs().mean() / other.abs().mean() for one, other in pairs]
        return jnp.stack([quotient.jax().astype(jnp.float32) > limit for quotient in quotients])


class MagCache(Blocks):
    """StepCache: the residual of all blocks together."""

    HOOKS = frozenset({"MagCacheHeadHook", "MagCacheBlockHook"})

    @property
    def apart(self) -> tuple:
        return self.manager, self.head.config, self.tail.config

    def step(self) -> Step:
        if self.manager._context is None:
            self.manager.set_context(sys.modules[type(self.manager).__module__].CacheContext(name="inference"))
        state = self.manager.get_state()
        before, real = dict(vars(state)), state.previous_residual
        one = torch.zeros(1, 1, 1)
        state.previous_residual = None if real is None else one
        self._ask(self.head, one)
        self._ask(self.tail, one)
        computed, lasts = state.should_compute, state.previous_residual is not None
        state.head_block_input, state.previous_residual = None, real if lasts else None

        def keep(results: list[torch.Tensor], form):
            if computed:
                state.previous_residual = results[0] if lasts else None
            self.decided.append(computed)

        return Step("computed" if computed else "skipped", [] if computed else [real], keep, [(state, before)])

    def _ask(self, hook, one: torch.Tensor):
        """Run upstream's hook around a block that returns its input."""
        with replaced([(vars(hook.fn_ref), "original_forward", lambda **given: one)]):
            hook.new_forward(None, **{self.metadata.hidden_states_argument_name: one, "encoder_hidden_states": one})

    @contextlib.contextmanager
    def traced(self, kind: str, tensors: list[Tensor], runs, branches: int) -> Iterator[Results]:
        state, results = self.manager._state_cls(), Results()
        state.previous_residual = tensors[0] if tensors else None
        always = {"mag_ratios": (1.0,), "retention_ratio": 0.0, "threshold": math.inf, "max_skip_steps": math.inf}
        head = SimpleNamespace(calibrate=kind == "computed", num_inference_steps=0, **always)
        tail = SimpleNamespace(calibrate=False, num_inference_steps=math.inf)
        configs = [(vars(self.head), "config", head), (vars(self.tail), "config", tail)]
        with replaced(configs + self._state(state)):
            yield results
        if kind == "computed":
            results.append(state.previous_residual)
