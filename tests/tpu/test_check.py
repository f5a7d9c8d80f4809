"""`diffusers-tpu check`, its report and its rates. Oracles: faults that are planted into stages' processes; figures by hand.

Faults come by a `sitecustomize` of the test's, which changes a stage's module in the process that imports it.
"""

import functools
import json
import os
import re
import socket
from pathlib import Path

import jax
import pytest

from conftest import GIVEN_FLAGS, run_python
from diffusers.tpu.apps.check import cases, programs, running
from diffusers.tpu.apps.check import report as reports
from diffusers.tpu.apps.cli import TABLE, main
from diffusers.tpu.chips.figures import CHIPS
from diffusers.tpu.kernels.attention.softmax_modes import MODES
from diffusers.tpu.kernels.settings import Settings
from diffusers.tpu.planner import aot, timing
from diffusers.tpu.planner.measured import PREFIXES, Rates, read_rates
from test_planner_readers import HLO


PLANTING = """
import importlib, json, os
faults, load = json.loads(os.environ["CHECK_FAULTS"]), importlib.import_module
exec(faults.get("host", ""))
def import_module(name, package=None):
    module = load(name, package)
    exec(faults.get(name.rpartition(".")[2], ""), vars(module))
    return module
importlib.import_module = import_module
"""
HANG = "def seconds(*_):\n import time; time.sleep(600)"
CRASH = "def products(*_):\n import os; os.abort()"
WRONG = "import dataclasses\nwhole = cases.KERNELS['linear']\ncases.KERNELS['linear'] = dataclasses.replace(whole, run=lambda *a: 1.05 * whole.run(*a))"
REFUSED = "def load(*_):\n raise RuntimeError('INTERNAL: wrong fingerprint of /opt/some/libtpu.so')"


@pytest.fixture
def check(monkeypatch, tmp_path):
    """A function from stages, and faults by stage, to the exit status and the report."""
    monkeypatch.setenv("DIFFUSERS_TPU", "cpu")
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret_indeed")
    monkeypatch.setenv("XLA_FLAGS", GIVEN_FLAGS)  # the quick ones are not for programs of TPUs, which stages plan
    monkeypatch.chdir(tmp_path)

    def check(*stages: str, **faults: str) -> tuple[int, dict]:
        (tmp_path / "sitecustomize.py").write_text(PLANTING)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("CHECK_FAULTS", json.dumps(faults))
        status = main(["check", *(word for stage in stages for word in ("--stage", stage))])
        return status, json.loads(Path("diffusers-tpu-check.json").read_text())

    return check


def rows_of(report: dict, stage: str) -> dict[str, dict]:
    number = running.NAMES.index(stage)
    return {row["name"]: row for row in report["rows"] if row["stage"] == number}


def texts(value):
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    return [text for one in value for text in texts(one)] if isinstance(value, list) else [str(value)]


def check_form(report: dict, stages):
    """The schema, and that nothing says who and where."""
    kinds = {"format": int, "simulated": bool, "sources": str, "python": str, "day": str}
    kinds |= {"counts": dict, "stages": list, "rows": list}
    assert {name: type(report[name]) for name in kinds} == kinds and {*report} == {*kinds, "chip"}
    for row in report["rows"]:
        assert tuple(row) == reports.COLUMNS and row["status"] in reports.STATUSES
        assert type(row["stage"]) is int and all(type(row[name]) is str for name in ("name", "unit", "note"))
        assert row["limit"] is None or type(row["limit"]) in (int, float)
    assert [stage["name"] for stage in report["stages"]] == [*stages]
    assert sum(report["counts"].values()) == len(report["rows"])
    for text in texts(report):
        assert not re.search(r"(?<![\w./:])/[\w.-]+/[\w.-]", text), text
        assert "secret" not in text and str(Path.home()) not in text
        assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", text), text


ENDS = {"time.sleep(600)": ("timed out", None), "os.abort()": ("failed", "killed by SIGABRT")}


