"""What the planner reads of compiled programs and of traces. Oracles: texts and a TPU's trace made up here, counted by hand.

No TPU has been used: the made-up trace has the planes, lines and names that traces of TPUs are documented to have.
"""

import json
import os
import types
from pathlib import Path

import jax
import pytest
from jax.profiler import ProfileData

from diffusers.tpu.apps.cli import main
from diffusers.tpu.chips.devices import QUEUE, QUEUED_BY, SUMMED_BY, compile_lowered, compiler_options
from diffusers.tpu.chips.figures import CHIPS
from diffusers.tpu.planner import aot, bundles, hlo, ici, profile, timing


PROGRAMS = Path(__file__).with_name("programs")
HLO, TEXT, SCHEDULE, WAYS_SCHEDULE = (
    (PROGRAMS / name).read_text() for name in ("loop.hlo", "profiled.hlo", "pipeline.schedule", "ways.schedule")
)


def on_a_sparse_core(text: str) -> str:
    """The program's gather as the SparseCore's."""
    small, whole = "bf16[1,128,64]{2,1,0:T(8,128)(2,1)S(1)}", "bf16[1,128,256]{2,1,0:T(8,128)(2,1)S(1)}"
    inside = "replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={2}"
    computation = (
        f"%gathering (p: {small}) -> {whole} {{\n  %p = {small} parameter(0)\n  ROOT %g = {whole} all-gather(%p),"
        f' {inside}\n}}, execution_thread="sparsecore"\n\n'
    )
    start = f'(({small}, token[]), {whole}) call-start(%w), async_execution_thread="sparsecore", to_apply=%gathering'
    text = text.replace(f"({small}, {whole}) all-gather-start(%w), {inside}", start)
    return text.replace("all-gather-done", "call-done").replace("%body (s", computation + "%body (s")


def in_other_tiles(text: str) -> str:
    """The program whose slice is of the stack in other tiles, which a fusion inside of the fusion gives it."""
    stack = "bf16[40,128,64]{2,1,0:T(8,128)(2,1)}"
    computation = (
        f"%tiles (p: {stack}) -> {stack} {{\n  %p = {stack} parameter(0)\n  ROOT %c = {stack} copy(%p)\n}}\n\n"
    )
    relaid = f"  %q = {stack} fusion(%p0), kind=kLoop, output_to_operand_aliasing={{{{}}: (0, {{}})}}, calls=%tiles\n"
    text = text.replace("dynamic-slice(%p0, ", "dynamic-slice(%q, ").replace("  ROOT %ds", relaid + "  ROOT %ds")
    return text.replace("%fused (p0", computation + "%fused (p0")


@pytest.mark.parametrize("written", [str, on_a_sparse_core, in_other_tiles])
def test_a_program_is_read_with_loops_parts_and_hidden_transfers(written):
    chip = CHIPS["v6e"]
    if written is on_a_sparse_core:
        assert "call-done" in written(HLO) and " all-gather-start(" not in written(HLO)
    compiled = aot.CompiledProgram(written(HLO), {}, {}, 0)
    places = [(x, y, 0, 0) for x in range(2) for y in range(4)]
    timed = timing.time_program(compiled, chip, places)["bound"]
    part = next(o for o in timed.operations if o.name == "slice")
    # One of forty slices is read, 64 lanes padded to 128, and one written; the index is four bytes.
    assert (part.module, part.runs, part.bytes) == ("blocks.*.attn1.to_q", 40, 2 * 128 * 128 * 2 + 4)
    assert part.seconds == pytest.approx(40 * 17500 / chip.clock)
    gather = next(o for o in timed.operations if o.kind == "collectives")
    assert gather.seconds == 0 and gather.hidden == pytest.approx(40 * 128 * 256 * 2 * 3 / 4 / chip.link_bandwidth)


MOVED = [("1,720,96", 3 * 720 * 128 * 2), ("162,7,96", 3 * 162 * 8 * 128 * 2 + 720 * 128 * 2)]


