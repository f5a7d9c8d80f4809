"""Oracle: upstream in float32, same weights and inputs. Some pipelines of the sweep anew, and what its record says of all; upstream's own tests."""

import json
import re
import runpy
import sys

import pytest

from conftest import ROOT, slow


sys.path.insert(0, str(ROOT / "examples/tpu/results/sweep"))

import coverage_tables  # noqa: E402
import upstream_tables  # noqa: E402
from building import RECIPES, exported  # noqa: E402
from components import BY_CLASS, BY_NAME  # noqa: E402
from examining import LAYOUTS, examine  # noqa: E402


# A UNet on pixels, a transformer of a text's joint attention, a sound.
SUBSET = ["DDIM", slow("CogView3Plus"), "DanceDiffusion"]


@pytest.mark.parametrize("name", SUBSET)
def test_a_pipeline_is_upstreams(chips, name):
    found = examine(f"{name}Pipeline", more=False)
    assert found["error"] <= coverage_tables.RESULT_LIMIT and not found["eager"]
    assert all(one["error"] <= coverage_tables.DENOISER_LIMIT for one in found["denoisers"].values())


@pytest.mark.slow
def test_a_second_size_has_two_more_programs_a_second_prompt_and_the_first_size_none(chips):
    """The denoiser's and the VAE's; text is as long as before, whatever the prompt, and each call has a generator of its own."""
    assert examine("StableDiffusionPipeline")["executables"][1:] == [2, 0, 0]


def test_what_runs_upstream_runs_here_and_is_right():
    record = json.loads((ROOT / "examples/tpu/results/coverage.json").read_text())
    ran = {name: found for name, found in record.items() if coverage_tables.ran(found)}
    assert set(record) == set(exported())
    assert [name for name, found in record.items() if found["status"] == "not"] == []
    assert [name for name, found in ran.items() if not coverage_tables.right(found)] == []
    denoisers = [one for found in ran.values() for one in found["denoisers"].values()]
    for mesh in LAYOUTS:
        layouts = [found["layouts"][mesh] for found in ran.values() if mesh in found.get("layouts", {})]
        assert all(map(coverage_tables.right, layouts))
        proved = {one["class"] for layout in layouts for one in layout["denoisers"].values()}
        assert proved == {one["class"] for one in denoisers if not one["eager"]}
    assert sum(1 for one in denoisers if not one["eager"]) >= 0.9 * len(denoisers)
    again = [found["executables"][1:] for found in ran.values() if len(found["executables"]) > 1]
    assert again.count([2, 0, 0]) >= 10  # a second size, a second prompt, the first again
    halves = [half for found in ran.values() for half in found.get("bfloat16", {}).values()]
    assert all(half["holds"] for half in halves if "upstream_stops" not in half)


def test_nothing_of_the_sweeps_tables_is_dead():
    names = [name.removesuffix("Pipeline") for name in exported()]
    assert [one for one in RECIPES if not any(re.fullmatch(one["pattern"], name) for name in names)] == []
    words = set()
    for path in (ROOT / "src/diffusers").rglob("*.py"):
        words |= set(re.findall(r"\w+", path.read_text())) if "tpu" not in path.parts else set()
    assert {*BY_CLASS, *BY_NAME} - words == set()


def test_what_upstream_passes_of_its_own_tests_is_passed_here():
    record = json.loads((ROOT / "examples/tpu/results/upstream.json").read_text())
    passes = runpy.run_path(str(ROOT / "examples/tpu/results/upstream/run.py"))["passing"]()
    assert sum(map(len, passes.values())) == 3502 and set(record) <= set(passes)
    lost = [(file, name, end) for file in record for name, end in record[file]["lost"].items()]
    assert [test for test in lost if upstream_tables.reason(*test[1:]) is None] == []
    kept = re.compile(r"pipelines/(stable_diffusion_xl|wan|cogvideo)/")
    assert any(map(kept.match, record)) and not any(kept.match(file) for file, *_ in lost)
