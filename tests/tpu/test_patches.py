"""The patch set and its strict diffs. Oracles: the real series on the pinned release, `git apply`, upstream's metadata."""

import random
import re
import shutil
import subprocess
from importlib import metadata

import pytest

import check
import series
import unified
import upstream as store
from laying import is_overlay
from small_fork import A_DIFF, LINES, edit, run_apply
from unified import DiffError


def random_edit(rng: random.Random) -> tuple[bytes, bytes]:
    before = [rng.choice([b"a\n", b"b\n", b"\n", b"\t x \n", b"\xc3\xa9\x0c\xe2\x80\xa8\n"]) for _ in range(40)]
    after = list(before)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(2, len(after) - 2)
        after[at : at + rng.randint(0, 2)] = [b"new %d\n" % rng.randrange(9) for _ in range(rng.randint(0, 3))]
    return b"".join(before), b"".join(after)


def test_a_diff_is_applied_and_taken_back(tmp_path):
    (tmp_path / "src/pkg").mkdir(parents=True)
    file = tmp_path / "src/pkg/a.py"
    for turn in range(8):
        before, after = random_edit(random.Random(random.random()))
        text = unified.make("pkg/a.py", before, after, context=1 + turn % 3)
        assert (text == b"") == (before == after)
        if text:
            (diff,) = unified.parse(b"header\n" + text + b"-- \nsignature\n")
            assert diff.apply(before) == after and diff.reversed().apply(after) == before
            file.write_bytes(before)
            subprocess.run(["git", "apply", "-"], input=text, cwd=tmp_path, check=True)
            assert file.read_bytes() == after


MISFITS = {
    "white space": (LINES.replace(b"line 8\n", b"line 8 \n"), r"line 8: expected 'line 8', got 'line 8 '"),
    "offset": (b"new\n" + LINES, r"line 7: expected 'line 7', got 'line 6'; these lines are at line 8"),
    "end of file": (LINES[: LINES.index(b"line 10\n")], r"line 10: expected 'line 10', got '\(end of file\)'"),
    "applied already": (LINES.replace(b"line 9\n", b"line nine\n"), r"line 9: expected 'line 9', got 'line nine'"),
}
UNREADABLE = [
    (b"--- a/src/pkg/a.py", b"new file mode 100644\n--- /dev/null", "belongs to the overlay"),
    (b"b/src/pkg/a.py", b"b/src/pkg/b.py", "with one path"),
    (b"src/pkg", b"setup", "below src/ only"),
    (b"@@ -7,5 +7,5 @@", b"@@ -7,6 +7,5 @@", "ends early"),
    (b"@@ -7,5 +7,5 @@", b"@@ -7,4 +7,5 @@", "holds 5 old|ends early|no hunk|old and"),
    (b"@@ -7,5 +7,5 @@", b"@@ -7,5 +8,5 @@", "says its result starts at line 8, it is 7"),
    (b"@@ -7,5 +7,5 @@", b"@@ all @@", "expected `@@ -LINE,COUNT"),
    (b" line 11\n", b" line 11\n\\ No newline at end of file\n", "final newline"),
    (b"diff --git", b"diff", "no `diff --git` line"),
]


def test_what_does_not_fit_or_cannot_be_read_is_refused():
    for source, message in MISFITS.values():
        with pytest.raises(DiffError, match=message):
            unified.parse(A_DIFF)[0].apply(source)
    for old, new, message in UNREADABLE:
        with pytest.raises(DiffError, match=message):
            for diff in unified.parse(A_DIFF.replace(old, new)):
                diff.apply(LINES)
    with pytest.raises(DiffError, match="no line of context"):
        unified.parse(unified.make("pkg/a.py", LINES, LINES.replace(b"line 9\n", b""), context=0))


# The real patch set


def test_the_patch_set_is_in_order(root):
    result = run_apply(root, "check")
    assert (result.returncode, result.stderr) == (0, ""), result.stdout
    assert result.stdout.endswith("in order\n")


def test_git_applies_the_series_too(root, pristine, tmp_path):
    patches = series.read_series(root / "patches")
    for name in {diff.path for patch in patches for diff in patch.diffs}:
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / name).write_bytes(pristine[name])
    for patch in patches:
        subprocess.run(["git", "apply", str(root / "patches" / patch.name)], cwd=tmp_path, check=True)
    for name, content in series.patched(patches, pristine).items():
        assert (tmp_path / "src" / name).read_bytes() == content


