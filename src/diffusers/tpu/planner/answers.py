"""Answers kept on disk, by a digest of their questions: whole or not there, as the store's programs are.

A damaged one is removed, said, and asked for again. Where nothing can be kept that is said once, before anyone waits for an answer.
"""

import contextlib
import json
import os
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

from .. import notices
from ..config import read_environment
from ..files import make_room, whole_files


MOST_BYTES = 4 << 30  # a step of a large model is 3 MB


class Answers:
    """Answers of one kind: JSON objects that `is_whole` tells from damaged ones; each can be computed again."""

    def __init__(self, kind: str, is_whole: Callable[[dict], bool]):
        cache = read_environment().cache_dir
        self.folder = None if cache is None else Path(cache) / kind
        self.is_whole = is_whole

    def find(self, name: str) -> dict | None:
        """The answer of this name; None where none is kept."""
        if self.folder is None:
            return None
        path = self.folder / name
        try:
            packed = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self._cannot("read", error)
            return None
        try:
            answer = json.loads(zlib.decompress(packed))
            if not (isinstance(answer, dict) and self.is_whole(answer)):
                raise ValueError(f"expected an answer, got {str(answer):.100}")
        except (ValueError, zlib.error) as error:
            notices.warn_once(
                f"damaged {path}", f"{path} is damaged ({error}): it is removed, and the compiler asked again"
            )
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):  # not ours to write: the time of its last use stays
            os.utime(path)
        return answer

    def check_writable(self):
        """Say now if what is asked next cannot be kept."""
        if self.folder is not None:
            with self._saying():
                self.folder.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=self.folder).close()

    def keep(self, name: str, answer: dict):
        """Keep it for the next run, within MOST_BYTES; where that fails it is said once."""
        if self.folder is not None:
            with self._saying():
                self.folder.mkdir(parents=True, exist_ok=True)
                with whole_files([self.folder / name]) as (draft,):
                    draft.write_bytes(zlib.compress(json.dumps(answer).encode()))
                make_room(self.folder, MOST_BYTES)

    @contextlib.contextmanager
    def _saying(self):
        try:
            yield
        except OSError as error:
            self._cannot("written to", error)

    def _cannot(self, verb: str, error: OSError):
        notices.warn_once(
            f"answers {self.folder}",
            f"answers of the compiler are not kept for the next run, {self.folder} cannot be {verb} ({error}): make room"
            " there, or set DIFFUSERS_TPU_CACHE to another folder or to off",
        )
