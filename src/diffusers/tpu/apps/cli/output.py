"""The output of a command: tables, JSON and files. Whether a file can be written is checked before the work."""

import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ...common.files import write_whole


SUFFIXES = (".mp4", ".png")


def say(text: str, stderr: bool = False, markup: bool = False):
    """Print one line. Brackets are rich's markup only with `markup`, as a prompt may contain some."""
    Console(stderr=stderr).print(text, soft_wrap=True, markup=markup, highlight=False)


def table(
    names: Sequence[str], rows: Iterable[Sequence | None], texts: int = 1, wrap: bool = True, **settings
) -> Table:
    """A table of these rows; None separates two sections. The first `texts` columns are text, the others numbers.

    Without `wrap` only cells of the first column may have several lines.
    """
    made = Table(*names, title_justify="left", **settings)
    for number, column in enumerate(made.columns):
        column.justify = "left" if number < texts else "right"
        column.no_wrap = number > 0 and not wrap
    if not wrap:
        made.columns[0].overflow, made.columns[0].min_width = "fold", 20
    for row in rows:
        made.add_section() if row is None else made.add_row(*map(str, row))
    return made


def cell(value) -> str:
    """The text of a table's cell: a float has four digits, None is empty."""
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def output_path(wanted: str | None, prompt, suffixes: tuple[str, ...] = SUFFIXES, kind: str = "") -> Path:
    """The file to write, with one of these suffixes; makes its folder. Without `wanted`: in out/, named by the prompt and `kind`.

    Raises ValueError for another suffix or a folder that cannot be written to.
    """
    words = prompt[0] if isinstance(prompt, list) else prompt or ""
    words = "-".join("".join(c if c.isalnum() else " " for c in words.lower()).split())[:60].strip("-")
    path = Path(wanted) if wanted else Path("out") / ((words or "generated") + kind + suffixes[0])
    path = path if path.suffix or not path.name or path.is_dir() else path.with_suffix(suffixes[0])
    if not path.name or path.is_dir():
        raise ValueError(f"expected --output to be a file, got the folder {str(path)!r}")
    if path.suffix not in suffixes:
        raise ValueError(f"expected --output to end in {' or '.join(suffixes)}, got {wanted!r}")
    check_folder(path.parent)
    return path


def check_folder(folder: Path):
    """Make a folder, before minutes of work. Raises ValueError if that fails or nothing can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"expected to write into {folder}, got {error.strerror}; choose another --output") from error


def check_writable(wanted: str | None, suffix: str):
    """Raises ValueError, before minutes of work, for another suffix or a folder that is missing or not writable."""
    if wanted in (None, "-"):
        return
    path = Path(wanted)
    if path.suffix != suffix or path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"expected a file that ends in {suffix}, in a writable folder that is there, got {wanted!r}")


def write_json(wanted: str | None, value):
    """Writes `value` as `--json` asks: to standard output for "-", else to a file; nothing for None."""
    text = json.dumps(value, indent=1)
    if wanted == "-":
        print(text)
    elif wanted:
        write_whole(Path(wanted), text + "\n")
