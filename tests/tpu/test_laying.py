"""Laying, where upstream comes from, and edits that become patches. Oracle: a release of three files made here, laid by hand."""

import base64
import contextlib
import hashlib
import shutil
import subprocess
import sys
import zipfile

import pytest

import check
import laying
import refresh
import series
import unified
import upstream as store
from laying import lay
from move import move
from small_fork import FILES, LINES, OURS, PATCHED, edit, laid, make_wheel, run_apply, write_patch
from unified import ForkError


def test_laying_is_upstream_patches_and_overlay(fork):
    assert laid(fork) == PATCHED
    assert check.problems_of(fork) == []
    again = lay(fork)
    assert (again.written, again.removed, again.total) == ((), (), 3)
    (fork / "src/diffusers/a.py").unlink()
    (fork / "src/diffusers/sub/lost.py").write_text("work\n")
    assert lay(fork).written == ("diffusers/a.py",)
    assert (fork / "src/diffusers/sub/lost.py").exists()
    assert any("src/diffusers/sub/lost.py: neither upstream's nor overlay" in line for line in check.problems_of(fork))


def test_what_may_not_be_laid_is_refused(fork):
    """Over an edit, where there is no manifest or the new release lacks the file; over the overlay; another wheel; none."""
    wheel = make_wheel(fork, "1.1", {**FILES, "diffusers/tpu/__init__.py": b"theirs\n"})
    with pytest.raises(ForkError, match="where the overlay stands: diffusers/tpu/__init__.py"):
        lay(fork, wheel)
    assert any("ours stands where upstream has a file" in problem for problem in check.problems_of(fork, wheel))
    assert laid(fork) == PATCHED
    (fork / "src/diffusers/sub/b.py").write_text("by hand\n")
    wheel = make_wheel(fork, "1.1", {name: content for name, content in FILES.items() if "sub" not in name})
    with pytest.raises(laying.EditedError, match="src/diffusers/sub/b.py"):
        lay(fork, wheel)
    with pytest.raises(ForkError, match="not in this upstream release: diffusers/sub/b.py"):
        refresh.refresh(fork)
    wheel = make_wheel(fork, "1.0", FILES)
    shutil.rmtree(fork / ".upstream")
    with pytest.raises(store.UpstreamError, match=r"found neither; `pip install -e \.` fetches"):
        lay(fork)
    with pytest.raises(laying.EditedError, match="src/diffusers/sub/b.py"):
        lay(fork, wheel)
    assert (fork / "src/diffusers/sub/b.py").read_text() == "by hand\n"
    other = fork / "other.whl"
    other.write_bytes(wheel.read_bytes() + b"x")
    result = run_apply(fork, "apply", "--wheel", str(other))
    assert result.returncode == 1 and "expected the wheel of diffusers==1.0 with sha256" in result.stderr


def test_hand_edited_files_stop_laying_and_survive_until_they_are_discarded(fork):
    names = ("src/diffusers/a.py", "src/diffusers/sub/b.py")
    for name in names:
        (fork / name).write_text("by hand\n")
    (fork / "src/diffusers/__init__.py").unlink()
    before, result = laid(fork), run_apply(fork, "apply")
    assert result.returncode == 1
    assert "apply.py refresh" in result.stderr and "apply --discard" in result.stderr
    assert laid(fork) == before
    for name in names:
        assert f"  {name}\n" in result.stderr
        assert any(f"{name}: edited by hand" in problem for problem in check.problems_of(fork))
    with pytest.raises(laying.EditedError, match="src/diffusers/sub/b.py") as error:
        lay(fork, discard=["src/diffusers/a.py"])
    assert "diffusers/a.py" not in str(error.value)
    with pytest.raises(ForkError, match="src/diffusers/a.py, src/diffusers/sub/b.py.*got diffusers/__init__.py"):
        lay(fork, discard=["src/diffusers/__init__.py"])
    assert run_apply(fork, "apply", "--discard").returncode == 0
    assert laid(fork) == PATCHED


def moved(fork, a: bytes, more: str = "diffusers/c.py") -> list[str]:
    """A move to a release with this `a.py`, another file and one less; its wheel is not pinned yet."""
    pin = (fork / "patches/UPSTREAM").read_text()
    files = {**FILES, "diffusers/a.py": a, more: b"new\n"}
    del files["diffusers/sub/b.py"]
    wheel = make_wheel(fork, "1.1", files)
    (fork / "patches/UPSTREAM").write_text(pin)
    return move(fork, "1.1", wheel)


