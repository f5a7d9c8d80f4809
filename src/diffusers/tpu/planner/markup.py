"""What the page is built of: elements, tables, bars and their style. Text that is not `Html` is escaped where it is put in."""

import html


class Html(str):
    """Text that is markup already."""


def joined(*inner) -> Html:
    """One after the other; what is not `Html` is escaped."""
    return Html("".join(x if isinstance(x, Html) else html.escape(str(x)) for x in inner))


def tag(name: str, *inner, **attributes) -> Html:
    """An element. `class_` is its class; an attribute that is None is left out."""
    words = [
        f' {k.rstrip("_").replace("_", "-")}="{html.escape(str(v))}"' for k, v in attributes.items() if v is not None
    ]
    return Html(f"<{name}{''.join(words)}>{joined(*inner)}</{name}>")


def table(columns: list[tuple[str, str]], rows: list[list], class_: str | None = None) -> Html:
    """`columns`: (heading, class of its cells). A row is a list of cells, or the markup of the row."""
    head = tag("tr", *(tag("th", name, class_=kind or None, scope="col") for name, kind in columns))
    body = []
    for row in rows:
        cells = [tag("td", cell, class_=kind or None) for cell, (_, kind) in zip(row, columns)]
        body.append(row if isinstance(row, Html) else tag("tr", *cells))
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body), class_=class_), class_="scroll")


def bar(segments: list[tuple[str, float, str]], whole: float, limit: float | None = None) -> Html:
    """A stacked bar: (colour, amount, tooltip) one after the other, where `whole` would fill the width.

    With a `limit` the room up to it is drawn behind, a line at it, and what lies beyond it in the colour of warnings.
    """

    def rect(colour: str, start: float, amount: float, tooltip: str) -> Html:
        place = {"x": percent(start, whole), "width": percent(amount, whole)}
        return tag("rect", tag("title", tooltip), height="100%", **place, class_=colour)

    drawn, end = [], 0.0
    if limit is not None:
        drawn.append(rect("room", 0, limit, f"limit {limit:.2f} GiB"))
    for colour, amount, tooltip in segments:
        drawn.append(rect(colour, end, amount, tooltip))
        end += amount
    if limit is not None:
        if end > limit:
            drawn.append(rect("over", limit, end - limit, f"{end - limit:.2f} GiB over the limit"))
        at = percent(limit, whole)
        drawn.append(tag("line", x1=at, x2=at, y1=0, y2="100%", class_="limit"))
    return tag("svg", *drawn, class_="bar", role="img", aria_label="; ".join(words for _, _, words in segments))


def legend(items: list[tuple[str, str, str]]) -> Html:
    """(colour, name, figure) of every segment."""
    entries = []
    for colour, name, figure in items:
        swatch = tag(
            "svg", tag("rect", width="100%", height="100%", class_=colour), class_="swatch", aria_hidden="true"
        )
        entries.append(tag("li", swatch, name, " ", tag("b", figure) if figure else ""))
    return tag("ul", *entries, class_="legend")


def percent(amount: float, whole: float) -> str:
    """A share of `whole` as SVG and CSS write it."""
    return f"{100 * amount / whole if whole else 0:.3f}%"


