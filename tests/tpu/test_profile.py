"""A trace beside a plan. Oracles: sums by hand of a made-up TPU trace; for a run, its own steps and modules.

No TPU has been used: the made-up trace has the planes, lines and names that traces of TPUs are documented to have.
"""

import json
import os
from pathlib import Path

import pytest
from jax.profiler import ProfileData

import tiny
from diffusers.tpu.apps.cli import main
from diffusers.tpu.planner import profile


TEXT = Path(__file__).with_name("programs").joinpath("profiled.hlo").read_text()
MILLISECOND = 10**9  # picoseconds


def event(number: int, start: float, length: float) -> str:
    """In milliseconds."""
    return f"events {{ metadata_id: {number} offset_ps: {int(start * MILLISECOND)} duration_ps: {int(length * MILLISECOND)} }}"


def plane(chip: int, scale: float) -> str:
    """A loop of 10 ms in which two operations run twice, 2 + 3 ms and 1 + 3 ms, and what no program says, 1 ms."""
    inside = [event(2, 0, 2), event(3, 2, 3), event(2, 5, 1), event(3, 6, 3)]
    names = {1: "%while.3 = f32[2]{0} while(%a)", 2: "%fusion.1 = f32[2]{0} add(%p, %p)", 3: "fusion.2", 4: "copy.9"}
    names |= {5: "jit_program(77)", 6: "jit_other(78)"}
    metadata = "".join(
        f'event_metadata {{ key: {n} value {{ id: {n} name: "{name}" }} }}' for n, name in names.items()
    )
    operations = " ".join([event(1, 0, 10), *inside, event(4, 10, scale)])
    return (
        f'planes {{ id: {chip + 1} name: "/device:TPU:{chip}" {metadata}'
        f' lines {{ id: 1 name: "XLA Modules" {event(5, 0, 10)} {event(6, 10, 5)} }}'
        f' lines {{ id: 2 name: "XLA Ops" {operations} }}'
        f' lines {{ id: 3 name: "Async XLA Ops" {event(1, 0, 500)} }} }}'
    )


@pytest.fixture
def traced(tmp_path):
    """A folder with a trace of two chips and two steps."""
    trace = tmp_path / "trace" / "plugins" / "profile" / "now"
    trace.mkdir(parents=True)
    text = (
        plane(0, 1)
        + plane(1, 3)
        + 'planes { id: 9 name: "/host:CPU" } planes { id: 8 name: "/device:TPU:0 SparseCore 0" }'
    )
    (trace / "vm.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    programs = [{"component": "transformer", "entry": "forward", "text": TEXT}]
    longer = TEXT.replace("%fusion.1", "%fusion.7").replace("[attn1]", "[wrong]")
    programs.append({"component": "vae", "entry": "decode", "text": longer})
    facts = {"steps": 2, "device": "TPU v6 lite", "mesh": {"dp": 1, "sp": 2, "tp": 1}, "programs": programs}
    (tmp_path / "trace" / profile.PROGRAMS).write_text(json.dumps(facts))
    return tmp_path / "trace"


PLAN = {
    "model": "wan", "topology": "v6e-4", "mesh": {}, "call": {}, "versions": {}, "steps": 50,
    "seconds_per_step": {"total": 0.004},
    "parts": [
        {"stage": "decode", "component": "vae", "runs": 1, "timing": None},
        {"stage": "denoise", "component": "transformer", "runs": 100, "timing": {
            "by_module": {"blocks.*.attn1": 0.001, "proj_out": 0.0005},
            "by_operation": {"matmul: dot_general": 0.0005, "other: dot_general": 0.001}}},
    ],
}  # fmt: skip


def test_a_tpus_operations_are_summed_by_module_without_what_lies_in_them(traced):
    found = profile.measured(traced)
    assert (found["steps"], found["chips"], found["device"]) == (2, 2, "TPU v6 lite")
    modules = {(row["component"], row["module"]): row["measured"] for row in found["modules"]}
    assert modules == pytest.approx(
        {
            ("transformer", "blocks.*.attn1"): 0.0015,
            ("transformer", "blocks.*.ffn"): 0.003,
            ("transformer", "(between modules)"): 0.0005,  # the loop's own
            (profile.GLUE, "(between modules)"): 0.001,  # mean of 1 and 3 ms, of two steps
        }
    )
    assert found["seconds_per_step"] == pytest.approx(0.006)
    assert {row["operation"] for row in found["operations"]} == {"dot_general", "gelu", "while", "copy.9"}


def test_what_was_planned_stands_beside(traced, tmp_path, capsys):
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    words = ["profile", str(traced), "--plan", str(tmp_path / "plan.json")]
    assert main([*words, "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    rows = {row["module"]: row for row in found["modules"] if row["component"] == "transformer"}
    assert rows["blocks.*.attn1"]["planned"] == pytest.approx(0.002)  # two runs a step
    assert rows["blocks.*.attn1"]["ratio"] == pytest.approx(0.75)
    assert (rows["proj_out"]["measured"], rows["blocks.*.ffn"]["planned"]) == (None, None)
    operations = {row["operation"]: row for row in found["operations"]}
    assert operations["dot_general"]["planned"] == pytest.approx(0.003)
    assert found["ratio"] == pytest.approx(1.5) and found["plan"]["topology"] == "v6e-4"
    assert "planned 0.004 s, measured is 1.5 of that" in capsys.readouterr().out


def test_bad_input_is_one_line(traced, tmp_path, capsys):
    for words, expected in (
        ([tmp_path / "none"], "expected a folder that diffusers-tpu generate --profile has written"),
        ([traced, "--plan", "none.json"], "none.json"),
        ([traced, "--plan", traced / profile.PROGRAMS], "expected --plan of one plan"),
    ):
        assert main(["profile", *map(str, words)]) == 2
        assert expected in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("asked", ["2", "4:4"])
def test_steps_that_are_not_there_are_refused_before_anything_is_loaded(chips, tmp_path, capsys, asked):
    tiny.wan().save_pretrained(tmp_path / "model")
    words = ["generate", str(tmp_path / "model"), *"--prompt x --device simulated --num-inference-steps 4".split()]
    assert main([*words, "--profile", str(tmp_path / "trace"), "--profile-steps", asked]) == 2
    assert "expected --profile-steps" in capsys.readouterr().err and not (tmp_path / "trace").exists()


@pytest.mark.slow
def test_a_run_on_simulated_chips_is_traced(chips, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.wan().save_pretrained("model")
    words = "generate model --prompt x --device simulated --mesh 1,2,1 --height 16 --width 16 --num-frames 1"
    words += " --num-inference-steps 4 --profile trace --output x.mp4 --profile-steps 1:3"
    assert main(words.split()) == 0
    found = profile.measured(tmp_path / "trace")
    modules = {row["module"]: row["measured"] for row in found["modules"] if row["component"] == "transformer"}
    assert (found["steps"], found["chips"]) == (2, 2)
    assert {"blocks.*.attn1", "blocks.*.ffn"} <= modules.keys() and min(modules.values()) >= 0
    assert not [row for row in found["modules"] if row["component"] in ("vae", "text_encoder")]  # those are not steps
    assert sorted(os.listdir("trace")) == [profile.PROGRAMS, "plugins"]
    assert main(["profile", "trace"]) == 0 and "s a step of a chip; 2 steps, 2 chips" in capsys.readouterr().out
