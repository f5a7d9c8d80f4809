"""Hand-made edits of upstream's files in `src/diffusers/` become a patch: a new one, or part of one that is there."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from pathlib import Path

import series
import unified
from laying import hand_edited, lay, read_manifest, sha256, wanted, write_whole
from upstream import open_store


HEADER = """\
From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: diffusers on TPU <diffusers-tpu@invalid>
Date: {day:%a, %d %b %Y} 00:00:00 +0000
Subject: [PATCH] {subject}

TODO: what this is, and why no lower rung of the ladder in patches/README.md works.

Origin: vendor
Forwarded: no
Last-Update: {day}
Remove-When: TODO
---

"""
SIGNATURE = b"-- \ndiffusers on TPU\n"


def refresh(root: Path, into: str | None = None, subject: str = "TODO") -> Path | None:
    """The path of the patch that now holds the edits; None where there are none."""
    store = open_store(root)
    want, known = wanted(root, store), read_manifest(root)
    edited = {name: (root / "src" / name).read_bytes() for name in hand_edited(root, want, known)}
    if not edited:
        return None
    gone = sorted(name for name in edited if name not in want)
    if gone:
        raise series.SeriesError(
            f"edited by hand, but not in this upstream release: {', '.join(gone)}; move them away"
        )
    moved = sorted(name for name in edited if name in known and known[name] != [sha256(want[name])])
    if moved:
        raise series.SeriesError(
            f"edited by hand: {', '.join(moved)}, whose patches changed since the last laying: the edit cannot be told from"
            " the change; take the change of the patches back, refresh, then make it again"
        )
    folder = root / "patches"
    if into is None:
        path = _new(folder, edited, want, subject)
    else:
        path = _extend(folder, edited, store, Path(into).name)
    lay(root)
    return path


def _new(folder: Path, edited: dict[str, bytes], want: dict[str, bytes], subject: str) -> Path:
    day = datetime.date.today()
    diffs = b"".join(unified.make(name, want[name], edited[name]) for name in sorted(edited))
    slug = re.sub(r"[^a-z0-9]+", "-", (subject if subject != "TODO" else Path(min(edited)).stem).lower()).strip("-")
    names = series.listed(folder)
    number = max((int(name[:4]) for name in names if name[:4].isdigit()), default=0) + 1
    path = folder / f"{number:04d}-{slug}.patch"
    write_whole(folder.parent, path, HEADER.format(day=day, subject=subject).encode() + diffs + SIGNATURE)
    listing = folder / "series"
    write_whole(folder.parent, listing, listing.read_bytes() + f"{path.name}\n".encode())
    return path


def _extend(folder: Path, edited: dict[str, bytes], pristine: Mapping[str, bytes], name: str) -> Path:
    patches = series.read_series(folder)
    at = next((i for i, patch in enumerate(patches) if patch.name == name), None)
    if at is None:
        raise series.SeriesError(f"--into: expected one of {', '.join(p.name for p in patches)}, got {name}")
    for later in patches[at + 1 :]:
        both = sorted({diff.path for diff in later.diffs} & {*edited})
        if both:
            raise series.SeriesError(
                f"--into {name}: {', '.join(both)} is changed by {later.name} too, which comes after it: the edits stand on"
                f" top of that; use --into {later.name}, or a new patch"
            )
    before = series.patched(patches[:at], pristine)
    after = series.patched(patches[: at + 1], pristine) | edited
    touched = sorted({diff.path for diff in patches[at].diffs} | {*edited})
    diffs = b"".join(unified.make(path, before.get(path, pristine[path]), after[path]) for path in touched)
    header = re.sub(r"(?m)^Last-Update:.*$", f"Last-Update: {datetime.date.today()}", patches[at].header)
    write_whole(folder.parent, folder / name, header.encode() + diffs + SIGNATURE)
    return folder / name
