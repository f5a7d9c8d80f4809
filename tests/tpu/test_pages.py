"""The pages for readers. Oracles: the files, names and tables they speak of; the parsers of the commands they show; their
Python, executed as it stands, with a tiny model behind the published name.

Of the commands, those that cost little are run here. `generate` and the example scripts are run in test_cli.py and
test_generate_flax.py, stages in test_stages.py, `plan` in test_planner.py, the patch set's tool in test_laying.py. The migration
pages' Python is run in test_migration.py.
"""

import ast
import dataclasses
import functools
import os
import re
import shlex
import subprocess
import sys

import huggingface_hub.constants
import jax.numpy as jnp
import numpy as np
import pytest
from pip._internal.commands import create_command

import apply
import cards
from bench import benches
from conftest import ROOT
from diffusers.tpu import TPUConfig, idioms, report
from diffusers.tpu.apps.cli import env, main, make_parser
from diffusers.tpu.chips.figures import TOPOLOGIES, find_topology
from diffusers.tpu.kernels.attention.api import attention, explain
from diffusers.tpu.planner.published import ALIASES, MODELS
from hub import MAKERS, Hub
from test_generate_flax import EXAMPLES, SCRIPTS, load


README = ROOT / "README_TPU.md"
ARCHITECTURE = ROOT / "src/diffusers/tpu/README.md"
PLANNING = ROOT / "examples/tpu/PLANNING.md"
PATCHES = ROOT / "patches/README.md"
FOLDERS = ("examples", "patches", "src/diffusers/tpu", "tests")
PAGES = [README, *sorted(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
BESIDE = ("", "src/diffusers/tpu", "src/diffusers", "tests/tpu")  # where file names of a page begin


@functools.cache
def blocks(page, language: str) -> list[str]:
    """The fenced blocks in a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


@functools.cache
def prose(page) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


def section(page, heading: str) -> str:
    return re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", page.read_text(), re.M | re.S)[1]


def first_cells(table: str) -> list[str]:
    """The names in backticks in the first column of a table."""
    cells = re.findall(r"^\| ([^|]*) \|", table, re.M)
    return [name for cell in cells[1:] for name in re.findall(r"`([^`]+)`", cell)]


# What pages point to


def anchors(page) -> set[str]:
    """Of the headings, as the hosting site makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_anchors_named_files_and_the_names_in_them_exist():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            assert "://" in target or file.exists(), (page, target)
            assert "://" in target or not anchor or anchor in anchors(file), (page, target)
        for name in re.findall(r"`((?:[\w.*-]+/)+[\w.*-]*\.(?:py|md|json|html))`", prose(page)):
            if "NAME" not in name:
                assert any([*(ROOT / folder).glob(name)] for folder in (*BESIDE, page.parent)), (page, name)
        for name, file in named_in_files(page):
            places = [ROOT / folder / file for folder in BESIDE if (ROOT / folder / file).is_file()]
            assert places and any(name in defined(place) for place in places), f"{page}: {name} in {file}"


@functools.cache
def defined(file) -> set[str]:
    """Names of a module, and of its classes' members with the class before them."""

    def of_body(body, prefix=""):
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from of_body(node.body, f"{node.name}.")
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))

    return set(of_body(ast.parse(file.read_text()).body))


def named_in_files(page) -> list[tuple[str, str]]:
    """(name, file) of every "`a` and `b` in `file.py`"."""
    name = r"`[A-Za-z_][\w.]*`"
    found = re.findall(rf"((?:{name}(?:, | and | or ))*{name})\s+in\s+`([\w./-]+\.py)`", prose(page))
    words = ((name, file) for names, file in found for name in re.findall(r"[\w.]+", names))
    return [(name, file) for name, file in words if name not in ("and", "or")]


def test_the_architecture_page_says_the_way_of_a_step_and_where_things_are_added():
    assert len(re.findall(r"^\d+\. ", section(ARCHITECTURE, "The life of one step"), re.M)) == 15
    named = {name for name, _ in named_in_files(ARCHITECTURE)}
    assert {"PIPELINES", "CHIPS", "MODELS"} <= named
    rows = re.findall(r"^\| ([^|]+) \|", section(ARCHITECTURE, "Where do I add"), re.M)
    assert {"a model", "a VAE", "a chip, a slice", "an attention kernel", "a patch", "a pipeline"} <= set(rows)


