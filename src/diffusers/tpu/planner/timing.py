"""Computed seconds of a compiled program, operation by operation; nothing is measured.

An operation takes the longest of three times: its final schedule (`bundles`), its rows through the busiest matrix unit, and its
bytes at the HBM's bandwidth. Without a schedule it has that of an equal operation, else the compiler's estimate. A collective takes
its time on the links (`ici`); an asynchronous one costs only what remains of it at its "-done".
"""

import math
import re
from collections import Counter
from dataclasses import asdict, dataclass, field, replace

from ..chips.figures import Chip
from ..kernels.attention.api import ATTENTION
from ..kernels.attention.softmax_modes import MODES
from . import bundles, hlo, ici
from .aot import CompiledProgram
from .measured import Rates


FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "copy-start", "copy-done", "slice-start", "slice-done", "opt-barrier", "add-dependency",
}  # fmt: skip
ASYNCHRONOUS = ("async-start", "call-start")
UPDATE = "dynamic-update-slice"
READS_A_PART = {"dynamic-slice", "slice", "gather", UPDATE}
KERNEL = "tpu_custom_call"
RELAID = "output_to_operand_aliasing={{}: (0, {})}"  # of a nested fusion that only retiles its parameter
NOTHING_WRITTEN = 'custom_call_target="AllocateBuffer"'
AROUND = ("exchange_", "key_norms_")  # kernels of ours around the attention kernel
LINEAR = "linear_kernel"
BETWEEN_SLICES = "xla_megascale_runtime"  # in a "recv" of data from another slice
KINDS = ("attention", "matmul", "other", "collectives")
LARGEST, DEPTH = 40, 3  # operations that a report lists; components of a module's name that it shows


@dataclass
class Operation:
    """One operation of the program, all its runs together."""

    name: str
    kind: str  # of `KINDS`; "attention" is a kernel, "collectives" the part that is not overlapped
    module: str  # upstream's name of the module in which it was traced, blocks as `blocks.*`; "" outside of any
    what: str  # JAX's name of the operation
    runs: int
    seconds: float  # of all runs; of a collective only the part that is not overlapped, `hidden` the rest
    limit: str  # what determines its time: "schedule", "memory", "estimate", "links" or, between slices, "network"
    bytes: int  # to and from HBM in one run; of a collective, sent over links by each chip
    hidden: float = 0.0
    steps: int = 0  # of a kernel's grid
    body: int = 0  # bundles that every step runs


# Shares of the published bandwidths for the upper end of a range, as "How To Scale Your Model" says of v5e. Its clock is
# divided by `Chip.stalls`.
HBM_REACHED, LINKS_REACHED = 0.9, 0.75


@dataclass
class Timing:
    """The operations of one program, and sums over them in seconds.

    `slower`: `seconds` at the upper end of the range: with `HBM_REACHED`, `LINKS_REACHED` and `Chip.stalls`.
    """

    operations: list[Operation] = field(default_factory=list)
    slower: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> dict[str, float]:
        """By kind, and the total."""
        sums = {kind: sum(o.seconds for o in self.operations if o.kind == kind) for kind in KINDS}
        return {**sums, "total": sum(sums.values())}

    @property
    def hidden_collectives(self) -> float:
        """Seconds of transfers that overlap with other work."""
        return sum(o.hidden for o in self.operations)

    def _sums(self, key) -> dict[str, float]:
        sums = Counter()
        for operation in self.operations:
            sums[key(operation)] += operation.seconds
        return dict(sums.most_common())

    def as_json(self) -> dict:
        """The fields for reports: sums by kind, by upstream module, by kind and JAX's name of the operation; largest first."""
        top = sorted(self.operations, key=lambda o: -o.seconds)[:LARGEST]
        return {
            "seconds": self.seconds,
            "slower": self.slower,
            "hidden_collectives": self.hidden_collectives,
            "by_module": self._sums(lambda o: short(o.module)),
            "by_operation": self._sums(lambda o: f"{o.kind}: {o.what}"),
            "kernels": [asdict(o) for o in self.operations if o.steps],
            "largest": [asdict(o) for o in top],
        }


def time_program(
    compiled: CompiledProgram, chip: Chip, places: list[ici.Place], rates: Rates | None = None
) -> dict[str, Timing]:
    """The program's time by mode of the attention kernel (`softmax_modes`), each as if all heads used it.

    Args:
        places: x, y, z and half of each device in the mesh's order.
        rates: measured on such a chip, in place of published ones.
    """
    links = LINKS_REACHED
    if rates is not None and rates.links is not None:
        chip, links = replace(chip, link_bandwidth=rates.links * chip.link_bandwidth), 1.0
    program = hlo.parse(compiled.text)
    schedules = {name: bundles.read_modes(text, chip.branch_slots) for name, text in compiled.schedules.items()}
    waiting = replace(
        chip,
        hbm_bandwidth=HBM_REACHED * chip.hbm_bandwidth,
        link_bandwidth=links * chip.link_bandwidth,
        die_bandwidth=LINKS_REACHED * chip.die_bandwidth,
        clock=chip.clock / chip.stalls,
        flops=chip.flops / chip.stalls,
    )
    timings = {}
    for mode in MODES:
        of_mode = {name: modes[mode] for name, modes in schedules.items()}
        timings[mode], slower = (_Clock(program, of_mode, c, places, rates, mode).timing() for c in (chip, waiting))
        timings[mode].slower = slower.seconds
    return timings


