"""`torch.nn.utils.clip_grad_norm_` of gradients that are on the chips: clipped there."""

from collections.abc import Callable

import torch

from .replacing import Replacements, Stand


clip: Callable | None = None  # of weights and a number, once gradients can be there; it gives None where they are not


def replace(replacements: Replacements):
    """Put what this file has in torch's place."""
    stand = Stand(torch.nn.utils.clip_grad, "clip_grad_norm_", _clipped)
    for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
        replacements.put(owner, "clip_grad_norm_", stand)


def _clipped(function, parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None):
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
    if clip is not None and norm_type == 2 and not error_if_nonfinite:
        if (total := clip(parameters, float(max_norm))) is not None:
            return total
    return function(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