def test_tables_of_settings_slices_and_patches_are_complete():
    variables, fields = re.findall(r"^\|.*?(?:\n\n|\Z)", section(README, "Settings"), re.M | re.S)
    assert first_cells(variables) == list(env.VARIABLES)
    assert sorted(first_cells(fields)) == sorted(field.name for field in dataclasses.fields(TPUConfig))
    slices = re.search(r"^Slices: (.*?)\. ", PLANNING.read_text(), re.M | re.S)[1]
    assert re.findall(r"v\w+-\d+", slices) == list(TOPOLOGIES)
    listed = re.findall(r"^(\S+)\.patch$", (ROOT / "patches/series").read_text(), re.M)
    assert first_cells(section(PATCHES, "The patches")) == listed


# Commands


def commands(page) -> list[list[str]]:
    """The words of each command of the page's bash blocks, variables before them left out."""
    lines = "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    for line in words:
        while line and re.match(r"[A-Z_]+=", line[0]):
            assert line.pop(0).partition("=")[0] in (*env.VARIABLES, *env.OF_SEVERAL)
    return [line for line in words if line]


def inline_commands(page) -> list[list[str]]:
    """The same of `diffusers-tpu ...` and `bench ...` in a page's text."""
    spans = re.findall(r"`(diffusers-tpu|bench) ([^`]+?)(?: \.\.\.)?`", prose(page))
    return [[*(["bench"] if first == "bench" else []), *shlex.split(rest)] for first, rest in spans]


def check_command_line(words: list[str]):
    """Raises where `diffusers-tpu` does not take these words."""
    if len(words) == 1 and words != ["env"]:
        with pytest.raises(SystemExit) as stop:
            make_parser().parse_args([*words, "--help"])
        assert stop.value.code == 0
        return
    options = make_parser().parse_args(words)
    if options.command == "env":
        assert main(words) == 0
    elif options.command == "bench":
        filters = {name: getattr(options, name) for name in ("chip", "model", "topology", "variant")}
        assert benches.select(options.kind, {name: value for name, value in filters.items() if value})
    elif options.command not in ("profile", "check"):
        known = {"MODEL", "path/to/model", *ALIASES, *MODELS, *MAKERS}
        assert options.model.partition("@")[0] in known or (ROOT / options.model / "model_index.json").is_file()
    if options.command == "plan":
        for name in ",".join(options.topology).split(","):
            find_topology(name)


def check_make(words: list[str]):
    makefile = (ROOT / "Makefile").read_text()
    variables = [word.partition("=")[0] for word in words if "=" in word]
    assert set(variables) <= set(re.findall(r"^(\w+) \?=", makefile, re.M))
    assert {word for word in words if "=" not in word} <= set(re.findall(r"^([\w-]+):(?!=)", makefile, re.M))


def check_script(words: list[str]):
    if words[:2] == ["-m", "pip"]:
        return check_pip(words[2:])
    name, *rest = words
    assert (ROOT / name).is_file(), name
    if name == "patches/apply.py":
        apply.parse(rest)
    elif name.removeprefix("examples/tpu/") in SCRIPTS:
        load(name.removeprefix("examples/tpu/")).make_parser().parse_args(rest)
    else:
        known, flags = (ROOT / name).read_text(), [word for word in rest if word.startswith("--")]
        assert all(f'add_argument("{flag}"' in known for flag in flags), (name, flags)


def check_pip(words: list[str]):
    options, rest = create_command(words[0]).parse_args(words[1:])
    assert rest or options.editables in (["."], [".[serve]"], [".[ray]"])


def pythons() -> list[str]:
    """The versions that setup.py says are supported."""
    (minors,) = re.findall(r"^PYTHONS = \((.*?)\)", (ROOT / "setup.py").read_text(), re.M)
    return [f"3.{minor}" for minor in minors.split(", ")]


def test_every_python_that_is_supported_is_named():
    """Of each the locked set was installed and the demo run."""
    *others, last = pythons()
    assert f"Python {', '.join(others)} or {last}" in section(README, "Try it")
    assert f"Python {', '.join(others)} and {last}" in (ROOT / "requirements-lock.txt").read_text().splitlines()[0]
    assert f"{sys.version_info[0]}.{sys.version_info[1]}" in pythons()


def check_uv(words: list[str]):
    """An environment of a Python that is supported, with pip in it; torch's CPU build."""
    if words[0] == "venv":
        assert words[1] == "--python" and words[2] in pythons() and words[3] == "--seed"
    else:
        assert words[0] == "pip" and words[-2:] == ["--torch-backend", "cpu"]
        check_pip(words[1:-2])


PROGRAMS = {"uv": check_uv, "make": check_make, "pip": check_pip, "python": check_script}
PROGRAMS |= {"diffusers-tpu": check_command_line, "curl": lambda words: None}  # curl's are run in test_serving.py


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_taken(page, chips, capsys):
    for block in blocks(page, "bash"):
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)
    for program, *words in commands(page):
        PROGRAMS[program](words)
    for words in inline_commands(page):
        check_command_line(words)


