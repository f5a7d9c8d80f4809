"""What the planner reads of compiled programs. Oracles: texts made up here, counted by hand."""

import types
from pathlib import Path

import jax
import pytest

from diffusers.tpu.chips.devices import compile_lowered, compiler_options
from diffusers.tpu.chips.figures import CHIPS
from diffusers.tpu.planner import aot, bundles, hlo, ici, timing
from diffusers.utils import logging


PROGRAMS = Path(__file__).with_name("programs")
HLO, SCHEDULE, WAYS_SCHEDULE = (
    (PROGRAMS / name).read_text() for name in ("loop.hlo", "pipeline.schedule", "ways.schedule")
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


@pytest.mark.parametrize("written", [str, on_a_sparse_core])
def test_a_program_is_read_with_loops_parts_and_hidden_transfers(written):
    chip = CHIPS["v6e"]
    assert written is str or ("call-done" in written(HLO) and " all-gather-start(" not in written(HLO))
    compiled = aot.CompiledProgram(written(HLO), {}, {}, 0)
    places = [(x, y, 0, 0) for x in range(2) for y in range(4)]
    timed = timing.time_program(compiled, chip, places)["bound"]
    part = next(o for o in timed.operations if o.name == "slice")
    # One of forty slices is read, 64 lanes padded to 128, and one written; the index is four bytes.
    assert (part.module, part.runs, part.bytes) == ("blocks.*.attn1.to_q", 40, 2 * 128 * 128 * 2 + 4)
    assert part.seconds == pytest.approx(40 * 17500 / chip.clock)
    gather = next(o for o in timed.operations if o.kind == "collectives")
    assert gather.seconds == 0 and gather.hidden == pytest.approx(40 * 128 * 256 * 2 * 3 / 4 / chip.link_bandwidth)


@pytest.mark.parametrize(
    ("notation", "groups"),
    [
        ("replica_groups={{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("replica_groups={}", [[0, 1, 2, 3]]),
        ("source_target_pairs={{0,1},{3,2}}", [[0, 1], [3, 2]]),
    ],
)
def test_groups_of_a_collective(notation, groups):
    instruction = hlo.Instruction("x", "all-gather", "f32[4]", [], f", {notation}, dimensions={{0}}")
    assert ici.groups_of(instruction, 4) == groups


@pytest.mark.parametrize(
    ("opcode", "link_loads"),
    # On a line of four chips, in units of one message's bytes: what the fullest link carries.
    [("all-gather", 3 / 4), ("all-reduce", 6 / 4), ("all-to-all", 4 / 4), ("reduce-scatter", 3)],
)
def test_a_line_of_four_chips_by_hand(opcode, link_loads):
    chip = CHIPS["v5e"]
    instruction = hlo.Instruction("x", opcode, "f32[8192]{0:T(1024)}", [], ", replica_groups={{0,1,2,3}}")
    moved = ici.transfer(instruction, [(0, y, 0, 0) for y in range(4)], chip)
    assert moved.seconds == pytest.approx(link_loads * 8192 * 4 / chip.link_bandwidth)


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


def test_a_size_is_no_counter():
    """`== 0` jumps over what runs where there is anything to do: in every round."""
    text = SCHEDULE.replace("%p1_p0 = scmp.ne.s32.totalorder %s5_s5, 0", "%p1_p0 = scmp.eq.s32.totalorder %s6_s6, 0")
    assert bundles.read(text, 0).cycles == pytest.approx(3 + 30 * (14 - 1) + 30 * 1 / 5)


def test_one_way_at_a_time_of_a_schedule_by_hand():
    ways = bundles.read_modes(WAYS_SCHEDULE, 0)
    # Six rounds of eight bundles that every way runs; "centred" is not compiled: such heads go online.
    assert {way: schedule.cycles for way, schedule in ways.items()} == {
        "bound": 1 + 6 * (8 + 2), "centred": 1 + 6 * (8 + 3), "online": 1 + 6 * (8 + 3),
    }  # fmt: skip
    assert [ways[way].rows for way in ("bound", "online")] == [0, 16 * 6]
    assert ways["online"].body == 4  # with the branch


def test_what_the_sparse_cores_cannot_exchange_stays_on_the_core(caplog, monkeypatch):
    monkeypatch.setattr(logging.get_logger("diffusers"), "propagate", True)
    options, asked = compiler_options(types.SimpleNamespace(platform="tpu", device_kind="TPU v6e"), True), []

    def refusing(words):
        def compile(given):
            asked.append(given)
            if any(given.values()):
                raise jax.errors.JaxRuntimeError(words)
            return "executable"

        return types.SimpleNamespace(compile=compile)

    assert compile_lowered(refusing("RET_CHECK failure (xla/sparse_core/emitter.cc:164)"), options) == "executable"
    assert asked == [options, dict.fromkeys(options, False)] and "stay on the core" in caplog.text
    with pytest.raises(jax.errors.JaxRuntimeError, match="no room"):
        compile_lowered(refusing("no room"), options)


def test_an_option_that_the_compiler_does_not_have_is_left_out_by_name(caplog, monkeypatch):
    monkeypatch.setattr(logging.get_logger("diffusers"), "propagate", True)
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    options = {"xla_tpu_of_mine": True, "xla_cpu_copy_insertion_use_region_analysis": False, "xla_tpu_of_yours": False}
    assert compile_lowered(lowered, options)(1.0) == 2.0
    said = {record.getMessage().partition(",")[0] for record in caplog.records}
    assert said == {f"this compiler has no option xla_tpu_of_{whose}" for whose in ("mine", "yours")}
    with pytest.raises(jax.errors.JaxRuntimeError, match="not a valid"):
        compile_lowered(lowered, {"xla_cpu_copy_insertion_use_region_analysis": "not a valid one"})


def test_a_matrix_unit_is_occupied_as_long_as_the_peak_says():
    for chip in CHIPS.values():
        products = chip.matrix_units * chip.matrix_side**2 * 16  # of 16 rows on every unit
        assert chip.matrix_cycles(16) / chip.clock == pytest.approx(2 * products / chip.flops)
    assert round(CHIPS["v5e"].matrix_cycles(16)) == 16 and round(CHIPS["v6e"].matrix_cycles(16)) == 8