@pytest.mark.parametrize("part, moved", MOVED)
def test_what_is_written_in_place_is_its_part(part, moved):
    """Beside another result, in VMEM: a column, of whole tiles, is written and another read; of rows within tiles, those are read too."""
    whole, column = "bf16[162,720,96]{2,1,0:T(8,128)(2,1)}", "bf16[1,720,96]{2,1,0:T(8,128)(2,1)S(1)}"
    part = f"bf16[{part}]{{2,1,0:T(8,128)(2,1)}}"
    text = f"""HloModule m, is_scheduled=true

%inside (p0: {whole}, p1: {part}) -> ({column}, {whole}) {{
  %p0 = {whole} parameter(0)
  %p1 = {part} parameter(1)
  %zero = s32[] constant(0)
  %first = {column} slice(%p0), slice={{[0:1], [0:720], [0:96]}}
  %written = {whole} dynamic-update-slice(%p0, %p1, %zero, %zero, %zero)
  ROOT %both = ({column}, {whole}) tuple(%first, %written)
}}

ENTRY %main (a: {whole}, b: {part}) -> ({column}, {whole}) {{
  %a = {whole} parameter(0)
  %b = {part} parameter(1)
  ROOT %f = ({column}, {whole}) fusion(%a, %b), kind=kLoop, calls=%inside
}}
"""
    timed = timing.time_program(aot.CompiledProgram(text, {}, {}, 0), CHIPS["v6e"], [(0, 0, 0, 0)])["bound"]
    assert [operation.bytes for operation in timed.operations] == [moved]


GROUPS = {
    "replica_groups={{0,2},{1,3}}": [[0, 2], [1, 3]],
    "replica_groups=[2,2]<=[4]": [[0, 1], [2, 3]],
    "replica_groups=[2,2]<=[2,2]T(1,0)": [[0, 2], [1, 3]],
    "replica_groups=mesh['a'=2,'b'=2] {'a'}": [[0, 2], [1, 3]],
    "replica_groups={}": [[0, 1, 2, 3]],
    "source_target_pairs={{0,1},{3,2}}": [[0, 1], [3, 2]],
}


def test_groups_of_a_collective_and_a_line_of_four_chips_by_hand():
    for notation, groups in GROUPS.items():
        instruction = hlo.Instruction("x", "all-gather", "f32[4]", [], f", {notation}, dimensions={{0}}")
        assert ici.groups_of(instruction, 4) == groups, notation
    # In units of one message's bytes: what the fullest link carries.
    chip, loads = CHIPS["v5e"], {"all-gather": 3 / 4, "all-reduce": 6 / 4, "all-to-all": 4 / 4, "reduce-scatter": 3}
    for opcode, load in loads.items():
        instruction = hlo.Instruction("x", opcode, "f32[8192]{0:T(1024)}", [], ", replica_groups={{0,1,2,3}}")
        moved = ici.transfer(instruction, [(0, y, 0, 0) for y in range(4)], chip)
        assert moved.seconds == pytest.approx(load * 8192 * 4 / chip.link_bandwidth), opcode


