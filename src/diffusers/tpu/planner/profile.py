"""Measured seconds of a profiled run, by upstream's modules and by operations, compared with those of a plan.

`jax.profiler`'s trace has planes "/device:TPU:0" with lines "XLA Ops" and "XLA Modules"; simulated chips are threads of
"/host:CPU". The file `PROGRAMS` beside it has the text of each program that ran. Seconds are per step, the mean of all chips; an
operation's exclude those nested in it. MFU is the plan's floating point operations over the slice's peak in the measured time.
Simulated chips show which operation belongs to which module; their seconds say nothing about a TPU.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jax.profiler import ProfileData

from ..chips.figures import Chip, chip_of_kind
from . import timing
from .report import summed, timed_parts
from .timing import module_of, short


PROGRAMS = "diffusers-tpu-programs.json"  # beside the trace: what ran, and the text of each program
DEVICE = re.compile(r"/device:TPU:\d+$")
OPERATIONS, MODULES, HOST = "XLA Ops", "XLA Modules", "/host:CPU"
GLUE = "(between models)"
ATTRIBUTED = 0.9  # share of a program's time that a text must account for: some operations are renamed


@dataclass(frozen=True)
class Event:
    """One run of an operation on one chip. `start`, `stop`: seconds from the trace's start; `program` identifies its program."""

    chip: str
    program: tuple
    operation: str
    name: str  # JAX's name of the operation; empty if the trace has none
    start: float
    stop: float


