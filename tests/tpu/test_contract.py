"""Private names of other libraries that the package relies on. Oracle: the installed libraries. An upgrade names here what moved."""

import ast
import importlib
import inspect
import re

import torch

from conftest import table
from diffusers.tpu import bridge  # noqa: F401  torchax needs what it puts in place first


PRIVATE = re.compile(r"_[a-zA-Z]\w*")
OWN = re.compile(r"_(array|tpu|TOKEN|allowed_effects|\w*flax)")  # left on modules by the package, and ends of names

# Module or module:class -> private names: its attributes or, of instances, names in its source.
CONTRACT = table("contract")


def test_private_names_are_still_there():
    gone = []
    for place, names in CONTRACT.items():
        module, _, owner = place.partition(":")
        found = importlib.import_module(module) if module != "torch.ops" else torch.ops
        found = getattr(found, owner, None) if owner else found
        gone += [f"{place} {name}" for name in names.split() if not (hasattr(found, name) or in_source(found, name))]
    assert gone == []


def in_source(found, name: str) -> bool:
    try:
        return re.search(rf"\b{name}\b", inspect.getsource(found)) is not None
    except (OSError, TypeError):
        return False


def test_every_private_name_that_the_package_reads_is_listed(root):
    """Read as an attribute, imported, or named in a string, and defined nowhere in the package."""
    overlay = root / "src/diffusers"
    defined, read, words = set(), {}, set()
    submodules = root / "examples/tpu/submodules"
    for file in (*overlay.glob("tpu/**/*.py"), *overlay.glob("**/*_flax.py"), *submodules.glob("*.py")):
        words |= set(re.findall(r"\b_\w+", file.read_text()))
        for node in ast.walk(ast.parse(file.read_text())):
            names, own = [], isinstance(getattr(node, "ctx", None), ast.Store)
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                defined.add(node.name)
            elif isinstance(node, (ast.arg, ast.Name)) and (own or isinstance(node, ast.arg)):
                defined.add(getattr(node, "arg", None) or node.id)
            elif isinstance(node, ast.Attribute):
                names = [node.attr]
                if own and isinstance(node.value, ast.Name) and node.value.id == "self":
                    defined.add(node.attr)
            elif isinstance(node, ast.Subscript) and own and isinstance(node.slice, ast.Constant):
                defined.add(node.slice.value)  # vars(x)["_name"] = ...
            elif isinstance(node, ast.ImportFrom):
                names = [*(alias.name for alias in node.names), *(node.module or "").split(".")]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names = [node.value]
            where = f"{file.relative_to(root)}:{getattr(node, 'lineno', 0)}"
            read |= {name: where for name in names if PRIVATE.fullmatch(name)}
    listed = {name for names in CONTRACT.values() for name in names.split()}
    places = {part for place in CONTRACT for part in re.split("[.:]", place)}
    assert {n: at for n, at in read.items() if n not in defined | listed | places and not OWN.match(n)} == {}
    assert {name for name in listed if PRIVATE.fullmatch(name)} - ({*read} | words) == set()