def test_a_schedule_by_hand():
    schedule = bundles.read(SCHEDULE, 0)
    # 32 rounds of a pipelined grid are 30 steps. The counter takes five values: first and last piece run in a fifth.
    assert (schedule.bundles, schedule.steps) == (17, 30)
    assert [(loop.start, loop.stop, loop.trips) for loop in schedule.loops] == [(1, 14, 30)]
    assert schedule.cycles == pytest.approx(3 + 30 * (14 - 3) + 30 * 3 / 5)
    assert schedule.rows == 16 * 30  # of bfloat16 through the first unit; through the third a fifth of that
    # One bundle behind each branch runs as well: there is one more in the loop, and one less in the first piece and the last.
    schedule = bundles.read(SCHEDULE, 1)
    assert [(loop.start, loop.stop, loop.trips) for loop in schedule.loops] == [(1, 15, 30)]
    assert schedule.cycles == pytest.approx(2 + 30 * (15 - 1) + 30 * 1 / 5)
    # A size is no counter: `== 0` jumps over what runs where there is anything to do: in every round.
    text = SCHEDULE.replace("%p1_p0 = scmp.ne.s32.totalorder %s5_s5, 0", "%p1_p0 = scmp.eq.s32.totalorder %s6_s6, 0")
    assert bundles.read(text, 0).cycles == pytest.approx(3 + 30 * (14 - 1) + 30 * 1 / 5)
    # Rounds from the fourth on are known where there is a piece of those before; without one it asks something else.
    parts = SCHEDULE.replace("%p1_p0 = scmp.ne.s32.totalorder %s5_s5, 0", "%p1_p0 = scmp.lt.s32.totalorder %s5_s5, 3")
    assert bundles.read(parts, 0).cycles == pytest.approx(3 + 30 * (14 - 1) + 30 * 1 / 5)
    other = "%p5_p4 = scmp.ge.s32.totalorder %s6_s6, 3 }\n 0x8 : > { %16 = sbr.rel (%p5_p4) target = $region11 }\n 0x8 : > { %v8 = vst"
    before = "   0x9   : > {"
    parts = parts.replace(before, f" 0x8 : > {{ {other} %v5 }}\n{before} /* Start region 11 */")
    assert bundles.read(parts, 0).cycles == pytest.approx(3 + 30 * (14 - 3 + 2) + 30 * (2 * 2 / 5 + 3 / 5 + 1 / 5))


def test_one_way_at_a_time_of_a_schedule_by_hand():
    ways = bundles.read_modes(WAYS_SCHEDULE, 0)
    # Six rounds of eight bundles that every way runs; "centred" is not compiled: such heads go online.
    assert {way: schedule.cycles for way, schedule in ways.items()} == {
        "bound": 1 + 6 * (8 + 2), "centred": 1 + 6 * (8 + 3), "online": 1 + 6 * (8 + 3),
    }  # fmt: skip
    assert [ways[way].rows for way in ("bound", "online")] == [0, 16 * 6]
    assert ways["online"].body == 4  # with the branch


def test_what_the_sparse_cores_cannot_exchange_goes_without_them(warned):
    """All-to-alls over the links beside the core, gathers still on the SparseCores; where those are refused too, with a warning, neither.
    Exchanges queue there in programs that send some during attention; sums go there in programs with layers in parts."""
    options, asked = compiler_options(types.SimpleNamespace(platform="tpu", device_kind="TPU v6e"), True), []

    def refusing(words, what="sparse_core", text=""):
        def compile(given):
            asked.append({*filter(given.get, given)})
            if any(on is True and what in name for name, on in given.items()):
                raise jax.errors.JaxRuntimeError(words)
            return "executable"

        return types.SimpleNamespace(compile=compile, as_text=lambda: text)

    offload = "xla_tpu_enable_sparse_core_collective_offload"
    gathers, all_to_alls = f"{offload}_all_gather", f"{offload}_dense_all_to_all"
    beside, refused = "xla_tpu_enable_async_all_to_all", "RET_CHECK failure (xla/sparse_core/emitter.cc:164)"
    assert compile_lowered(refusing(refused, "sparse_core_collective_offload_dense"), options) == "executable"
    assert asked == [{gathers, all_to_alls}, {gathers, beside}] and not warned
    assert compile_lowered(refusing(refused), options) == "executable"
    assert asked[2:] == [{gathers, all_to_alls}, {gathers, beside}, {beside}] and "stay on the core" in warned[0]
    grouped = refusing(refused, "sparse_core_collective_offload_dense", f'kernel_name = "{QUEUED_BY}"')
    assert compile_lowered(grouped, options) == "executable"
    assert asked[5:] == [{QUEUE, gathers, all_to_alls}, {QUEUE, gathers, beside}]
    del asked[:]
    summing = refusing(refused, text=f'kernel_name = "{SUMMED_BY}"')
    assert compile_lowered(summing, options) == "executable"
    sums, apart = f"{offload}_all_reduce", "xla_tpu_sparse_core_all_reduce_offload_max_num_operands"
    assert [*map(sorted, asked)] == [
        sorted(some) for some in ({gathers, all_to_alls, sums, apart}, {gathers, beside, sums, apart}, {beside, apart})
    ]
    with pytest.raises(jax.errors.JaxRuntimeError, match="no room"):
        compile_lowered(refusing("no room", ""), options)


