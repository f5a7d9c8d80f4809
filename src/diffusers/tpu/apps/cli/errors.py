"""Which errors are the user's to mend: ValueError and NotImplementedError that are `raised_here`, told in one line.

Every other one is shown with its traceback.
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
    """Whether a `raise` of this package's or its examples' did, which says what was expected, what came and the way out."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return frame.filename.startswith((f"{PACKAGE}{os.sep}", f"{EXAMPLES}{os.sep}")) and frame.line.startswith("raise ")


@contextlib.contextmanager
def refusing(*kinds: type[Exception]):
    """Errors of these classes as ValueError, whoever raises them."""
    try:
        yield
    except kinds as error:
        raise ValueError(one_line(error)) from error


def loading():
    """Upstream's errors about a model directory or hub id, wherever they are raised, as ValueError."""
    return refusing(OSError, ValueError, NotImplementedError)


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
