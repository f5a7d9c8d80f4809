"""An index without a network: wheels packed from the distributions that are installed here, stubs, and a tree to build from."""

import re
import shutil
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.tags import parse_tag, sys_tags

from conftest import ROOT


def pack(dist: Distribution, folder: Path):
    """Writes the wheel that an installed distribution came from, without compiled bytecode and launchers."""
    tags = {tag for line in re.findall(r"^Tag: (.*)$", dist.read_text("WHEEL"), re.M) for tag in parse_tag(line)}
    tag = next(tag for tag in sys_tags() if tag in tags)
    (record,) = (str(file) for file in dist.files if file.name == "RECORD" and len(file.parts) == 2)
    info = record.removesuffix("/RECORD")
    left_out = {f"{info}/{name}" for name in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")}
    left_out |= {f"bin/{name}" for name in dist.entry_points.names}
    kept = {}
    for file in dist.files:
        name = "/".join(part for part in file.parts if part != "..")
        if name in left_out or file.suffix == ".pyc":
            continue
        if file.parts[0] == "..":  # beside site-packages
            place = "scripts" if name.startswith("bin/") else "data"
            name = f"{info.removesuffix('.dist-info')}.data/{place}/{name.removeprefix('bin/')}"
        kept[name] = file.locate()
    stem = f"{re.sub(r'[-_.]+', '_', dist.name)}-{dist.version}"
    with zipfile.ZipFile(folder / f"{stem}-{tag}.whl", "w") as wheel:
        for name, path in kept.items():
            wheel.write(path, name)
        wheel.writestr(record, "".join(f"{name},,\n" for name in [*kept, record]))


def required(*requirements: str) -> set[str]:
    """Names of the installed distributions that these need, with what those need."""
    todo, done = [Requirement(requirement) for requirement in requirements], set()
    while todo:
        requirement = todo.pop()
        for extra in ("", *requirement.extras):
            if (requirement.name, extra) in done:
                continue
            done.add((requirement.name, extra))
            needed = map(Requirement, distribution(requirement.name).requires or ())
            todo += [needs for needs in needed if needs.marker is None or needs.marker.evaluate({"extra": extra})]
    return {distribution(name).name for name, _ in done}


def pack_all(folder: Path, *requirements: str) -> Path:
    """Packs what these need, but for our own distribution; returns the folder."""
    for name in required(*requirements) - {"diffusers"}:
        pack(distribution(name), folder)
    return folder


def write_stub(folder: Path, name: str, version: str, modules: dict[str, str]):
    """A wheel of these modules."""
    info = f"{name}-{version}.dist-info"
    texts = {
        **modules,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in texts.items():
            wheel.writestr(path, text)
        wheel.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in [*texts, f"{info}/RECORD"]))


def copy_tree(folder: Path) -> Path:
    """A copy of this tree, without what is no source."""
    unneeded = (".git", ".venv", "out", "build", "*.egg-info", "__pycache__", ".pytest_cache", ".ruff_cache")
    return shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*unneeded))
