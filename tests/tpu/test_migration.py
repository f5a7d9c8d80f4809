"""The migration pages. Oracle: what they say that their snippets print, exactly, but for errors, which are rounding where both are small.

Both pages have the same snippets, which are one script; they are run once.
"""

import contextlib
import io
import re

import pytest
import torch

from conftest import ROOT
from test_pages import blocks, prose


PAGE, CHINESE = (ROOT / f"examples/tpu/{name}" for name in ("MIGRATION.md", "MIGRATION.zh.md"))
PRINTED = re.compile(r"^#> (.*)\n", re.M)
ERROR = re.compile(r"\b\d+e[+-]\d+\b")
ROUNDING = 1e-6  # errors below it are any
FACTOR = 3  # of errors above, which are a fault's


@pytest.fixture
def printed(chips, tmp_path, monkeypatch) -> list[str]:
    """What each snippet prints, in the script that they are."""
    monkeypatch.chdir(tmp_path)
    codes = [PRINTED.sub("", code) for code in blocks(PAGE, "python")]
    (tmp_path / "page.py").write_text("\n".join(codes))  # reasons quote its lines
    names, lines, outputs = {"__name__": "__main__"}, 0, []
    for code in codes:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile("\n" * lines + code, "page.py", "exec"), names)
        lines += code.count("\n") + 1
        outputs.append(output.getvalue())
    yield outputs
    torch.set_grad_enabled(True)


def test_snippets_print_what_the_page_shows(printed):
    for code, output in zip(blocks(PAGE, "python"), printed, strict=True):
        shown = "".join(f"{line}\n" for line in PRINTED.findall(code))
        assert ERROR.sub("...", output) == ERROR.sub("...", shown)
        for ours, said in zip(*(map(float, ERROR.findall(text)) for text in (output, shown)), strict=True):
            assert max(ours, said) < ROUNDING or said / FACTOR <= ours <= said * FACTOR, (output, shown)


def test_both_pages_have_the_same_snippets_and_lessons():
    assert blocks(PAGE, "python") == blocks(CHINESE, "python")
    numbers, files = (
        [re.findall(pattern, prose(page), re.M) for page in (PAGE, CHINESE)]
        for pattern in (r"^## (\d+)\. ", r"`([\w/]+\.py)`")
    )
    assert numbers[0] == numbers[1] == [str(n + 1) for n in range(len(blocks(PAGE, "python")) - 1)]
    assert sorted(files[0]) == sorted(files[1])
    for page, found, write in ((PAGE, "Found by:", "Write:"), (CHINESE, "怎么发现：", "怎么写：")):
        lessons = re.split(r"^## ", page.read_text(), flags=re.M)[1:]
        assert lessons and all(lesson.count(found) == lesson.count(write) == 1 for lesson in lessons)
