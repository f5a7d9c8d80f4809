"""Rates that `diffusers-tpu check` measured on a TPU, for a plan: kernels, links between chips, and the cost of a launch.

A kernel's planned seconds are multiplied by its factor in `kernels`, the published bandwidth of links by `links`. Each program of a
step adds one `dispatch`. What the report lacks keeps its published rate.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from ..chips.figures import CHIPS


KERNELS_STAGE, EXCHANGES_STAGE = 4, 5
DISPATCH = "an empty dispatch"
ROWS = "published"  # sizes of kernels whose rows are used; the ragged ones are small
# Prefix of the compiler's name of a kernel, longest first -> the kernel's name in rows.
PREFIXES = {
    "linear_kernel_of_windows": "convolution",
    "attention_kernel": "attention",
    "key_norms_kernel": "key_norms",
    "linear_kernel": "linear",
    "rotary_kernel": "rotary",
}


@dataclass(frozen=True)
class Rates:
    """Measured over planned. `kernels`: ratio of seconds by kernel, of attention by mode ("attention bound"); `links`: ratio of
    bandwidth, None if not measured. `dispatch`: measured seconds of a launch."""

    chip: str
    day: str = ""
    kernels: dict[str, float] = field(default_factory=dict)
    links: float | None = None
    dispatch: float = 0.0

    def factor(self, instruction: str, mode: str) -> float:
        """The factor of a kernel's seconds, by the name of the compiler's instruction; 1 if it was not measured."""
        name = next((name for prefix, name in PREFIXES.items() if instruction.startswith(prefix)), "")
        return self.kernels.get(f"{name} {mode}" if name == "attention" else name, 1.0)

    def __str__(self) -> str:
        parts = [f"{name} x {factor:.3g}" for name, factor in self.kernels.items()]
        parts += [] if self.links is None else [f"links x {self.links:.3g}"]
        parts += [f"a launch {1e6 * self.dispatch:.3g} us"] if self.dispatch else []
        return f"a {self.chip}, measured {self.day}, in place of published ones: {', '.join(parts)}"


def read_rates(path: str, generations: list[str]) -> dict:
    """The fields of `Rates` from a report, for plans of these generations.

    Raises ValueError for a file that is no report, or a report of simulated chips, of another generation, or without seconds.
    """
    try:
        report = json.loads(Path(path).read_text())
        rows, chip, simulated, day = (report[name] for name in ("rows", "chip", "simulated", "day"))
        # Of kernels the rows "KERNEL [MODE], published SIZE"; of links the lowest share of the bandwidth among the exchanges.
        of_kernels, of_links = _ratios(rows, KERNELS_STAGE, "s"), _ratios(rows, EXCHANGES_STAGE, "GB/s")
        kernels = {name.partition(",")[0]: ratio for name, ratio in of_kernels if f", {ROWS} " in name}
        links = min((ratio for _, ratio in of_links), default=None)
        dispatch = next((row["measured"] for row in rows if row["name"] == DISPATCH and row["measured"]), 0.0)
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


def _ratios(rows: list[dict], stage: int, unit: str) -> list[tuple[str, float]]:
    """(name, measured over expected) of the rows of a stage that have both."""
    found = [row for row in rows if row["stage"] == stage and row["unit"] == unit]
    return [
        (row["name"], row["measured"] / row["expected"])
        for row in found
        if all(type(row[name]) in (int, float) and row[name] > 0 for name in ("measured", "expected"))
    ]
