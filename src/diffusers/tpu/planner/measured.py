"""Rates that `diffusers-tpu check` measured on a TPU, for a plan: kernels, links between chips, and what a launch costs.

A kernel's seconds are the plan's times its `kernels` factor; links have the measured share of the published bandwidth; every program of
a step costs one `dispatch`. What the report does not have stays as published.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from ..chips.figures import CHIPS


KERNELS_STAGE, EXCHANGES_STAGE = 4, 5
DISPATCH = "an empty dispatch"
ROWS = "published"  # sizes of kernels that count; the ragged ones are small
# How the compiler's names of kernels begin, the longest first -> the names of rows.
PREFIXES = {
    "linear_kernel_of_windows": "convolution",
    "attention_kernel": "attention",
    "key_norms_kernel": "key_norms",
    "linear_kernel": "linear",
    "rotary_kernel": "rotary",
}


@dataclass(frozen=True)
class Rates:
    """What was measured, over what is planned. `kernels`: seconds by kernel, attention also by mode ("attention bound"); `links`: of the
    bandwidth, None: not measured; `dispatch`: seconds of a launch."""

    chip: str
    day: str = ""
    kernels: dict[str, float] = field(default_factory=dict)
    links: float | None = None
    dispatch: float = 0.0

    def factor(self, instruction: str, mode: str) -> float:
        """Of a kernel's seconds, by the name of the compiler's instruction; 1 for what was not measured."""
        name = next((name for prefix, name in PREFIXES.items() if instruction.startswith(prefix)), "")
        return self.kernels.get(f"{name} {mode}" if name == "attention" else name, 1.0)

    def __str__(self) -> str:
        parts = [f"{name} x {factor:.3g}" for name, factor in self.kernels.items()]
        parts += [] if self.links is None else [f"links x {self.links:.3g}"]
        parts += [f"a launch {1e6 * self.dispatch:.3g} us"] if self.dispatch else []
        return f"a {self.chip}, measured {self.day}, in place of published ones: {', '.join(parts)}"


def read_rates(path: str, generations: list[str]) -> dict:
    """The fields of `Rates` of a report, for plans of these generations.

    Raises ValueError for a file that is no report, a report of simulated chips, or of a chip of another generation.
    """
    try:
        report = json.loads(Path(path).read_text())
        rows, chip, simulated, day = (report[name] for name in ("rows", "chip", "simulated", "day"))
        kernels, links, dispatch = _kernels(rows), _links(rows), _dispatch(rows)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"expected --measured FILE, a report of diffusers-tpu check, got {path}: {error!r}"
        ) from error
    if simulated or chip not in CHIPS:
        raise ValueError(
            f"expected --measured with a report of a TPU, got {path} of simulated chips, whose seconds are a CPU's"
        )
    if others := [name for name in generations if name != chip]:
        raise ValueError(f"expected --measured with a report of {others[0]}, as --topology asks, got {path} of {chip}")
    if not kernels and links is None and not dispatch:
        raise ValueError(
            f"expected --measured with measured seconds, got {path} without: run its stages transfers and kernels"
        )
    return {"chip": chip, "day": day, "kernels": kernels, "links": links, "dispatch": dispatch}


def _numbers(row: dict) -> bool:
    return all(type(row[name]) in (int, float) and row[name] > 0 for name in ("measured", "expected"))


def _kernels(rows: list[dict]) -> dict[str, float]:
    """Of rows "KERNEL [MODE], published SIZE: seconds"."""
    found = [
        row for row in rows if row["stage"] == KERNELS_STAGE and row["unit"] == "s" and f", {ROWS} " in row["name"]
    ]
    return {row["name"].partition(",")[0]: row["measured"] / row["expected"] for row in found if _numbers(row)}


def _links(rows: list[dict]) -> float | None:
    """The lowest of the exchanges' shares."""
    found = [row for row in rows if row["stage"] == EXCHANGES_STAGE and row["unit"] == "GB/s" and _numbers(row)]
    return min((row["measured"] / row["expected"] for row in found), default=None)


def _dispatch(rows: list[dict]) -> float:
    return next((row["measured"] for row in rows if row["name"] == DISPATCH and row["measured"]), 0.0)
