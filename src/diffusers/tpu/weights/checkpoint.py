"""A checkpoint's tensors, converted to the requested dtype when their values are needed, not when they are loaded.

A `FileTensor` is a host tensor of that dtype without storage. `FileTensor.read(index)` converts a part of the mapped file and
caches nothing; the weights of the chips are read this way. Any other use converts all values, once, into an ordinary parameter.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from safetensors import SafetensorError, safe_open
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves

from .disk import load_file


_settling, _loading = threading.Lock(), threading.RLock()


@dataclass(eq=False)
class Source:
    """Where values come from: a tensor of the file and the dtypes to which it is converted in turn, or what training keeps and
    changes on the chips (`compile.chip_arrays.Part`). `values` is None once they are in memory."""

    values: torch.Tensor | None
    dtypes: tuple[torch.dtype, ...] = ()


class FileTensor(torch.Tensor):
    """A tensor whose values are in a file. Its aliases (`detach`) share `source` and, later, the storage."""

    source: Source

    def __new__(cls, data, requires_grad=True):  # accelerate makes a new parameter by the class of the old one
        return torch.nn.Parameter(data, requires_grad)

    @classmethod
    def of(cls, values: torch.Tensor, *dtypes: torch.dtype) -> "FileTensor":
        """The tensor of `values`, converted to these dtypes in turn."""
        with _plain():
            empty = torch.empty(values.shape, dtype=(values.dtype, *dtypes)[-1], device="cpu")
            empty.untyped_storage().resize_(0)
            return cls._around(empty, Source(values, dtypes))

    @classmethod
    def _around(cls, empty: torch.Tensor, source: Source) -> "FileTensor":
        tensor = torch.Tensor._make_subclass(cls, empty, empty.requires_grad)
        tensor.source = source
        return tensor

    def read(self, index=...) -> torch.Tensor:
        """The values at `index`, as an ordinary tensor that is not cached."""
        values, dtypes = self.source.values, self.source.dtypes
        with _plain():
            part = self.as_subclass(torch.Tensor).detach() if values is None else values
            return functools.reduce(torch.Tensor.to, () if values is None else dtypes, part[index])

    def settle(self) -> torch.Tensor:
        """Turns this object into an ordinary tensor or parameter with its values in memory, which its aliases share."""
        with _settling, _plain():
            if type(self) is FileTensor:
                if (given := self.source.values) is not None:
                    values, storage = self.read(), self.untyped_storage()
                    storage.resize_(values.nbytes)
                    values.new_empty(0).set_(storage, 0, self.shape, self.stride()).copy_(values)
                    self.source.values = None
                self._become_ordinary()
                if given is not None and not isinstance(given, torch.Tensor):
                    given.settled(self)
        return self

    @classmethod
    def stand_in(cls, tensor: torch.Tensor, values):
        """Turns `tensor` into a FileTensor with these values as its source. Frees its memory, if nothing else uses it."""
        with _plain():
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            empty.untyped_storage().resize_(0)
            torch._C.TensorBase.data.__set__(tensor, empty)
            if isinstance(tensor, torch.nn.Parameter):
                tensor._is_param = True
            tensor.__class__, tensor.source = cls, Source(values)

    def _become_ordinary(self):
        self.__class__ = torch.nn.Parameter if vars(self).pop("_is_param", False) else torch.Tensor
        del self.source  # torch would save it to files

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        unread = [t for t in tree_leaves((args, kwargs)) if type(t) is FileTensor and t.source.values is not None]
        if func in _WITHOUT_VALUES and unread and args[0] is unread[0]:
            answer = _WITHOUT_VALUES[func](*args, **kwargs)
            if answer is not NotImplemented:
                return answer
        if is_about_values(func):
            settled(args, kwargs)
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo):
        if self.source.values is None or on_chips(self):
            return self.settle().__deepcopy__(memo)
        copy = FileTensor.of(self.source.values, *self.source.dtypes)
        copy = torch.nn.Parameter(copy, self.requires_grad) if "_is_param" in vars(self) else copy
        return memo.setdefault(id(self), copy)

    def __reduce_ex__(self, protocol):
        return self.settle().__reduce_ex__(protocol)


def waiting(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous floating tensor of a checkpoint with deferred conversion; any other tensor unchanged."""
    if type(tensor) is not torch.Tensor or not tensor.is_floating_point() or not tensor.is_contiguous():
        return tensor
    return FileTensor.of(tensor)


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether its bytes are its values; not so for quantized weights, which are subclasses of torch's tensor."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter, FileTensor)


def on_chips(tensor: torch.Tensor) -> bool:
    """Whether training keeps its values on the chips."""
    return type(tensor) is FileTensor and not isinstance(tensor.source.values, (torch.Tensor, type(None)))


def settled(*tree):
    """Brings the values of every tensor among the leaves of `tree` into memory."""
    for leaf in tree_leaves(tree):
        if type(leaf) is FileTensor:
            leaf.settle()


def values(tensor: torch.Tensor, index=...) -> torch.Tensor:
    """The values at `index`; those of a file are read and not cached."""
    if type(tensor) is FileTensor:
        return tensor.read(index)
    if index is ... and type(tensor) is torch.Tensor and not tensor.requires_grad:
        return tensor
    with _plain():
        return tensor.detach()[index]


@contextlib.contextmanager
def _plain():
    """A context of plain torch, without modes, subclasses or gradients, even inside torchax's environment."""
    with torch.inference_mode(False), torch.no_grad(), no_dispatch(), torch._C.DisableTorchFunction():
        yield


