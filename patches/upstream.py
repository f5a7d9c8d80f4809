"""The pinned upstream release: where its files come from, and how they are known to be the right ones.

`patches/UPSTREAM` names the release, the sha256 of its wheel and the digest of the wheel's content:

    digest = sha256 of the lines "SHA256  NAME\\n", sorted by NAME, one for every file of the package
             and for METADATA, entry_points.txt and LICENSE of its .dist-info

The wheel's own hash can be checked only where the wheel file is at hand. pip installs a build requirement and throws the
wheel away, so what is checked there is each file against the installation's RECORD (which names the file that differs), and
all of them against the digest. Files that passed are kept in one zip below `.upstream/`, laid out as in the wheel: the pristine
side of every patch, offline from then on.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from unified import ForkError


class UpstreamError(ForkError):
    """Upstream's files are not there, or are not the pinned ones."""


@dataclass(frozen=True)
class Pin:
    name: str
    version: str
    wheel_sha256: str
    files_sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"

    @property
    def dist_info(self) -> str:
        return f"{self.name}-{self.version}.dist-info/"

    def holds(self, name: str) -> bool:
        """Whether the file is part of what we keep: the package, and the metadata that pip never rewrites."""
        if name.startswith(f"{self.name}/"):
            return not name.endswith(".pyc")
        return name in {self.dist_info + part for part in ("METADATA", "entry_points.txt", "licenses/LICENSE")}


def read_pin(root: Path) -> Pin:
    path = root / "patches" / "UPSTREAM"
    text = path.read_text()
    release = re.search(r"^(\w+)==(\S+) --hash=sha256:([0-9a-f]{64})$", text, re.M)
    files = re.search(r"^# files: sha256:([0-9a-f]{64})$", text, re.M)
    if not release or not files:
        raise UpstreamError(
            f"{path}: expected `NAME==VERSION --hash=sha256:HEX` and `# files: sha256:HEX`, got:\n{text}"
        )
    return Pin(*release.groups(), files[1])


def digest(files: Mapping[str, bytes]) -> str:
    lines = (f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def read_wheel(pin: Pin, path: Path) -> dict[str, bytes]:
    """The files of a wheel, after its sha256 was found to be the pinned one."""
    got = hashlib.sha256(path.read_bytes()).hexdigest()
    if got != pin.wheel_sha256:
        raise UpstreamError(
            f"{path}: expected the wheel of {pin.requirement} with sha256 {pin.wheel_sha256}, got {got};"
            " `pip download --no-deps -r patches/UPSTREAM` fetches the right one"
        )
    with zipfile.ZipFile(path) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist() if pin.holds(name)}


def read_installed(pin: Pin) -> dict[str, bytes] | None:
    """The files of an installed upstream, each checked against its RECORD; None where that release is not installed."""
    for dist in metadata.distributions(name=pin.name):
        if dist.version == pin.version and dist.files:
            names = {file.as_posix(): file for file in dist.files if pin.holds(file.as_posix()) and file.hash}
            return {name: _read_checked(file) for name, file in names.items()}
    return None


def _read_checked(file: metadata.PackagePath) -> bytes:
    content = Path(file.locate()).read_bytes()
    got = base64.urlsafe_b64encode(hashlib.new(file.hash.mode, content).digest()).rstrip(b"=").decode()
    if got != file.hash.value:
        raise UpstreamError(
            f"{file.locate()}: expected {file.hash.mode} {file.hash.value} as its RECORD says, got {got}: the installed"
            " upstream was edited; reinstall it, or give its wheel: python patches/apply.py apply --wheel FILE"
        )
    return content


def store_path(root: Path, pin: Pin) -> Path:
    return root / ".upstream" / f"{pin.name}-{pin.version}-{pin.files_sha256[:12]}.zip"


def open_store(root: Path, wheel: Path | None = None) -> dict[str, bytes]:
    """The pinned release's files by name: from the store, else filled from `wheel`, else from the installation that can be imported here."""
    pin = read_pin(root)
    path = store_path(root, pin)
    if wheel is not None:
        _fill(pin, path, read_wheel(pin, wheel), str(wheel))
    elif not path.exists():
        files = read_installed(pin)
        if files is None:
            raise UpstreamError(
                f"expected upstream {pin.requirement} in .upstream/ or installed, found neither; `pip install -e .` fetches"
                " it, or: pip download --no-deps -r patches/UPSTREAM && python patches/apply.py apply --wheel FILE"
            )
        _fill(pin, path, files, "the installed package")
    with zipfile.ZipFile(path) as store:
        return {name: store.read(name) for name in store.namelist()}


def _fill(pin: Pin, path: Path, files: dict[str, bytes], origin: str) -> None:
    got = digest(files)
    if got != pin.files_sha256:
        raise UpstreamError(
            f"{origin}: expected {pin.requirement} with content digest {pin.files_sha256} (patches/UPSTREAM), got {got} over"
            f" {len(files)} files"
        )
    path.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        draft = Path(folder) / path.name
        with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as store:
            for name in sorted(files):
                store.writestr(zipfile.ZipInfo(name), files[name], zipfile.ZIP_DEFLATED, 1)
        os.replace(draft, path)


def drop_other_releases(root: Path) -> None:
    """Remove the files of releases that are not pinned, once the tree is the pinned one's."""
    path = store_path(root, read_pin(root))
    for old in path.parent.glob("*.zip"):
        if old != path:
            old.unlink()
