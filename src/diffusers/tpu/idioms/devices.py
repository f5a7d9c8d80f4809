"""Where a script puts a tensor: "cuda", "tpu" and the like name the TPU, and what is put there is a host tensor.

Pipelines and models take host tensors and move them to the chips themselves. So `torch.randn(..., device="cuda")`,
`x.to(pipe.device)` and `torch.Generator("cuda")` give what they give on the CPU: the same values, the same draws.
Inside of the pipelines' own environment torchax decides what a device means.

The functions that take a device are replaced one by one: a mode of torch's would cost every call of every function, would
close torch's fast paths, and would be missing in threads.
"""

import threading

import torch

from ..config import ACCELERATORS
from .replacing import Replacements, Stand, StandingType


HOST = torch.device("cpu")
_DEVICES = (*ACCELERATORS, "privateuseone")


class _Inside(threading.local):
    depth = 0


inside = _Inside()  # of this thread: how often the pipelines' own environment is entered, kept by the bridge


def names_accelerator(device) -> bool:
    """Whether this names the TPU: "cuda", "tpu:0", a `torch.device`, or an index."""
    if isinstance(device, str):
        return device.partition(":")[0] in _DEVICES
    if isinstance(device, torch.device):
        return device.type in _DEVICES
    return isinstance(device, int) and not isinstance(device, bool)


def hosted(device):
    """The device where a tensor that is meant for this one is kept."""
    return HOST if names_accelerator(device) else device


CONSTRUCTORS = (
    "arange as_tensor asarray bartlett_window blackman_window empty empty_like empty_permuted empty_quantized empty_strided"
    " eye from_file full full_like hamming_window hann_window kaiser_window linspace logspace normal ones ones_like rand"
    " rand_like randint randint_like randn randn_like randperm range scalar_tensor sparse_bsc_tensor sparse_bsr_tensor"
    " sparse_compressed_tensor sparse_coo_tensor sparse_csc_tensor sparse_csr_tensor tensor tril_indices triu_indices"
    " zeros zeros_like"
).split()
NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


def replace(replacements: Replacements):
    """Put what this file has in torch's place."""
    owners = [(torch, "torch", CONSTRUCTORS), (torch.fft, "torch.fft", ("fftfreq", "rfftfreq"))]
    for owner, module, names in owners:
        for name in names:
            _stand(replacements, owner, name, _made, module, name)
    for name in NEW:
        _stand(replacements, torch.Tensor, name, _made, "torch", f"Tensor.{name}")
    for name, call in (
        ("to", _moved),
        ("cuda", _to_accelerator),
        ("pin_memory", _pinned),
        ("type", _typed),
        ("type_as", _alike),
    ):
        _stand(replacements, torch.Tensor, name, call, "torch", f"Tensor.{name}")
    for storage in (torch.storage._StorageBase, torch.TypedStorage):
        _stand(replacements, storage, "cuda", _kept, storage.__module__, f"{storage.__name__}.cuda")
    _stand(replacements, torch.nn.Module, "to", _module_moved, "torch.nn", "Module.to")
    _stand(replacements, torch, "load", _loaded, "torch", "load")
    _stand(replacements, torch, "set_default_tensor_type", _default_type, "torch", "set_default_tensor_type")
    replacements.put(torch, "Generator", Generator)
    replacements.put(torch, "device", device)
    context = torch.utils._device.DeviceContext
    replacements.put(context, "__init__", _with_hosted_device(context.__init__))


def _stand(replacements: Replacements, owner, name: str, call, module: str, qualname: str):
    original = getattr(owner, name)
    stand = Stand(original, call, module, qualname)
    replacements.put(owner, name, stand)
    builtins = torch.jit._builtins
    if builtins._builtin_table is not None and (operator := builtins._find_builtin(original)) is not None:
        builtins._register_builtin(stand, operator)  # torch.jit.script knows functions by their ids


def _made(function, *args, **kwargs):
    """A new tensor."""
    if not inside.depth:
        if names_accelerator(kwargs.get("device")):
            kwargs["device"] = HOST
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        for arg in args:
            if isinstance(arg, torch.device):
                args = tuple(hosted(arg) if isinstance(arg, torch.device) else arg for arg in args)
                break
    return function(*args, **kwargs)


def _moved(function, tensor, *args, **kwargs):
    """`Tensor.to`: a device, a dtype, both, or another tensor's."""
    if inside.depth:
        return function(tensor, *args, **kwargs)
    if names_accelerator(kwargs.get("device")):
        kwargs["device"] = HOST
    if args and (isinstance(args[0], (str, torch.device)) or type(args[0]) is int):
        args = (hosted(args[0]), *args[1:])
    else:
        other = args[0] if args else kwargs.get("other")
        if isinstance(other, torch.Tensor) and names_accelerator(other.device):
            kwargs.pop("other", None)
            return function(tensor, HOST, other.dtype, *args[1:], **kwargs)
    return function(tensor, *args, **kwargs)


def _to_accelerator(function, tensor, device=None, non_blocking=False, memory_format=torch.preserve_format):
    if inside.depth:
        return tensor.to("cuda")
    return tensor.to(device=HOST, non_blocking=non_blocking, memory_format=memory_format)


def _pinned(function, tensor, device=None):
    return tensor if not inside.depth else function(tensor)


def _typed(function, tensor, dtype=None, *args, **kwargs):
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.")
    return function(tensor, dtype, *args, **kwargs)


def _alike(function, tensor, other):
    if not inside.depth and names_accelerator(other.device):
        return tensor.to(HOST, other.dtype)
    return function(tensor, other)


def _kept(function, storage, *args, **kwargs):
    return storage


def _module_moved(function, module, *args, **kwargs):
    if not inside.depth:
        if args and (isinstance(args[0], (str, torch.device)) or type(args[0]) is int):
            args = (hosted(args[0]), *args[1:])
        if names_accelerator(kwargs.get("device")):
            kwargs["device"] = HOST
    return function(module, *args, **kwargs)


def _loaded(function, f, map_location=None, *args, **kwargs):
    """`torch.load`: what a file says was on a GPU comes to the host, where nothing else is asked for too."""
    if map_location is None or names_accelerator(map_location):
        map_location = HOST
    elif isinstance(map_location, dict):
        map_location = {key: hosted(value) for key, value in map_location.items()}
    return function(f, map_location, *args, **kwargs)


def _default_type(function, kind):
    return function(kind.replace("torch.cuda.", "torch.") if isinstance(kind, str) else kind)


def _with_hosted_device(init):
    def __init__(self, device):
        init(self, hosted(device))

    return __init__


class Generator(metaclass=StandingType, original=torch.Generator):
    """torch's own generator, of the CPU where an accelerator is named: it gives there the noise it gives everywhere."""

    @staticmethod
    def make(original, device="cpu"):
        return original(device=hosted(device))


class device(metaclass=StandingType, original=torch.device):
    """torch's own device. Indices, and names that torch does not know, are the TPU's, which it calls "cuda"."""

    @staticmethod
    def make(original, *args, **kwargs):
        first, rest = (args[0], args[1:]) if args else (kwargs.pop("type", None) or kwargs.pop("device", "cuda"), ())
        if type(first) is int:
            return original("cuda", first, *rest, **kwargs)
        try:
            return original(first, *rest, **kwargs)
        except RuntimeError:
            if not isinstance(first, str) or not names_accelerator(first):
                raise
            return original("cuda" + first[len(first.partition(":")[0]) :], *rest, **kwargs)
