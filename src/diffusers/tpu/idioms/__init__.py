"""`torch.cuda`, `torch.compile`, `torch.distributed` and the like for scripts that were written for a GPU.

`on` replaces what such scripts use of torch, once, when diffusers is imported and the path is active; `off` puts torch's own
objects back. Where the path is off nothing of torch is touched. What each idiom does: `examples/tpu/IDIOMS.md`.

| file | idioms |
|---|---|
| `devices` | where tensors, modules and generators are put |
| `cuda`, `streams`, `chips` | `torch.cuda`, `torch.accelerator`: what is asked of the device |
| `compiling` | `torch.compile`, `Module.compile` |
| `processes` | `torch.distributed`: a process for each GPU |
| `modes` | `torch.inference_mode`, `torch.autocast` |
| `xla`, `overloads` | torch_xla beside us; torchax imported by a script |
| `refusing` | quantization, gradients: what cannot be honoured |
"""

import sys


__all__ = ["is_on", "off", "on"]

_replacements = None
_others = ()


def is_on() -> bool:
    """Whether torch's functions are replaced now."""
    return _replacements is not None


def on(*others):
    """Replace what scripts for CUDA use of torch; nothing if it is already. Imports neither JAX nor torchax.

    others: switched on behind all that is here, by `switch_on`, and off first, by `switch_off`; those of the first call if none.
    """
    global _replacements, _others
    if _replacements is None:
        from . import compiling, cuda, devices, modes, overloads, processes, xla
        from .replacing import Replacements

        _replacements = Replacements()
        for file in (devices, cuda, compiling, modes, xla, processes):
            file.replace(_replacements)
        overloads.serve()  # for good: it changes nothing but what torchax sees while it is imported
        _others = others or _others
        for other in _others:
            other.switch_on()
        _forget_devices()


def off():
    """torch's own objects, as they were."""
    global _replacements
    if _replacements is not None:
        for other in _others:
            other.switch_off()
        _replacements.undo()
        _replacements = None
        _forget_devices()


def _forget_devices():
    """What diffusers found out about accelerators while it was imported."""
    found = sys.modules.get("diffusers.utils.torch_utils")
    if found is not None:
        found.TorchDeviceBackend._detect_device_type.cache_clear()
