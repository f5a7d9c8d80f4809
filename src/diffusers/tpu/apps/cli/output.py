"""Where what a command makes is written; said before it is made if that cannot be."""

import contextlib
import json
import os
from pathlib import Path

from ...files import whole_files
from .errors import BadInput


SUFFIXES = (".mp4", ".png")


def output_path(wanted: str | None, prompt, suffixes: tuple[str, ...] = SUFFIXES, kind: str = "") -> Path:
    """Where to write, of these suffixes; its folder is made. Without `wanted`: out/, named after the prompt and `kind`.

    Raises BadInput for another suffix or a folder that cannot be written to.
    """
    words = prompt[0] if isinstance(prompt, list) else prompt
    path = Path(wanted) if wanted else Path("out") / (_file_name(words or "") + kind + suffixes[0])
    if not path.name or path.is_dir():
        raise BadInput(f"expected --output to be a file, got the folder {str(path)!r}")
    path = path if path.suffix else path.with_suffix(suffixes[0])
    if path.suffix not in suffixes:
        raise BadInput(f"expected --output to end in {' or '.join(suffixes)}, got {wanted!r}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(
            f"expected to write into {path.parent}, got {error.strerror}; choose another --output"
        ) from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise BadInput(f"expected --output to be a file in a writable folder, got {str(path)!r}")
    return path


def _file_name(words: str) -> str:
    kept = "".join(c if c.isalnum() else " " for c in words.lower()).split()
    return "-".join(kept)[:60].strip("-") or "generated"


@contextlib.contextmanager
def whole_file(wanted: str, suffix: str):
    """A hidden file beside `wanted` to write to, which gets its name at the end.

    Raises BadInput for another suffix or a folder that is not there or cannot be written to.
    """
    path = Path(wanted)
    if path.suffix != suffix or path.is_dir() or not os.access(path.parent, os.W_OK):
        raise BadInput(f"expected a file that ends in {suffix}, in a writable folder that is there, got {wanted!r}")
    with whole_files([path]) as (draft,):
        yield draft


def check_writable(wanted: str, suffix: str):
    """Says now, not after minutes, that a file cannot be written: as `whole_file`, nothing is left there."""
    with contextlib.suppress(_NotYet), whole_file(wanted, suffix):
        raise _NotYet


class _NotYet(Exception):
    pass


def write_json(wanted: str | None, value):
    """`--json`: to the output where it is "-", to a file where it is one; None: not asked for."""
    text = json.dumps(value, indent=1)
    if wanted == "-":
        print(text)
    elif wanted:
        with whole_file(wanted, ".json") as draft:
            draft.write_text(text + "\n")
