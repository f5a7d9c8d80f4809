"""`torch.nn.utils.clip_grad_norm_` and diffusers' `EMAModel.step`: computed on the chips for gradients and weights there."""

from collections.abc import Callable

import torch

from .replacing import Replacements, Stand


TRAINING = f"{__package__.split('.')[0]}.training_utils"

# Set once gradients can be on the chips. `clip(weights, max_norm)` returns the norm, or None where the chips hold no gradients.
# `averages(weights, averages)` returns, by index of each average that the chips can make, a function of the decay that makes it.
clip: Callable | None = None
averages: Callable | None = None


def replace(replacements: Replacements):
    stand = Stand(torch.nn.utils.clip_grad, "clip_grad_norm_", _clipped)
    for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
        replacements.put(owner, "clip_grad_norm_", stand)
    replacements.when_imported(TRAINING, lambda module: replacements.wrap(module.EMAModel, "step", _averaged))


def _clipped(function, parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None):
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
    if clip is not None and norm_type == 2 and not error_if_nonfinite:
        if (total := clip(parameters, float(max_norm))) is not None:
            return total
    return function(parameters, max_norm, norm_type, error_if_nonfinite, foreach)


def _averaged(step, ema, parameters):
    """Upstream's step, which also computes the decay, for averages not made on the chips; then the others."""
    if averages is None or isinstance(parameters, torch.nn.Module):
        return step(ema, parameters)
    parameters, shadows, foreach = [*parameters], ema.shadow_params, ema.foreach
    there = averages(parameters, shadows)
    rest = [n for n in range(len(parameters)) if n not in there]
    ema.shadow_params, ema.foreach = [shadows[n] for n in rest], foreach and bool(rest)
    try:
        step(ema, [parameters[n] for n in rest])
    finally:
        ema.shadow_params, ema.foreach = shadows, foreach
    for average in dict.fromkeys(there.values()):
        average(ema.cur_decay_value)
