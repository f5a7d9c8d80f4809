"""What a program is keyed by, in words that mean the same in every process and on every machine.

In a process keys are of objects (`state`): a class is itself. Here a class is its name and where the code of its methods stands,
a function its code, a tensor its values. What has no such words (code of a script, a lock, a model from elsewhere) is
`NotPortable`: its program is not kept for other processes, as nobody could say whether it is still theirs.
"""

import enum
import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import operator
import os
import sys
import sysconfig
import types
from pathlib import Path

import numpy as np
import torch
from jax.sharding import PartitionSpec
from torch.utils._pytree import TreeSpec

from ...chips.figures import MIB
from ...weights.checkpoint import FileTensor, values
from ..state import Held, Module, Number, class_version


# What configurations say of where they came from and who wrote them, not of what a forward computes.
ORIGIN = frozenset(
    "_name_or_path name_or_path _commit_hash _diffusers_version transformers_version _use_default_values architectures"
    " _attn_implementation_autoset _from_model_config".split()
)
LARGEST_CONSTANT = 256 * MIB
OURS = "diffusers/tpu/"
MADE = "<made>"  # by a library as it runs, as dataclasses' methods are: what such a code holds tells it
_PLAIN = (
    bool,
    int,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    torch.layout,
    range,
    slice,
)
_VALUES = (bool, int, float, str, tuple, list, dict, set, type(None))
_OF_CLASSES = frozenset(
    "__dict__ __weakref__ __doc__ __module__ __qualname__ __annotations__ __abstractmethods__ __parameters__ __orig_bases__"
    " __hash__ __match_args__ __dataclass_fields__ __dataclass_params__ __annotate__ _abc_impl __static_attributes__"
    " __slotnames__ __annotations_cache__ __annotate_func__ __firstlineno__".split()
)
_FUNCTIONS = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)


class NotPortable(Exception):
    """There are no words for a part of the key; the message says for what."""


class StableKey:
    """The words of one key. `modules`: names of the modules whose classes and functions it names."""

    def __init__(self):
        self.modules: set[str] = set()
        self._known: dict[int, tuple[tuple, str]] = {}

    def of(self, x) -> str:
        """Equal for what is equal, also between processes. Raises NotPortable."""
        if type(x) is float:
            return repr(x)
        if isinstance(x, enum.Enum):
            return f"{self.name(type(x))}.{x.name}"
        if isinstance(x, _PLAIN):
            return repr(x)
        if isinstance(x, tuple):
            return self._tuple(x)
        if isinstance(x, (frozenset, set)):
            return "{" + ", ".join(sorted(map(self.of, x))) + "}"
        if isinstance(x, list):
            return "[" + ", ".join(map(self.of, x)) + "]"
        if isinstance(x, dict):
            return "{" + ", ".join(f"{self.of(k)}: {self.of(v)}" for k, v in x.items()) + "}"
        return self._thing(x)

    def _thing(self, x) -> str:
        if isinstance(x, Held):
            return self.of(x.thing)
        if isinstance(x, type):
            return self.name(x)
        if isinstance(x, types.CodeType):
            return code_in_words(x)
        if isinstance(x, (types.FunctionType, *_FUNCTIONS)):
            return self.function(x)
        if isinstance(x, functools.partial):
            return f"partial({self.of(x.func)}, {self.of(x.args)}, {self.of(x.keywords)})"
        if isinstance(x, types.MethodType):
            raise NotPortable(f"a method of {x.__self__!r:.60}")
        if isinstance(x, (np.ndarray, np.generic)):
            return f"array({x.dtype.str}, {x.shape}, {_digest(x.tobytes())})"
        if isinstance(x, torch.Tensor):
            return _tensor(x)
        if isinstance(x, (torch.Generator, Number)):
            return f"{type(x).__name__}({x.device if isinstance(x, torch.Generator) else x})"
        if isinstance(x, (TreeSpec, PartitionSpec, types.BuiltinFunctionType)):
            return _without_addresses(repr(x))
        raise NotPortable(f"a {type(x).__module__}.{type(x).__qualname__}")

    def _tuple(self, x: tuple) -> str:
        if id(x) not in self._known:
            # The number beside a class or a module says which of this process's states it has.
            if len(x) == 2 and isinstance(x[0], Held) and isinstance(x[0].thing, type):
                text = self.name(x[0].thing)
            elif len(x) == 2 and isinstance(x[0], Module):
                text = str(x[0])
            else:
                some = (item for item in x if not _names_origin(item))
                text = "(" + ", ".join(map(self.of, some)) + ")"
            if len(text) > 200:  # of a class, say, which comes again with every module
                text = _digest(text.encode())
            self._known[id(x)] = x, text  # with x, so that nothing else gets its id
        return self._known[id(x)][1]

    def name(self, cls: type) -> str:
        """A class by name; what it holds by a digest."""
        self.modules.add(cls.__module__)
        return _class_in_words(cls, class_version(cls))

    def function(self, x) -> str:
        """A function by its code, its defaults left out: they are read apart where they count."""
        found = _function_of(x)
        if found is None:
            raise NotPortable(f"{x!r:.80}")
        self.modules.add(found.__module__ or "")
        return code_in_words(found.__code__)


