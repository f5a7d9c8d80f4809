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
    "failures",
    "config",
    "locks",
    "recent",
    "hosts",
    "devices",
    "moving",
    "idioms",
    "modular",
    "disk",
    "checkpoint",
    "mesh",
    "sharding",
    "settings",
    "cost",
    "declared",
    "plans",
    "attention",
    "linear",
    "rotary",
    "adapters",
    "scan",
    "compile",
    "video",
    "bridge",
    "parts",
    "nans",
    "filling",
    "placing",
    "weights",
    "residency",
    "call",
    "decided",
    "eager",
    "store",
    "programs",
    "executables",
    "branches",
    "runner",
    "host",
    "ladder",
    "models",
    "glue",
    "stepping",
    "components",
    "pipeline",
    "generation",
    "bulk",
    "serving",
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


IMPORTS = """
import sys
import diffusers.tpu
print(*(m for m in ("jax", "torchax") if m in sys.modules))
import diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15_flax as hunyuan
import diffusers.models.autoencoders.autoencoder_kl_wan_flax as wan
print(*(m for m in ("flax",) if m in sys.modules))
hunyuan.FlaxAutoencoderKLHunyuanVideo15, wan.FlaxAutoencoderKLWan
print(*(m for m in ("flax", "torchax") if m in sys.modules))
"""


def test_imports_bring_no_more_than_they_must():
    """The public face starts nothing; VAEs' plans do not import Flax, and their Flax modules no torchax."""
    env = {**os.environ, "PYTHONPATH": str(ROOMS.parents[1]), "DIFFUSERS_TPU": "cpu"}
    command = [sys.executable, "-c", IMPORTS]
    brought = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert brought.splitlines() == ["", "", "flax"]
