"""Stage 9, a trace of two steps of stage 7's model: the share of the time that is attributed to models, and names in the trace."""

from collections import defaultdict
from pathlib import Path

import torch
from jax.profiler import ProfileData

from ... import TPUConfig, install
from ...planner.profile import GLUE, measured
from ..cli.profile import traced
from . import wan
from .chips import devices_here


STEPS = range(2, 4)
MOST_NAMES = 40


def run(rows, request: dict):
    of_model, folder = wan.model_request(request), Path(request["cache"], "trace")
    kept = any(Path(request["cache"], "cache", "executables").glob("*"))
    pipe, size = wan.make_pipeline(of_model["heads"], torch.bfloat16), wan.size_of(of_model, len(devices_here()))
    install(pipe, TPUConfig(**of_model["config"]))
    with traced(pipe, str(folder), STEPS):
        wan.call(pipe, size)
    name = "programs that a second process compiled"
    if kept:
        rows.equal(name, sum(wan.compilations(pipe).values()), 0, note="stage 7 kept them")
    else:
        rows.skip(name, "stage 7 kept none")
    with rows.trying(name := "share of the time that is attributed"):
        found, least = measured(folder), request["attributed"]
        glue = sum(row["measured"] for row in found["modules"] if row["component"] == GLUE)
        share = 1 - glue / found["seconds_per_step"]
        rows.add(name, share, share >= least, limit=least, note="at least")
        rows.add("a traced step", found["seconds_per_step"], unit="s", note="of each chip, without what it waits")
    names(rows, folder)


def names(rows, folder: Path):
    """Adds rows with the names of planes, lines and statistics."""
    trace = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    lines, statistics = defaultdict(set), defaultdict(set)
    for plane in ProfileData.from_file(str(trace)).planes:
        lines[plane.name] |= set()
        for line in plane.lines:
            lines[plane.name].add(line.name)
            for event in line.events:
                statistics[plane.name] |= {name for name, _ in event.stats}
    rows.add("planes", sorted(lines))
    for plane, found in lines.items():
        for kind, some in (("lines", found), ("statistics", statistics[plane])):
            rows.add(f"{kind} of {plane}", sorted(some)[:MOST_NAMES], note=f"{len(some)} in all")