def test_a_move_merges_each_patch_and_leads_back(fork):
    before = {path: path.read_bytes() for path in sorted((fork / "patches").glob("[0-9sU]*"))}
    (fork / "requirements-lock.txt").write_text("Other==1\nRegex==2.0\nsafetensors==1.0\n")
    assert moved(fork, b"new\n" + LINES) == ["requirements-lock.txt: 2.0 of regex is locked, the release needs <2"]
    (fork / "requirements-lock.txt").unlink()
    assert check.problems_of(fork) == []
    assert laid(fork)["diffusers/a.py"] == b"new\n" + PATCHED["diffusers/a.py"]
    assert (fork / "src/diffusers/c.py").exists() and not (fork / "src/diffusers/sub").exists()
    assert [path.name[:14] for path in (fork / ".upstream").glob("*.zip")] == ["diffusers-1.1-"]
    assert move(fork, "1.0", fork / "diffusers-1.0-py3-none-any.whl") == [] and laid(fork) == PATCHED
    assert {path: path.read_bytes() for path in before} == before
    assert moved(fork, LINES.replace(b"line 9\n", b"line nine\n")) == [
        "patches/0001-nine.patch: upstream has all of it; its row in patches/README.md can go"
    ]
    assert series.listed(fork / "patches") == [] and check.problems_of(fork) == []


def test_a_move_stops_with_both_sides_and_takes_what_was_mended(fork):
    with pytest.raises(ForkError, match=r"(?s)line 9!.*line 9\n.*line nine.*nothing else was changed") as error:
        moved(fork, LINES.replace(b"line 9\n", b"line 9!\n"))
    assert laid(fork) == PATCHED and check.problems_of(fork) == []
    with pytest.raises(series.SeriesError, match="files where the overlay stands"):  # once the new release is there
        moved(fork, LINES, "diffusers/tpu/__init__.py")
    assert laid(fork) == PATCHED and check.problems_of(fork) == []
    (place,) = (fork / ".upstream/merges/1.1").iterdir()
    assert str(place.relative_to(fork)) in str(error.value)
    place.write_bytes(LINES.replace(b"line 9\n", b"line nine!\n"))
    assert moved(fork, LINES.replace(b"line 9\n", b"line 9!\n")) == []
    assert b"line nine!\n" in laid(fork)["diffusers/a.py"] and check.problems_of(fork) == []


@pytest.mark.parametrize("stop", range(5))
def test_an_interrupted_laying_is_repeated(fork, monkeypatch, stop):
    """Stopped at any write, even when the next laying is for another series than the one that was stopped."""
    two = b"".join(b"line %d of 2\n" % n for n in range(5))
    wheel = make_wheel(fork, "1.1", {name: two for name in FILES} | {"diffusers/a.py": LINES})
    write, done = laying.write_whole, []

    def interrupted(*arguments):
        if len(done) == stop:
            raise KeyboardInterrupt
        done.append(arguments)
        write(*arguments)

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(laying, "write_whole", interrupted)
        lay(fork, wheel)
    for path in (fork / "src").rglob("*.py"):
        assert path.read_bytes() in {*PATCHED.values(), two, LINES}
    three = {name: b"three\n" for name in FILES} | {"diffusers/a.py": LINES}
    lay(fork, make_wheel(fork, "1.2", three))
    assert laid(fork) == {**three, "diffusers/a.py": PATCHED["diffusers/a.py"], **OURS}


# Where upstream comes from


def record_hash(path) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()


@pytest.fixture
def installed(fork, tmp_path, monkeypatch):
    """What pip leaves of the wheel where Python finds it: its files, and a RECORD with more in it; and no store yet."""
    folder, info = tmp_path / "site", "diffusers-1.0.dist-info"
    with zipfile.ZipFile(fork / "diffusers-1.0-py3-none-any.whl") as wheel:
        wheel.extractall(folder)
    (folder / "diffusers/__pycache__").mkdir()
    (folder / "diffusers/__pycache__/a.cpython-311.pyc").write_bytes(b"compiled")
    (folder / info / "INSTALLER").write_text("pip\n")
    names = [*FILES, f"{info}/METADATA", f"{info}/INSTALLER"]
    lines = [f"{name},sha256={record_hash(folder / name)},1" for name in names]
    lines += ["diffusers/__pycache__/a.cpython-311.pyc,,", f"{info}/RECORD,,"]
    (folder / info / "RECORD").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(folder))
    for path in (fork / ".upstream").glob("*.zip"):
        path.unlink()
    return folder


def test_an_installed_release_is_taken_unless_it_was_edited(fork, installed):
    (fork / "src/diffusers/a.py").unlink()
    assert lay(fork).written == ("diffusers/a.py",)
    assert laid(fork) == PATCHED
    (kept,) = (fork / ".upstream").glob("*.zip")
    kept.unlink()
    edited = installed / "diffusers/sub/b.py"
    edited.write_text("edited\n")
    with pytest.raises(store.UpstreamError, match=r"sub/b.py: expected sha256 \S+ as its RECORD says"):
        lay(fork)
    # RECORD agrees with the files, but neither is what was pinned.
    record = installed / "diffusers-1.0.dist-info/RECORD"
    lines = [line for line in record.read_text().splitlines() if "sub/b.py" not in line]
    record.write_text("\n".join([*lines, f"diffusers/sub/b.py,sha256={record_hash(edited)},1"]) + "\n")
    with pytest.raises(store.UpstreamError, match="expected diffusers==1.0 with content digest"):
        lay(fork)
    assert not list((fork / ".upstream").glob("*.zip"))


