"""Hand-made edits become patches. Oracle: the tree is the same before and after, and the patch set is in order."""

import pytest

import check
import refresh
import series
import unified
from laying import lay
from small_fork import LINES, PATCHED, edit, laid, run_apply, write_patch
from unified import ForkError


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
