"""Timings of tokamax's flash attention on v7x, from its wheel, and our computed seconds of the same kernels with the same blocks.

A timing is the median of five by the profiler, from the start of the call's first operation to the end of its last, with the transposes
around the kernel, on one JAX device, which is half a chip (`tokamax/_src/benchmarking.py`, `autotuning/autotuner.py`). Rows are forward
passes in bfloat16, without residuals and masks. Causal ones are left out: the number of grid steps and the body of each are data, which
the reader of schedules does not see.
"""

import importlib.metadata
import json
import statistics
from pathlib import Path

from diffusers.tpu.common import notices
from diffusers.tpu.planner import Question

from .cases import Case


ROW = "bench.tokamax_row:answer"
VERSION, TOPOLOGY = "0.0.12", "v7x-8"
TABLE = "tokamax/data/autotuning/tpu7x/pallas_mosaic_tpu_flash_attention.json"
RECORD = Path(__file__).resolve().parents[1] / "results" / "calibration.json"
NAMED = "tokamax"  # how the names of these rows begin


def cases() -> list[Case]:
    """Returns a case for each timing; without tokamax the rows of the record, unchanged."""
    try:
        found = timings(Path(importlib.metadata.distribution("tokamax").locate_file(TABLE)))
    except importlib.metadata.PackageNotFoundError:
        notices.warn_once(f"rows of tokamax are the record's; to compile them, pip install tokamax=={VERSION}")
        rows = [row for row in json.loads(RECORD.read_text()) if row["name"].startswith(NAMED)]
        return [Case(_identity(row["name"]), None, lambda row=row: row) for row in rows]
    return [_case(name, *timed) for name, timed in found.items()]


def _case(name: str, shapes: list, config: dict, seconds: float) -> Case:
    def read(answer):
        figures = {"measured_seconds": seconds, "error": answer["our_seconds"] / seconds - 1}
        return {**figures, **answer, "source": f"tokamax {VERSION}, {TABLE}"}

    return Case(_identity(name), Question(ROW, {"topology": TOPOLOGY, "shapes": shapes, "config": config}, 3600), read)


def _identity(name: str) -> dict:
    return {"name": name, "topology": TOPOLOGY, "model": "attention"}


def timings(table: Path) -> dict[str, tuple[list, dict, float]]:
    """Returns by name the shapes [B, T, N, D] of q, k and v, the kernel's configuration, and seconds."""
    found = {}
    for said, tried in json.loads(table.read_text()).items():
        asked = json.loads(said)
        if not tried or asked["return_residuals"] or asked["mask"]["is_causal"]:
            continue
        ((config, timed),) = tried.items()
        shapes = [[int(n) for n in asked[x].rstrip("]").split("[")[1].split(",")] for x in "qkv"]
        seconds = statistics.median(timed["evaluation_times_ms"]) / 1000
        found["{}, {} x {:,} x {} x {}".format(NAMED, *shapes[0])] = shapes, json.loads(config), seconds
    return dict(sorted(found.items(), key=lambda row: (row[1][0][0][1], row[1][0][0][3])))