# Functions that do not need the values


def _alias(tensor: FileTensor) -> FileTensor:
    with _plain():
        return FileTensor._around(torch.Tensor.detach(tensor), tensor.source)


def _same(tensor: FileTensor, index=..., **kwargs):
    return tensor if index is ... and not kwargs else NotImplemented


def _converted(tensor: FileTensor, *args, **kwargs):
    try:
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
    except (TypeError, RuntimeError):  # another form of `to`, a copy for example
        return NotImplemented
    if (device is not None and device.type != "cpu") or layout is not None:
        return NotImplemented
    values, dtypes = tensor.source.values, tensor.source.dtypes
    if dtype in (None, tensor.dtype):
        return tensor if dtypes or on_chips(tensor) else values
    if on_chips(tensor) or not dtype.is_floating_point or (torch.is_grad_enabled() and tensor.requires_grad):
        return NotImplemented
    return FileTensor.of(values, *dtypes, dtype)


def _given_data(tensor: FileTensor, data: torch.Tensor):
    with torch._C.DisableTorchFunctionSubclass():
        torch.Tensor.data.__set__(tensor, data)
    if type(data) is FileTensor:
        tensor.source = data.source
    else:
        tensor._become_ordinary()


_WITHOUT_VALUES = {
    torch.Tensor.detach: _alias,
    torch.Tensor.contiguous: _same,
    torch.Tensor.cpu: _same,
    torch.Tensor.__getitem__: _same,
    torch.Tensor.to: _converted,
    torch.Tensor.float: functools.partial(_converted, dtype=torch.float32),
    torch.Tensor.half: functools.partial(_converted, dtype=torch.float16),
    torch.Tensor.bfloat16: functools.partial(_converted, dtype=torch.bfloat16),
    torch.Tensor.data.__set__: _given_data,
}
_METHODS_ABOUT_SHAPE = (
    "__len__ dim element_size get_device is_complex is_contiguous is_floating_point is_shared is_signed"
    " ndimension nelement numel requires_grad_ size storage_offset stride"
)
_ABOUT_SHAPE = {
    *(torch.is_floating_point, torch.numel, torch._has_compatible_shallow_copy_type),
    *(torch.Tensor.requires_grad.__set__, torch.Tensor.grad.__set__),
    *(getattr(torch.Tensor, name) for name in _METHODS_ABOUT_SHAPE.split()),
}
_PROPERTIES_WITH_VALUES = {"data", "T", "H", "mT", "mH", "real", "imag"}


def is_about_values(func) -> bool:
    """Whether a torch function needs its tensors' values or memory, and not only shape, dtype and the like."""
    is_property = getattr(func, "__name__", None) == "__get__"
    return func.__self__.__name__ in _PROPERTIES_WITH_VALUES if is_property else func not in _ABOUT_SHAPE


# Loading


def checked(load: Callable) -> Callable:
    """A model's `from_pretrained` with deferred conversions. It raises ValueError with the names of weights that the checkpoint
    lacks, or if shapes differ, and OSError for a file that is cut off."""
    from transformers import PreTrainedModel, modeling_utils

    from ...models.modeling_utils import LegacyModelMixin, ModelMixin

    loaders = {cls: cls.from_pretrained.__func__ for cls in (ModelMixin, LegacyModelMixin, PreTrainedModel)}
    if getattr(load, "__func__", None) not in loaders.values():
        return load

    @functools.wraps(load)
    def run(path, **kwargs):
        folder = os.path.join(path, kwargs.get("subfolder") or "")
        with contextlib.ExitStack() as stack:
            if load.__func__ is loaders[PreTrainedModel] and kwargs.get("quantization_config") is None:
                # Transformers' loader has no option for deferred tensors. Each thread restores what it found.
                stack.enter_context(_loading)
                stack.callback(setattr, modeling_utils, "safe_open", modeling_utils.safe_open)
                modeling_utils.safe_open = _File
            try:
                model, info = load(path, output_loading_info=True, **kwargs)
            except SafetensorError as error:
                raise OSError(
                    f"expected whole safetensors files in {folder}, got one that cannot be read: {error}. It is cut off or"
                    " damaged: download it again."
                ) from error
            except RuntimeError as error:
                if "ignore_mismatched_sizes" not in str(error):
                    raise
                raise ValueError(
                    f"expected weights of the shapes that the configuration in {folder} says, got others, which transformers"
                    " listed above. The files are of another model or version: download them again."
                ) from error
        missing = sorted(set(info.get("missing_keys", ())) & {name for name, _ in model.named_parameters()})
        if missing:
            raise ValueError(missing_message(type(model).__name__, missing, path))
        return model

    return run


def missing_message(model: str, names: list[str], path=None) -> str:
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    where = "in its checkpoint" if path is None else f"in {path}"
    return (
        f"expected every weight of {model} {where}, found none for {shown}. The files are cut off, of another model or of"
        " another version: download them again, or load the class that they were saved from."
    )


class _File:
    """A safetensors file whose slices, taken whole, are tensors with deferred conversion."""

    def __init__(self, path, *args, **kwargs):
        self.file = safe_open(path, *args, **kwargs)
        self.tensors = functools.cache(lambda: load_file(path))

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        self.file.__enter__()
        return self

    def __exit__(self, *exc):
        return self.file.__exit__(*exc)

    def get_slice(self, name: str):
        return waiting(self.tensors()[name])
