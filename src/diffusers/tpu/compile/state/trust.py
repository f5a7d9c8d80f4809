"""Whose code a function, a class or a module is: an installed library's, or the user's.

Libraries are what is installed: Python's own, what lies in its folders for packages, and this package. What their code reads of
their modules is watched as a whole (`key.library_names`); what the user's code reads is followed name by name.
"""

import functools
import importlib.util
import os
import sys
import sysconfig
import types
from pathlib import Path


# Where a development checkout of one of these is installed, it is a library too.
KNOWN = ("torch", "transformers", "peft", "accelerate", "torchax", "jax", "numpy", "huggingface_hub", "safetensors")


@functools.cache
def _folders() -> tuple[str, ...]:
    paths = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {*map(str, Path(__file__).resolve().parents[4:5])}
    for name in KNOWN:
        spec = importlib.util.find_spec(name)
        paths |= {*(spec.submodule_search_locations or ())} if spec else set()
    paths |= {path for path in sys.path if path.rstrip(os.sep).endswith(("site-packages", "dist-packages"))}
    return tuple(os.path.realpath(path) + os.sep for path in paths if path)


@functools.lru_cache(maxsize=65536)
def is_library_file(path: str) -> bool:
    if path.startswith("<frozen"):
        return True
    return not path.startswith("<") and os.path.realpath(path).startswith(_folders())


@functools.lru_cache(maxsize=65536)
def is_library_module(name: str) -> bool:
    """Of a module's name; of one without a file, whether it is a part of Python."""
    if name == "__main__":
        return False
    module = sys.modules.get(name)
    if not isinstance(module, types.ModuleType):
        return name.partition(".")[0] in sys.stdlib_module_names
    file = getattr(module, "__file__", None)
    if file is None:
        paths = [*getattr(module, "__path__", ())]
        return (
            all(map(is_library_file, map(str, paths)))
            if paths
            else name.partition(".")[0] in _BUILT_IN or name in sys.builtin_module_names
        )
    return is_library_file(file)


_BUILT_IN = sys.stdlib_module_names | {"torch"}


def is_library(x: types.FunctionType | type) -> bool:
    """Of a function by its own code: a wrapper that says it is what it wraps is still the user's."""
    if isinstance(x, type):
        return is_library_module(x.__module__)
    file = x.__code__.co_filename
    if file.startswith("<") and not file.startswith(
        "<frozen"
    ):  # made by a library as it runs, as dataclasses' methods are
        return is_library_module(x.__globals__.get("__name__") or "__main__")
    return is_library_file(file)