def measured(folder: Path) -> dict:
    """Seconds per step of `modules` and `operations`, largest first, and their sum; `steps`, `chips`, `device`, `trace` (its file).

    Raises ValueError for a folder without a trace and its programs, and a trace without operations.
    """
    traces = sorted(Path(folder).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    record = Path(folder) / PROGRAMS
    if not traces or not record.is_file():
        raise ValueError(
            f"expected a folder that diffusers-tpu generate --profile has written, got {folder} without"
            f" {'a trace (*.xplane.pb)' if record.is_file() else PROGRAMS}"
        )
    facts = json.loads(record.read_text())
    events = [event for events in lines(ProfileData.from_file(str(traces[-1]))) for event in own(events)]
    if not events:
        raise ValueError(f"expected operations in {traces[-1]}, got none: no program ran while it was traced")
    programs, chip = programs_by_event(facts["programs"], events), chip_of_kind(facts["device"])
    chips = len({event.chip for event, _ in events})
    modules, operations, limits = Counter(), Counter(), defaultdict(Counter)
    for event, seconds in events:
        component, known = programs[event.program] or (GLUE, {})
        op_name, unit, size = known.get(event.operation, ("", None, 0))
        name = event.name or op_name
        each = seconds / chips / facts["steps"]
        modules[component, short(module_of(name))] += each
        what = name.split(";")[0].rpartition("/")[2] or event.operation
        operations[what] += each
        limits[what][_limit(unit, size, seconds, chip)] += each
    return {
        "trace": str(traces[-1]),
        "device": facts["device"],
        "steps": facts["steps"],
        "chips": chips,
        "seconds_per_step": sum(modules.values()),
        "modules": [{"component": c, "module": m, "measured": s} for (c, m), s in modules.most_common()],
        "operations": [
            {"operation": o, "measured": s, "limit": limits[o].most_common(1)[0][0]}
            for o, s in operations.most_common()
        ],
    }


def beside(found: dict, plan: dict) -> dict:
    """`found` with a plan's figures: `planned` and `ratio` (measured / planned) in each row, rows only of the plan, and `mfu`.

    Raises ValueError for a plan whose denoiser was not compiled and so has no seconds.
    """
    modules, operations, flops = Counter(), Counter(), Counter()
    if untimed := [p["component"] for p in plan["parts"] if p["stage"] == "denoise" and not p.get("timing")]:
        raise ValueError(f"expected a plan with the seconds of {untimed[0]}, got one that does not fit its chips")
    for part, runs in timed_parts(plan):
        modules.update({(part["component"], name): runs * s for name, s in part["timing"]["by_module"].items()})
        for name, count in part["flops_by_module"].items():
            flops[part["component"], short(name)] += runs * part["branches"] * count / plan["peak_flops"]
    for name, seconds in summed(plan, "by_operation"):
        operations[(name.partition(": ")[2],)] += seconds
    total = plan["seconds_per_step"]["total"]
    return {
        **found,
        "plan": {name: plan[name] for name in ("model", "topology", "mesh", "call", "versions")},
        "planned_seconds_per_step": total,
        "ratio": found["seconds_per_step"] / total,
        "mfu": plan["flops_per_step"] / plan["peak_flops"] / found["seconds_per_step"],
        "modules": [
            {**row, "mfu": flops[row["component"], row["module"]] / row["measured"] if row["measured"] else None}
            for row in _with_planned(found["modules"], ("component", "module"), modules)
        ],
        "operations": _with_planned(found["operations"], ("operation",), operations),
    }


def _with_planned(rows: list[dict], names: tuple[str, ...], planned: dict[tuple, float]) -> list[dict]:
    measured = {tuple(row[name] for name in names): row for row in rows}
    found = []
    for key in dict.fromkeys([*measured, *planned]):
        row = measured.get(key, {**dict(zip(names, key)), "measured": None})
        ours, theirs = row["measured"], planned.get(key)
        found.append({**row, "planned": theirs, "ratio": ours / theirs if ours and theirs else None})
    return found


# The trace


def lines(data: ProfileData) -> Iterator[list[Event]]:
    """Lists of events of one line of a chip or of one thread; events may be nested."""
    for plane in data.planes:
        if DEVICE.match(plane.name):
            found = {line.name: list(line.events) for line in plane.lines}
            around = [(event.name, *_span(event)) for event in found.get(MODULES, ())]
            yield [_of_chip(plane.name, event, around) for event in found.get(OPERATIONS, ())]
        elif plane.name == HOST:
            for line in plane.lines:
                some = ((event, dict(event.stats)) for event in line.events)
                yield [_of_thread(event, stats) for event, stats in some if "hlo_op" in stats]


def _of_chip(chip: str, event, around: list[tuple]) -> Event:
    """An event of "XLA Ops". Its name is the instruction's text, "%name = shape opcode(...)", or the instruction's name alone."""
    stats, (start, stop) = dict(event.stats), _span(event)
    program = next((name for name, begins, ends in around if begins <= start < ends), "")
    operation = str(stats.get("hlo_op") or event.name.split(" = ")[0].lstrip("%"))
    name = str(stats.get("tf_op", "")).rstrip(":")
    return Event(chip, (program.partition("(")[0], program), operation, name, start, stop)


def _of_thread(event, stats: dict) -> Event:
    program = stats.get("hlo_module", ""), stats.get("program_id")
    return Event(f"simulated {stats.get('device_ordinal', 0)}", program, str(stats["hlo_op"]), "", *_span(event))


def _span(event) -> tuple[float, float]:
    """Start and stop in seconds."""
    return event.start_ns / 1e9, (event.start_ns + event.duration_ns) / 1e9


def own(events: list[Event]) -> Iterator[tuple[Event, float]]:
    """Each event of a line with its own seconds, which exclude nested events."""
    inside: list[list] = []  # event, its own seconds so far
    for event in sorted(events, key=lambda e: (e.start, -e.stop)):
        while inside and inside[-1][0].stop <= event.start:
            yield tuple(inside.pop())
        if inside:
            outer = inside[-1]
            outer[1] = max(0.0, outer[1] - (min(event.stop, outer[0].stop) - event.start))
        inside.append([event, event.stop - event.start])
    yield from map(tuple, reversed(inside))


def _limit(unit: str | None, size: int, seconds: float, chip: Chip | None) -> str | None:
    """What limited a run: "memory" if its bytes take half of its seconds at the HBM's bandwidth, else its unit; None: unknown."""
    if unit is None or chip is None:
        return None
    return "memory" if unit != "links" and size / chip.hbm_bandwidth >= seconds / 2 else unit


def programs_by_event(programs: list[dict], events: list[tuple[Event, float]]) -> dict[tuple, tuple[str, dict] | None]:
    """The `program` of each event -> (component, its operations as `timing.units` returns them), or None if no text matches.

    Programs of a trace share a name and differ by a number, so they are matched by the operations that ran. The match is the text
    whose operations took the largest share of the time, at least `ATTRIBUTED`; among equals the one with the fewest operations.
    """
    texts, ran = [], defaultdict(Counter)
    for program in programs:
        module = re.match(r"HloModule ([^,\s]+)", program["text"])
        texts.append((module[1] if module else "", program["component"], timing.units(program["text"])))
    for event, seconds in events:
        ran[event.program][event.operation] += seconds
    found = {}
    for program, spent in ran.items():
        shares = [
            (sum(s for name, s in spent.items() if name in text[2]) / (spent.total() or 1), -len(text[2]), text[1:])
            for text in texts
            if text[0] == program[0]
        ]
        share, _, text = max(shares, key=lambda one: one[:2], default=(0, 0, None))
        found[program] = text if share >= ATTRIBUTED else None
    return found
