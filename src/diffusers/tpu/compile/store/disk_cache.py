"""Values that outlive their process, pickled below `DIFFUSERS_TPU_CACHE`: executables, and the planner's programs and plans.

A file is a line of JSON (key and digest), then the value. It is whole or absent, even while other processes write or evict. Reading
runs code, as with any pickle: only use a folder that you or your host wrote.
"""

import contextlib
import hashlib
import json
import os
import pickle
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from ...common import notices
from ...common.config import read_environment
from ...common.files import make_room, write_whole


MOST_BYTES = 8 << 30  # of one folder; the least recently used files are removed


class DiskCache:
    """The values of one kind, by name. Without a folder (None) nothing is found or stored."""

    def __init__(self, kind: str, folder: Path | None):
        self.kind, self.folder = kind, folder

    @classmethod
    def of(cls, kind: str) -> "DiskCache":
        """This process's cache; it has no folder if `DIFFUSERS_TPU_CACHE` is off."""
        cache = read_environment().cache_dir
        return cls(kind, None if cache is None else Path(cache) / kind)

    def find(self, name: str, key: dict | None = None):
        """The value written under this name with this key; None: there is none. Damaged files are removed, with a warning."""
        if self.folder is None:
            return None
        path = self.folder / name
        try:
            raw = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            return self._warn("read", error)
        try:
            head, _, body = raw.partition(b"\n")
            head = json.loads(head)
            if head["key"] != key or hashlib.sha256(body).hexdigest() != head["sha256"]:
                raise ValueError("it is not what was written under its name")
            found = pickle.loads(zlib.decompress(body))
        except Exception as error:
            return self.remove(name, error)
        with contextlib.suppress(OSError):  # where another user owns the file its time of last use stays
            os.utime(path)
        return found

    def remove(self, name: str, error: Exception):
        """Remove a file that cannot be used, with a warning."""
        path = self.folder / name
        notices.warn_once(f"damaged {path}", f"{path} is damaged ({error!r:.200}): it is removed and made again")
        with contextlib.suppress(OSError):
            path.unlink()

    def keep(self, name: str, value, key: dict | None = None, **facts):
        """Write a value; warns once if the folder is not writable or full. `facts` are stored beside the key."""
        if self.folder is None:
            return
        body = zlib.compress(pickle.dumps(value), 1)
        head = json.dumps({"key": key, "sha256": hashlib.sha256(body).hexdigest(), **facts})
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / name, head.encode() + b"\n" + body)
            make_room(self.folder, MOST_BYTES)

    def check_writable(self):
        """Warn now if later values cannot be written."""
        if self.folder is not None:
            with self._writing():
                self.folder.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=self.folder).close()

    def heads(self, start: str) -> list[dict]:
        """Keys and facts of the files whose names begin with `start`, the last used first."""
        found = []
        with contextlib.suppress(OSError):
            for path in self.folder.glob(f"{start}*"):
                with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
                    found.append((path.stat().st_mtime, json.loads(file.readline())))
        heads = (head for _, head in sorted(found, key=lambda one: -one[0]))
        return [head for head in heads if isinstance(head, dict) and isinstance(head.get("key"), dict)]

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._warn("written to", error)

    def _warn(self, verb: str, error: OSError):
        notices.warn_once(
            f"cache {self.folder}",
            f"{self.kind} are not kept for the next run, {self.folder} cannot be {verb} ({error}): make room there, or set"
            " DIFFUSERS_TPU_CACHE to another folder or to off",
        )