def units(text: str) -> dict[str, tuple[str, str, int]]:
    """Operation -> JAX's name, unit ("links", "matrix" or "vector"), and bytes to and from HBM in one run, of a program's text."""
    program = hlo.parse(text)
    clock, found = _Clock(program, {}, None, []), {}
    for instructions in map(program.by_name, program.computations):
        for i in instructions.values():
            unit = "links" if clock._collective(i) else "vector" if clock._kind(i) == "other" else "matrix"
            if i.opcode.endswith("-done") and i.operands:  # of the operation that it completes
                unit = found.get(i.operands[0], ("", unit))[1]
            found[i.name] = i.op_name, unit, clock._bytes(i, instructions)
    return found


def module_of(op_name: str) -> str:
    """Upstream's module in an operation's name (`compile/tracing/scopes.py` writes it): `blocks.*.attn1.to_q`."""
    name = ".".join(re.findall(r"(?:^|/)\[([^\]]+)\]", op_name.split(";")[0]))
    return name.rpartition("..")[2].lstrip(".")


def short(module: str) -> str:
    """A module's name as in sums: its first `DEPTH` components."""
    return ".".join(module.split(".")[:DEPTH]) or "(between modules)"


class _Clock:
    def __init__(
        self,
        program: hlo.Program,
        schedules: dict[str, bundles.Schedule],
        chip: Chip,
        places: list[ici.Place],
        rates: Rates | None = None,
        mode: str = "",
    ):
        self.program, self.schedules, self.chip, self.places = program, schedules, chip, places
        self.rates, self.mode = rates, mode
        self.alike: dict[str, bundles.Schedule] = {}
        self.found: list[Operation] = []
        for name in program.computations:
            instructions = program.by_name(name)
            for instruction in instructions.values():
                if instruction.name in schedules:
                    self.alike.setdefault(self._likeness(instruction, instructions), schedules[instruction.name])

    def timing(self) -> Timing:
        self._run(self.program.entry, 1)
        return Timing(self.found)

    def _run(self, computation: str, runs: int) -> float:
        """Seconds of one run of a computation. Its operations are added to `found`, `runs` times each."""
        now, free, pending = 0.0, {"links": 0.0, "network": 0.0}, {}
        instructions = self.program.by_name(computation)
        for i in instructions.values():
            collective, received = self._collective(i), i.opcode == "recv" and BETWEEN_SLICES in i.rest
            if i.opcode in FREE or NOTHING_WRITTEN in i.rest:
                continue
            if i.opcode == "while":
                trips = self.program.trip_count(i)
                self._run(i.called("condition"), runs * trips)
                now += trips * self._run(i.called("body"), runs * trips)
            elif i.opcode == "conditional":
                now += max((self._run(branch, runs) for branch in i.branches), default=0.0)
            elif i.opcode.endswith("-done"):
                if i.operands and i.operands[0] in pending:
                    ends, operation, seconds = pending.pop(i.operands[0])
                    waited = max(0.0, ends - now)
                    operation.seconds, operation.hidden = runs * waited, runs * (seconds - min(waited, seconds))
                    now += waited
            elif collective is not None or received:
                moved = ici.received(i, self.chip) if received else ici.transfer(collective, self.places, self.chip)
                way = "network" if received else "links"
                operation = self._operation(i, "collectives", runs, moved.seconds, way, moved.bytes_sent)
                free[way] = max(now, free[way]) + moved.seconds
                if received or i.opcode.endswith("-start"):
                    pending[i.name] = free[way], operation, moved.seconds
                else:
                    operation.seconds = runs * (free[way] - now)
                    now = free[way]
            elif i.opcode in ("call", *ASYNCHRONOUS):
                now += self._run(i.called("to_apply") or i.called("calls"), runs)
            elif i.opcode not in ("send", "recv"):
                now += self._compute(i, instructions, runs)
        return now

    def _collective(self, i: hlo.Instruction) -> hlo.Instruction | None:
        """The collective that this instruction is or calls asynchronously, as it does on a SparseCore; None: neither."""
        inside = self.program.inside(i) if i.opcode in ASYNCHRONOUS else [i]
        return next((x for x in inside if x.opcode.removesuffix("-start") in ici.COLLECTIVES), None)

    def _compute(self, i: hlo.Instruction, instructions: dict, runs: int) -> float:
        moved = self._bytes(i, instructions)
        schedule = self.schedules.get(i.name) or self.alike.get(self._likeness(i, instructions))
        memory = moved / self.chip.hbm_bandwidth
        if schedule is not None:
            cycles = max(schedule.cycles, self.chip.matrix_cycles(schedule.rows))
            seconds, limit = cycles / self.chip.clock, "schedule"
        else:
            seconds, limit = (i.estimated_cycles or 0) / self.chip.clock, "estimate"
        if memory > seconds:
            seconds, limit = memory, "memory"
        if self.rates is not None and KERNEL in i.rest:
            seconds *= self.rates.factor(i.name, self.mode)
        operation = self._operation(i, self._kind(i), runs, seconds, limit, moved)
        if KERNEL in i.rest and schedule is not None:
            operation.steps, operation.body = schedule.steps, schedule.body
        return seconds

    def _operation(
        self, i: hlo.Instruction, kind: str, runs: int, seconds: float, limit: str, moved: int
    ) -> Operation:
        what = i.opcode if i.opcode == "copy" else i.op_name.split(";")[0].rpartition("/")[2] or i.opcode
        operation = Operation(i.name, kind, module_of(i.op_name), what, runs, runs * seconds, limit, moved)
        self.found.append(operation)
        return operation

    def _kind(self, i: hlo.Instruction) -> str:
        if KERNEL in i.rest and not i.name.startswith(AROUND):
            return "attention" if ATTENTION in i.op_name else "matmul" if LINEAR in i.name else "other"
        products = any(x.opcode in ("convolution", "dot") for x in [i, *self.program.inside(i)])
        return "matmul" if products else "other"

    def _bytes(self, i: hlo.Instruction, instructions: dict) -> int:
        """Bytes to and from HBM. Of an operand read in part, or a result updated in place, only that part counts."""
        inner, total = self.program.inside(i) if i.opcode == "fusion" else [], i.hbm_bytes
        names = {x.name: x for x in inner} or instructions
        for update in (x for x in inner or [i] if x.opcode == UPDATE):  # the rest of the array stays as it is
            part, made = names.get(update.operands[1]), update.arrays[0]
            if part is not None and any((one.dims, one.space) == (made.dims, 0) for one in i.arrays):
                total -= update.hbm_bytes - part.stored_bytes
        stated = i.attribute(r'"bytes_accessed":"(\d+)"') if KERNEL in i.rest else ""
        most = int(stated) if stated else math.inf  # a kernel may read one layer of stacked weights, or some columns
        for number, operand in enumerate(i.operands):
            source = instructions.get(operand)
            if source is not None and inner:
                total += self._read(inner, number, source.hbm_bytes)
            elif source is not None:
                total += min(source.hbm_bytes, _part(i, names)) if _reads_a_part(i, operand) else source.hbm_bytes
        return max(int(min(total, most)), 0)

    def _read(self, computation: list[hlo.Instruction], number: int, size: int) -> int:
        """Bytes that a computation, with those it calls, reads of its parameter `number`, which has `size` bytes."""
        names = {x.name: x for x in computation}
        held = {x.name for x in computation if x.opcode == "parameter" and int(x.operands[0]) == number}
        total, used = 0, False
        for x in computation:  # in order: a bitcast or retiling of the parameter counts as the parameter
            places = [place for place, name in enumerate(x.operands) if name in held]
            if places and (x.opcode == "bitcast" or (x.opcode == "fusion" and RELAID in x.rest)):
                held.add(x.name)
            elif places and _reads_a_part(x, x.operands[0]) and places == [0]:
                total, used = total + _part(x, names), True
            elif places and x.opcode in ("fusion", "call"):
                total, used = total + sum(self._read(self.program.inside(x), place, size) for place in places), True
            elif places:
                return size
        return min(size, total) if used else size

    def _likeness(self, i: hlo.Instruction, instructions: dict) -> str:
        """A key, equal for operations of the same schedule: opcode, shapes, operands' shapes, windows, the inside of a fusion."""
        inner = [(x.opcode, x.shape) for x in self.program.inside(i)]
        operands = [instructions[name].shape for name in i.operands if name in instructions]
        return repr((i.opcode, i.shape, operands, i.attribute(r'("window_config":\{.*?\})'), inner))


def _reads_a_part(user: hlo.Instruction, operand: str) -> bool:
    return user.opcode in READS_A_PART and user.operands[:1] == [operand]


def _part(user: hlo.Instruction, names: dict) -> int:
    """Bytes that `user` reads of its first operand. An update reads as many as it writes, or none if it writes whole tiles."""
    if user.opcode != UPDATE:
        return user.stored_bytes
    part, made = names.get(user.operands[1]), user.arrays[0]
    if part is None or all(part.arrays[0].dims[axis] == made.dims[axis] for axis in made.order[: len(made.tile)]):
        return 0
    return part.stored_bytes
