"""Code as strings that mean the same in every process: its place in a library of a certain version, and digests of sources."""

import functools
import hashlib
import importlib.metadata
import inspect
import os
import sys
import sysconfig
import types
from pathlib import Path

from ..state.libraries import CONSTANTS, Libraries, is_library_file, layers_of


OURS = "diffusers/tpu/"
MADE = "<made>"  # code made at run time, such as dataclasses' methods: its content is its key
_ASKERS = ("apps", "planner", "compare", "idioms")  # packages of ours that do not affect programs
_ROOT = str(Path(__file__).resolve().parents[4]) + os.sep  # the folder of `diffusers`
_known: dict[tuple, str] = {}  # digests, by the key of `Libraries`


class NotPortable(Exception):
    """A part of the key has no words; the message names it."""


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def code_words(code: types.CodeType) -> str:
    """The place of a code in a library's file, and that file's version. Raises NotPortable for code of a script.

    Code without a file, such as dataclasses' methods or a notebook's, is described by its content, byte by byte.
    """
    if (where := place_of(code.co_filename)) is None:
        raise NotPortable(f"{code.co_qualname} of {os.path.basename(code.co_filename)}, which is no library's")
    if where == MADE:
        return f"{where}:{code.co_qualname}:{digest(repr(_content(code)).encode())}"
    return f"{where}:{code.co_qualname}:{code.co_firstlineno}"


def _content(code: types.CodeType) -> tuple:
    """All that a code does. `co_code` is the code as it was compiled, without Python's later specialization."""
    constants = [_content(c) if isinstance(c, types.CodeType) else (type(c).__name__, repr(c)) for c in code.co_consts]
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return code.co_code, constants, names, code.co_argcount, code.co_kwonlyargcount, code.co_flags


@functools.cache
def place_of(file: str) -> str | None:
    """A file's place in a library, with the library's version or the file's digest; None: it is a script's."""
    if file.startswith("<"):
        return MADE
    path = Path(os.path.realpath(file))
    if str(path).startswith(_ROOT):
        inside = str(path).removeprefix(_ROOT)
        return f"{inside}@{'' if OURS in inside else _file_digest(path)}"
    if not is_library_file(file):
        return None
    standard = Path(os.path.realpath(sysconfig.get_path("stdlib")))
    if path.is_relative_to(standard) and not {"site-packages", "dist-packages"} & {*path.parts}:
        return f"python{sys.version_info[:2]}/{path.relative_to(standard)}@{_file_digest(path)}"
    package = path
    while (package.parent / "__init__.py").exists():
        package = package.parent
    try:
        return f"{package.stem}=={importlib.metadata.version(package.stem)}/{path.relative_to(package.parent)}"
    except importlib.metadata.PackageNotFoundError:
        return None


def function_of(x) -> types.FunctionType | None:
    """The function that runs where x, an attribute of a class or a module, is used."""
    if isinstance(x, (staticmethod, classmethod)):
        x = x.__func__
    elif isinstance(x, property):
        x = x.fget
    elif isinstance(x, functools.cached_property):
        x = x.func
    return x if isinstance(x, types.FunctionType) else None


def held_words(value) -> str:
    """The words of an attribute of a class or a module. Raises NotPortable if it is a script's."""
    found = inspect.unwrap(value) if isinstance(value, functools._lru_cache_wrapper) else function_of(value)
    if found is not None:
        return " of ".join(code_words(layer.__code__) for layer in layers_of(found))
    if isinstance(value, functools.partial):
        return f"partial({held_words(value.func)}, {value.args!r:.200}, {value.keywords!r:.200})"
    if isinstance(value, (type, types.BuiltinFunctionType, types.ModuleType)):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"
    if isinstance(value, CONSTANTS):
        text = repr(value)
        return type(value).__name__ if " at 0x" in text else text
    if callable(value) and type(value).__module__.partition(".")[0] == "__main__":
        raise NotPortable(f"a {type(value).__qualname__}, which is no library's")
    call = function_of(getattr(type(value), "__call__", None))
    return f"{type(value).__module__}.{type(value).__qualname__} {call and code_words(call.__code__)}"


def library_words(libraries: Libraries) -> str:
    """A digest of upstream's modules that a trace may run: their files, and the value of each name in them.

    A name that was assigned another function has that function's words. Raises NotPortable if it is a script's.
    """
    if libraries.key not in _known:
        found = []
        for module, names, held in zip(libraries.modules, libraries.names, libraries.held):
            words = [(name, held_words(value)) for name, value in zip(names, held[2:])]
            if module.__name__.startswith("torch."):  # its version covers it, except for what others put there
                words = [one for one in words if not one[1].startswith((OURS, "torch", "python", "typing.", MADE))]
            found.append((module.__name__, _file_digest(module.__file__), words))
        _known[libraries.key] = digest(repr(sorted(found)).encode())
    return _known[libraries.key]


@functools.cache
def _digest_of_file(path, size: int, changed: int) -> str:
    return digest(Path(path).read_bytes())


def _file_digest(path) -> str:
    status = os.stat(path)
    return _digest_of_file(path, status.st_size, status.st_mtime_ns)


@functools.cache
def our_words() -> str:
    """A digest of the sources of this package that programs are made from."""
    root = Path(_ROOT) / "diffusers"
    files = [path for path in (root / "tpu").rglob("*.py") if path.relative_to(root / "tpu").parts[0] not in _ASKERS]
    files += [*root.glob("**/*_flax.py"), *(root / "tpu").rglob("*.json"), *(root / "utils").rglob("*.py")]
    found = [(path.relative_to(root).as_posix(), digest(path.read_bytes())) for path in sorted(files)]
    return digest(repr(found).encode())
