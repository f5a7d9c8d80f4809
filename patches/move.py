"""Moving to another release: every patch merged three ways with what upstream changed, then the release laid in place of the other.

A patch turns a file `before` into `after`; `ours` is what the patches above it made of the file of the new release. `git merge-file`
puts the change from `before` to `after` into `ours`. Where both changed the same lines the move stops before it writes to the tree.
The file with both sides is in `MERGES`: mended there, the next `move` takes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import email
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import series
import unified
from laying import hand_edited, lay, read_manifest, wanted
from refresh import SIGNATURE
from upstream import Pin, UpstreamError, digest, open_store, read_pin, read_wheel


MERGES = Path(".upstream", "merges")
MARKER = re.compile(rb"^(<{7}|={7}|>{7}|\|{7})", re.M)


class ConflictError(unified.ForkError):
    """Upstream and a patch changed the same lines."""


def move(root: Path, version: str, wheel: Path | None = None) -> list[str]:
    """Pin, patches and tree are those of release `version`. Returns what is left to do, one line each.

    Raises:
        EditedError: files of upstream were edited by hand.
        ConflictError: a patch does not merge; nothing was changed.
        UpstreamError: pip has no such release, or `wheel` is of another.
    """
    old = open_store(root)
    edited = hand_edited(root, wanted(root, old), read_manifest(root))
    if edited:
        raise unified.ForkError(
            f"edited by hand: {', '.join(edited)}; `apply.py refresh` makes a patch of it, then move"
        )
    with _wheel_of(root, version, wheel) as path:
        pin, files = _read(read_pin(root), version, path)
        patches = _merged(root, pin, old, files)
        kept = {file: file.read_bytes() for file in (root / "patches").iterdir() if file.is_file()}
        try:
            _write(root, pin, patches)
            lay(root, path)
        except BaseException:  # the tree is still the old release's
            for file, content in kept.items():
                file.write_bytes(content)
            raise
    shutil.rmtree(root / MERGES, ignore_errors=True)
    dropped = [name for name, text in patches.items() if text is None]
    left = [f"patches/{name}: upstream has all of it; its row in patches/README.md can go" for name in dropped]
    metadata = email.message_from_bytes(files[pin.dist_info + "METADATA"])
    return left + _locked_otherwise(root / "requirements-lock.txt", metadata.get_all("Requires-Dist", []))


def _locked_otherwise(lock: Path, requirements: list[str]) -> list[str]:
    """A line for each package that the release always needs, in another version than the locked one."""
    from pip._vendor.packaging.requirements import Requirement  # `apply` needs only Python
    from pip._vendor.packaging.utils import canonicalize_name

    lines = [Requirement(line) for line in lock.read_text().splitlines() if "==" in line] if lock.exists() else []
    locked = {canonicalize_name(line.name): str(line.specifier)[2:] for line in lines}
    asked = {canonicalize_name(one.name): one for one in map(Requirement, requirements) if one.marker is None}
    return [
        f"{lock.name}: {locked[name]} of {name} is locked, the release needs {one.specifier}"
        for name, one in asked.items()
        if name in locked and locked[name] not in one.specifier
    ]


@contextlib.contextmanager
def _wheel_of(root: Path, version: str, wheel: Path | None) -> Iterator[Path]:
    if wheel is not None:
        yield wheel
        return
    name = read_pin(root).name
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, f"{name}=={version}"]
        done = subprocess.run(command, capture_output=True, text=True)
        found = [*Path(folder).glob("*.whl")]
        if done.returncode or not found:
            raise UpstreamError(f"expected a wheel of {name}=={version}, pip has none:\n{done.stderr[-1000:]}")
        yield found[0]


def _read(pin: Pin, version: str, path: Path) -> tuple[Pin, dict[str, bytes]]:
    """The pin of a wheel that is not pinned yet, and its files."""
    found = Pin(pin.name, version, hashlib.sha256(path.read_bytes()).hexdigest(), "")
    files = read_wheel(found, path)
    if found.dist_info + "METADATA" not in files:
        raise UpstreamError(f"expected a wheel of {found.requirement}, got {path}")
    return dataclasses.replace(found, files_sha256=digest(files)), files


def _merged(root: Path, pin: Pin, old: Mapping[str, bytes], new: Mapping[str, bytes]) -> dict[str, bytes | None]:
    """The text of each patch by name, None for one that has become upstream's."""
    texts, conflicts = {}, []
    before: dict[str, bytes] = {}
    ours: dict[str, bytes] = {}
    for patch in series.read_series(root / "patches"):
        after, diffs = dict(before), []
        series.step(patch, patch.diffs, old, after)
        for name in (diff.path for diff in patch.diffs):
            theirs = ours.get(name, new.get(name))
            if theirs is None:
                conflicts.append(
                    f"patches/{patch.name}: {pin.requirement} has no {name}; take it out of the patch, or find its place"
                )
                continue
            place = root / MERGES / pin.version / f"{Path(patch.name).stem}-{name.replace('/', '-')}"
            merged = _merge(place, before.get(name, old[name]), after[name], theirs)
            if MARKER.search(merged):
                conflicts.append(f"patches/{patch.name}: both sides, in {place.relative_to(root)}:\n{_shown(merged)}")
            diffs.append(unified.make(name, theirs, merged))
            ours[name] = merged
        texts[patch.name] = patch.header.encode() + b"".join(diffs) + SIGNATURE if any(diffs) else None
        before = after
        if conflicts:
            raise ConflictError(
                "\n".join([*conflicts, "mend the files named, then move again; nothing else was changed"])
            )
    return texts


def _merge(place: Path, before: bytes, after: bytes, ours: bytes) -> bytes:
    """The merged file, with both sides of lines that clash; then it is kept at `place`, from where it is taken once it is mended."""
    if place.exists() and not MARKER.search(content := place.read_bytes()):
        return content
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, part) for part in ("ours", "before", "after")]
        for file, content in zip(files, (ours, before, after)):
            file.write_bytes(content)
        labels = [word for label in ("the new release", "the old release", "the patch") for word in ("-L", label)]
        done = subprocess.run(["git", "merge-file", "-p", "--diff3", *labels, *map(str, files)], capture_output=True)
    if done.returncode > 127:
        raise unified.ForkError(f"git merge-file: {done.stderr.decode()[-300:]}")
    if done.returncode:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(done.stdout)
    return done.stdout


def _shown(merged: bytes) -> str:
    """The lines with both sides."""
    return b"\n".join(re.findall(rb"^<{7}.*?^>{7}[^\n]*", merged, re.M | re.S)).decode()


def _write(root: Path, pin: Pin, patches: dict[str, bytes | None]):
    folder = root / "patches"
    text = (folder / "UPSTREAM").read_text()
    text = re.sub(
        r"^\w+==\S+ --hash=sha256:\w+$", f"{pin.requirement} --hash=sha256:{pin.wheel_sha256}", text, flags=re.M
    )
    text = re.sub(r"^# files: sha256:\w+$", f"# files: sha256:{pin.files_sha256}", text, flags=re.M)
    (folder / "UPSTREAM").write_text(text)
    for name, content in patches.items():
        if content is None:
            (folder / name).unlink()
            listing = folder / "series"
            listing.write_text(listing.read_text().replace(f"{name}\n", ""))
        else:
            (folder / name).write_bytes(content)
