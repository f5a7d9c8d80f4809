"""`torch.inference_mode` and `torch.autocast` on the TPU path.

Inference mode is `torch.no_grad` here: the same values. Its tensors have no version, by which weights that were changed
are known, and under it torch does not take its composite operators apart, which torchax needs.
Autocast to an accelerator does nothing: models compute in their own dtype, as the compiler sees it.
"""

import functools

import torch

from ..notices import warn_once
from .devices import names_accelerator
from .replacing import Replacements


def replace(replacements: Replacements):
    """Put what this file has in torch's place."""
    mode = torch.autograd.grad_mode.inference_mode
    replacements.put(mode, "__enter__", _entered(mode.__enter__))
    autocast = torch.amp.autocast_mode.autocast
    replacements.put(autocast, "__init__", _without_accelerator(autocast.__init__))


def _entered(enter):
    @functools.wraps(enter)
    def __enter__(self):
        if not self.mode:
            return enter(self)
        self._inference_mode_context = torch.no_grad()
        self._inference_mode_context.__enter__()

    return __enter__


def _without_accelerator(init):
    @functools.wraps(init)
    def __init__(self, device_type, dtype=None, enabled=True, cache_enabled=None):
        if isinstance(device_type, str) and names_accelerator(device_type):
            if enabled:
                warn_once(
                    "autocast", "torch.autocast: on the TPU path models compute in their own dtype; load them in it"
                )
            device_type, enabled = "cuda", False
        init(self, device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

    return __init__
