"""Files of the store: each a line of JSON, its key in words, and what is kept, with a digest of it.

A file is whole or not there, read by any number of processes while another writes or makes room: it is named by a digest of
its key, and a name always means the same. Only load what you or your host made: reading it runs code, as any pickle does.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import pickle
import zlib
from dataclasses import dataclass
from pathlib import Path

from ... import notices
from ...config import read_environment
from ...files import make_room, whole_files


MOST_BYTES = 8 << 30
FOLDER = "executables"
SUFFIX = ".executable"
PARTS = {
    "state": "the model's attributes, hooks, processors or adapters",
    "weights": "shapes, dtypes or layout of its weights",
    "numbers": "its adapters",
    "plan": "how its class runs on the path",
    "settings": "TPUConfig",
    "mesh": "the chips or their mesh",
    "compiler": "flags of the compiler",
    "versions": "versions",
    "sources": "the code of diffusers or transformers",
}  # of a key, for those who read of it


@dataclass(frozen=True)
class Key:
    """What a program is kept by.

    Attributes:
        of_module: of the module as it is now, of chips and versions: part of a key -> its words.
        of_call: of the call.
    """

    model: str
    of_module: dict[str, str]
    of_call: dict[str, str]

    @property
    def family(self) -> str:
        """The start of the names of all programs of the module as it is."""
        return f"{self.model}-{_digest(self.of_module)}"

    @property
    def name(self) -> str:
        return f"{self.family}-{_digest(self.of_call)}{SUFFIX}"

    @property
    def parts(self) -> dict[str, str]:
        return {"model": self.model, **self.of_module, **self.of_call}


@dataclass(frozen=True)
class Apart:
    """What is kept for the same call, of another run.

    Attributes:
        words: part of a key -> its words there (None: it has none) and here.
        ahead: it was made ahead of a run, for a run like this one.
    """

    words: dict[str, tuple[str | None, str]]
    ahead: bool

    def __str__(self) -> str:
        return ", ".join(_named(name, *words) for name, words in self.words.items())


class Store:
    """The store in one folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def find(self, key: Key):
        """What is kept for this key; None if nothing is. What is damaged is removed, said, and not there."""
        path = self.folder / key.name
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            notices.warn_once(
                f"store {error.errno}", f"compiled programs cannot be read, so they are compiled anew: {error}"
            )
            return None
        try:
            found = _unpacked(raw, key)
        except Exception as error:
            self.damaged(key, error)
            return None
        with contextlib.suppress(OSError):  # not ours to write: the time of its last use stays
            os.utime(path)
        return found

    def damaged(self, key: Key, error: Exception):
        """What is kept for this key cannot be used: it is removed, and said."""
        path = self.folder / key.name
        notices.warn_once(
            f"damaged {path}", f"{path} is damaged ({error!r:.200}): it is removed, and the program compiled anew"
        )
        with contextlib.suppress(OSError):
            path.unlink()

    def keep(self, key: Key, thing, ahead: bool = False) -> Path | None:
        """Keep it; None, said once, where the folder cannot be written to or has no room. `ahead`: made for a run to come."""
        body = zlib.compress(pickle.dumps(thing), 1)
        digest = hashlib.sha256(body).hexdigest()
        head = json.dumps({"key": key.parts, "sha256": digest, "bytes": len(body), "ahead": ahead})
        path = self.folder / key.name
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with whole_files([path]) as (draft,):
                draft.write_bytes(head.encode() + b"\n" + body)
            self._make_room()
        except OSError as error:
            why = "no room is left" if error.errno == errno.ENOSPC else str(error)
            notices.warn_once(
                f"store {self.folder}",
                f"compiled programs are not kept for the next run, {self.folder} cannot be written to ({why});"
                " DIFFUSERS_TPU_CACHE names another folder, or off",
            )
            return None
        return path

    def _make_room(self):
        """The longest unused go; one process at a time looks."""
        with open(self.folder.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            make_room(self.folder, MOST_BYTES)

    def of_family(self, key: Key) -> list[Key]:
        """Keys of what is kept of the module as it is, the last used first."""
        return [Key(key.model, key.of_module, kept.of_call) for kept, _ in self._heads(f"{key.family}-*{SUFFIX}", key)]

    def nearest(self, key: Key) -> "Apart | None":
        """What parts this key from the nearest one kept of the same model and call; None where there is none."""
        found = []
        for kept, ahead in self._heads(f"{key.model}-*{SUFFIX}", key):
            words = {name: (kept.of_module.get(name), here) for name, here in key.of_module.items()}
            words = {name: pair for name, pair in words.items() if pair[0] != pair[1]}
            if words and kept.of_call == key.of_call:
                found.append(Apart(words, ahead))
        return min(found, key=lambda apart: (not apart.ahead, len(apart.words)), default=None)

    def _heads(self, pattern: str, key: Key) -> list[tuple[Key, bool]]:
        """Keys of what is kept and whether it was made ahead, the last used first."""
        found = []
        with contextlib.suppress(OSError):
            for path in self.folder.glob(pattern):
                with contextlib.suppress(OSError, ValueError, KeyError):
                    with open(path, "rb") as file:
                        head = json.loads(file.readline())
                    lasting, passing = (
                        {name: head["key"][name] for name in part if name in head["key"]}
                        for part in (key.of_module, key.of_call)
                    )
                    found.append((path.stat().st_mtime, Key(key.model, lasting, passing), head["ahead"]))
        return [(kept, ahead) for _, kept, ahead in sorted(found, key=lambda one: -one[0])]


def store_here() -> Store | None:
    """The store of this process; None where nothing is kept (`DIFFUSERS_TPU_CACHE=off`)."""
    cache = read_environment().cache_dir
    return None if cache is None else Store(Path(cache) / FOLDER)


def _unpacked(raw: bytes, key: Key):
    head, _, body = raw.partition(b"\n")
    head = json.loads(head)
    if head["key"] != key.parts:
        raise ValueError("its key is another one's")
    if len(body) != head["bytes"] or hashlib.sha256(body).hexdigest() != head["sha256"]:
        raise ValueError(f"expected {head['bytes']} bytes of its digest, got {len(body)}")
    return pickle.loads(zlib.decompress(body))


def _digest(parts: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(sorted(parts.items())).encode()).hexdigest()[:16]


def _named(part: str, there: str | None, here: str) -> str:
    """A part of a key by name; of versions, which."""
    if part != "versions" or there is None:
        return PARTS.get(part, part)
    former = dict(item.split(" ", 1) for item in there.split(", "))
    now = dict(item.split(" ", 1) for item in here.split(", "))
    apart = [name for name in {**former, **now} if former.get(name) != now.get(name)]
    said = (f"{name} {former.get(name, 'none')} there, {now.get(name, 'none')} here" for name in apart)
    return f"versions ({', '.join(said)})"
