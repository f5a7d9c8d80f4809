"""Seconds of a compiled program, operation by operation.

An operation takes as long as the slowest of three: its final schedule (`bundles`) at the core's clock, the rows it sends
through the busiest matrix unit at the chip's peak, and the bytes it moves between HBM and the core at the HBM's bandwidth. An operation without a schedule of its own has that of one that is
alike; if there is none, the compiler's estimate. A collective takes its time on the links (`ici`); one that is started
early costs what is left of it where it is waited for. All of it is read from the program; nothing is measured.
"""

import re
from collections import defaultdict
from dataclasses import asdict, dataclass, field

from ..aot import CompiledProgram
from ..devices import Chip
from . import bundles, hlo, ici


FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "copy-start", "copy-done", "slice-start", "slice-done", "opt-barrier", "add-dependency",
}  # fmt: skip
ASYNCHRONOUS = ("async", "call")
READS_A_PART = {"dynamic-slice", "slice", "gather"}
KERNEL = "tpu_custom_call"
ATTENTION = "scaled_dot_product_attention"
LINEAR = "linear_kernel"
KINDS = ("attention", "matmul", "other", "collectives")


@dataclass
class Operation:
    """One operation of the program, all its runs together.

    Attributes:
        kind: "attention" (a kernel), "matmul", "collectives" (the part that nothing hides) or "other".
        module: upstream's name of the module it was traced in, blocks as `blocks.*`; "" outside of any.
        what: JAX's name of the operation.
        runs: how often it runs.
        seconds: of all runs; of a collective what the step waits for it, `hidden` the rest.
        limit: what its time is: "schedule", "memory", "estimate" or "links".
        bytes: to and from HBM in one run; of a collective, sent over links by each chip.
        steps: of a kernel, the trips of its grid; `body`: bundles that every one of them runs.
    """

    name: str
    kind: str
    module: str
    what: str
    runs: int
    seconds: float
    limit: str
    bytes: int
    hidden: float = 0.0
    steps: int = 0
    body: int = 0


@dataclass
class Timing:
    """The operations of one program, and sums over them in seconds."""

    operations: list[Operation] = field(default_factory=list)

    @property
    def seconds(self) -> dict[str, float]:
        """By kind, and the total."""
        sums = {kind: sum(o.seconds for o in self.operations if o.kind == kind) for kind in KINDS}
        return {**sums, "total": sum(sums.values())}

    @property
    def hidden_collectives(self) -> float:
        """Seconds of transfers that other work hides."""
        return sum(o.hidden for o in self.operations)

    def by_module(self, depth: int = 3) -> dict[str, float]:
        """Seconds by upstream module, names cut after `depth` parts; largest first."""
        return self._sums(lambda o: ".".join(o.module.split(".")[:depth]) or "(between modules)")

    def by_operation(self) -> dict[str, float]:
        """Seconds by kind and JAX's name of the operation; largest first."""
        return self._sums(lambda o: f"{o.kind}: {o.what}")

    def _sums(self, key) -> dict[str, float]:
        sums = defaultdict(float)
        for operation in self.operations:
            sums[key(operation)] += operation.seconds
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def as_json(self, largest: int = 40) -> dict:
        """What reports show of it."""
        top = sorted(self.operations, key=lambda o: -o.seconds)[:largest]
        return {
            "seconds": self.seconds,
            "hidden_collectives": self.hidden_collectives,
            "by_module": self.by_module(),
            "by_operation": self.by_operation(),
            "kernels": [asdict(o) for o in self.operations if o.steps],
            "largest": [asdict(o) for o in top],
        }


def time_program(compiled: CompiledProgram, chip: Chip, places: list[ici.Place]) -> Timing:
    """`places`: x, y, z and half of each device in the mesh's order."""
    return _Clock(hlo.parse(compiled.text), compiled.schedules, chip, places).timing()


