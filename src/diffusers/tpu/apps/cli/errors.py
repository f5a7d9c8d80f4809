"""Which errors are the user's to mend: they are told in one line, every other one with its traceback."""

import contextlib
import os
import traceback
from pathlib import Path


PACKAGE = Path(__file__).parents[3]


class BadInput(ValueError):
    """What the user gave cannot be done; the message says what was expected, what came and the way out."""


def is_bad_input(error: Exception) -> bool:
    """Whether it is about an argument, and raised by code of this package."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, (ValueError, NotImplementedError)) and frames[-1].filename.startswith(
        f"{PACKAGE}{os.sep}"
    )


@contextlib.contextmanager
def refusing(*kinds: type[Exception]):
    """Errors of these classes as BadInput, whoever raises them."""
    try:
        yield
    except kinds as error:
        raise BadInput(one_line(error)) from error


def loading():
    """Upstream's errors about a model directory or hub id, wherever they are raised, as BadInput."""
    return refusing(OSError, ValueError, NotImplementedError)


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
