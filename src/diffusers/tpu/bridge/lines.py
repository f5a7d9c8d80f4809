"""The line of the model's own code that a trace has reached, or that an error came from."""

import functools
import linecache
import os
import sys
import traceback
import types
from dataclasses import dataclass

from jax._src.config import traceback_filtering  # a context for one thread; JAX's public option is global


INSIDE = ("/torch/", "/torchax/", "/jax/", "/jaxlib/", "/opt_einsum/")
LIBRARIES = (*INSIDE, "/diffusers/tpu/", "/tpu/submodules/", "/contextlib.py", "/functools.py", "<frozen")
OURS = "_flax.py"


@dataclass(frozen=True)
class Line:
    """`code` at a line of a file, in a function."""

    file: str
    line: int
    code: str
    function: str

    def __str__(self):
        return f"{os.path.basename(self.file)}, line {self.line}: {self.code}"


def foreign(file: str) -> bool:
    """Whether a file is a library's or ours, not the model's."""
    return file.endswith(OURS) or any(name in file for name in LIBRARIES)


def line_of_frame(frame: types.FrameType, number: int | None = None) -> Line:
    code, number = frame.f_code, number or frame.f_lineno
    text = linecache.getline(code.co_filename, number, frame.f_globals).strip()
    return Line(code.co_filename, number, text, code.co_qualname)


def frames_to_asker() -> list[types.FrameType]:
    """The frames from here out to the model's own code, or to the outermost frame where none of it is on the stack."""
    frames = [sys._getframe(1)]
    while frames[-1].f_back is not None and foreign(frames[-1].f_code.co_filename):
        frames.append(frames[-1].f_back)
    return frames


def asking_line() -> Line:
    """The line of the model's own code that is running."""
    return line_of_frame(frames_to_asker()[-1])


def line_of(error: BaseException) -> Line:
    """The innermost line of the model's own code in an error's traceback; without one, the line that raised it."""
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [(frame, number) for frame, number in frames if not foreign(frame.f_code.co_filename)]
    return line_of_frame(*(own or frames)[-1])


whole_tracebacks = functools.partial(traceback_filtering, "off")  # errors that go through JAX keep their frames


def raised_inside(error: BaseException, places: tuple[str, ...] = INSIDE) -> bool:
    """Whether a file in one of these places raised the error. By default these are torch, torchax, JAX and what they build on, not
    the model's code, which checks its arguments, nor ours."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return any(name in frame.f_code.co_filename for name in places)


def asked_by_ours(error: BaseException) -> bool:
    """Whether code of ours that replaces the model's (`*_flax.py`) is further in in the traceback than the model's own code."""
    files = (frame.f_code.co_filename for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]))
    return next((file.endswith(OURS) for file in files if not foreign(file) or file.endswith(OURS)), False)
