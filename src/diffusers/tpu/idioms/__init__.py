"""`torch.cuda`, `torch.compile`, `torch.distributed` and the like for scripts that were written for a GPU.

`on` replaces what such scripts use of torch, once, when diffusers is imported and the path is active; `off` puts torch's own
objects back. Where the path is off torch is unchanged. What each idiom does: `examples/tpu/IDIOMS.md`.
"""

import sys


__all__ = ["off", "on"]

_replacements = None
_others = ()


def on(*others):
    """Replace what scripts for CUDA use of torch, if it is not replaced already. Imports neither JAX nor torchax.

    Args:
        others: modules with a `replace` like those here, called after them; if none, those of the last call that named some.
    """
    global _replacements, _others
    _others = others or _others
    if _replacements is None:
        from . import compiling, cuda, devices, optimizing, overloads, processes
        from .replacing import Replacements

        overloads.serve()  # not undone: it has an effect only where torchax looks overloads up
        _replacements = Replacements()
        for file in (devices, cuda, compiling, processes, optimizing, *_others):
            file.replace(_replacements)
        _forget_devices()


def off():
    """Put torch's own objects back."""
    global _replacements
    if _replacements is not None:
        _replacements.undo()
        _replacements = None
        _forget_devices()


def _forget_devices():
    """Clear the device type that diffusers cached while it was imported."""
    if (found := sys.modules.get("diffusers.utils.torch_utils")) is not None:
        found.TorchDeviceBackend._detect_device_type.cache_clear()
