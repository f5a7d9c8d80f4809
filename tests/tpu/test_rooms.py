"""Oracle: DESIGN's map of rooms, read from the source: imports go one way, torchax has one importer."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest


ROOMS = Path(__file__).resolve().parents[2] / "src" / "diffusers" / "tpu"

# Each room may import those before it.
ORDER = [
    "files",
    "config",
    "moving",
    "devices",
    "idioms",
    "modular",
    "checkpoint",
    "mesh",
    "sharding",
    "plans",
    "attention",
    "linear",
    "rotary",
    "scan",
    "video",
    "bridge",
    "calls",
    "weights",
    "residency",
    "runner",
    "host",
    "models",
    "components",
    "pipeline",
    "stages",
    "aot",
    "planner",
]
TOP = ["fidelity", "cli"]


def room_of(path: Path) -> str:
    return path.relative_to(ROOMS).parts[0].removesuffix(".py")


def imports(path: Path):
    """(absolute module name, is it imported inside a function) of every import statement."""
    package = ["diffusers", "tpu", *path.relative_to(ROOMS).parent.parts]
    tree = ast.parse(path.read_text())
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) not in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module, id(node) not in top
            yield from ((f"{module}.{alias.name}", id(node) not in top) for alias in node.names)


FILES = sorted(ROOMS.rglob("*.py"))


def test_every_room_is_on_the_map():
    assert {room_of(f) for f in FILES} - {"__init__"} <= {*ORDER, *TOP}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOMS)))
def test_imports_go_one_way(path):
    room = room_of(path)
    names = [(name, inner) for name, inner in imports(path)]
    if room != "bridge":
        assert not [name for name, _ in names if name.split(".")[0] == "torchax"], "only the bridge imports torchax"
    if room not in ORDER:
        return
    own = [name.split(".")[2] for name, inner in names if name.startswith("diffusers.tpu.") and not inner]
    later = {r for r in own if r in ORDER and ORDER.index(r) > ORDER.index(room)} | {r for r in own if r in TOP}
    assert not later, f"{room} imports {later}, which may import it"
    if room != "pipeline":
        assert not [name for name, _ in names if name.endswith("_flax")]


def in_new_process(code: str, **environment) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOMS.parents[1]), **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout


def test_without_a_tpu_neither_jax_nor_torchax_is_imported():
    code = (
        "import sys; sys.path.insert(0, {tests!r}); import torch, tiny; "
        "pipe = tiny.wan(); pipe.to('cpu'); pipe(**tiny.arguments('wan', steps=1)); "
        "print([m for m in ('jax', 'jaxlib', 'torchax') if m in sys.modules])"
    ).format(tests=str(Path(__file__).parent))
    assert in_new_process(code, DIFFUSERS_TPU="auto").strip().splitlines()[-1] == "[]"


def test_importing_the_public_face_starts_nothing():
    code = "import sys, diffusers.tpu; print([m for m in ('jax', 'torchax') if m in sys.modules])"
    assert in_new_process(code, DIFFUSERS_TPU="cpu").strip() == "[]"
