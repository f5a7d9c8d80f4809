"""Files that are whole or not there: written beside their place under a hidden name, named at the end."""

import contextlib
import os
import signal
import threading
from pathlib import Path


@contextlib.contextmanager
def whole_files(paths: list[Path]):
    """Hidden files beside `paths` to write to; they get their names at the end, or are removed if anything goes wrong.

    While they exist, SIGTERM raises SystemExit, so that they are removed then too.
    """
    drafts = [path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}") for path in paths]
    main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _stop) if main_thread else None
    try:
        yield drafts
        for draft, path in zip(drafts, paths):
            os.replace(draft, path)
    finally:
        for draft in drafts:
            draft.unlink(missing_ok=True)
        if main_thread:
            signal.signal(signal.SIGTERM, before)


def _stop(number, frame):
    raise SystemExit(128 + number)
