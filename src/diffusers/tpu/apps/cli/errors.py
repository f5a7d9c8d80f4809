"""Which errors are the user's to mend: they are told in one line, every other one with its traceback."""

import contextlib
import os
import traceback


PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


class BadInput(Exception):
    """What the user gave cannot be done; the message says what was expected, what came and the way out."""


@contextlib.contextmanager
def loading():
    """Upstream's errors about a model directory or hub id, wherever they are raised, as BadInput."""
    try:
        yield
    except (OSError, ValueError, NotImplementedError) as error:
        raise BadInput(one_line(error)) from error


@contextlib.contextmanager
def calling():
    """Errors about arguments, raised by code of this package, as BadInput; the same classes from elsewhere pass."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        if not raised_here(error):
            raise
        raise BadInput(one_line(error)) from error


def raised_here(error: Exception) -> bool:
    """Whether the statement that raised it stands in this package, upstream's files included."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(PACKAGE + os.sep)


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
