"""The notebooks for Colab and Kaggle. Oracles: nbformat's schema; the plans' records; `pip freeze` of an image before and after.

The image is a virtual environment with stubs of what those images hold: importing one is an error. Both notebooks are run whole,
their parameter cell replaced: the shipped model, this tree as the source, and wheels packed from this environment instead of an index.
"""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT
from diffusers.tpu.apps.cli import make_parser
from diffusers.tpu.planner.published import MODELS
from wheelhouse import copy_tree, pack_all, write_stub


nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

FOLDER = ROOT / "examples/tpu"
NOTEBOOKS = ("colab", "kaggle")
SHAPES = [str(FOLDER / "models/wan-shapes"), "--prompt", "a red circle moving right"]
SHAPES += "--height 64 --width 64 --num-frames 9 --num-inference-steps 2".split()
IMAGES = {
    "colab": {"torch": "2.9.0", "torch_xla": "2.9.0", "jax": "0.7.2", "libtpu": "0.0.21"},
    "kaggle": {"torch": "2.8.0", "torch_xla": "2.8.0", "jax": "0.6.2", "libtpu": "0.0.17", "diffusers": "0.35.1"},
}
COLAB_FILES = (
    "from pathlib import Path\ndef download(name): assert Path(name).stat().st_size; print('downloads', name)\n"
)


@functools.cache
def notebook(name: str):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def tagged(book, tag: str) -> list:
    return [cell for cell in book.cells if tag in cell.metadata.get("tags", [])]


def parameters(name: str) -> dict:
    (cell,) = tagged(notebook(name), "parameters")
    values = {}
    exec(cell.source, values)
    return values


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_are_valid_without_outputs_and_name_published_models(name):
    book = notebook(name)
    nbformat.validate(book)
    assert book.nbformat == 4
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    for cell in code:
        compile(cell.source, name, "exec")
    models = [words for key, words in parameters(name).items() if key in ("PICTURE", "VIDEO")]
    for words in models:
        assert words[0] in MODELS
        make_parser().parse_known_args(["generate", *words, "--dtype", "bfloat16", "--output", "out"])


def test_what_both_notebooks_do_is_written_the_same():
    for tag in ("install", "video"):
        ours, theirs = (tagged(notebook(name), tag) for name in NOTEBOOKS)
        assert [cell.source for cell in ours] == [cell.source for cell in theirs], tag
    runs = [[cell.source for cell in notebook(name).cells if "def run(" in cell.source] for name in NOTEBOOKS]
    assert runs[0] == runs[1] and len(runs[0]) == 1


PLANS = {"colab": ["sdxl-v5e-1", "wan2.1-t2v-1.3b-480p-v5e-1"], "kaggle": ["wan2.1-t2v-14b-480p-v5e-8"]}


def test_the_costs_of_the_page_are_those_of_the_records():
    rows = re.findall(
        r"^\| .* \| (v\w+-(\d)) \| ([\d.]+) \| ([\d.]+) \|$", (FOLDER / "FIRST_HOUR.md").read_text(), re.M
    )
    records = [*PLANS["colab"], "wan2.1-t2v-14b-v6e-8"]
    assert len(rows) == len(records)
    for (topology, chips, seconds, product), record in zip(rows, records):
        plan = plan_of(record)
        total, digits = plan["seconds_total"], len(seconds.partition(".")[2])
        assert (plan["topology"], plan["steps"], f"{total:.{digits}f}") == (topology, 50, seconds)
        assert f"{total * int(chips):.{digits}f}" == product


def plan_of(record: str) -> dict:
    return json.loads((FOLDER / f"results/plan-{record}.json").read_text())


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_planned_figures_are_those_of_the_records(name):
    texts = [cell.source for cell in notebook(name).cells if "Planned:" in cell.source]
    assert len(texts) == len(PLANS[name])
    for text, record in zip(texts, PLANS[name]):
        plan = plan_of(record)
        memory, step = plan["hbm_gib_per_chip"], plan["seconds_per_step"]["total"]
        ways = plan["by_way"].values()
        digits = 2 if step < 1 else 1
        assert f"{memory['peak']:.1f} of {memory['limit']:.2f} GiB" in text
        assert f"{step:.{digits}f} to {max(way['slower'] for way in ways):.{digits}f} s a step" in text
        assert plan["steps"] == 50 and "50 steps" in text
        assert "s in all" not in text or f"{plan['seconds_total']:.0f} s in all" in text
        assert bool(plan["waiting"]) == ("waits in the" in text)


# Run whole


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> Path:
    """What an index has: this environment's packages, but ours."""
    return pack_all(tmp_path_factory.mktemp("wheels"), "diffusers", "setuptools", "pip", "uv", "ipykernel")


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    return copy_tree(tmp_path_factory.mktemp("tree") / "tree")


def make_image(name: str, folder: Path, wheels: Path) -> Path:
    """The image's Python: ipykernel, and packages that cannot be imported."""
    python, stubs = folder / "image/bin/python", folder / "stubs"
    stubs.mkdir()
    for stub, version in IMAGES[name].items():
        error = f"raise ImportError('{stub} {version} of the image is imported')\n"
        write_stub(stubs, stub, version, {f"{stub}/__init__.py": error})
    write_stub(stubs, "google_colab", "1.0.0", {"google/colab/files.py": COLAB_FILES})
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "image"], check=True)
    install = ["uv", "pip", "install", "--quiet", "--python", python, "--no-index"]
    for found, packages in (wheels, ["ipykernel", "pip"]), (stubs, [*IMAGES[name], "google_colab"]):
        subprocess.run([*install, "--find-links", found, *packages], check=True)
    return python


def freeze(python: Path) -> str:
    return subprocess.run([python, "-m", "pip", "freeze", "--all"], capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_run_whole_and_leave_the_images_packages_alone(name, wheels, tree, tmp_path, monkeypatch):
    """On Colab's image uv is there, on Kaggle's it is not."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # caches of uv and of compiled programs
    python = make_image(name, tmp_path, wheels)
    before = freeze(python)
    uv = f":{Path(sys.executable).parent}" if name == "colab" else ""
    environment = {
        "PYTHONPATH": str(next((tmp_path / "image/lib").glob("*/site-packages"))),
        "PATH": f"{tmp_path / 'image/bin'}:/usr/bin:/bin{uv}",
        "UV_SYSTEM_PYTHON": "true",
        "TPU_LIBRARY_PATH": "/nowhere/libtpu.so",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "DIFFUSERS_TPU": "cpu",
        "DIFFUSERS_TPU_DEVICES": "2",
    }
    kernel = tmp_path / "jupyter/kernels/image/kernel.json"
    kernel.parent.mkdir(parents=True)
    argv = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel.write_text(json.dumps({"argv": argv, "display_name": name, "language": "python", "env": environment}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    given = {"SOURCE": str(tree), "FOLDER": str(tmp_path / "made")}
    given["TORCH"] = ["--no-index", "--find-links", str(wheels)]
    book = nbformat.from_dict(notebook(name))
    (cell,) = tagged(book, "parameters")
    cell.source = "\n".join(f"{key} = {given.get(key, SHAPES)!r}" for key in parameters(name) if key.isupper())
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=1800, kernel_name="image", resources=resources).execute()
    assert freeze(python) == before
    shown = {tag: json.dumps([cell.outputs for cell in tagged(book, tag)]) for tag in ("install", "picture", "video")}
    assert "+tpu." in shown["install"] and "simulated on the CPU" in shown["install"]
    assert "image/png" in shown["picture"] or name == "kaggle"
    assert "<video" in shown["video"] and "data:video/mp4" in shown["video"]
