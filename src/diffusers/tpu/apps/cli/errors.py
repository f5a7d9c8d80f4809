"""Errors that the user can fix: ValueError and NotImplementedError that are `raised_here` are printed in one line.

All others, except `Failure` of `common/errors.py`, are shown with their traceback.
"""

import contextlib
import importlib
import os
import sys
import traceback
from types import ModuleType

from ...common.files import EXAMPLES, PACKAGE


def from_checkout(name: str) -> ModuleType:
    """A module of `examples/tpu`. Raises ValueError where there is no checkout."""
    if not EXAMPLES.is_dir():
        raise ValueError(f"expected a checkout of the repository, got a wheel, which has no examples/tpu ({name})")
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(name)


def raised_here(error: Exception) -> bool:
    """Whether a `raise` of this package or its examples raised it: such messages say what was expected, got, and the way out."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return frame.filename.startswith((f"{PACKAGE}{os.sep}", f"{EXAMPLES}{os.sep}")) and frame.line.startswith("raise ")


@contextlib.contextmanager
def refusing(*kinds: type[Exception]):
    """Raises errors of these classes as ValueError, wherever they come from."""
    try:
        yield
    except kinds as error:
        raise ValueError(one_line(error)) from error


def loading():
    """Raises upstream's errors about a model directory or hub id as ValueError, wherever they come from."""
    return refusing(OSError, ValueError, NotImplementedError)


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
