"""Unified diffs, strictly: a hunk fits where its header says, byte for byte, or it does not fit.

No fuzz, no offset, no guess about white space. What a patch of this fork has no need of (new, deleted or renamed files,
missing newlines, binary content, hunks without context) is refused by name. Everything is bytes; paths are as in a wheel
(`diffusers/...`), in the patch text they stand under `src/`.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace


PREFIX = "src/"
_HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class ForkError(Exception):
    """Something about the fork that a person has to put right; the message says what and how."""


class DiffError(ForkError):
    """A diff that cannot be read, or that does not fit the file it is for."""


@dataclass(frozen=True)
class Hunk:
    """Some lines, each with its mark (` `, `-`, `+`), and the line numbers at which they start before and after."""

    old_start: int
    new_start: int
    lines: tuple[bytes, ...]

    @property
    def before(self) -> list[bytes]:
        return [line[1:] for line in self.lines if line[:1] in b" -"]

    @property
    def after(self) -> list[bytes]:
        return [line[1:] for line in self.lines if line[:1] in b" +"]

    def reversed(self) -> Hunk:
        swap = {b"+": b"-", b"-": b"+", b" ": b" "}
        return Hunk(self.new_start, self.old_start, tuple(swap[line[:1]] + line[1:] for line in self.lines))


@dataclass(frozen=True)
class FileDiff:
    """All hunks for one file, in order."""

    path: str
    hunks: tuple[Hunk, ...]

    def reversed(self) -> FileDiff:
        return replace(self, hunks=tuple(hunk.reversed() for hunk in self.hunks))

    def apply(self, source: bytes) -> bytes:
        """The file after the diff. Raises DiffError with the first line that is not what a hunk says it is."""
        lines = source.splitlines(keepends=True)
        result: list[bytes] = []
        done = 0
        for number, hunk in enumerate(self.hunks, 1):
            where = f"hunk {number} of {self.path}"
            start = hunk.old_start - 1
            if start < done:
                raise DiffError(f"{where} starts at line {hunk.old_start}, before the end of the hunk above it")
            result += lines[done:start]
            if len(result) + 1 != hunk.new_start:
                raise DiffError(f"{where} says its result starts at line {hunk.new_start}, it is {len(result) + 1}")
            done = start + len(hunk.before)
            _expect(where, hunk, lines, start)
            result += hunk.after
        return b"".join(result + lines[done:])


def _expect(where: str, hunk: Hunk, lines: list[bytes], start: int) -> None:
    expected, found = hunk.before, lines[start : start + len(hunk.before)]
    if found == expected:
        return
    at = next((i for i, pair in enumerate(zip(expected, found)) if pair[0] != pair[1]), len(found))
    got = found[at] if at < len(found) else b"(end of file)"
    places = [
        i + 1 for i in range(len(lines) - len(expected) + 1) if i != start and lines[i : i + len(expected)] == expected
    ]
    hint = f"; these lines are at line {places[0]}" if len(places) == 1 else ""
    raise DiffError(
        f"{where} does not fit at line {start + at + 1}: expected {_show(expected[at])}, got {_show(got)}{hint}"
    )


def _show(line: bytes) -> str:
    return repr(line.decode("utf-8", "replace").rstrip("\n"))


def parse(text: bytes) -> list[FileDiff]:
    """The diffs in a patch's text, from its first `diff --git` line to the signature or the end."""
    lines = text.splitlines(keepends=True)
    diffs: list[FileDiff] = []
    at = next((i for i, line in enumerate(lines) if line.startswith(b"diff --git ")), len(lines))
    while at < len(lines) and lines[at] != b"-- \n":
        path, at = _read_path(lines, at)
        hunks = []
        while at < len(lines) and lines[at].startswith(b"@@"):
            hunk, at = _read_hunk(lines, at)
            hunks.append(hunk)
        if not hunks:
            raise DiffError(f"{path}: no hunk where one is expected: {_show(lines[at]) if at < len(lines) else 'end'}")
        diffs.append(FileDiff(path, tuple(hunks)))
    if not diffs:
        raise DiffError("no `diff --git` line: expected a patch as `git format-patch` writes it")
    return diffs


def _read_path(lines: list[bytes], at: int) -> tuple[str, int]:
    match = re.fullmatch(rb"diff --git a/(\S+) b/(\S+)\n", lines[at])
    if not match or match[1] != match[2]:
        raise DiffError(f"expected `diff --git a/PATH b/PATH` with one path, got {_show(lines[at])}")
    path = match[1].decode()
    if not path.startswith(PREFIX):
        raise DiffError(f"{path}: a patch changes files below {PREFIX} only")
    at += 1
    if at < len(lines) and lines[at].startswith(b"index "):
        at += 1
    if lines[at : at + 2] != [b"--- a/" + match[1] + b"\n", b"+++ b/" + match[1] + b"\n"]:
        raise DiffError(
            f"{path}: expected `--- a/{path}` and `+++ b/{path}`, got {_show(b''.join(lines[at : at + 1]))}; a patch changes"
            " a file that exists: a new one belongs to the overlay (src/diffusers/tpu/ or a *_flax.py)"
        )
    return path[len(PREFIX) :], at + 2


def _read_hunk(lines: list[bytes], at: int) -> tuple[Hunk, int]:
    header = _HUNK.match(lines[at])
    if not header:
        raise DiffError(f"expected `@@ -LINE,COUNT +LINE,COUNT @@`, got {_show(lines[at])}")
    old_count, new_count = (int(n) if n else 1 for n in (header[2], header[4]))
    body: list[bytes] = []
    olds = news = 0
    while olds < old_count or news < new_count:
        at += 1
        line = lines[at] if at < len(lines) else b""
        if line[:1] not in (b" ", b"-", b"+") or not line.endswith(b"\n"):
            raise DiffError(f"hunk {_show(header[0])} ends early at {_show(line)}")
        olds += line[:1] in b" -"
        news += line[:1] in b" +"
        body.append(line)
    if (olds, news) != (old_count, new_count):
        raise DiffError(f"hunk {_show(header[0])} holds {olds} old and {news} new lines")
    if not any(line[:1] == b" " for line in body):
        raise DiffError(f"hunk {_show(header[0])} has no line of context")
    if lines[at + 1 : at + 2] and lines[at + 1].startswith(b"\\"):
        raise DiffError(f"hunk {_show(header[0])}: a file without a final newline is not supported")
    return Hunk(int(header[1]), int(header[3]), tuple(body)), at + 1


def make(path: str, before: bytes, after: bytes, context: int = 2) -> bytes:
    """The diff that turns `before` into `after`, as `parse` reads it; empty where they are equal."""
    if before == after:
        return b""
    for side in (before, after):
        if not side.endswith(b"\n"):
            raise DiffError(f"{path}: a file without a final newline is not supported; add one")
    name = (PREFIX + path).encode()
    body = difflib.diff_bytes(
        difflib.unified_diff,
        before.splitlines(keepends=True),
        after.splitlines(keepends=True),
        b"a/" + name,
        b"b/" + name,
        n=context,
        lineterm=b"\n",
    )
    return b"diff --git a/%b b/%b\n" % (name, name) + b"".join(body)
