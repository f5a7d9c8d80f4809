"""`PyramidAttentionBroadcastConfig` and `TaylorSeerCacheConfig`: what their modules keep, and what replaces skipped modules."""

import itertools
from collections.abc import Hashable

import jax.numpy as jnp
import torch

from ....bridge import DEVICE, Tensor, environment, numpy_dtype
from ...state.watch import replaced
from ..results import flattened, unflattened
from .modules import Held, Modules, Part


class PyramidAttentionBroadcast(Modules):
    """StepCache: each attention's output. As in upstream, all calls share its state, whatever their branch."""

    HOOKS = frozenset({"PyramidAttentionBroadcastHook"})
    KEPT = "cache"

    @property
    def apart(self) -> tuple:
        """Also the function that returns the timestep: the model's configuration of the cache holds it too."""
        return (*self.hooks, *(hook.current_timestep_callback for hook in self.hooks))

    def _state(self, hook):
        return hook.state

    def _states(self, hook) -> list:
        return [hook.state]

    def _decide(self, hook) -> bool:
        ran = object()
        with replaced([(vars(hook.fn_ref), "original_forward", lambda: ran)]):
            return hook.new_forward(None) is ran

    def _part(self, hook, runs: bool) -> tuple[Part, list[torch.Tensor]]:
        held = Held([], None) if runs else hook.state.cache
        return Part(runs, held.form, held.fills), held.tensors

    def _give_back(self, state, form: Hashable, tensors: list[torch.Tensor]):
        state.cache = unflattened(*form, tensors)

    def _run(self, hook, held: Held, output) -> tuple[list, Hashable]:
        tensors, *form = flattened(output)
        return tensors, tuple(form)

    def _output_of(self, hook, held: Held):
        return unflattened(*held.form, held.tensors)


class TaylorSeer(Modules):
    """StepCache: Taylor factors of each tensor that a module returns, lowest order first; upstream's state computes and sums them.

    A module whose state is inactive returns zeros where it does not run; only shapes are kept of it.
    """

    HOOKS = frozenset({"TaylorSeerCacheHook"})
    KEPT = "taylor_factors"

    def _state(self, hook):
        return hook.state_manager.get_state()

    def _states(self, hook) -> list:
        return [*hook.state_manager._state_cache.values()]

    def _decide(self, hook) -> bool:
        return hook._measure_should_compute()[0]

    def _part(self, hook, runs: bool) -> tuple[Part, list[torch.Tensor]]:
        state, settings = self._state(hook), tuple(hook.state_manager._init_kwargs.items())
        held = state.taylor_factors or Held([], None)
        if state.is_inactive or held.form is None:
            return Part(runs, (settings, None if runs else held.form)), []
        orders, *rest = held.form
        used = tuple(min(order, state.max_order) for order in orders) if runs else orders
        starts = [0, *itertools.accumulate(orders)]
        taken = [place for start, number in zip(starts, used) for place in range(start, start + number)]
        tensors, fills = [held.tensors[place] for place in taken], tuple(held.fills[place] for place in taken)
        elapsed = torch.full(tensors[0].shape[:1], float(state.current_step - state.last_update_step))
        return Part(runs, (settings, (used, *rest)), fills, True), [*tensors, elapsed]

    def _keep(self, state, held: Held):
        state.taylor_factors, state.last_update_step = held, state.current_step

    def _give_back(self, state, form: Hashable, tensors: list[torch.Tensor]):
        if state.is_inactive:
            state.inactive_shapes, state.module_dtypes = zip(*form)
            state.taylor_factors, state.device = {}, DEVICE
        else:
            orders, state.module_dtypes = form
            state.taylor_factors = _by_order(orders, tensors)

    def _run(self, hook, held: Held, output) -> tuple[list, Hashable]:
        state = self._traced(hook, held)
        outputs = [output] if isinstance(output, torch.Tensor) else [*output]
        if state.is_inactive:
            return [], tuple(((x.shape[0] // held.branches, *x.shape[1:]), x.dtype) for x in outputs)
        state.update(tuple(outputs))
        factors = [[*state.taylor_factors[n].values()] for n in range(len(outputs))]
        return sum(factors, []), (tuple(map(len, factors)), state.module_dtypes)

    def _output_of(self, hook, held: Held):
        _, form = held.form
        state = self._traced(hook, held)
        if form is not None and state.is_inactive:
            zeros = [jnp.zeros((held.branches * rows, *shape), numpy_dtype(dtype)) for (rows, *shape), dtype in form]
            outputs = [Tensor(x, environment()) for x in zeros]
        else:  # raises upstream's error if nothing is kept
            _, state.module_dtypes = form or ((), ())
            outputs = state.predict()
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _traced(self, hook, held: Held):
        """One of upstream's states, holding what a program is given."""
        settings, form = held.form
        state = hook.state_manager._state_cls(**dict(settings))
        state.current_step = 0
        if held.elapsed is not None:
            state.taylor_factors = _by_order(form[0], held.tensors)
            state.current_step, state.last_update_step = held.elapsed, 0
        return state


def _by_order(orders: tuple[int, ...], tensors: list) -> dict[int, dict[int, torch.Tensor]]:
    """The Taylor factors of each output, as many as its order says."""
    tensors = iter(tensors)
    return {number: dict(enumerate(itertools.islice(tensors, some))) for number, some in enumerate(orders)}
