"""The patches: their order, their headers, and what they make of upstream's files.

A patch is in `git format-patch` form with a zeroed commit id. Its header says why (body), then
`Origin:`, `Forwarded:`, `Last-Update:` (DEP-3) and `Remove-When:`, a condition that someone can check.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import unified


FIELDS = ("Origin", "Forwarded", "Last-Update", "Remove-When")
_FIRST_LINE = "From " + "0" * 40 + " "


class SeriesError(unified.ForkError):
    """The series names a patch that is not there, or a patch does not fit upstream."""


@dataclass(frozen=True)
class Patch:
    name: str
    header: str
    diffs: tuple[unified.FileDiff, ...]

    @property
    def subject(self) -> str:
        match = re.search(r"^Subject: \[PATCH\] (.+(?:\n .+)*)", self.header, re.M)
        return match[1].replace("\n ", " ") if match else ""

    @property
    def body(self) -> str:
        """What stands between the mail header and the fields."""
        text = self.header.partition("\n\n")[2].partition("\n---\n")[0]
        return re.split(rf"^(?:{'|'.join(FIELDS)}):", text, maxsplit=1, flags=re.M)[0].strip()

    def field(self, name: str) -> str:
        match = re.search(rf"^{name}:[ \t]*(.*)$", self.header, re.M)
        return match[1].strip() if match else ""

    def problems(self) -> list[str]:
        """What its header lacks."""
        found = []
        if not self.header.startswith(_FIRST_LINE):
            found.append(f"expected a first line {_FIRST_LINE!r}..., got {self.header.partition(chr(10))[0]!r}")
        if not re.match(r"[\w., -]+: \S", self.subject):
            found.append(f"expected `Subject: [PATCH] area: what`, got {self.subject!r}")
        if len(self.body.split()) < 10:
            found.append(f"expected a body that says why (ten words at least), got {self.body!r}")
        for name in FIELDS:
            value = self.field(name)
            if not value or value.startswith("TODO"):
                found.append(f"expected a line `{name}: ...` in the header, got {value or 'none'}")
        try:
            datetime.date.fromisoformat(self.field("Last-Update") or "2000-01-01")
        except ValueError as error:
            found.append(f"Last-Update: {error}")
        return found


def read_patch(path: Path) -> Patch:
    content = path.read_bytes()
    header = content.partition(b"diff --git ")[0].decode()
    try:
        return Patch(path.name, header, tuple(unified.parse(content)))
    except unified.DiffError as error:
        raise SeriesError(f"patches/{path.name}: {error}") from error


def listed(folder: Path) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in (folder / "series").read_text().splitlines())
    return [line for line in lines if line]


def read_series(folder: Path) -> list[Patch]:
    names = listed(folder)
    for name in names:
        if not (folder / name).is_file():
            raise SeriesError(f"patches/series lists {name}: expected a file patches/{name}, found none")
    return [read_patch(folder / name) for name in names]


def patched(patches: list[Patch], pristine: Mapping[str, bytes]) -> dict[str, bytes]:
    """The content after the whole series of every file that it touches. Raises SeriesError naming patch, hunk and line."""
    result: dict[str, bytes] = {}
    for patch in patches:
        step(patch, patch.diffs, pristine, result)
    return result


def step(
    patch: Patch, diffs: tuple[unified.FileDiff, ...], pristine: Mapping[str, bytes], state: dict[str, bytes]
) -> None:
    """Apply one patch's `diffs` to `state`, the files changed so far."""
    for diff in diffs:
        if diff.path not in pristine:
            raise SeriesError(f"patches/{patch.name}: expected {diff.path} in upstream, it has no such file")
        try:
            state[diff.path] = diff.apply(state.get(diff.path, pristine[diff.path]))
        except unified.DiffError as error:
            raise SeriesError(f"patches/{patch.name}: {error}") from error
