"""Measured seconds of a traced run's steps, by upstream's modules and by operations, beside those of a plan.

A trace is what `jax.profiler` writes (`*.xplane.pb`), read by `jax.profiler.ProfileData`. Beside it `PROGRAMS` has the text of each
program that ran: which operation was traced in which module. Of a TPU the planes are "/device:TPU:0" and so on, their line
"XLA Ops" has the core's operations and "XLA Modules" the programs around them; simulated chips are threads of the plane "/host:CPU"
whose events say of which operation and program they are.

Seconds are of one chip (the mean of all) and one step. An operation's are its own, those inside of it (of a loop's body) left
out. Of simulated chips they say which operation is of which module, and nothing of a TPU.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jax.profiler import ProfileData

from . import hlo
from .timing import module_of


PROGRAMS = "diffusers-tpu-programs.json"  # beside the trace: what ran, and the text of each program
DEVICE = re.compile(r"/device:TPU:\d+$")
OPERATIONS, MODULES, HOST = "XLA Ops", "XLA Modules", "/host:CPU"
DEPTH = 3  # of modules' names, as a plan's
GLUE = "(between models)"


@dataclass(frozen=True)
class Event:
    """One run of an operation on one chip: seconds from the trace's start, `program` what it is part of."""

    chip: str
    program: tuple
    operation: str
    name: str  # JAX's of the operation, where the trace has it
    start: float
    stop: float


def measured(folder: Path) -> dict:
    """`modules` and `operations`: seconds a step, largest first; `steps`, `chips`, `device` and the `trace` that it is of.

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
    names = Names(facts["programs"], [event for event, _ in events])
    chips = len({event.chip for event, _ in events})
    modules, operations = defaultdict(float), defaultdict(float)
    for event, seconds in events:
        component, name = names.of(event)
        each = seconds / chips / facts["steps"]
        modules[component, short(module_of(name))] += each
        operations[name.split(";")[0].rpartition("/")[2] or event.operation] += each
    return {
        "trace": str(traces[-1]),
        "device": facts["device"],
        "steps": facts["steps"],
        "chips": chips,
        "seconds_per_step": sum(modules.values()),
        "modules": [{"component": c, "module": m, "measured": s} for (c, m), s in largest(modules)],
        "operations": [{"operation": o, "measured": s} for o, s in largest(operations)],
    }


def beside(found: dict, plan: dict) -> dict:
    """The same with `planned` seconds, and `ratio` of measured to planned, in each row, and what only the plan has."""
    modules, operations = planned(plan)
    rows = {(row["component"], row["module"]): row["measured"] for row in found["modules"]}
    ops = {row["operation"]: row["measured"] for row in found["operations"]}
    total = plan["seconds_per_step"]["total"]
    return {
        **found,
        "plan": {name: plan[name] for name in ("model", "topology", "mesh", "call", "versions")},
        "planned_seconds_per_step": total,
        "ratio": found["seconds_per_step"] / total,
        "modules": [
            {"component": c, "module": m, **compared(rows.get((c, m)), modules.get((c, m)))}
            for c, m in dict.fromkeys([*rows, *modules])
        ],
        "operations": [
            {"operation": o, **compared(ops.get(o), operations.get(o))} for o in dict.fromkeys([*ops, *operations])
        ],
    }


def planned(plan: dict) -> tuple[dict[tuple, float], dict[str, float]]:
    """A plan's seconds of a step by (component, module), and by operation.

    Raises ValueError for a plan whose denoiser was not compiled: it has no seconds.
    """
    modules, operations = defaultdict(float), defaultdict(float)
    for part in plan["parts"]:
        if part["stage"] != "denoise":
            continue
        if not part.get("timing"):
            raise ValueError(
                f"expected a plan with the seconds of {part['component']}, got one that does not fit its chips"
            )
        share = part["runs"] / plan["steps"]
        for name, seconds in part["timing"]["by_module"].items():
            modules[part["component"], name] += share * seconds
        for name, seconds in part["timing"]["by_operation"].items():
            operations[name.partition(": ")[2]] += share * seconds
    return dict(modules), dict(operations)


def compared(measured: float | None, planned: float | None) -> dict:
    return {"measured": measured, "planned": planned, "ratio": measured / planned if measured and planned else None}


def short(module: str) -> str:
    return ".".join(module.split(".")[:DEPTH]) or "(between modules)"


def largest(sums: dict) -> list[tuple]:
    return sorted(sums.items(), key=lambda item: -item[1])


# The trace


def lines(data: ProfileData) -> Iterator[list[Event]]:
    """Events that may lie within each other, of one line of a chip or one thread."""
    for plane in data.planes:
        if DEVICE.match(plane.name):
            found = {line.name: list(line.events) for line in plane.lines}
            around = [(e.name, e.start_ns, e.start_ns + e.duration_ns) for e in found.get(MODULES, ())]
            yield [_of_chip(plane.name, event, around) for event in found.get(OPERATIONS, ())]
        elif plane.name == HOST:
            for line in plane.lines:
                some = ((event, dict(event.stats)) for event in line.events)
                yield [_of_thread(event, stats) for event, stats in some if "hlo_op" in stats]


def _of_chip(chip: str, event, around: list[tuple]) -> Event:
    """An event of "XLA Ops": its name is the instruction, in the compiler's text "%name = shape opcode(...)" or by itself."""
    stats = dict(event.stats)
    program = next((name for name, start, stop in around if start <= event.start_ns < stop), "")
    operation = str(stats.get("hlo_op") or event.name.split(" = ")[0].lstrip("%"))
    return _event(
        event, chip, (program.partition("(")[0], program), operation, str(stats.get("tf_op", "")).rstrip(":")
    )


