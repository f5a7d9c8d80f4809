"""`torch.nn.utils.clip_grad_norm_`, and diffusers' `EMAModel.step`, of gradients and weights that are on the chips: there."""

from collections.abc import Callable

import torch

from .replacing import Replacements, Stand


TRAINING = f"{__package__.split('.')[0]}.training_utils"

# Once gradients can be there. `clip`: of weights and a number, None where no gradient is there; `averages`: of weights and their
# averages, what makes these by a decay, for those that are there, by their number.
clip: Callable | None = None
averages: Callable | None = None


def replace(replacements: Replacements):
    """Put what this file has in torch's place."""
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
    """Upstream's step of the averages that are not made on the chips, which also finds the decay."""
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
