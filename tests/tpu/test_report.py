"""The planner's page. Oracle: a small plan whose figures and bars are computed by hand, and a browser's own layout."""

import copy
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from diffusers.tpu.planner import report


def operation(
    name: str, kind: str, module: str, seconds: float, limit: str = "schedule", steps: int = 0, body: int = 0
):
    what = {"attention": "pallas_call", "matmul": "dot_general", "collectives": "all_to_all"}.get(kind, "copy")
    return {
        "name": name, "kind": kind, "module": module, "what": what, "runs": 40, "seconds": seconds, "limit": limit,
        "bytes": 7, "hidden": 0.0, "steps": steps, "body": body,
    }  # fmt: skip


def part(
    component: str, entry: str, stage: str, runs: int, seconds: float, weights: float, activations: float, **more
):
    hbm = {"weights": weights, "activations": activations, "program": 0.5, "peak": weights + activations + 0.5}
    return {
        "component": component, "entry": entry, "stage": stage, "how": "modelled", "branches": 1, "runs": runs,
        "shapes": [[1, 16, 3, 8, 8]], "seconds": seconds, "flops": 1e12, "flops_by_module": {}, "hbm_gib": hbm,
        "memory_analysis": None, "compile_seconds": None, "timing": None, "refused": None, **more,
    }  # fmt: skip


def small_plan(**changes) -> dict:
    """A run of 4 steps of 2 s, 3 GiB + 1 GiB of weights, 3.5 GiB of activations, 0.5 GiB of program, of 16 GiB."""
    operations = [
        operation("splash.2", "attention", "blocks.*.attn1", 1.0, steps=54760, body=3152),
        operation("fusion.239", "matmul", "blocks.*.ffn", 0.5, "memory"),
        operation("fusion.7", "other", "", 0.3, "estimate"),
        operation("all_to_all.70", "collectives", "blocks.*.attn1", 0.2, "links"),
    ]
    timing = {
        "seconds": {"attention": 1.0, "matmul": 0.5, "other": 0.3, "collectives": 0.2, "total": 2.0},
        "hidden_collectives": 0.125,
        "by_module": {"blocks.*.attn1": 1.2, "blocks.*.ffn": 0.5, "(between modules)": 0.3},
        "by_operation": {f"{o['kind']}: {o['what']}": o["seconds"] for o in operations},
        "kernels": operations[:1],
        "largest": operations,
    }
    denoiser = {"how": "compiled", "branches": 2, "timing": timing, "compile_seconds": 73.9}
    plan = {
        "model": "a-model",
        "topology": "v6e-8",
        "mesh": {"dp": 2, "sp": 4, "tp": 1},
        "fits": True,
        "hbm_gib_per_chip": {"weights": 4.0, "activations": 3.5, "program": 0.5, "peak": 8.0, "limit": 16.0},
        "fullest": "vae.decode",
        "waiting": [],
        "seconds_per_step": {**timing["seconds"]},
        "way": "bound",
        "by_way": {
            way: {"seconds": {**timing["seconds"], "total": total}, "slower": 1.125 * total}
            for way, total in (("bound", 2.0), ("centred", 2.25), ("online", 2.5))
        },
        "seconds_total": 9.25,
        "flops_per_step": 1e15,
        "mfu": 0.30712,
        "compile_seconds": 73.9,
        "versions": {"jax": "0.10.2", "libtpu": "0.0.42.1"},
        "pipeline": "WanPipeline",
        "dtype": "bfloat16",
        "steps": 4,
        "call": {"height": 720, "width": 1280, "num_frames": 9, "num_inference_steps": 4},
        "chip": {"devices": 8, "flops": 9e14, "hbm": 16 * 2**30},
        "parts": [
            part("vae", "decode", "decode", 1, 1.25, 1.0, 3.5),
            part("transformer", "forward", "denoise", 4, 2.0, 3.0, 2.5, **denoiser),
        ],
        "ranking": [
            {"mesh": mesh, "guessed_seconds_per_step": guessed, "seconds_per_step": exact, "fits": fits}
            for mesh, guessed, exact, fits in (
                ({"dp": 2, "sp": 4, "tp": 1}, 1.875, 2.0, True),
                ({"dp": 1, "sp": 8, "tp": 1}, 4.0, None, None),
            )
        ],
        "notes": ["vae.decode is modelled"],
        "advice": [],
    }
    return {**plan, **changes}


def refused_plan() -> dict:
    """One whose denoiser the compiler found no room for: 20 GiB of 16, and no times."""
    plan = small_plan(fits=False, seconds_total=None, mfu=None, topology="v5e-8", advice=["use v6e-8"], ranking=[])
    plan["seconds_per_step"] = dict.fromkeys(plan["seconds_per_step"])
    plan["by_way"] = {}
    plan["hbm_gib_per_chip"].update(activations=16.0, program=0.0, peak=20.0)
    refused = {"message": "Ran out of memory: 19 of 16", "asked": 19 * 2**30}
    hbm = {"weights": 3.0, "activations": 16.0, "program": 0.0, "peak": 19.0}
    nothing = {"seconds": None, "timing": None, "compile_seconds": None}
    plan["parts"][1].update(how="refused", refused=refused, hbm_gib=hbm, **nothing)
    return plan


