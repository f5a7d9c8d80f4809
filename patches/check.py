"""What is wrong with the patch set: one line each, none where all is in order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import series
from laying import hand_edited, is_overlay, read_manifest, strays
from upstream import open_store


def problems_of(root: Path, wheel: Path | None = None) -> list[str]:
    store = open_store(root, wheel)
    pristine = {name: content for name, content in store.items() if name.startswith("diffusers/")}
    patches, problems = _read(root / "patches")
    state: dict[str, bytes] = {}
    for patch in patches:
        problems += [f"patches/{patch.name}: {problem}" for problem in patch.problems()]
        problems += _try(patch, pristine, state)
    problems += [
        f"src/{name}: ours stands where upstream has a file; rename it" for name in pristine if is_overlay(name)
    ]
    return problems if problems else _tree(root, pristine | state)


def _read(folder: Path) -> tuple[list[series.Patch], list[str]]:
    """The patches that can be read, in order, and what keeps the others from it."""
    names = series.listed(folder)
    files = {path.name for path in folder.glob("*.patch")}
    problems = [
        f"patches/{name}: not listed in patches/series; list or delete it" for name in sorted(files - {*names})
    ]
    problems += [
        f"patches/series: {name} is listed {names.count(name)} times" for name in {*names} if names.count(name) > 1
    ]
    patches = []
    for name in names:
        if name not in files:
            problems.append(f"patches/{name}: listed in patches/series, but there is no such file")
            continue
        try:
            patches.append(series.read_patch(folder / name))
        except series.SeriesError as error:
            problems.append(str(error))
    return patches, problems


def _try(patch: series.Patch, pristine: Mapping[str, bytes], state: dict[str, bytes]) -> list[str]:
    """Apply a patch to `state`, then take it back on a copy: a strict diff restores the files from before or does not fit."""
    after = dict(state)
    try:
        series.step(patch, patch.diffs, pristine, after)
        series.step(patch, tuple(diff.reversed() for diff in reversed(patch.diffs)), pristine, dict(after))
    except series.SeriesError as error:
        return [str(error)]
    state.update(after)
    return []


def _tree(root: Path, want: dict[str, bytes]) -> list[str]:
    """What stands in `src/diffusers/` and should not; nothing where upstream was not laid yet."""
    if not read_manifest(root):
        return []
    edited = hand_edited(root, want, read_manifest(root))
    return [
        *(f"src/{name}: edited by hand; `apply.py refresh` makes a patch of it" for name in edited),
        *(
            f"src/{name}: neither upstream's nor overlay (tpu/, *_flax.py): git ignores it"
            for name in strays(root, want)
        ),
    ]