def module_of(op_name: str) -> str:
    """Upstream's module in an operation's name (`bridge/scopes.py` writes it): `blocks.*.attn1.to_q`."""
    name = ".".join(re.findall(r"(?:^|/)\[([^\]]+)\]", op_name.split(";")[0]))
    return name.rpartition("..")[2].lstrip(".")


class _Clock:
    def __init__(self, program: hlo.Program, schedules: dict[str, str], chip: Chip, places: list[ici.Place]):
        self.program, self.chip, self.places = program, chip, places
        self.schedules: dict[str, bundles.Schedule] = {}
        self.alike: dict[str, bundles.Schedule] = {}
        self.found: list[Operation] = []
        for name in program.computations:
            for instruction in program.computations[name]:
                if instruction.name in schedules:
                    schedule = bundles.read(schedules[instruction.name])
                    self.schedules[instruction.name] = schedule
                    self.alike.setdefault(self._likeness(instruction), schedule)

    def timing(self) -> Timing:
        self._run(self.program.entry, 1)
        return Timing(self.found)

    def _run(self, computation: str, runs: int) -> float:
        """Seconds of one run of a computation; its operations are added, `runs` times each."""
        now, links_free, pending = 0.0, 0.0, {}
        instructions = self.program.by_name(computation)
        for i in instructions.values():
            kind = i.opcode.removesuffix("-start").removesuffix("-done")
            if kind in ASYNCHRONOUS and i.opcode != kind:
                kind = self._wrapped(i, instructions)
            if i.opcode in FREE:
                continue
            if i.opcode == "while":
                trips = self.program.trip_count(i)
                self._run(i.called("condition"), runs * trips)
                now += trips * self._run(i.called("body"), runs * trips)
            elif i.opcode in ("call", "call-start", "async-start") and kind not in ici.COLLECTIVES:
                now += self._run(i.called("to_apply") or i.called("calls"), runs)
            elif i.opcode == "conditional":
                now += max((self._run(branch, runs) for branch in i.branches), default=0.0)
            elif i.opcode.endswith("-done"):
                if kind in ici.COLLECTIVES and i.operands[0] in pending:
                    ends, operation, moved = pending.pop(i.operands[0])
                    waited = max(0.0, ends - now)
                    operation.seconds, operation.hidden = (
                        runs * waited,
                        runs * (moved.seconds - min(waited, moved.seconds)),
                    )
                    now += waited
            elif kind in ici.COLLECTIVES:
                moved = ici.transfer(self._collective(i), self.places, self.chip)
                operation = self._operation(i, "collectives", runs, moved.seconds, "links", moved.bytes_sent)
                if i.opcode.endswith("-start"):
                    links_free = max(now, links_free) + moved.seconds
                    pending[i.name] = links_free, operation, moved
                else:
                    ends = max(now, links_free) + moved.seconds
                    operation.seconds = runs * (ends - now)
                    now = links_free = ends
            else:
                now += self._compute(i, instructions, runs)
        return now

    def _wrapped(self, i: hlo.Instruction, instructions: dict) -> str:
        start = i if i.opcode.endswith("-start") else instructions.get(i.operands[0], i)
        return next((x.opcode for x in self._inside(start) if x.opcode in ici.COLLECTIVES), "call")

    def _collective(self, i: hlo.Instruction) -> hlo.Instruction:
        return next((x for x in self._inside(i) if x.opcode in ici.COLLECTIVES), i)

    def _inside(self, i: hlo.Instruction) -> list[hlo.Instruction]:
        """What a start runs beside what follows; a SparseCore's are calls."""
        if i.opcode not in (f"{kind}-start" for kind in ASYNCHRONOUS):
            return []
        return self.program.computations.get(i.called("calls") or i.called("to_apply") or "", [])

    def _compute(self, i: hlo.Instruction, instructions: dict, runs: int) -> float:
        moved = self._bytes(i, instructions)
        schedule = self.schedules.get(i.name) or self.alike.get(self._likeness(i))
        memory = moved / self.chip.hbm_bandwidth
        if schedule is not None:
            cycles = max(schedule.cycles, self.chip.matrix_cycles(schedule.rows))
            seconds, limit = cycles / self.chip.clock, "schedule"
        else:
            seconds, limit = (i.estimated_cycles or 0) / self.chip.clock, "estimate"
        if memory > seconds:
            seconds, limit = memory, "memory"
        operation = self._operation(i, self._kind(i), runs, seconds, limit, moved)
        if KERNEL in i.rest and schedule is not None:
            operation.steps, operation.body = schedule.steps, schedule.body
        return seconds

    def _operation(
        self, i: hlo.Instruction, kind: str, runs: int, seconds: float, limit: str, moved: int
    ) -> Operation:
        module = module_of(i.op_name)
        what = i.op_name.split(";")[0].rpartition("/")[2] or i.opcode
        operation = Operation(
            i.name, kind, module, i.opcode if i.opcode == "copy" else what, runs, runs * seconds, limit, moved
        )
        self.found.append(operation)
        return operation

    def _kind(self, i: hlo.Instruction) -> str:
        if KERNEL in i.rest:
            return "attention" if ATTENTION in i.op_name else "matmul" if i.name.startswith(LINEAR) else "other"
        inner = self.program.computations.get(i.called("calls") or "", [i])
        return "matmul" if any(x.opcode in ("convolution", "dot") for x in [i, *inner]) else "other"

    def _bytes(self, i: hlo.Instruction, instructions: dict) -> int:
        """To and from HBM. Of an operand of which only a part is read, or a result that is written in place, that part."""
        inner = self.program.computations.get(i.called("calls") or "", []) if i.opcode == "fusion" else []
        total = sum(_in_hbm(a) for a in i.arrays)
        updates = [x for x in inner if x.opcode == "dynamic-update-slice"] or (
            [i] if i.opcode == "dynamic-update-slice" else []
        )
        names = {x.name: x for x in inner} or instructions
        for update in updates:  # the rest of the array stays as it is
            whole, part = (names.get(update.operands[n]) for n in (0, 1))
            if whole is not None and part is not None and i.arrays and i.arrays[0].space == 0:
                total -= sum(_in_hbm(a) for a in update.arrays) - sum(a.stored_bytes for a in part.arrays)
        parameters = {int(x.operands[0]): x for x in inner if x.opcode == "parameter"}
        for number, operand in enumerate(i.operands):
            source = instructions.get(operand)
            if source is None:
                continue
            size = sum(_in_hbm(a) for a in source.arrays)
            uses = [x for x in inner if number in parameters and parameters[number].name in x.operands]
            if uses and all(_reads_a_part(x, parameters[number].name) for x in uses):
                size = min(size, sum(_part(x, names) for x in uses))
            elif not inner and _reads_a_part(i, operand):
                size = min(size, _part(i, names))
            total += size
        return max(int(total), 0)

    def _likeness(self, i: hlo.Instruction) -> str:
        """What two operations share that have one schedule: opcode, shapes, windows and the inside of a fusion."""
        inner = self.program.computations.get(i.called("calls") or "", [])
        windows = re.search(r'"window_config":\{.*?\}', i.rest)
        return repr((i.opcode, i.shape, windows and windows[0], [(x.opcode, x.shape) for x in inner]))


def _in_hbm(array: hlo.Array) -> int:
    return array.stored_bytes if array.space == 0 else 0


def _reads_a_part(user: hlo.Instruction, operand: str) -> bool:
    first = bool(user.operands) and user.operands[0] == operand
    return first and (user.opcode in READS_A_PART or user.opcode == "dynamic-update-slice")


def _part(user: hlo.Instruction, names: dict) -> int:
    if user.opcode == "dynamic-update-slice":
        part = names.get(user.operands[1])
        return 0 if part is None else sum(a.stored_bytes for a in part.arrays)
    return sum(a.stored_bytes for a in user.arrays)
