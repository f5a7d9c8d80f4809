"""Oracle: the map of the architecture page, read from the source: imports go one way and in no circle, torchax has one importer."""

import ast
import functools
import graphlib
import json
import re
from collections.abc import Iterator

from conftest import ROOT as TREE
from conftest import run_python


ROOT = TREE / "src" / "diffusers" / "tpu"

# Each package, and each file beside them, may import those before it.
ORDER = """
common chips kernels weights idioms bridge compile pipelines __init__ planner compare apps
""".split()
FILES = {
    ".".join(part for part in path.relative_to(ROOT).with_suffix("").parts if part != "__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}


def package_of(module: str) -> str:
    return module.partition(".")[0] or "__init__"


@functools.cache
def imported(module: str) -> dict[str, int]:
    """Ours that a file imports, also inside of functions, and torchax: to the line."""
    path, found = FILES[module], {}
    package = ["diffusers", "tpu", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*above, *filter(None, [node.module])])
            names = [f"{start}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.partition(".")[0] == "torchax":
                found["torchax"] = node.lineno
            elif name == "diffusers.tpu" or name.startswith("diffusers.tpu."):
                ours = name.removeprefix("diffusers.tpu").removeprefix(".")
                found[ours if ours in FILES else ours.rpartition(".")[0]] = node.lineno
            elif name.endswith("_flax"):
                found["_flax"] = node.lineno
    found.pop(module, None)
    return found


def map_of_packages() -> str:
    """The table of the architecture page: the first line of each package's docstring, and the packages that it imports."""
    rows = ["| package | | imports |", "|---|---|---|"]
    for package in ORDER:
        of_package = [module for module in FILES if package_of(module) == package]
        found = {package_of(x) for module in of_package for x in imported(module) if x in FILES} - {package}
        path = ROOT / f"{package}.py"
        text = ast.get_docstring(ast.parse((path if path.exists() else ROOT / package / "__init__.py").read_text()))
        rows.append(f"| `{package}` | {text.splitlines()[0]} | {', '.join(sorted(found, key=ORDER.index))} |")
    return "\n".join(rows) + "\n"


def test_every_package_is_on_the_map_and_there_are_no_circles():
    """Of files, imports inside of functions too."""
    assert {package_of(module) for module in FILES} == {*ORDER}
    assert map_of_packages() in (ROOT / "README.md").read_text(), "python tests/tpu/test_rooms.py writes it"
    graph = {module: {x for x in imported(module) if x in FILES} for module in FILES}
    [*graphlib.TopologicalSorter(graph).static_order()]


def test_imports_go_one_way():
    for module in FILES:
        place, found = ORDER.index(package_of(module)), imported(module)
        assert "torchax" not in found or package_of(module) == "bridge", (
            f"only the bridge imports torchax, not {module}"
        )
        assert "_flax" not in found, f"the tables of `pipelines` name the files beside upstream's, not {module}"
        later = {x: line for x, line in found.items() if x in FILES and ORDER.index(package_of(x)) > place}
        assert not later, f"{module} imports {later}, which may import it"


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
    assert run_python("-c", IMPORTS, DIFFUSERS_TPU="cpu").stdout.splitlines() == ["", "", "flax"]


def imports_at_once(node) -> Iterator[str]:
    """Names that a module imports when it is imported: outside of functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and not child.level:
            yield child.module
        elif not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from imports_at_once(child)


def test_peft_is_an_extras():
    """Where it is not installed, models are planned all the same: who asks for an adapter imports it."""
    for path in (*FILES.values(), *TREE.glob("src/diffusers/**/*_flax.py")):
        names = {name.partition(".")[0] for name in imports_at_once(ast.parse(path.read_text()))}
        assert "peft" not in names, path


def test_every_planted_fault_is_where_the_table_has_it(root, monkeypatch):
    """Of `make mutants`: the files, the tests and the kept record."""
    monkeypatch.syspath_prepend(root / "examples/tpu/results/mutants")
    import run

    mutants = run.every()
    for mutant in mutants:
        text = (root / mutant.file).read_text()
        assert mutant.planted(text) != text, mutant.name
        for test in mutant.tests:
            file, _, name = test.partition("::")
            assert re.search(rf"^def {name.partition('[')[0]}\(", (root / "tests/tpu" / file).read_text(), re.M), test
    record = json.loads((root / "examples/tpu/results/mutants.json").read_text())
    seen = [m for m in mutants if record[m.name]["caught_by"]]
    assert len(seen) >= 57 and all(m.survives for m in mutants if m not in seen)


if __name__ == "__main__":
    PAGE = ROOT / "README.md"
    head, table, tail = re.split(r"(^\| package \|.*\n(?:\|.*\n)*)", PAGE.read_text(), maxsplit=1, flags=re.M)
    PAGE.write_text(head + map_of_packages() + tail)