def test_an_option_that_the_compiler_does_not_have_is_left_out_by_name(warned):
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    options = {"xla_tpu_of_mine": True, "xla_cpu_copy_insertion_use_region_analysis": False, "xla_tpu_of_yours": False}
    assert compile_lowered(lowered, options)(1.0) == 2.0
    assert {sentence.partition(",")[0] for sentence in warned} == {
        f"this compiler has no option xla_tpu_of_{whose}" for whose in ("mine", "yours")
    }
    with pytest.raises(jax.errors.JaxRuntimeError, match="not a valid"):
        compile_lowered(lowered, {"xla_cpu_copy_insertion_use_region_analysis": "not a valid one"})


def test_a_matrix_unit_is_occupied_as_long_as_the_peak_says():
    for chip in CHIPS.values():
        products = chip.matrix_units * chip.matrix_side**2 * 16  # of 16 rows on every unit
        assert chip.matrix_cycles(16) / chip.clock == pytest.approx(2 * products / chip.flops)
    assert round(CHIPS["v5e"].matrix_cycles(16)) == 16 and round(CHIPS["v6e"].matrix_cycles(16)) == 8


# A trace beside a plan


MILLISECOND = 10**9  # picoseconds


def event(number: int, start: float, length: float) -> str:
    """In milliseconds."""
    return f"events {{ metadata_id: {number} offset_ps: {int(start * MILLISECOND)} duration_ps: {int(length * MILLISECOND)} }}"


