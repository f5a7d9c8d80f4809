"""The page: comparisons of one component, every submodule's error over the order in which upstream computes them.

It needs nothing but itself: no script, no file beside it, no network.
"""

import math

from ..planner.markup import STYLE, Html, joined, legend, percent, table, tag
from .modules import LADDER, Comparison, ModuleRow


LOWEST, HIGHEST = 1e-9, 1e1
PLOT = """
.plot { display: block; width: 100%; height: 300px; margin: 8px 0; border: solid var(--line); border-width: 0 0 1px 1px; }
.plot line { stroke: var(--line); } .plot text { fill: var(--soft); font-size: 11px; } .plot .limit { stroke: var(--plain); }
.plot .first { stroke: var(--bad); stroke-dasharray: 3 3; } .parts { fill: var(--bad); color: var(--bad); }
"""


def page(model: str, comparisons: list[Comparison]) -> str:
    """The whole document."""
    title = f"{model}: {', '.join(dict.fromkeys(c.component for c in comparisons))}"
    head = joined(
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        tag("title", title),
        tag("style", Html(STYLE + PLOT)),
    )
    body = tag("body", tag("main", tag("h1", title), *(_comparison(c) for c in comparisons)))
    return Html("<!doctype html>\n") + tag("html", tag("head", head), body, lang="en") + "\n"


def _comparison(comparison: Comparison) -> Html:
    first = comparison.first
    verdict = "no submodule parts by itself" if first is None else f"parts first: {first or comparison.component}"
    words = [tag("p", verdict, class_="good" if comparison.ok else "bad")]
    if comparison.not_finite is not None:
        words.append(tag("p", f"first NaN or infinity: {comparison.not_finite or comparison.component}", class_="bad"))
    left_out = [tag("li", f"{name}: {reason}") for name, reason in comparison.left_out.items()]
    return tag(
        "section",
        tag("h2", f"{comparison.component}.{comparison.entry} "),
        tag("p", f"{comparison.form} against {comparison.against}, {len(comparison.rows)} submodules", class_="soft"),
        *words,
        _plot(comparison),
        legend(
            [("matmul", "mean |x - o| / mean |o|", ""), ("parts", "above its limit", ""), ("plain", "its limit", "")]
        ),
        _rows(comparison.rows),
        *([tag("h3", "Not compared"), tag("ul", *left_out)] if left_out else []),
    )


def _plot(comparison: Comparison) -> Html:
    """One dot a submodule in upstream's order, its limit as a dash, the ladder as lines; errors on a logarithmic scale."""
    drawn, rows = [], comparison.rows
    for limit, _ in LADDER[:-1]:
        y = _height(limit)
        drawn.append(tag("line", x1=0, x2="100%", y1=y, y2=y))
    for (limit, word), (below, _) in zip(LADDER, ((LOWEST, ""), *LADDER)):
        drawn.append(tag("text", word, x="100%", y=_height(min(limit, HIGHEST)), dy="1.1em", text_anchor="end"))
        drawn.append(tag("text", f"{below:.0e}", x=2, y=_height(below), dy="-0.3em"))
    for place, row in enumerate(rows):
        x = percent(place + 0.5, len(rows))
        words = f"{row.name or comparison.component} ({row.kind}): {row.error.relative:.1e}, limit {row.limit:.1e}, {row.grade}"
        if row.name == comparison.first:
            drawn.append(tag("line", x1=x, x2=x, y1=0, y2="100%", class_="first"))
        dash = percent(place + 0.1, len(rows)), percent(place + 0.9, len(rows))
        drawn.append(tag("line", x1=dash[0], x2=dash[1], y1=_height(row.limit), y2=_height(row.limit), class_="limit"))
        kind = "matmul" if row.ok else "parts"
        drawn.append(tag("circle", tag("title", words), cx=x, cy=_height(row.error.relative), r=3.5, class_=kind))
    return tag("svg", *drawn, class_="plot", role="img", aria_label="error of every submodule")


def _height(error: float) -> str:
    """Where an error stands, from the top; NaN is the largest."""
    error = HIGHEST if math.isnan(error) else min(max(error, LOWEST), HIGHEST)
    return percent(math.log10(HIGHEST / error), math.log10(HIGHEST / LOWEST))


def _rows(rows: list[ModuleRow]) -> Html:
    numbers = ("calls", "mean", "max", "relative", "Euclidean", "cosine", "growth", "upstream's own", "limit")
    columns = [("submodule", "name"), ("class", "name"), *((name, "n") for name in numbers), ("verdict", "")]
    columns += [("shape", "n"), ("spec", "n"), ("chips", "n")]
    lines = []
    for row in rows:
        e = row.error
        verdict = tag("span", row.grade, class_=None if row.ok else "bad")
        growth = "" if row.growth is None else f"x{row.growth:.1f}"
        own = "" if row.own is None else f"{row.own:.1e}"
        lines.append(
            [row.name or "(all)", row.kind, row.calls]
            + [f"{x:.1e}" for x in (e.mean, e.maximum, e.relative, e.euclidean)]
            + [f"{e.cosine:.6f}", growth, own, f"{row.limit:.1e}", verdict]
            + [" x ".join(map(str, row.shape)), row.spec or "host", row.chips]
        )
    return table(columns, lines)