def _of_thread(event, stats: dict) -> Event:
    chip = f"simulated {stats.get('device_ordinal', 0)}"
    return _event(event, chip, (stats.get("hlo_module", ""), stats.get("program_id")), str(stats["hlo_op"]), "")


def _event(event, chip: str, program: tuple, operation: str, name: str) -> Event:
    return Event(chip, program, operation, name, event.start_ns / 1e9, (event.start_ns + event.duration_ns) / 1e9)


def own(events: list[Event]) -> Iterator[tuple[Event, float]]:
    """Each event of a line with its own seconds: without those that lie within it."""
    inside: list[list] = []  # event, seconds of what lies within it
    for event in sorted(events, key=lambda e: (e.start, -e.stop)):
        while inside and inside[-1][0].stop <= event.start:
            yield _closed(inside.pop())
        if inside:
            inside[-1][1] += min(event.stop, inside[-1][0].stop) - event.start
        inside.append([event, 0.0])
    while inside:
        yield _closed(inside.pop())


def _closed(one: list) -> tuple[Event, float]:
    return one[0], max(0.0, one[0].stop - one[0].start - one[1])


# Whose operation it is


class Names:
    """Component and JAX's name of events' operations, by the texts of the programs.

    All programs have one name in a trace. Which of them is meant by a program's number shows in the operations that ran: it has all
    of them, and of several that do it is the smallest.
    """

    def __init__(self, programs: list[dict], events: list[Event]):
        read = []
        for program in programs:
            text = hlo.parse(program["text"])
            names = {i.name: i.op_name for some in text.computations.values() for i in some}
            module = re.match(r"HloModule ([^,\s]+)", program["text"])
            read.append((program["component"], module[1] if module else "", names))
        ran = defaultdict(Counter)
        for event in events:
            ran[event.program][event.operation] += 1
        self._found = {}
        for program, operations in ran.items():
            fits = [one for one in read if one[1] == program[0] and operations.keys() <= one[2].keys()]
            self._found[program] = min(fits, key=lambda one: len(one[2]), default=None)

    def of(self, event: Event) -> tuple[str, str]:
        found = self._found[event.program]
        if found is None:
            return GLUE, event.name
        return found[0], event.name or found[2][event.operation]
