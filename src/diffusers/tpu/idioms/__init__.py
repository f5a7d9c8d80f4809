"""`torch.cuda`, `torch.compile`, `torch.distributed` and the like for scripts that were written for a GPU.

`on` replaces what such scripts use of torch, once, when diffusers is imported and the path is active; `off` puts torch's own
objects back. Where the path is off nothing of torch is touched. What each idiom does: `examples/tpu/IDIOMS.md`.
"""

import sys


__all__ = ["off", "on"]

_replacements = None
_others = ()


def on(*others):
    """Replace what scripts for CUDA use of torch; nothing if it is already. Imports neither JAX nor torchax.

    Args:
        others: modules with a `replace` as those here, which come behind them; those of the first call if none.
    """
    global _replacements, _others
    _others = others or _others
    if _replacements is None:
        from . import compiling, cuda, devices, optimizing, overloads, processes
        from .replacing import Replacements

        overloads.serve()  # for good: it changes nothing but what torchax sees while it is imported
        _replacements = Replacements()
        for file in (devices, cuda, compiling, processes, optimizing, *_others):
            file.replace(_replacements)
        _forget_devices()


def off():
    """torch's own objects, as they were."""
    global _replacements
    if _replacements is not None:
        _replacements.undo()
        _replacements = None
        _forget_devices()


def _forget_devices():
    """What diffusers found out about accelerators while it was imported."""
    if (found := sys.modules.get("diffusers.utils.torch_utils")) is not None:
        found.TorchDeviceBackend._detect_device_type.cache_clear()
