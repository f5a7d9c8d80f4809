"""Atomic writes: files are written under a hidden name in their folder, and renamed at the end."""

import contextlib
import os
import signal
import stat
import sys
import threading
from pathlib import Path


PACKAGE = Path(__file__).parents[2]
EXAMPLES = PACKAGE.parents[1] / "examples" / "tpu"  # of a checkout; a wheel has none


@contextlib.contextmanager
def whole_files(paths: list[Path]):
    """Yields hidden files beside `paths` to write to; they are renamed to `paths` at the end, or removed if anything fails.

    While they exist, SIGTERM raises SystemExit, so that they are removed then too.
    """
    drafts = [path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}") for path in paths]
    main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number)) if main_thread else None
    try:
        yield drafts
        for draft, path in zip(drafts, paths):
            os.replace(draft, path)
    finally:
        for draft in drafts:
            draft.unlink(missing_ok=True)
        if main_thread:
            signal.signal(signal.SIGTERM, before)


def write_whole(path: Path, content: str | bytes):
    """Writes a file atomically, text as UTF-8; an old file is replaced only by the complete new one."""
    with whole_files([path]) as (draft,):
        draft.write_bytes(content.encode() if isinstance(content, str) else content)


def make_room(folder: Path, most_bytes: int):
    """Deletes the files of a folder that were modified longest ago, until the others take at most so many bytes."""
    found = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process has deleted it
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                found.append((status.st_mtime, status.st_size, path))
    left = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if left > most_bytes:
            path.unlink(missing_ok=True)
            left -= size