def plane(chip: int, scale: float) -> str:
    """A loop of 10 ms in which two operations run twice, 2 + 3 ms and 1 + 3 ms, and what no program says, 1 ms."""
    inside = [event(2, 0, 2), event(3, 2, 3), event(2, 5, 1), event(3, 6, 3)]
    names = {1: "%while.3 = f32[2]{0} while(%a)", 2: "%fusion.1 = f32[2]{0} add(%p, %p)", 3: "fusion.2", 4: "copy.9"}
    names |= {5: "jit_program(77)", 6: "jit_other(78)"}
    metadata = "".join(f'event_metadata {{ key: {n} value {{ id: {n} name: "{x}" }} }}' for n, x in names.items())
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
    text = plane(0, 1) + plane(1, 3)
    text += 'planes { id: 9 name: "/host:CPU" } planes { id: 8 name: "/device:TPU:0 SparseCore 0" }'
    (trace / "vm.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    programs = [{"component": "transformer", "entry": "forward", "text": TEXT}]
    longer = TEXT.replace("%fusion.1", "%fusion.7").replace("[attn1]", "[wrong]")
    programs.append({"component": "vae", "entry": "decode", "text": longer})
    facts = {"steps": 2, "device": "TPU v6 lite", "mesh": {"dp": 1, "sp": 2, "tp": 1}, "programs": programs}
    (tmp_path / "trace" / profile.PROGRAMS).write_text(json.dumps(facts))
    return tmp_path / "trace"


PLAN = {
    "model": "wan", "topology": "v6e-4", "mesh": {}, "call": {}, "versions": {}, "steps": 50,
    "seconds_per_step": {"total": 0.004}, "flops_per_step": 3e12, "peak_flops": 1e15,
    "parts": [
        {"stage": "decode", "component": "vae", "runs": 1, "timing": None},
        {"stage": "denoise", "component": "transformer", "runs": 100, "branches": 1, "flops_by_module": {"blocks.*.attn1.to_q": 6e11}, "timing": {
            "by_module": {"blocks.*.attn1": 0.001, "proj_out": 0.0005},
            "by_operation": {"matmul: dot_general": 0.0005, "other: dot_general": 0.001}}},
    ],
}  # fmt: skip


def test_a_tpus_operations_are_summed_by_module_beside_what_was_planned(traced, tmp_path, capsys):
    """Without what lies in them."""
    found = profile.measured(traced)
    assert (found["steps"], found["chips"], found["device"]) == (2, 2, "TPU v6 lite")
    modules = {(row["component"], row["module"]): row["measured"] for row in found["modules"]}
    expected = {("transformer", "blocks.*.attn1"): 0.0015, ("transformer", "blocks.*.ffn"): 0.003}
    expected["transformer", "(between modules)"] = 0.0005  # the loop's own
    expected[profile.GLUE, "(between modules)"] = 0.001  # mean of 1 and 3 ms, of two steps
    assert modules == pytest.approx(expected)
    assert found["seconds_per_step"] == pytest.approx(0.006)
    limits = {row["operation"]: row["limit"] for row in found["operations"]}
    assert limits == {"dot_general": "matrix", "gelu": "memory", "while": "vector", "copy.9": None}
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
    assert rows["blocks.*.attn1"]["mfu"] == pytest.approx(0.8) and found["mfu"] == pytest.approx(0.5)
    assert found["ratio"] == pytest.approx(1.5) and found["plan"]["topology"] == "v6e-4"
    assert "planned 0.004 s, measured is 1.5 of that; MFU 50.0%" in capsys.readouterr().out


@pytest.mark.parametrize("known, component", [(9.1, "transformer"), (8.9, None)])
def test_a_program_is_told_by_nine_tenths_of_its_time(known, component):
    """The compiler renames some operations between its text and the trace. "links": of a gather, and where it is waited for."""
    programs = [{"component": "transformer", "text": TEXT}, {"component": "vae", "text": on_a_sparse_core(HLO)}]
    runs = [("fusion.1", known), ("renamed.8", 10 - known)]
    events = [(profile.Event("chip", ("jit_program", 1), name, "", 0, 1), seconds) for name, seconds in runs]
    events.append((profile.Event("chip", ("m", 2), "start", "", 0, 1), 1.0))
    found = profile.programs_by_event(programs, events)
    assert (found["jit_program", 1] or [None])[0] == component
    assert [found["m", 2][1][name][1] for name in ("start", "done", "slice")] == ["links", "links", "vector"]


def test_bad_input_is_one_line(traced, chips, wan_folder, tmp_path, capsys):
    """Steps that are not there are refused before anything is loaded."""
    for words, expected in (
        ([tmp_path / "none"], "expected a folder that diffusers-tpu generate --profile has written"),
        ([traced, "--plan", "none.json"], "none.json"),
        ([traced, "--plan", traced / profile.PROGRAMS], "expected --plan of one plan"),
    ):
        assert main(["profile", *map(str, words)]) == 2
        assert expected in capsys.readouterr().err.splitlines()[-1]
    words = ["generate", wan_folder, *"--prompt x --device simulated --num-inference-steps 4".split()]
    for asked in ("2", "4:4"):
        assert main([*words, "--profile", str(tmp_path / "new"), "--profile-steps", asked]) == 2
        assert "expected --profile-steps" in capsys.readouterr().err and not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_run_on_simulated_chips_is_traced(chips, wan_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = f"generate {wan_folder} --prompt x --device simulated --mesh 1,2,1 --height 16 --width 16 --num-frames 1"
    words += " --num-inference-steps 4 --profile trace --output x.mp4 --profile-steps 1:3"
    assert main(words.split()) == 0
    found = profile.measured(tmp_path / "trace")
    modules = {row["module"]: row["measured"] for row in found["modules"] if row["component"] == "transformer"}
    assert (found["steps"], found["chips"]) == (2, 2)
    assert {"blocks.*.attn1", "blocks.*.ffn"} <= modules.keys() and min(modules.values()) >= 0
    assert not [row for row in found["modules"] if row["component"] in ("vae", "text_encoder")]  # those are not steps
    assert sorted(os.listdir("trace")) == [profile.PROGRAMS, "plugins"]
    assert main(["profile", "trace"]) == 0 and "s a step of a chip; 2 steps, 2 chips" in capsys.readouterr().out
