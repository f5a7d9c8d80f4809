"""Renders pages: templates, formats of figures, and bars.

A page is self-contained: no script, no other file, no network. Bars are SVG whose lengths are percentages, so that they follow
the window's width. A colour means one kind of work or of memory on the whole page.
"""

from pathlib import Path

import jinja2
from markupsafe import Markup


TEMPLATES = Path(__file__).with_name("templates")
NONE = "–"


def render(template: str, folder: Path = TEMPLATES, **values) -> str:
    """The text of a page. `folder`: its template's, if not `TEMPLATES`; text in `values` is escaped."""
    loader = jinja2.FileSystemLoader([folder, TEMPLATES], encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, loader=loader, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "seconds": seconds,
        "unit": lambda value: NONE if value is None else f"{seconds(value)} s",
        "gib": "{:.2f} GiB".format,
        "share": lambda value: NONE if value is None else f"{value:.1%}",
        "percent": percent,
        "mesh": lambda mesh: ", ".join(f"{axis} {degree}" for axis, degree in mesh.items()),
        "dotted": lambda name: Markup(".<wbr>").join(name.split(".")),  # lines may break after a dot
        "called": lambda part: f"{part['component']}.{part['entry']}",
    }
    environment.globals |= {"rects": rects}
    return environment.get_template(template).render(**values) + "\n"


def seconds(value: float | None) -> str:
    if value is None:
        return NONE
    return "<0.001" if 0 < value < 0.0005 else f"{value:,.1f}" if value >= 100 else f"{value:.3f}"


def percent(amount: float, whole: float) -> str:
    """`amount` as a percentage of `whole`, in SVG's notation."""
    return f"{100 * amount / whole if whole else 0:.3f}%"


def rects(
    segments: list[tuple[str, float, str]], whole: float, limit: float | None
) -> list[tuple[str, str, str, str]]:
    """Rectangles (colour, x, width, tooltip) of a stacked bar of (colour, amount, tooltip); `whole` is the full width.

    With a `limit`, a rectangle up to it is drawn behind the bar, and the bar beyond it has the colour of warnings.
    """
    drawn, end = [], 0.0
    if limit is not None:
        drawn.append(("room", 0.0, limit, f"limit {limit:.2f} GiB"))
    for colour, amount, tooltip in segments:
        drawn.append((colour, end, amount, tooltip))
        end += amount
    if limit is not None and end > limit:
        drawn.append(("over", limit, end - limit, f"{end - limit:.2f} GiB over the limit"))
    return [(colour, percent(start, whole), percent(amount, whole), words) for colour, start, amount, words in drawn]
