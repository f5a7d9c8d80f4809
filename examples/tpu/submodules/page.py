"""The report: each submodule's error, in the order in which upstream computes them."""

import math
from pathlib import Path

from diffusers.tpu.planner.pages import percent, render

from .modules import LADDER, Comparison


LOWEST, HIGHEST = 1e-9, 1e1


def page(model: str, comparisons: list[Comparison]) -> str:
    """Returns the HTML document, from `templates/comparison.html`."""
    limits = [limit for limit, _ in LADDER]
    return render(
        "comparison.html",
        Path(__file__).with_name("templates"),
        title=f"{model}: {', '.join(dict.fromkeys(c.component for c in comparisons))}",
        comparisons=comparisons,
        ladder=[(below, limit, word) for below, (limit, word) in zip([LOWEST, *limits], LADDER)],
        height=_height,
    )


def _height(error: float) -> str:
    """Returns the distance of an error from the top of the plot; NaN counts as the largest."""
    error = HIGHEST if math.isnan(error) else min(max(error, LOWEST), HIGHEST)
    return percent(math.log10(HIGHEST / error), math.log10(HIGHEST / LOWEST))