def test_the_build_requires_upstream_until_it_is_kept(fork):
    code = "import backend; print(backend.get_requires_for_build_editable(), backend.get_requires_for_build_wheel())"
    command = [sys.executable, "-c", code]
    for expected in ("[] []", "['diffusers==1.0'] ['diffusers==1.0']"):
        result = subprocess.run(command, capture_output=True, text=True, cwd=fork / "patches")
        assert result.stdout.strip() == expected, result.stderr
        shutil.rmtree(fork / ".upstream", ignore_errors=True)


# Hand-made edits become patches: the tree is the same before and after, and the patch set is in order


def test_refresh_makes_a_new_patch(fork):
    edit(fork / "src/diffusers/sub/b.py", "two", "zwei")
    edit(fork / "src/diffusers/a.py", "line 11\n", "line elf\n")
    edited = laid(fork)
    result = run_apply(fork, "refresh", "--subject", "a, b: German")
    assert (result.returncode, result.stdout) == (0, "patches/0002-a-b-german.patch holds the edits\n"), result.stderr
    assert series.listed(fork / "patches") == ["0001-nine.patch", "0002-a-b-german.patch"]
    assert laid(fork) == edited and lay(fork).written == ()
    problems = check.problems_of(fork)
    assert len(problems) == 1 and "`Remove-When: ...`" in problems[0]
    edit(fork / "patches/0002-a-b-german.patch", "Remove-When: TODO", "Remove-When: upstream speaks German")
    assert check.problems_of(fork) == []
    (fork / "patches/0002-a-b-german.patch").unlink()
    edit(fork / "patches/series", "0002-a-b-german.patch\n", "")
    lay(fork)
    assert laid(fork) == PATCHED


def test_refresh_puts_an_edit_into_a_patch(fork):
    edit(fork / "src/diffusers/sub/b.py", "two", "zwei")
    edit(fork / "src/diffusers/a.py", "line nine\n", "line neun\n")
    edited = laid(fork)
    assert run_apply(fork, "refresh", "--into", "patches/0001-nine.patch").returncode == 0
    assert series.listed(fork / "patches") == ["0001-nine.patch"]
    assert laid(fork) == edited and check.problems_of(fork) == []
    assert "nothing to do" in run_apply(fork, "refresh").stdout
    patch = series.read_patch(fork / "patches/0001-nine.patch")
    assert [diff.path for diff in patch.diffs] == ["diffusers/a.py", "diffusers/sub/b.py"]
    assert patch.subject == "a: line nine in words" and patch.field("Last-Update") > "2026-01-01"


def test_refresh_refuses_an_edit_below_a_later_patch(fork):
    after = PATCHED["diffusers/a.py"]
    text = unified.make("diffusers/a.py", after, after.replace(b"line 15\n", b"line fifteen\n"))
    write_patch(fork, "0002-fifteen.patch", text)
    lay(fork)
    edit(fork / "src/diffusers/a.py", "line nine\n", "line neun\n")
    edited = laid(fork)
    with pytest.raises(ForkError, match="diffusers/a.py is changed by 0002-fifteen.patch too"):
        refresh.refresh(fork, into="0001-nine.patch")
    with pytest.raises(ForkError, match="--into: expected one of 0001-nine.patch, 0002-fifteen.patch, got none.patch"):
        refresh.refresh(fork, into="none.patch")
    assert laid(fork) == edited
    refresh.refresh(fork, into="0002-fifteen.patch")
    assert laid(fork) == edited and check.problems_of(fork) == []


def test_refresh_refuses_an_edit_over_a_series_that_moved(fork):
    """A patch changed since the last laying and the file edited by hand: the edit alone cannot be told."""
    edit(fork / "patches/0001-nine.patch", "+line nine", "+line IX")
    edit(fork / "src/diffusers/a.py", "line 20\n", "line zwanzig\n")
    with pytest.raises(ForkError, match="diffusers/a.py, whose patches changed since the last laying"):
        refresh.refresh(fork)


def test_refresh_leaves_out_a_file_that_became_upstreams_again(fork):
    edit(fork / "src/diffusers/sub/b.py", "two", "zwei")
    (fork / "src/diffusers/a.py").write_bytes(LINES)
    refresh.refresh(fork, into="0001-nine.patch")
    assert [diff.path for diff in series.read_series(fork / "patches")[0].diffs] == ["diffusers/sub/b.py"]
