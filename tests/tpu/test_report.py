"""The planner's page. Oracle: a small plan (`plan.json`) whose figures and bars are computed by hand, and a browser's own layout.

The plan: 4 steps of 2 s, 3 GiB + 1 GiB of weights, 3.5 GiB of activations, 0.5 GiB of program, of 16 GiB.
"""

import copy
import re
from html.parser import HTMLParser

import pytest

from browser import browser
from conftest import table
from diffusers.tpu.planner import report


PLAN = table("plan")
SHOWN = PLAN.pop("shown")  # figures on its page


def small_plan(**changes) -> dict:
    return {**copy.deepcopy(PLAN), **changes}


def refused_plan() -> dict:
    """One whose denoiser the compiler found no room for: 20 GiB of 16, and no times."""
    plan = small_plan(fits=False, seconds_total=None, mfu=None, topology="v5e-8", advice=["use v6e-8"], ranking=[])
    plan |= {"seconds_per_step": dict.fromkeys(plan["seconds_per_step"]), "by_way": {}}
    plan["hbm_gib_per_chip"].update(activations=16.0, program=0.0, peak=20.0)
    refused = {"message": "Ran out of memory: 19 of 16", "asked": 19 * 2**30}
    hbm = {"weights": 3.0, "activations": 16.0, "program": 0.0, "peak": 19.0}
    nothing = {"seconds": None, "timing": None, "compile_seconds": None}
    plan["parts"][1].update(how="refused", refused=refused, hbm_gib=hbm, **nothing)
    return plan


PAGES = (
    [small_plan()],
    [refused_plan()],
    [refused_plan(), small_plan(), small_plan(topology="v6e-16", chip={"devices": 16})],
)


class Read(HTMLParser):
    """What a page holds: its tags, its words, and the bars as lists of (colour, start, length) in percent."""

    def __init__(self, *plans: dict):
        super().__init__()
        self.tags, self.pieces, self.bars, self.open_bar = set(), [], [], False
        self.feed(report.page([*plans]))
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


def test_all_text_is_escaped_and_a_page_needs_nothing_else():
    for page in map(report.page, PAGES):
        assert not re.findall(r"https?:|\bsrc=|<link|<script|url\(|@import", page)
        assert set(re.findall(r'href="([^"]*)"', page)) <= {"#plan-1", "#plan-2", "#plan-3"}
    evil = '<evil a="1">&amp;'

    def spoiled(value, key=""):
        if isinstance(value, dict):
            by_name = key in ("by_module", "by_operation", "versions")
            return {(k + evil if by_name else k): spoiled(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [spoiled(v, key) for v in value]
        return value + evil if isinstance(value, str) and key not in ("kind", "stage", "how", "entry") else value

    found = Read(spoiled(small_plan()), spoiled(refused_plan()))
    assert "evil" not in found.tags
    strings = "a-model v6e-8 bfloat16 WanPipeline transformer splash.2 blocks.*.ffn dot_general links libtpu 0.10.2"
    strings = [*strings.split(), "Ran out of memory: 19 of 16", "use v6e-8", "vae.decode is modelled"]
    assert [s for s in strings if s + evil not in found.words] == []


def test_every_figure_appears():
    found = Read(small_plan())
    assert [figure for figure in SHOWN if figure not in found.words] == []
    memory, step, *_ = found.bars
    assert memory == [
        ("room", 0, 100), ("weights-0", 0, 18.75), ("weights-1", 18.75, 6.25),
        ("activations", 25, 21.875), ("program", 46.875, 3.125),
    ]  # fmt: skip
    assert step == [("attention", 0, 50), ("matmul", 50, 25), ("other", 75, 15), ("collectives", 90, 10)]


def test_a_plan_that_does_not_fit():
    found = Read(refused_plan())
    assert ("over", 80, 20) in found.bars[0] and ("room", 0, 80) in found.bars[0]
    for words in ("does not fit by 4.00 GiB", "over the limit 4.00 GiB", "Ran out of memory: 19 of 16", "use v6e-8"):
        assert words in found.words
    assert not re.search(r"None|nan", found.words)
    too_large = small_plan(fits=False)  # in sum alone: it keeps its times
    too_large["hbm_gib_per_chip"]["limit"] = 6.0
    found = Read(too_large)
    assert "does not fit by 2.00 GiB per chip 2.000 s per step" in found.words and ("over", 75, 25) in found.bars[0]


def test_two_denoisers_are_summed_as_often_as_they_run():
    plan = small_plan()
    second = copy.deepcopy(plan["parts"][1])
    second.update(component="transformer_2", runs=1)
    second["timing"]["by_module"] = {"blocks.*.attn1": 4.8}
    plan["parts"][1]["runs"] = 3
    found = Read({**plan, "parts": [*plan["parts"], second]})
    assert "blocks.*.attn1 2,100.000 ms" in found.words  # 3/4 * 1.2 + 1/4 * 4.8
    assert "splash.2 transformer_2.forward blocks.*.attn1 40 54,760 × 3,152 172.60 25.000 0.250" in found.words


def test_a_sweep_compares_on_one_scale():
    fast = small_plan(topology="v6e-16", chip={"devices": 16}, seconds_total=5.0)
    fast["seconds_per_step"] = {kind: seconds * 0.75 for kind, seconds in fast["seconds_per_step"].items()}
    fast["hbm_gib_per_chip"]["limit"] = 32.0
    found = Read(refused_plan(), small_plan(), fast)
    refused, times, slow_memory, step, fast_memory = found.bars[:5]
    assert refused[-1] == ("over", 50, 12.5)
    assert times[0] == ("attention", 0, 50) and slow_memory[0] == ("room", 0, 50)
    assert step[0] == ("attention", 0, 37.5) and fast_memory[0] == ("room", 0, 100)
    assert "2.000 16.000 9.250 30.7%" in found.words and "1.500 24.000 5.000 30.7%" in found.words  # chip-seconds
    page = report.page([refused_plan(), small_plan(), fast])
    assert "<b>16.000</b>" in page and "<b>1.500</b>" in page and "<b>24.000</b>" not in page


LOOK = """(() => {
  const all = selector => [...document.querySelectorAll(selector)], length = e => e.getBoundingClientRect().width;
  return {
    beyond: document.documentElement.scrollWidth - innerWidth,
    cut: all(".scroll").filter(e => e.scrollWidth > e.clientWidth).length,
    black: all("rect").filter(e => getComputedStyle(e).fill === "rgb(0, 0, 0)").length,
    drawn: all("section > .bar .attention").map(e => length(e) / length(e.ownerSVGElement)),
  };
})()"""


def test_a_browser_shows_it_whole(tmp_path):
    """No wider than its window, every colour of the style, no table cut off in a window of usual width."""
    with browser() as window:
        for plans, bars in zip(PAGES, (1, 0, 2)):
            (tmp_path / "look.html").write_text(report.page(plans), encoding="utf-8")
            window.goto((tmp_path / "look.html").as_uri())
            for width in (380, 800, 1200):
                window.set_viewport_size({"width": width, "height": 600})
                seen = window.evaluate(LOOK)
                assert seen["beyond"] <= 0 and seen["black"] == 0 and (width < 1200 or seen["cut"] == 0), (width, seen)
                assert seen["drawn"] == [pytest.approx(0.5, abs=0.01)] * bars
