"""Devices of a script's tensors: "cuda", "tpu" and the like name the TPU, and a tensor that is moved there stays on the host.

Pipelines and models move tensors to the chips themselves; inside of the pipelines' own environment torchax interprets devices.
The functions that take a device are replaced one by one: a torch mode would slow down every call of every function, and would not
apply in other threads.
"""

import threading

import torch
from torch.utils._pytree import tree_map_only

from ..common.config import names_accelerator
from .replacing import Replacements, Stand, StandingType


HOST = torch.device("cpu")


class _Inside(threading.local):
    depth = 0


inside = _Inside()  # per thread: how often the pipelines' own environment is entered; set by the bridge


def hosted(device):
    """The device that holds a tensor meant for this one: for an accelerator, the host."""
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
    rows = [(torch, name, _made) for name in CONSTRUCTORS]
    rows += [(torch.fft, name, _made) for name in ("fftfreq", "rfftfreq")]
    moves = {"to": _moved, "cuda": _to_accelerator, "pin_memory": _kept, "type": _typed, "type_as": _alike}
    moves["record_stream"] = lambda *args: None
    rows += [(torch.Tensor, name, call) for name, call in (dict.fromkeys(NEW, _made) | moves).items()]
    rows += [(storage, "cuda", _kept) for storage in (torch.storage._StorageBase, torch.TypedStorage)]
    rows += [
        (torch.nn.Module, "to", _module_moved),
        (torch, "load", _loaded),
        (torch, "set_default_tensor_type", _typed),
    ]
    builtins = torch.jit._builtins
    for owner, name, call in rows:
        original, stand = getattr(owner, name), Stand(owner, name, call)
        replacements.put(owner, name, stand)
        if builtins._builtin_table is not None and (operator := builtins._find_builtin(original)) is not None:
            builtins._register_builtin(stand, operator)  # torch.jit.script finds functions by their ids
    replacements.put(torch, "Generator", Generator)
    replacements.put(torch, "device", device)
    context = torch.utils._device.DeviceContext
    replacements.wrap(context, "__init__", lambda init, self, device: init(self, hosted(device)))


def _on_host(args: tuple, kwargs: dict) -> tuple:
    """The arguments, with the host in place of an accelerator that is the first one or the keyword `device`."""
    if names_accelerator(kwargs.get("device")):
        kwargs["device"] = HOST
    if args and (isinstance(args[0], (str, torch.device)) or type(args[0]) is int):
        return (hosted(args[0]), *args[1:])
    return args


def _made(function, *args, **kwargs):
    """A constructor of tensors, with the host in place of an accelerator."""
    if not inside.depth:
        if names_accelerator(kwargs.get("device")):
            kwargs["device"] = HOST
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if any(isinstance(arg, torch.device) for arg in args):
            args = tuple(hosted(arg) if isinstance(arg, torch.device) else arg for arg in args)
    return function(*args, **kwargs)


def _moved(function, tensor, *args, **kwargs):
    """`Tensor.to` a device, a dtype, both, or those of another tensor."""
    if not inside.depth:
        args = _on_host(args, kwargs)
        other = args[0] if args else kwargs.get("other")
        if isinstance(other, torch.Tensor) and names_accelerator(other.device):
            kwargs.pop("other", None)
            args = (HOST, other.dtype, *args[1:])
    return function(tensor, *args, **kwargs)


def _to_accelerator(function, tensor, device=None, non_blocking=False, memory_format=torch.preserve_format):
    if inside.depth:
        return tensor.to("cuda")
    return tensor.to(HOST, **({} if memory_format is torch.preserve_format else {"memory_format": memory_format}))


def _typed(function, *args, **kwargs):
    """Replaces names of GPU tensor types by those of the CPU's."""
    args, kwargs = tree_map_only(str, lambda name: name.replace("torch.cuda.", "torch."), (args, kwargs))
    return function(*args, **kwargs)


def _alike(function, tensor, other):
    if not inside.depth and names_accelerator(other.device):
        return tensor.to(HOST, other.dtype)
    return function(tensor, other)


def _kept(function, owner, *args, **kwargs):
    return owner


def _module_moved(function, module, *args, **kwargs):
    return function(module, *(args if inside.depth else _on_host(args, kwargs)), **kwargs)


def _loaded(function, f, map_location=None, *args, **kwargs):
    """`torch.load`: tensors that were saved from a GPU are loaded to the host, also where `map_location` is not given."""
    if map_location is None or names_accelerator(map_location):
        map_location = HOST
    elif isinstance(map_location, dict):
        map_location = {key: hosted(value) for key, value in map_location.items()}
    return function(f, map_location, *args, **kwargs)


class Generator(metaclass=StandingType):
    """torch's own generator, on the CPU where an accelerator is named: a seed gives the same noise everywhere."""

    __module__, __wrapped__ = "torch", torch.Generator

    @staticmethod
    def make(original, device="cpu"):
        return original(device=hosted(device))


class device(metaclass=StandingType):
    """torch's own device. Bare indices, and accelerator names that torch does not have, become "cuda", which means the TPU."""

    __module__, __wrapped__ = "torch", torch.device

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
