"""Laying: upstream's files and the patches become `src/diffusers/`, beside our overlay, and no one's work is lost.

The manifest (`.upstream/manifest.json`) holds the sha256 of every file laid. A file that is neither what the manifest says
nor what is about to be written was edited by hand: laying stops before it changes anything. Files are drafted elsewhere and
renamed into place, and the manifest first names old and new together, so an interrupted laying is simply done again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import series
from unified import ForkError
from upstream import drop_other_releases, open_store


Manifest = dict[str, list[str]]


class EditedError(ForkError):
    """Files of upstream were edited by hand since the last laying."""


@dataclass(frozen=True)
class Laid:
    """What one laying did."""

    written: tuple[str, ...]
    removed: tuple[str, ...]
    total: int


def is_overlay(name: str) -> bool:
    """Whether a file (named as in a wheel) is ours. `.gitignore` says the same."""
    return name.startswith("diffusers/tpu/") or name.endswith("_flax.py")


def wanted(root: Path, store: dict[str, bytes]) -> dict[str, bytes]:
    """Every upstream file as it is to stand in `src/`: patched where the series says so."""
    pristine = {name: content for name, content in store.items() if name.startswith("diffusers/")}
    shadowed = sorted(filter(is_overlay, pristine))
    if shadowed:
        raise series.SeriesError(f"upstream has files where the overlay stands: {', '.join(shadowed)}; rename ours")
    return pristine | series.patched(series.read_series(root / "patches"), pristine)


def lay(root: Path, wheel: Path | None = None, discard: Iterable[str] | None = None) -> Laid:
    """Make `src/` hold what is wanted. `discard` names hand-edited files to overwrite; an empty one means all of them."""
    want = wanted(root, open_store(root, wheel))
    known = read_manifest(root)
    edited = hand_edited(root, want, known)
    if discard is not None:
        names = {Path(name).as_posix().removeprefix("src/") for name in discard}
        if not names <= set(edited):
            raise ForkError(
                f"--discard: expected files edited by hand ({', '.join(f'src/{name}' for name in edited) or 'there are none'}),"
                f" got {', '.join(sorted(names - set(edited)))}"
            )
        edited = [name for name in edited if names and name not in names]
    if edited:
        raise EditedError(
            "edited by hand since the last laying, which would be lost:\n"
            + "".join(f"  src/{name}\n" for name in edited)
            + "turn it into a patch: python patches/apply.py refresh\n"
            + "or drop it:           python patches/apply.py apply --discard"
        )
    stale = [name for name in known if name not in want]
    different = [name for name in want if _current(root, name) != want[name]]
    final = {name: [sha256(content)] for name, content in want.items()}
    if stale or different or known != final:
        _write_manifest(root, {n: [*known.get(n, []), *final.get(n, [])] for n in {**known, **final}})
        for name in different:
            write_whole(root, root / "src" / name, want[name])
        for name in stale:
            _remove(root, name)
        _write_manifest(root, final)
    drop_other_releases(root)
    return Laid(tuple(different), tuple(stale), len(want))


def hand_edited(root: Path, want: dict[str, bytes], known: Manifest) -> list[str]:
    """The files that are neither as last laid nor as wanted now."""
    found = []
    for name in sorted({*want, *known}):
        content = _current(root, name)
        if content is not None and content != want.get(name) and sha256(content) not in known.get(name, []):
            found.append(name)
    return found


def strays(root: Path, want: dict[str, bytes]) -> list[str]:
    """Files in `src/diffusers/` that are neither upstream's nor overlay: git ignores them, so they would be lost unseen."""
    names = (path.relative_to(root / "src") for path in (root / "src" / "diffusers").rglob("*") if path.is_file())
    return sorted(
        name.as_posix()
        for name in names
        if "__pycache__" not in name.parts and name.as_posix() not in want and not is_overlay(name.as_posix())
    )


def read_manifest(root: Path) -> Manifest:
    path = _manifest_path(root)
    return json.loads(path.read_text()) if path.exists() else {}


def _manifest_path(root: Path) -> Path:
    return root / ".upstream" / "manifest.json"


def _write_manifest(root: Path, manifest: Manifest) -> None:
    write_whole(root, _manifest_path(root), json.dumps(manifest, indent=0, sort_keys=True).encode())


def write_whole(root: Path, path: Path, content: bytes) -> None:
    draft = root / ".upstream" / f"draft-{os.getpid()}"
    draft.write_bytes(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.replace(draft, path)


def _remove(root: Path, name: str) -> None:
    path = root / "src" / name
    path.unlink(missing_ok=True)
    for folder in path.parents:
        if folder == root / "src" or not folder.is_dir() or any(folder.iterdir()):
            break
        folder.rmdir()


def _current(root: Path, name: str) -> bytes | None:
    path = root / "src" / name
    return path.read_bytes() if path.exists() else None


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