STYLE = """
:root { color-scheme: light dark; --paper: #fcfcfb; --ink: #1f2429; --soft: #626c76; --line: #e2e5e8; --room: #eceef1;
  --good: #2b7a4b; --bad: #c0342b; --attention: #3f6cb0; --matmul: #4aa08c; --other: #aab2bb; --collectives: #dc9c3f;
  --w0: #5d4b8a; --w1: #7c6aab; --w2: #9c8dc6; --w3: #bcb1de; --activations: #cb8fb3; --program: #878d96;
  --plain: #7d8a99; --faint: #c6ccd3; }
@media screen and (prefers-color-scheme: dark) { :root { --paper: #16191d; --ink: #e2e5e8; --soft: #98a2ac;
  --line: #2c3238; --room: #252a30; --good: #6cc48f; --bad: #f2786d; --attention: #6d98dc; --matmul: #5bb5a0;
  --other: #69737e; --collectives: #dca552; --w0: #7d69b4; --w1: #9684c8; --w2: #afa0da; --w3: #c8bceb;
  --activations: #c787ac; --program: #7d858f; --plain: #8494a5; --faint: #454e58; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 14px/1.45 system-ui, sans-serif;
  font-variant-numeric: tabular-nums; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 24px 40px; }
h1, h2, h3, h4 { margin: 30px 0 8px; font-weight: 600; line-height: 1.25; overflow-wrap: anywhere; break-after: avoid; }
h1 { margin-top: 0; font-size: 26px; } h2 { font-size: 18px; } h3 { font-size: 15px; } h4 { font-size: 14px; }
h1 .soft, h2 .soft, h3 .soft { font-weight: 400; }
p, ul { margin: 6px 0; } ul { padding-left: 20px; } li, .asked, .said { overflow-wrap: anywhere; }
small { color: var(--soft); font-size: 0.86em; } .soft { color: var(--soft); } p.soft { font-size: 0.93em; }
.good { color: var(--good); } .bad { color: var(--bad); } .asked { margin: 0 0 16px; }
.said { color: var(--soft); font: 12px/1.4 ui-monospace, monospace; }
.figures { display: flex; flex-wrap: wrap; gap: 14px 36px; margin: 0 0 12px; padding: 14px 0; break-inside: avoid;
  border: solid var(--line); border-width: 1px 0; }
.figures b { display: block; font-size: 22px; font-weight: 600; line-height: 1.2; }
.figures span { color: var(--soft); font-size: 0.93em; }
.bar { display: block; width: 100%; height: 24px; overflow: visible; } .bar rect { stroke: var(--paper); stroke-width: 1px; }
td .bar { height: 14px; min-width: 60px; } .bars .bar rect { stroke: none; } .faded { opacity: 0.45; }
.axis { display: block; width: 100%; height: 18px; font-size: 12px; } .axis text { fill: var(--soft); }
.bar .limit { stroke: var(--ink); stroke-width: 2px; } .bar .room { fill: var(--room); stroke: none; }
.attention { fill: var(--attention); color: var(--attention); } .matmul { fill: var(--matmul); color: var(--matmul); }
.other { fill: var(--other); color: var(--other); } .collectives { fill: var(--collectives); color: var(--collectives); }
.weights-0 { fill: var(--w0); } .weights-1 { fill: var(--w1); } .weights-2 { fill: var(--w2); } .weights-3 { fill: var(--w3); }
.activations { fill: var(--activations); } .program { fill: var(--program); } .over { fill: var(--bad); }
.plain { fill: var(--plain); } .faint { fill: var(--faint); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 22px; margin: 8px 0; padding: 0; list-style: none; font-size: 0.93em; }
.legend b { font-weight: 600; } .swatch { width: 10px; height: 10px; margin-right: 6px; }
.dot { display: inline-block; width: 8px; height: 8px; margin-right: 6px; background: currentColor; }
.columns { display: grid; gap: 0 40px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); }
.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; } tr { break-inside: avoid; }
th { color: var(--soft); font-size: 0.86em; font-weight: 400; text-align: left; vertical-align: bottom; }
th, td { padding: 3px 14px 3px 0; border-bottom: 1px solid var(--line); } th:last-child, td:last-child { padding-right: 0; }
td.n, th.n { text-align: right; white-space: nowrap; } td.name { overflow-wrap: break-word; } td.wide { width: 26%; }
.bars td { border: 0; padding-top: 2px; padding-bottom: 2px; line-height: 1.3; } .bars td.wide { width: 30%; }
.sweep td, .sweep th { white-space: nowrap; } .sweep td.name small { display: block; }
section.plan + section.plan, .sweep + section.plan { break-before: page; }
h1 ~ section.plan { margin-top: 44px; padding-top: 4px; border-top: 3px solid var(--line); }
a { color: inherit; text-decoration-color: var(--soft); text-underline-offset: 2px; }
footer { margin-top: 36px; padding-top: 12px; border-top: 1px solid var(--line); color: var(--soft); font-size: 0.93em; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 18px; margin: 0; } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 900px) { .sweep :is(th, td):nth-child(6), .sweep :is(th, td):nth-child(7) { display: none; } }
@media screen and (max-width: 640px) { main { padding: 18px 14px 30px; } .figures { gap: 12px 26px; }
  th, td { padding-right: 10px; } }
@media print { body { font-size: 11px; background: none; } main { max-width: none; padding: 0; } .scroll { overflow: visible; } }
"""