def _names_origin(item) -> bool:
    """Whether an item of a configuration (name, value) is of where it came from; names are ("name") or (str, "name")."""
    if not isinstance(item, tuple) or len(item) != 2:
        return False
    name = item[0][1] if isinstance(item[0], tuple) and len(item[0]) == 2 and item[0][0] is str else item[0]
    return isinstance(name, str) and name in ORIGIN


def _tensor(tensor: torch.Tensor) -> str:
    if tensor.is_meta or tensor.device.type != "cpu" or tensor.nbytes > LARGEST_CONSTANT:
        raise NotPortable(f"a tensor {[*tensor.shape]} on {tensor.device}")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, FileTensor):
        raise NotPortable(f"a {type(tensor).__name__}")
    raw = values(tensor).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"tensor({tensor.dtype}, {[*tensor.shape]}, {_digest(raw)})"


@functools.cache
def _class_in_words(cls: type, version: int) -> str:
    """`version`: which of the states that the class's attributes have had this is."""
    held = [(name, _held(value)) for name, value in sorted(vars(cls).items()) if name not in _OF_CLASSES]
    return f"{cls.__module__}.{cls.__qualname__}<{_digest(repr(held).encode())}>"


def _held(value) -> str:
    """What stands under a name of a class or a module. Raises NotPortable where it is a script's."""
    found = _function_of(value)
    if found is not None:
        return code_in_words(found.__code__)
    if isinstance(value, functools._lru_cache_wrapper):
        return code_in_words(inspect.unwrap(value).__code__)
    if isinstance(value, functools.partial):
        return f"partial({_held(value.func)}, {value.args!r:.200}, {value.keywords!r:.200})"
    if isinstance(value, (type, types.BuiltinFunctionType, types.ModuleType)):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"
    if isinstance(value, (bool, int, float, str, tuple, list, dict)):
        text = repr(value)
        return type(value).__name__ if " at 0x" in text else text
    if callable(value) and type(value).__module__.partition(".")[0] == "__main__":
        raise NotPortable(f"a {type(value).__qualname__}, which is no library's")
    call = _function_of(getattr(type(value), "__call__", None))
    return f"{type(value).__module__}.{type(value).__qualname__} {call and code_in_words(call.__code__)}"


def _function_of(x) -> types.FunctionType | None:
    if isinstance(x, (staticmethod, classmethod)):
        x = x.__func__
    elif isinstance(x, property):
        x = x.fget
    elif isinstance(x, functools.cached_property):
        x = x.func
    return x if isinstance(x, types.FunctionType) else None


def code_in_words(code: types.CodeType) -> str:
    """Where a code stands in a file of a library, and which state of the file that is. Raises NotPortable for code of a script.

    Of code without a file, as dataclasses' methods and a notebook's are: what it does, byte by byte.
    """
    where = place_of(code.co_filename)
    if where is None:
        raise NotPortable(f"{code.co_qualname} of {os.path.basename(code.co_filename)}, which is no library's")
    if where == MADE:
        return f"{where}:{code.co_qualname}:{_digest(repr(_content(code)).encode())}"
    return f"{where}:{code.co_qualname}:{code.co_firstlineno}"


def _content(code: types.CodeType) -> tuple:
    """All that a code does; of `co_code`, which Python gives as it was compiled, not as it has specialized it since."""
    constants = [_content(c) if isinstance(c, types.CodeType) else (type(c).__name__, repr(c)) for c in code.co_consts]
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return code.co_code, constants, names, code.co_argcount, code.co_kwonlyargcount, code.co_flags


@functools.cache
def place_of(file: str) -> str | None:
    """A file's place in a library, with the version of one that is installed; None: it is a script's."""
    if file.startswith("<"):
        return MADE
    path = os.path.realpath(file)
    if path.startswith(_root()):
        return path.removeprefix(_root()) + "@" + ("" if OURS in path else _file_digest(path))
    for kind in ("purelib", "platlib"):
        folder = os.path.realpath(sysconfig.get_path(kind)) + os.sep
        if path.startswith(folder):
            return _installed(path.removeprefix(folder))
    standard = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep
    if path.startswith(standard):
        inside = path.removeprefix(standard)
        known = inside.split(os.sep)[0] in ("site-packages", "dist-packages")
        return (
            _installed(inside.split(os.sep, 1)[1])
            if known
            else f"python{sys.version_info[:2]}/{inside}@{_file_digest(path)}"
        )
    return _of_spec(path)