def test_the_readme_is_short_and_shows_every_command_and_what_ci_runs():
    assert len(README.read_text().splitlines()) <= 120
    assert (ROOT / "README.md").is_symlink() and (ROOT / "README.md").read_text() == README.read_text()
    shown = commands(README)
    assert [["make", "demo"], ["make", "test"]] == [words for words in shown if words[0] == "make"]
    commands_shown = {words[1] for words in shown if words[0] == "diffusers-tpu"}
    assert commands_shown == {"env", "generate", "compare", "plan", "compile"}
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == "exec make test" and os.access(ROOT / ".ci/run", os.X_OK)


def test_the_page_of_the_earlier_scripts_knows_every_flag():
    known = {"-h", "--help", *re.findall(r"--\w+", (EXAMPLES / "SCRIPTS.md").read_text())}
    for script in SCRIPTS:
        flags = {flag for action in load(script).make_parser()._actions for flag in action.option_strings}
        assert flags <= known, script


# Python


@pytest.fixture
def run(chips, monkeypatch, tmp_path):
    """A function from a page to the names that its Python blocks leave, one after another, offline and at small sizes."""
    hub = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub.cache))
    monkeypatch.chdir(tmp_path)

    def run(page, **given) -> dict:
        names = {"__name__": "__main__", **given}
        limits = cards.LIMITS | {"height": 16, "width": 16, "num_frames": 1, "num_inference_steps": 1}
        with cards.surroundings(monkeypatch, limits, []):
            for code in blocks(page, "python"):
                for repository in cards.repositories(code):
                    hub.lay(repository)
                exec(compile(code, str(page), "exec"), names)
        return names

    return run


def test_the_readmes_script_makes_a_video(run, tmp_path):
    pipe = run(README)["pipe"]
    assert (tmp_path / "cat.mp4").stat().st_size
    assert pipe._tpu.config.mesh == (1, 8, 1)
    assert report(pipe)["components"]["transformer"]["compilations"] == 0  # those were of the mesh before


def test_the_lora_pages_script_makes_a_video_without_a_second_branch(run, tmp_path):
    pipe = run(EXAMPLES / "LORA.md")["pipe"]
    assert (tmp_path / "cat.mp4").stat().st_size
    (program,) = report(pipe)["components"]["transformer"]["programs"]
    assert pipe._tpu.config.mesh == (1, 8, 1) and (program["branches"], program["calls"]) == (1, 1)
    assert pipe.get_active_adapters() == ["default_0"]


def test_the_training_pages_script_trains_an_adapter(run, tmp_path):
    names = run(EXAMPLES / "TRAINING.md")
    assert names["loss"].isfinite() and (tmp_path / "adapter/pytorch_lora_weights.safetensors").stat().st_size
    trained = [p for name, p in names["transformer"].named_parameters() if "lora_B" in name]
    assert trained and all(p.any() for p in trained)  # they begin as zeros
    assert not report(names["pipe"])["components"]["transformer"]["eager"]


@pytest.mark.slow
def test_the_script_of_hunyuan_video15s_page_makes_a_video(run, tmp_path):
    idioms.on()  # as `import diffusers` does where the path is active
    try:
        pipe = run(EXAMPLES / "SCRIPTS.md")["pipe"]
    finally:
        idioms.off()
    assert (tmp_path / "boat.mp4").stat().st_size
    assert pipe.guider.guidance_scale == 5.0 and pipe._tpu.config.mesh == (2, 4, 1)


def test_the_attention_page_explains_calls_and_the_video_page_encodes_and_decodes(run, capsys, monkeypatch):
    q = jnp.ones((1, 2, 8, 16))
    attention(q, q, q, is_causal=True)
    run(ROOT / "src/diffusers/tpu/kernels/attention/README.md")
    assert len(capsys.readouterr().out.splitlines()) == len(explain()) > 0
    monkeypatch.setenv("DIFFUSERS_TPU_MESH", "1,1,1")
    video = np.zeros((1, 1, 16, 16, 3), np.float32)
    names = run(ROOT / "src/diffusers/tpu/kernels/video/README.md", video=video)
    assert names["latents"].shape[:4] == (1, 1, 2, 2) and names["video"].shape == video.shape


def test_every_page_with_python_is_run_here():
    ran = {"README_TPU.md", *(f"src/diffusers/tpu/kernels/{name}/README.md" for name in ("attention", "video"))}
    pages = "SCRIPTS", "LORA", "TRAINING", "MIGRATION", "MIGRATION.zh"  # the last two in test_migration.py
    ran |= {f"examples/tpu/{name}.md" for name in pages}
    assert {str(page.relative_to(ROOT)) for page in PAGES if blocks(page, "python")} == ran