PAGES = {
    "one": lambda: [small_plan()],
    "refused": lambda: [refused_plan()],
    "sweep": lambda: [refused_plan(), small_plan(), small_plan(topology="v6e-16", chip={"devices": 16})],
}


class Read(HTMLParser):
    """What a page holds: its tags, its words, and the bars as lists of (colour, start, length) in percent."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.pieces, self.bars, self.open_bar = set(), [], [], False
        self.feed(text)
        self.words = " ".join("".join(self.pieces).split())

    def handle_starttag(self, name, attributes):
        found = dict(attributes)
        self.tags.add(name)
        self.pieces += [""] if name in ("wbr", "b", "i") else [" "]
        if name == "svg":
            self.open_bar = found["class"] == "bar"
            self.bars += [[]] if self.open_bar else []
        if name == "rect" and self.open_bar:
            x, width = (float(found[key].removesuffix("%")) for key in ("x", "width"))
            self.bars[-1].append((found["class"], x, width))

    def handle_data(self, data):
        if self.lasttag != "style":
            self.pieces.append(data)


def read(plans: list[dict]) -> Read:
    return Read(report.page(plans))


def test_all_text_is_escaped():
    evil = '<evil a="1">&amp;'
    kept = {"kind", "stage", "how", "entry"}

    def spoiled(value, key=""):
        if isinstance(value, dict):
            by_name = key in ("by_module", "by_operation", "versions")
            return {(k + evil if by_name else k): spoiled(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [spoiled(v, key) for v in value]
        return value + evil if isinstance(value, str) and key not in kept else value

    found = read([spoiled(small_plan()), spoiled(refused_plan())])
    assert "evil" not in found.tags
    strings = "a-model v6e-8 bfloat16 WanPipeline transformer splash.2 blocks.*.ffn dot_general links libtpu 0.10.2"
    strings = [*strings.split(), "Ran out of memory: 19 of 16", "use v6e-8", "vae.decode is modelled"]
    assert [s for s in strings if s + evil not in found.words] == []


@pytest.mark.parametrize(
    "figure",
    [
        "a-model on v6e-8", "fits 8.00 GiB per chip are free", "2.000 s per step, 4 steps",
        "2.000 to 2.250 s with scores of all heads bounded; 2.250 to 2.531 s with bounded around the mean", "9.250 s whole video",
        "30.7% MFU", "8.00 GiB HBM peak, of 16.00 GiB per chip", "limit 16.00 GiB", "Compiled for v6e-8; nothing was measured.",
        "transformer weights 3.00 GiB", "vae weights 1.00 GiB", "activations of vae.decode 3.50 GiB", "program 0.50 GiB",
        "attention kernels 1.000 s, 50%", "matrix products 0.500 s, 25%", "collectives not hidden 0.200 s, 10%",
        "Further 0.125 s of transfers", "pallas_call attention 1,000.000 ms 1,000.00 50.0%",
        "(between modules) 300.000 ms 300.00 15.0%",
        "splash.2 blocks.*.attn1 40 54,760 × 3,152 172.60 25.000 1.000",
        "fusion.239 blocks.*.ffn dot_general 40 12.500 0.500 memory", "fusion.7 – copy 40 7.500 0.300 estimate",
        "transformer.forward 2 branches at once denoise compiled 4 2.000 8.000", "3.00 2.50 6.00 73.9 s",
        "vae.decode decode modelled 1 1.250 1.250", "dp 2, sp 4, tp 1 chosen compiled: 2.000 s 1.875 2.000 fits",
        "dp 1, sp 8, tp 1 guessed: 4.000 s 4.000 – –", "num_frames 9", "libtpu 0.0.42.1", "dtype bfloat16",
    ],
)  # fmt: skip
def test_every_figure_appears(figure):
    assert figure in read([small_plan()]).words


def test_bars_are_proportional():
    memory, step, *_ = read([small_plan()]).bars
    assert memory == [
        ("room", 0, 100), ("weights-0", 0, 18.75), ("weights-1", 18.75, 6.25),
        ("activations", 25, 21.875), ("program", 46.875, 3.125),
    ]  # fmt: skip
    assert step == [("attention", 0, 50), ("matmul", 50, 25), ("other", 75, 15), ("collectives", 90, 10)]


def test_a_plan_that_does_not_fit():
    found = read([refused_plan()])
    assert ("over", 80, 20) in found.bars[0] and ("room", 0, 80) in found.bars[0]
    for words in ("does not fit by 4.00 GiB", "over the limit 4.00 GiB", "Ran out of memory: 19 of 16", "use v6e-8"):
        assert words in found.words
    assert not re.search(r"None|nan", found.words)


def test_a_plan_that_is_too_large_only_in_sum_keeps_its_times():
    plan = small_plan(fits=False)
    plan["hbm_gib_per_chip"]["limit"] = 6.0
    found = read([plan])
    assert "does not fit by 2.00 GiB per chip 2.000 s per step" in found.words and ("over", 75, 25) in found.bars[0]


def test_two_denoisers_are_summed_as_often_as_they_run():
    plan = small_plan()
    second = copy.deepcopy(plan["parts"][1])
    second.update(component="transformer_2", runs=1)
    second["timing"]["by_module"] = {"blocks.*.attn1": 4.8}
    plan["parts"][1]["runs"] = 3
    found = read([{**plan, "parts": [*plan["parts"], second]}])
    assert "blocks.*.attn1 2,100.000 ms" in found.words  # 3/4 * 1.2 + 1/4 * 4.8
    assert "splash.2 transformer_2.forward blocks.*.attn1 40 54,760 × 3,152 172.60 25.000 0.250" in found.words


def test_a_sweep_compares_on_one_scale():
    fast = small_plan(topology="v6e-16", chip={"devices": 16}, seconds_total=5.0)
    fast["seconds_per_step"] = {kind: seconds * 0.75 for kind, seconds in fast["seconds_per_step"].items()}
    fast["hbm_gib_per_chip"] = {**fast["hbm_gib_per_chip"], "limit": 32.0}
    found = read([refused_plan(), small_plan(), fast])
    refused, _, slow_memory, step, fast_memory = found.bars[0], *found.bars[1:5]
    assert refused[-1] == ("over", 50, 12.5)
    assert found.bars[1][0] == ("attention", 0, 50) and slow_memory[0] == ("room", 0, 50)
    assert step[0] == ("attention", 0, 37.5) and fast_memory[0] == ("room", 0, 100)
    assert "2.000 16.000 9.250 30.7%" in found.words and "1.500 24.000 5.000 30.7%" in found.words  # chip-seconds
    page = report.page([refused_plan(), small_plan(), fast])
    assert "<b>16.000</b>" in page and "<b>1.500</b>" in page and "<b>24.000</b>" not in page


@pytest.mark.parametrize("plans", PAGES.values(), ids=PAGES)
def test_it_needs_nothing_else(plans):
    page = report.page(plans())
    assert not re.findall(r"https?:|\bsrc=|<link|<script|url\(|@import", page)
    assert set(re.findall(r'href="([^"]*)"', page)) <= {"#plan-1", "#plan-2", "#plan-3"}


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "plan.html"
    report.write([small_plan()], path)
    before = path.read_bytes()
    assert before.startswith(b"<!doctype html>") and before.endswith(b"</html>\n")

    def fail(*paths):
        raise OSError("no space")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="no space"):
        report.write([refused_plan()], path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


LOOK = """<script>addEventListener("load", () => {
  const seen = [...document.querySelectorAll("iframe")].map(frame => {
    const inner = frame.contentDocument, all = selector => [...inner.querySelectorAll(selector)];
    const length = e => e.getBoundingClientRect().width;
    return {
      window: frame.clientWidth, page: inner.documentElement.scrollWidth,
      cut: all(".scroll").filter(e => e.scrollWidth > e.clientWidth).length,
      black: all("rect").filter(e => inner.defaultView.getComputedStyle(e).fill === "rgb(0, 0, 0)").length,
      drawn: all("section > .bar .attention").map(e => length(e) / length(e.ownerSVGElement)),
    };
  });
  document.body.replaceChildren(JSON.stringify(seen));
})</script>"""
WIDTHS = (380, 800, 1200)


def test_a_browser_shows_it_whole(tmp_path):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium or Chrome on PATH to open the page in")
    pages = [report.page(plans()) for plans in PAGES.values()]
    frames = [
        f'<iframe width="{w}" height="600" srcdoc="{html.escape(page)}"></iframe>' for page in pages for w in WIDTHS
    ]
    path = tmp_path / "look.html"
    path.write_text(f'<!doctype html><meta charset="utf-8"><body>{"".join(frames)}{LOOK}', encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    options += ["--enable-logging=stderr", "--v=0", "--dump-dom", path.as_uri()]
    ended = subprocess.run([browser, *options], capture_output=True, text=True, timeout=60, check=True)
    assert "CONSOLE" not in ended.stderr
    seen = json.loads(html.unescape(re.search(r"<body>(.*?)</body>", ended.stdout, re.S)[1]))
    assert len(seen) == len(frames)
    for frame in seen:
        assert frame["page"] <= frame["window"], "the page is wider than its window"
        assert frame["black"] == 0, "a colour is not in the style"
        assert frame["window"] < 1200 or frame["cut"] == 0, "a table is cut off in a window of usual width"
    drawn = [frame["drawn"] for frame in seen]
    assert drawn == [pytest.approx([0.5] * n, abs=0.01) for n in (1, 1, 1, 0, 0, 0, 2, 2, 2)]
