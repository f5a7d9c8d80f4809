"""The records of examples/tpu/results/ and what pages say of them. Oracles: the records; the chips' peaks, counted by hand."""

import json
import math
import re
from types import SimpleNamespace

import make_records as maker
import pytest

from bench import benches, naming, tokamax_cases
from bench.attention_cases import ATTENTION_SHAPES
from bench.cases import Case
from conftest import ROOT
from diffusers.tpu import planner
from diffusers.tpu.apps import cli
from diffusers.tpu.chips.figures import CHIPS, Chip, find_topology


RESULTS = ROOT / "examples" / "tpu" / "results"


def read(name: str):
    return json.loads((RESULTS / name).read_text())


# Pages


def test_every_table_of_a_page_is_its_record_and_every_table_is_on_a_page():
    assert [str(page.relative_to(ROOT)) for page in maker.make_tables(check=True)] == []
    shown = [name for page in maker.pages() for name in re.findall(r"<!-- table: (\S+) -->", page.read_text())]
    assert sorted(shown) == sorted(n for n, table in maker.TABLES.items() if (RESULTS / table.record).exists())
    there = {path.name for path in RESULTS.iterdir() if path.is_file() and path.suffix != ".py"}
    made = {name for record in maker.records().values() for name in record.files}
    of_scripts = {f"{name}.json" for name in ("mutants", "coverage", "upstream", "bulk", "serve", "values-at-size")}
    assert there - of_scripts <= made and made - there <= {"run.json"}
    assert {*cli.TABLE["commands"]["bench"]["options"]["kind"]["choices"]} == {*benches.BENCHES}


def test_a_row_is_made_again_as_it_stands(monkeypatch, tmp_path):
    """Where the compiler and its reader say something else of the same program, `planner.READER` counts up and rows are made anew."""
    monkeypatch.setenv("DIFFUSERS_TPU_CACHE", str(tmp_path))
    case = benches.BENCHES["attention"]()[0]
    (row,) = [row for row in read("attention.json") if case.row.items() <= row.items()]
    of_this_run = {"versions": None, "compile_seconds": None}
    assert {**case.row, **case.ask(), **of_this_run} == {**row, **of_this_run}


COLUMNS = ("model", "submodules", "tensors", "check_microseconds", "read_milliseconds")
ROWS = [dict(zip(COLUMNS, row)) for row in (("linear-1000", 1000, 1998, 674, 20.71), ("ltx-video", 40, 7, 1300.1, 9))]
PAGE = "before\n<!-- table: check -->\n{}<!-- end of table -->\nafter, 0.67 ms\n"
TABLE = """| model | submodules | tensors | a look, nothing changed, ms | a reading, where something has, ms |
|---|---|---|---|---|
| a thousand submodules | 1,000 | 1,998 | 0.67 | 20.7 |
| LTX-Video | 40 | 7 | 1.30 | 9.0 |
"""


def test_a_table_is_made_anew_and_nothing_around_it(tmp_path):
    """Marks that mark no table are an error."""
    page = tmp_path / "README_TPU.md"
    (tmp_path / "check.json").write_text(json.dumps(ROWS))
    for there in ("", "| an | old |\n", TABLE):
        page.write_text(PAGE.format(there))
        for check, text in ((True, there), (False, TABLE)):
            assert maker.make_tables(check, tmp_path, tmp_path) == ([page] if there != TABLE else [])
            assert page.read_text() == PAGE.format(text)
    end = "<!-- end of table -->"
    unended, unbegun = PAGE.replace(end, ""), PAGE.replace("<!-- table: check -->", "")
    for page in (unended, unbegun, PAGE + unended, PAGE.replace(": check", ": nothing")):
        with pytest.raises(ValueError, match="expected"):
            maker.rewritten(page, tmp_path)


def timed(length: str, heads: str, ours: float) -> dict:
    name = f"tokamax, {length} x {heads}"
    row = {"name": name, "topology": "v7x-8", "model": "attention", "measured_seconds": 0.002, "our_seconds": ours}
    return {**row, "slower": 1.25 * ours, "error": ours / 0.002 - 1}


TIMED = [
    timed("2 x 8,192", "32 x 64", 0.0015),
    timed("2 x 8,192", "8 x 256", 0.001),
    timed("1 x 16", "8 x 256", 0.0022),
]


def test_timings_of_tokamax_are_a_table_of_their_own():
    """Medians by hand: of -25 and -50, of -50 and +10, of all three; and the sizes of the other rows' errors."""
    other = {**timed("", "", 0.0021), "name": "a step", "model": "m"}
    assert maker.TABLES["tokamax"].make([other, *TIMED])[2:] == [
        "| 2 x 8,192 | 2.000; 1.500 to 1.875 (-25 %) | 2.000; 1.000 to 1.250 (-50 %) | -37.5 % |",
        "| 1 x 16 | | 2.000; 2.200 to 2.750 (+10 %) | +10.0 % |",
        "| median | -25.0 % | -20.0 % | -25.0 % |",
    ]
    first, _, last = maker.TABLES["calibration"].make([*TIMED, other])[2:]
    assert first.startswith("| a step | v7x-8 |") and last == "The median of the errors' sizes is 5.0 %."