@pytest.mark.parametrize("does", ENDS)
def test_a_hang_and_a_crash_are_rows_and_what_came_before_stays(does, check, monkeypatch, capsys):
    """In stage 0, whose last row is of the metadata server: its process starts in no time."""
    monkeypatch.setitem(running.STAGES["host"]["simulated"], "seconds", 3)
    code, report = check("host", host=f"import os, socket, time; socket.create_connection = lambda *_, **__: {does}")
    check_form(report, ["host"])
    rows = rows_of(report, "host")
    assert code == 1 and (rows["stage"]["status"], rows["stage"]["measured"]) == ENDS[does]
    assert rows["variables"]["measured"]["DIFFUSERS_TPU"] == "cpu" and rows["version of jax"]["status"] == "ok"
    assert "metadata server" not in rows and rows["torch_xla"]["measured"] is None
    said = f"{report['counts']['ok']} ok, 0 differ, {report['counts']['failed']} failed"
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"check: {said}")
    assert last.endswith("diffusers-tpu-check.json; please attach it to an issue")


def test_stage_0_imports_neither_jax_nor_torch():
    child = Path(running.__file__).with_name("child.py")
    code = f"import runpy, sys; child = runpy.run_path({str(child)!r}); child['load']('host')"
    code += "; print({'jax', 'torch', 'diffusers'} & {*sys.modules})"
    assert run_python("-c", code).stdout.strip() == "set()"