@pytest.fixture
def copy(root, pristine, tmp_path):
    """The patch set in a folder of its own, with the pinned release but nothing laid."""
    shutil.copytree(root / "patches", tmp_path / "patches", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / ".upstream").mkdir()
    path = store.store_path(root, store.read_pin(root))
    shutil.copy(path, tmp_path / ".upstream" / path.name)
    return tmp_path


FIRST = "0001-attention-tpu-backend.patch"
SECOND = "0002-hunyuan15-static-is-t2v.patch"
# What is replaced in the first patch and by what, or what is done to the patches; the problem that is named.
EDITS = {
    **{f"no {name}": ((f"{name}: ", "X: "), f"expected a line `{name}: ...`") for name in series.FIELDS},
    "a header left to do": (("Remove-When: ", "Remove-When: TODO "), "`Remove-When: ...`"),
    "no date": (("Last-Update: 20", "Last-Update: in 20"), "Last-Update: Invalid isoformat"),
    "no body": (("Models that set", "Origin: x\nModels that set"), "a body that says why"),
    "no area": (("[PATCH] attention: backends", "[PATCH] backends"), "`Subject: [PATCH] area: what`"),
    "a real commit id": (("From 0000", "From 0001"), "expected a first line 'From 0000000000"),
    "an offset": (("@@ -259,4 +260,11 @@", "@@ -258,4 +259,11 @@"), "of diffusers/models/attention_dispatch.py does not fit at line 258"),
    "an unknown file": (("/attention_dispatch.py", "/nowhere.py", 4), "expected diffusers/models/nowhere.py in upstream, it has no"),
    "a file missing": (lambda p: (p / FIRST).unlink(), f"patches/{FIRST}: listed in patches/series, but there is no"),
    "a patch unlisted": (lambda p: shutil.copy(p / FIRST, p / "0099-x.patch"), "patches/0099-x.patch: not listed"),
    "listed twice": (lambda p: edit(p / "series", FIRST, f"{FIRST}\n{FIRST}"), f"{FIRST} is listed 2 times"),
    "not a patch": (lambda p: (p / FIRST).write_text("hello\n"), "no `diff --git` line"),
    "order": (
        lambda p: (p / "series").write_text((p / "series").read_text().replace(f"{SECOND}\n", "") + f"{SECOND}\n"),
        "0003-hunyuan15-order-tokens-without-boolean-indices.patch: hunk 1 of",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_check_names_what_is_wrong(copy, name):
    assert check.problems_of(copy) == []
    what, message = EDITS[name]
    if callable(what):
        what(copy / "patches")
    else:
        edit(copy / "patches" / FIRST, *what)
    assert [problem for problem in check.problems_of(copy) if message in problem], check.problems_of(copy)
    if name == "a file missing":
        result = run_apply(copy, "check")
        assert result.returncode == 1 and message in result.stdout and "problem" in result.stdout.splitlines()[-1]


def test_gitignore_and_overlay_are_one(root):
    names = ["__init__.py", "tpu/a.py", "tpu/b/c.json", "models/x.py", "models/x_flax.py", "py.typed", "new/y.py"]
    names = [f"diffusers/{name}" for name in [*names, "pipelines/wan/pipeline_wan_flax.py", "tpu_flax/z.py"]]
    command = ["git", "check-ignore", "--no-index", *(f"src/{name}" for name in names)]
    ignored = subprocess.run(command, capture_output=True, text=True, cwd=root).stdout.splitlines()
    assert ignored == [f"src/{name}" for name in names if not is_overlay(name)]


def test_the_pin_is_written_once(root):
    pin = store.read_pin(root)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "patches/backend.py", "requirements-lock.txt"):
        assert not re.search(rf"(?<![\d.]){re.escape(pin.version)}\b", (root / name).read_text()), name


def test_the_distribution_keeps_what_upstream_asks_for(root, pristine):
    ours = metadata.distribution("diffusers")
    if "+tpu." not in ours.version:
        pytest.skip(f"diffusers {ours.version} is installed here, not this fork")
    pin = store.read_pin(root)
    text = pristine[pin.dist_info + "METADATA"].decode()
    theirs = {line[15:] for line in text.splitlines() if line.startswith("Requires-Dist: ")}
    assert {line for line in theirs if 'extra == "test"' not in line} <= set(ours.requires)
    assert {"diffusers-cli", "diffusers-tpu"} <= {entry.name for entry in ours.entry_points}
    assert ours.version.startswith(f"{pin.version}+tpu.")
    libtpu = [line for line in ours.requires if "jax[tpu]" in line or "libtpu" in line]
    assert len(libtpu) == 1 and "linux" in libtpu[0] and "x86_64" in libtpu[0]