def test_timings_are_of_the_wheel_or_of_the_record(tmp_path, monkeypatch):
    """Of its rows those that are forward, without residuals and a mask; without the wheel the record's, as they stand."""
    said = {"q": "bf16[1,16,8,256]", "k": "bf16[1,16,8,256]", "v": "bf16[1,16,8,64]"}
    table, rows = tmp_path / tokamax_cases.TABLE, {}
    for residuals, causal, times in ((False, False, [3, 9, 2]), (True, False, [1]), (False, True, [1])):
        asked = {**said, "return_residuals": residuals, "mask": {"is_causal": causal}}
        rows[json.dumps(asked)] = {'{"block_q": 128}': {"evaluation_times_ms": times}}
    rows[json.dumps({**said, "q": "f16[1,16,8,256]"})] = {}
    table.parent.mkdir(parents=True)
    table.write_text(json.dumps(rows))
    wheel = SimpleNamespace(locate_file=lambda name: tmp_path / name)
    monkeypatch.setattr(tokamax_cases.importlib.metadata, "distribution", lambda name: wheel)
    (case,) = tokamax_cases.cases()
    assert case.row["name"] == "tokamax, 1 x 16 x 8 x 256" and case.question.request["config"] == {"block_q": 128}
    assert case.question.request["shapes"] == [[1, 16, 8, 256], [1, 16, 8, 256], [1, 16, 8, 64]]
    made = case.read({"our_seconds": 0.0015})
    assert (made["measured_seconds"], made["error"]) == (0.003, -0.5)

    def absent(name):
        raise tokamax_cases.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(tokamax_cases.importlib.metadata, "distribution", absent)
    record = [row for row in read("calibration.json") if row["name"].startswith("tokamax")]
    assert record and [{**case.row, **case.ask()} for case in tokamax_cases.cases()] == record


# No figure above a chip's peak


def least_bundles(chip: Chip, dim: int) -> float:
    """Cycles that 1024 x 1024 scores of heads of this size occupy the matrix units.

    A unit holds a square of one operand while rows of the other pass. Scores: for each `side` queries, in squares `dim` deep,
    a row for each key. Values: for each `side` queries and `side` keys, a row for each of `dim` channels.
    """
    side = chip.matrix_side
    rows = 1024 / side * 1024 * math.ceil(dim / side) + (1024 / side) ** 2 * dim
    return chip.matrix_cycles(rows / chip.matrix_units)


def test_no_attention_kernel_is_above_the_peak():
    """By hand: with heads of 128 v5e has no square half empty: 4 * 2^20 * 128 operations at 197e12 a second. v6e's are half as deep."""
    assert least_bundles(CHIPS["v5e"], 128) == pytest.approx(4 * 2**20 * 128 / 197e12 * 1.5e9)
    assert least_bundles(CHIPS["v6e"], 128) == pytest.approx(1.5 * 4 * 2**20 * 128 / 918e12 * 1.75e9)
    assert round(least_bundles(CHIPS["v6e"], 128)) == 1535 and round(least_bundles(CHIPS["v6e"], 256)) == 2047
    for row in read("attention.json"):
        least = least_bundles(CHIPS[row["chip"]], ATTENTION_SHAPES[row["shape"]][4])
        assert row["bundles_per_mtile"] >= least, (row["chip"], row["shape"], row["path"])


# model: layers, heads, pixels along the sides of a token; where heads are not of 128, their size and the latent frames of a token
SIZES = {
    **dict.fromkeys(("wan2.1-t2v-14b", "wan2.1-i2v-14b-720p", "wan2.2-t2v-a14b"), (40, 40, 16)),
    "wan2.2-ti2v-5b": (30, 24, 32),
    "wan2.1-t2v-1.3b": (30, 12, 16),
    **dict.fromkeys(("hunyuanvideo-1.5-720p-t2v", "hunyuanvideo-1.5-480p-t2v"), (54, 16, 16)),
    "cogvideox1.5-5b": (42, 48, 16, 64, 2),
    "cogvideox-5b": (42, 48, 16, 64, 1),
    "cogvideox-2b": (30, 30, 16, 64, 1),
    "ltx-video": (28, 32, 32, 64, 2),
    "sdxl": (10 + 60 / 8, 10, 16, 64, 1),  # 60 of its blocks have a quarter of the tokens, and twice the heads
}


