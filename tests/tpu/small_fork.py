"""A fork of a release of three files, made here: enough for every rule of laying, and quick."""

import datetime
import hashlib
import shutil
import subprocess
import sys
import zipfile

import refresh
import unified
import upstream
from laying import lay


LINES = b"".join(b"line %d\n" % n for n in range(1, 21))


A_DIFF = unified.make("pkg/a.py", LINES, LINES.replace(b"line 9\n", b"line nine\n"))
FILES = {"diffusers/__init__.py": b"", "diffusers/a.py": LINES, "diffusers/sub/b.py": b"one\ntwo\nthree\nfour\n"}
METADATA = b"""Metadata-Version: 2.1
Name: diffusers
Version: %b
Requires-Dist: regex<2
Requires-Dist: safetensors
Requires-Dist: other<1; extra == "more"
"""


def make_wheel(root, version: str, files: dict[str, bytes]):
    """A wheel of these files, and UPSTREAM naming it."""
    files = {**files, f"diffusers-{version}.dist-info/METADATA": METADATA % version.encode()}
    path = root / f"diffusers-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in {**files, f"diffusers-{version}.dist-info/RECORD": b""}.items():
            wheel.writestr(name, content)
    sha = hashlib.sha256(path.read_bytes()).hexdigest()
    pin = f"diffusers=={version} --hash=sha256:{sha}\n# files: sha256:{upstream.digest(files)}\n"
    (root / "patches" / "UPSTREAM").write_text(pin)
    return path


HEADER = refresh.HEADER.replace("TODO: what this is, and why no", "Lines nine and on are said in words, since no")
HEADER = HEADER.replace("TODO", "upstream writes words")


def write_patch(root, name: str, text: bytes, subject: str = "a: line nine in words"):
    header = HEADER.format(day=datetime.date(2026, 1, 1), subject=subject)
    (root / "patches" / name).write_bytes(header.encode() + text + refresh.SIGNATURE)
    listing = root / "patches" / "series"
    listing.write_text((listing.read_text() if listing.exists() else "") + name + "\n")


def laid(fork) -> dict[str, bytes]:
    names = (path.relative_to(fork / "src") for path in (fork / "src").rglob("*") if path.is_file())
    return {name.as_posix(): (fork / "src" / name).read_bytes() for name in names}


OURS = {"diffusers/tpu/__init__.py": b"ours = True\n"}
PATCHED = {**FILES, "diffusers/a.py": LINES.replace(b"line 9\n", b"line nine\n"), **OURS}


def make_fork(root, folder):
    """A small fork, laid: two files untouched, one patched, an overlay."""
    shutil.copytree(root / "patches", folder / "patches", ignore=shutil.ignore_patterns("*.patch", "__pycache__"))
    (folder / "patches" / "series").unlink()
    write_patch(folder, "0001-nine.patch", A_DIFF.replace(b"src/pkg", b"src/diffusers"))
    (folder / "src/diffusers/tpu").mkdir(parents=True)
    (folder / "src/diffusers/tpu/__init__.py").write_text("ours = True\n")
    lay(folder, make_wheel(folder, "1.0", FILES))
    return folder


def run_apply(root, *arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, str(root / "patches" / "apply.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=root.parent)


def edit(path, old: str, new: str, count: int = 1):
    text = path.read_text()
    assert text.count(old) >= 1, old
    path.write_text(text.replace(old, new, count))