def test_without_a_tpu_the_command_says_what_is_missing(bare, capsys):
    assert main(["check"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "expected a TPU to check, found none: " in error and "DIFFUSERS_TPU=cpu" in error
    assert main(["check", "--compare", "a", "b", "--stage", "host"]) == 2 and not os.listdir()


def test_stages_are_those_of_the_command_line():
    assert [*running.NAMES] == TABLE["commands"]["check"]["options"]["--stage"]["choices"]
    for stage, table in running.STAGES.items():
        assert {"tpu", "simulated"} <= {*table} and table["tpu"]["seconds"] <= 70, stage
    assert sum(table["tpu"]["seconds"] for table in running.STAGES.values()) <= 300


CLEANED = {
    "in /home/ann/x/lib.so: no": "in PATH lib.so: no",
    "got '/home/ann/models'": "got 'PATH'",
    "/host:CPU of /device:TPU:0, libtpu 0.0.42.1": "/host:CPU of /device:TPU:0, libtpu 0.0.42.1",
    "t1v-n-0.us-central1-a.c.ann.internal at 10.128.0.3:8476": "HOST at ADDRESS",
    "as hf_very_secret_indeed said": "as SECRET said",
}


def test_texts_lose_paths_hosts_and_secrets(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret_indeed")
    monkeypatch.setattr(socket, "gethostname", lambda: "ann-laptop")
    for text, cleaned in CLEANED.items():
        assert reports.clean({"a": [f"{text} on ann-laptop"]}) == {"a": [f"{cleaned} on HOST"]}


def made_report(path: Path, **changes) -> str:
    """As a TPU's: a kernel's seconds of twice the plan's, links at half, a launch of 50 us."""
    facts = {"simulated": False, "chip": "v6e", "sources": "", "python": "", "day": "2027-01-02"}
    report = reports.Report({**facts, **changes})
    figures = {"status": "ok", "measured": 0.02, "expected": 0.01, "unit": "s"}
    for name in (*(f"attention {mode}" for mode in MODES), "linear"):
        report.add(4, {**figures, "name": f"{name}, published 1x2: seconds"})
    report.add(4, {**figures, "measured": 9.0, "name": "linear, ragged 1x2: seconds"})
    rate = {"measured": 40.0, "expected": 80.0, "unit": "GB/s"}
    report.add(5, {**figures, **rate, "name": "all-gather, SparseCores on: rate"})
    report.add(3, {"name": "an empty dispatch", "status": "ok", "measured": 5e-5, "unit": "s"})
    report.write(path)
    return str(path)


def test_a_plan_takes_a_reports_rates_and_names_them(tmp_path, root, capsys):
    """Attention twice as long and so on: of the same program, from the planner's cache."""
    path = made_report(tmp_path / "a.json")
    words = ["plan", str(root / "examples/tpu/models/wan-shapes"), "--topology", "v6e-8", "--json"]
    words += "--height 64 --width 64 --num-frames 9 --num-inference-steps 4".split()
    plans = []
    for more in ([], ["--measured", path]):
        assert main([*words, *more]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    published, measured = (plan["seconds_per_step"] for plan in plans)
    assert measured["attention"] == pytest.approx(2 * published["attention"])
    runs = sum(part["runs"] for part in plans[0]["parts"] if part["stage"] == "denoise") / 4
    assert measured["other"] == pytest.approx(published["other"] + runs * 5e-5, rel=1e-3)
    assert measured["total"] == pytest.approx(sum(measured[kind] for kind in timing.KINDS))
    assert plans[0]["measured"] is None and plans[1]["measured"]["links"] == 0.5
    said = "attention bound x 2", "links x 0.5", "a v6e"
    assert any(all(words in note for words in said) for note in plans[1]["notes"])


def test_rates_scale_what_they_are_of():
    """Links of half the bandwidth: a gather that nothing waits for takes twice as long; kernels by their names."""
    chip, places = CHIPS["v6e"], [(x, y, 0, 0) for x in range(2) for y in range(4)]
    compiled = aot.CompiledProgram(HLO, {}, {}, 0)
    rates = Rates("v6e", kernels={"linear": 1.5, "attention bound": 2.0}, links=0.5)
    plain, slow = (timing.time_program(compiled, chip, places, given)["bound"] for given in (None, rates))
    assert slow.hidden_collectives == pytest.approx(2 * plain.hidden_collectives)
    assert [rates.factor(f"{name}.7", "bound") for name in PREFIXES] == [1.0, 2.0, 1.0, 1.5, 1.0]
    assert rates.factor("attention_kernel.1", "online") == 1.0


@pytest.mark.parametrize(
    "changes, words",
    [({"simulated": True}, "simulated chips"), ({"chip": "v5e"}, "a report of v6e"), (None, "a report of diffusers")],
)
def test_a_report_that_is_not_the_slices_is_refused(changes, words, tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text("{}") if changes is None else made_report(path, **changes)
    with pytest.raises(ValueError, match=words):
        read_rates(str(path), ["v6e"])
    assert main(["plan", "wan2.1-t2v-1.3b", "--topology", "v6e-1", "--measured", str(path)]) == 2
    assert words in capsys.readouterr().err


def test_two_reports_are_set_side_by_side(tmp_path, capsys):
    paths = [made_report(tmp_path / name, chip=chip) for name, chip in (("a.json", "v5e"), ("b.json", "v6e"))]
    second = json.loads(Path(paths[1]).read_text())
    second["rows"][0] |= {"measured": 0.03, "status": "differs"}
    del second["rows"][-1]
    Path(paths[1]).write_text(json.dumps(second))
    assert main(["check", "--compare", *paths, "--json"]) == 0
    rows = {(row["stage"], row["name"]): row for row in json.loads(capsys.readouterr().out)}
    first = rows[4, "attention bound, published 1x2: seconds"]
    assert first["ratio"] == pytest.approx(1.5) and first["statuses"] == ["ok", "differs"]
    assert rows[3, "an empty dispatch"]["statuses"] == ["ok", None] and len(rows) == 7
    assert main(["check", "--compare", *paths]) == 0
    assert "v5e, 2027-01-02 beside v6e" in capsys.readouterr().out
    for rows, said in (([], "without chip, day"), ([{}], "stage, status"), ([1], "a report")):
        (tmp_path / "c.json").write_text(json.dumps({"format": 1, "simulated": False, "rows": rows}))
        assert main(["check", "--compare", paths[0], str(tmp_path / "c.json")]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["tpu", "simulated"])
def test_kernels_take_the_sizes_that_are_checked(kind):
    """On v5e, as a TPU's kernels: of smaller sizes they leave the call to the compiler."""
    settings = Settings(platform="tpu", generation="v5e", kernel="kernel", layers="kernel")
    request = running.STAGES["kernels"][kind]
    named = {"convolution": "linear_kernel_of_windows"}
    for name, kernel in cases.KERNELS.items():
        for size in () if kernel.degrees else cases.SIZES:
            make = functools.partial(kernel.arguments, request[size][name], mode=kernel.modes[0])
            arguments = jax.eval_shape(make, jax.random.key(0))
            trace = jax.make_jaxpr(lambda *given: kernel.run(settings, None, *given))(*arguments)
            assert f"name={named.get(name, f'{name}_kernel')}" in str(trace), (name, size)


@pytest.mark.slow
def test_kernels_compile_for_a_v5e_at_their_real_sizes():
    request = {**running.STAGES["kernels"], **running.STAGES["kernels"]["tpu"], "plan_seconds": 900}
    planned = programs.planning(f"{cases.__name__}:programs", request, "v5e-1").result()
    assert {name for name in planned if name.endswith("published")} == {
        f"{k} published" for k in cases.KERNELS if k not in ("exchange", "sum")
    }
    for name, seconds in planned.items():
        assert isinstance(seconds, dict) and 0 < seconds["bound"] <= seconds["online"] < 0.2, (name, seconds)


WRITTEN = {
    "chips": ["device_kind", "id, place and process of each device of v6e-8"],
    "primitives": ["exp2 in Mosaic", "product of float32, high, in XLA", "Fourier transform of 256"],
    "transfers": ["to the device", "an empty dispatch", "a donated argument is the result's memory"],
    "kernels": [f"attention {mode}: mode of all blocks" for mode in MODES],
    "exchanges": ["all-to-all: the same bits with SparseCores and without", "hop y, SparseCores on: rate"],
    "executables": ["the same bits as compiled here", "programs that this process compiled"],
    "model": ["video in float32", "video in bfloat16", "seconds of a step, bfloat16"],
    "faults": ["an allocation that no chip has room for", "a program that no chip has room for", "a second process"],
    "trace": ["programs that a second process compiled", "share of the time that is attributed", "planes"],
}


@pytest.mark.slow
def test_every_stage_writes_its_rows_on_simulated_chips(check):
    status, report = check()
    check_form(report, running.NAMES)
    bad = [row for row in report["rows"] if row["status"] not in ("ok", "not applicable")]
    assert status == 0 and not report["counts"]["differs"], bad
    for stage, names in WRITTEN.items():
        assert {*names} <= {*rows_of(report, stage)}, stage
    seconds = [row for row in rows_of(report, "kernels").values() if row["unit"] == "s"]
    assert len(seconds) == 18 and all(row["measured"] > 0 < row["expected"] for row in seconds)  # planned for v6e-8
    assert rows_of(report, "model")["seconds of a step, bfloat16"]["expected"] > 0


@pytest.mark.slow
def test_faults_become_rows_and_the_last_stage_runs(check, monkeypatch):
    monkeypatch.setitem(running.STAGES["transfers"]["simulated"], "seconds", 2)
    stages = "primitives", "transfers", "kernels", "executables", "trace"
    status, report = check(*stages, primitives=CRASH, transfers=HANG, kernels=WRONG, executables=REFUSED)
    check_form(report, stages)
    found = {stage: rows_of(report, stage) for stage in stages}
    assert status == 1 and found["primitives"]["stage"]["status"] == "failed"
    assert found["transfers"]["stage"]["status"] == "timed out"
    wrong = [name for name, row in found["kernels"].items() if row["status"] == "differs"]
    assert wrong and all(name.startswith("linear") and name.endswith("error") for name in wrong)
    refused = found["executables"]["an executable made ahead"]
    said = "RuntimeError: INTERNAL: wrong fingerprint of PATH libtpu.so"
    assert (refused["status"], refused["note"]) == ("failed", said)
    assert found["executables"]["programs that this process compiled"]["measured"] == 0
    assert found["trace"]["share of the time that is attributed"]["status"] == "ok"