def steps() -> list[dict]:
    """Of the bench and of every plan."""
    plans = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("plan-*.json"))]
    return read("step.json") + [{**p, **p["call"], "variant": "plan", "seconds": p["seconds_per_step"]} for p in plans]


def test_no_step_is_above_the_peak():
    for row in steps():
        topology, (layers, heads, pixels, *others) = find_topology(row["topology"]), SIZES[row["model"]]
        dim, frames = others or (128, 1)
        chip, seconds = topology.chip, row["seconds"]
        latents = math.ceil((row.get("num_frames", 1) + 3) // 4 / frames)
        tokens = latents * (row["height"] // pixels) * (row["width"] // pixels)
        branches = 1 if row.get("guidance_scale") == 1 else 2
        mtiles = branches * layers * heads * tokens**2 / 2**20 / topology.devices  # of the video's tokens
        left_out = row["variant"].removeprefix("sparse attention, ")
        mtiles *= 1 if left_out == row["variant"] else 0.98 - float(left_out)  # of whole tiles
        attention = mtiles * least_bundles(chip, dim) / chip.clock
        products = row["mfu"] * seconds["total"]  # all of them at the peak
        fits = seconds["attention"] >= attention and seconds["attention"] + seconds["matmul"] >= products
        named = row["topology"], row["model"], row["variant"], row.get("way"), seconds
        assert fits and row["mfu"] <= 1, (named, {"attention": attention, "products": products})


def test_a_range_goes_up():
    firsts = {"step.json": "seconds_per_step", "vae.json": "seconds", "calibration.json": "our_seconds"}
    ends = [(row[key], row["slower"]) for name, key in firsts.items() for row in read(name) if "slower" in row]
    assert ends and all(0 < first <= last < 1.5 * first for first, last in ends if last is not None), ends


# Rows, of answers made up here


def answer(**changes) -> dict:
    """Of 50 steps of 2 s, 3 s online, two texts of 0.5 s and a video of 4 s; a chip that waits more takes a quarter longer."""

    totals = {"bound": 2.0, "centred": 2.5, "online": 3.0}
    by_way = {way: {"seconds": {"total": total}, "slower": 1.25 * total} for way, total in totals.items()}
    runs = (
        ("vae decode decode", 1, 4.0),
        ("text_encoder forward text", 2, 0.5),
        ("transformer forward denoise", 50, 2.0),
    )
    parts = [
        {**dict(zip(("component", "entry", "stage"), words.split())), "runs": count, "seconds": seconds,
         "timing": {"slower": {"total": 1.25 * seconds}}, "refused": None, "mesh": {}, "layout": "its plan", "scans": 1}
        for words, count, seconds in runs
    ]  # fmt: skip
    made = {"model": "m", "topology": "v6e-8", "mesh": {}, "steps": 50, "hbm_gib_per_chip": {}, "versions": {}}
    made |= {"programs": ["p"], "reader": "r"}
    return {**made, "by_way": by_way, "parts": parts, "compile_seconds": 100.0, "trace_seconds": 7.0, **changes}


def test_a_first_run_is_a_run_and_what_comes_before_it(monkeypatch):
    """The times of compilation are of a program without schedules, which it is not read from."""

    def answered(question, on_progress):
        request = question.request
        assert request["everything"] and request["arguments"]["num_inference_steps"] == 50
        if question.schedules:
            return answer()
        return answer(by_way={}, parts=[], compile_seconds=60.0, trace_seconds=5.0)

    monkeypatch.setattr(planner.Question, "answer", answered)
    cases = benches.select("run", {"topology": "v6e-8", "model": "wan2.1-t2v-14b"})
    rows = [{**case.row, **case.ask()} for case in cases]
    assert [row["way"] for row in rows] == ["bound", "centred", "online"]
    assert rows[0]["seconds"] == {"vae.decode": 4, "text_encoder.forward": 1, "steps": 100, "total": 105}
    names = "slower", "first_run_seconds", "first_run_slower"
    figures = [[row["seconds"]["total"], *(row[name] for name in names)] for row in rows]
    assert figures == [[105, 131.25, 170, 196.25], [130, 162.5, 195, 227.5], [155, 193.75, 220, 258.75]]
    table = maker.TABLES["run"].make(rows)
    ends = "1.00 | 50 in 100 | 4.00 | 105 to 131 | 155 to 194 | 60.0 | 170 to 196 |"
    assert table[2:-2] == [f"| Wan 2.1 14B, 720p x 81 | v6e-8 | {ends}"]
    assert "scheduler" in table[-1]


def test_a_program_without_room_is_a_row_that_failed(monkeypatch, capsys):
    refused = answer(by_way={})
    refused["parts"][2]["refused"] = {"message": "Used 40G of 31G hbm", "asked": 40 << 30}
    monkeypatch.setattr(planner.Question, "answer", lambda *asked: refused)
    words = "bench step --topology v6e-8 --model wan2.1-t2v-14b --way bound --json"
    assert cli.main(words.split()) == 1
    (failed,) = {row["failed"] for row in json.loads(capsys.readouterr().out)}
    room = "a chip with room for transformer.forward of m on v6e-8, the compiler says: Used 40G of 31G hbm"
    assert failed == f"expected {room}"
    refused |= {"fits": False, "mfu": None}
    assert cli.main("bench models --topology v6e-1 --model wan2.1-t2v-14b --json".split()) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["fits"] is False and row["seconds_per_step"] is None
    assert maker.TABLES["models"].make([row])[2:] == ["| wan2.1-t2v-14b | no room |"]


# How records are made


@pytest.fixture
def bench(monkeypatch, tmp_path) -> SimpleNamespace:
    """A bench of three rows whose answers are remembered. `asked`: those that were asked; `failing`: rows to errors.

    A row's program is named by its number, `renamed` ones otherwise.
    """
    bench = SimpleNamespace(asked=[], failing={}, renamed={})

    def of_program(row):
        return {"programs": [bench.renamed.get(row, f"program {row}")], "reader": "this"}

    def answers(function, request, **others):
        if function == "bench.naming:names":
            return {"programs": [of_program(asked["row"]) for _, asked in request["questions"]]}
        bench.asked.append(request["row"])
        if request["row"] in bench.failing:
            raise bench.failing[request["row"]]
        versions = {"sources": planner.sources()}
        return {"answer": 10 * request["row"], **of_program(request["row"]), "versions": versions}

    def case(number: int) -> Case:
        return Case({"row": number}, planner.Question("a:question", {"row": number}), dict)

    monkeypatch.setenv("DIFFUSERS_TPU_CACHE", str(tmp_path / "cache"))
    for module in (planner, naming):
        monkeypatch.setattr(module, "run_in_child", answers)
    monkeypatch.setitem(benches.BENCHES, "check", lambda: [case(number) for number in (1, 2, 3)])
    return bench


def rows_of(record) -> list[tuple]:
    return [(row["row"], row["answer"]) for row in json.loads(record.read_text())]


def test_a_record_that_was_cut_off_goes_on_and_one_that_is_made_stays(bench, tmp_path):
    wanted, record = {"check": maker.of_bench("check")}, tmp_path / "check.json"
    record.write_text("[]")
    bench.failing[2] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        maker.make(wanted, tmp_path)
    assert record.read_text() == "[]" and bench.asked == [1, 2]
    bench.failing.clear()
    assert maker.make(wanted, tmp_path) == 0
    assert rows_of(record) == [(1, 10), (2, 20), (3, 30)] and bench.asked == [1, 2, 2, 3]
    made = record.stat()
    (tmp_path / "cache").rename(tmp_path / "no cache")
    assert maker.make(wanted, tmp_path) == 0
    assert len(bench.asked) == 4 and record.stat().st_ino == made.st_ino


@pytest.mark.parametrize(
    "change, made",
    [("nothing", []), ("another program", [2]), ("another reader", [2]), ("a row more", []), ("a row less", [3])],
)
def test_rows_of_other_programs_are_made_again_and_the_others_stay(bench, tmp_path, monkeypatch, change, made):
    wanted, record = {"check": maker.of_bench("check")}, tmp_path / "check.json"
    maker.make(wanted, tmp_path)
    monkeypatch.setattr(planner, "sources", lambda: "changed")
    if change == "another program":
        bench.renamed[2] = "program 4"
    rows = json.loads(record.read_text())
    if change == "another reader":
        rows[1]["reader"] = "that"
    record.write_text(json.dumps({"a row more": [*rows, rows[0]], "a row less": rows[:2]}.get(change, rows)))
    bench.asked.clear()
    maker.make(wanted, tmp_path)
    assert bench.asked == made and rows_of(record) == [(1, 10), (2, 20), (3, 30)]
    found = {row["row"]: row["versions"]["sources"] == "changed" for row in json.loads(record.read_text())}
    assert [row for row, anew in found.items() if anew] == made


def test_a_row_that_fails_leaves_the_old_record_and_the_others_are_made(bench, tmp_path, capsys):
    (tmp_path / "check.json").write_text("[]")
    bench.failing[2] = ValueError("expected a chip with room")
    other = maker.Record(("other.json",), lambda stand: [maker.as_json({"versions": {}})])
    assert maker.make({"check": maker.of_bench("check"), "other": other}, tmp_path) == 1
    assert (tmp_path / "check.json").read_text() == "[]" and (tmp_path / "other.json").exists()
    said = capsys.readouterr().out
    assert "2: failed: expected a chip with room" in said and "1 of 3 rows failed, the old record stays: 2" in said
    assert bench.asked == [1, 2, 3]
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["check.json", "other.json"]