def _installed(inside: str) -> str | None:
    top = inside.split(os.sep)[0].removesuffix(".py")
    try:
        return f"{top}=={importlib.metadata.version(top)}/{inside}"
    except importlib.metadata.PackageNotFoundError:
        return None


def _of_spec(path: str) -> str | None:
    """Of a library that is installed elsewhere, torch in a folder of its own, say: one that has a version."""
    for top in ("torch", "transformers", "peft", "accelerate", "torchax", "jax", "numpy", "huggingface_hub"):
        spec = importlib.util.find_spec(top)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            home = os.path.realpath(folder) + os.sep
            if path.startswith(home):
                return _installed(f"{top}{os.sep}{path.removeprefix(home)}")
    return None


@functools.cache
def _root() -> str:
    """The folder that `diffusers` lies in, with a separator."""
    return str(Path(__file__).resolve().parents[4]) + os.sep


def _without_addresses(text: str) -> str:
    if " at 0x" in text:
        raise NotPortable(text[:80])
    return text


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def sources_in_words(modules: set[str]) -> str:
    """A digest of the files and of what stands under which name in modules of diffusers and transformers that a trace of these may
    read, in theirs, and so on; and in torch's functions.

    A name that somebody gave another function has that one's words. Raises NotPortable where it is a script's.
    """
    seen, steps, said = set(), sorted(modules), []
    while steps:
        name = steps.pop()
        module = sys.modules.get(name)
        if name in seen or type(module) is not types.ModuleType or not _is_read(name):
            continue
        seen.add(name)
        words, further = _module_in_words(module)
        said.append((name, words))
        steps += further
    said.sort()
    said.append(("torch.nn.functional", _put_into(torch.nn.functional)))
    return _digest(repr(said).encode())


def _is_read(name: str) -> bool:
    top, _, rest = name.partition(".")
    return top in ("diffusers", "transformers", "peft") and not rest.startswith("tpu")


_modules: dict[str, tuple[list, tuple[str, set[str]]]] = {}


def _module_in_words(module: types.ModuleType) -> tuple[str, set[str]]:
    """Its digest, and the modules that what stands in it is of; found again while the same things stand in it."""
    values = [*vars(module).values()]
    before, words = _modules.get(module.__name__, ([], None))
    if len(values) != len(before) or not all(map(operator.is_, values, before)):
        words = _words_of_module(module)
        _modules[module.__name__] = values, words
    return words


def _words_of_module(module: types.ModuleType) -> tuple[str, set[str]]:
    further, held = set(), []
    for name, value in sorted(vars(module).items(), key=lambda item: item[0]):
        if name.startswith("__") or isinstance(value, types.ModuleType):
            continue
        if isinstance(value, _VALUES) and ".models." not in module.__name__:
            continue  # levels of logging, what was looked up once, and the like; None: before it is
        held.append((name, _held(value)))
        if isinstance(value, (types.FunctionType, functools._lru_cache_wrapper, type)):
            further.add(value.__module__ or "")
    return _digest(repr(held).encode()) + _file_digest(getattr(module, "__file__", None)), further


def _put_into(module: types.ModuleType) -> str:
    """What others have put into a module of torch's; ours is told by our sources."""
    held = []
    for name, value in sorted(vars(module).items(), key=lambda item: item[0]):
        if callable(value) and not isinstance(value, (type, types.BuiltinFunctionType)):
            words = _held(value)
            if not words.startswith((OURS, "torch", "python", "typing.", MADE)):
                held.append((name, words))
    return repr(held)


@functools.cache
def _digest_of_file(path: str, size: int, changed: int) -> str:
    return _digest(Path(path).read_bytes())


def _file_digest(path: str | None) -> str:
    if path is None:
        return ""
    status = os.stat(path)
    return _digest_of_file(path, status.st_size, status.st_mtime_ns)


# Packages that no program is made of, as they only ask for programs.
_ASKERS = ("apps", "planner", "compare", "idioms")


@functools.cache
def ours_in_words() -> str:
    """A digest of our own sources that programs are made by, the files beside upstream's too."""
    root = Path(_root()) / "diffusers"
    ours = [path for kind in ("*.py", "*.json") for path in (root / "tpu").rglob(kind)]
    files = [path for path in ours if path.relative_to(root / "tpu").parts[0] not in _ASKERS]
    files += root.glob("**/*_flax.py")
    said = [(path.relative_to(root).as_posix(), _digest(path.read_bytes())) for path in sorted(files)]
    return _digest(repr(said).encode())
