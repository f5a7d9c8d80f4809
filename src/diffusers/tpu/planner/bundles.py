"""Cycles of one operation from its final schedule: bundles times how often each runs.

A TPU core issues one bundle per cycle; the schedule is static, so the bundles of a straight piece of it are its cycles
(waiting for memory and for matrix units apart, see `timing`). Loops are read with their trip counts. A piece that a condition guards runs
always, unless the condition is that a counter has its first or last value: then once per round of that counter; or that
heads go one way of the attention kernel (`attention.ways`): then always or never, as the reader says. A branch takes effect some
bundles later (`SLOTS`): those behind it take their cycles whether or not it is taken, so that they are in the loop, and in no guarded piece.
"""

import re
from collections import Counter
from dataclasses import dataclass

from ..kernels.attention.softmax_modes import BOUND, CODES, FIRST_CODE, WAYS


LINE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+(\w\w)?\s*:")
BRANCH = re.compile(r"sbr\.rel \((!?)%(p\d+(?:_p\d+)?)\) target = \$region(\d+)")
ONLY_IF = r"(?:\(!?%p\w+\), )?"  # an instruction that a predicate turns off; where it is off, nothing here asks for its result
COMPARE = re.compile(rf"%(p\d+(?:_p\d+)?) = scmp\.(\w+)\.s32\.totalorder {ONLY_IF}(%?[\w.]+), (%?[\w.]+)")
ADD = re.compile(rf"%(s\d+(?:_s\d+)?) = sadd\.s32 {ONLY_IF}(\d+), ")
REGION = re.compile(r"Start region (\d+)|Start/End empty region (\d+)")
PRODUCT = re.compile(r"\bvmatmul[\w.]*\.bf16[\w.\[\]]*\.mxu(\d)")
PRODUCT_ROWS = 16  # of bfloat16 that one such instruction sends through a matrix unit
PIPELINE = "iteration index, stage = 1"
SLOTS = {"v5e": 4, "v5p": 4, "v6e": 4, "v7x": 6}  # cycles until a branch takes effect, by generation


@dataclass(frozen=True)
class Loop:
    """Bundles `start` to `stop` (which end with the branch back and its slots) run `trips` times."""

    start: int
    stop: int
    trips: int


@dataclass(frozen=True)
class Schedule:
    """What the schedule of one operation comes to.

    Attributes:
        cycles: bundles times runs, all pieces together.
        bundles: of the whole text.
        loops: outermost first.
        steps: trips of a kernel's grid (the outermost loop, without the rounds that only fill and drain its pipeline).
        body: bundles of the largest straight piece, the part that every step runs.
        rows: of bfloat16 that go through the busiest matrix unit.
    """

    cycles: float
    bundles: int
    loops: tuple[Loop, ...]
    steps: int
    body: int
    rows: float = 0.0


def read_ways(text: str, slots: int) -> dict[str, Schedule]:
    """`read` by way."""
    if any(str(code) in text for code in CODES.values()):
        return {way: read(text, slots, way) for way in WAYS}
    return dict.fromkeys(WAYS, read(text, slots))


def read(text: str, slots: int, way: str = BOUND) -> Schedule:
    """The schedule of a `final_bundles` text.

    Args:
        slots: of each branch (`SLOTS`).
        way: of the attention kernel, that all heads go, or where it is not compiled the next slower one that is.
    """
    lines, marks = [], set()
    for line in text.splitlines():
        found = LINE.match(line)
        if found:
            lines.append(line)
            if found[2]:
                marks.add(len(lines) - 1)
        elif lines:
            lines[-1] += " " + line.strip()
    loops, guards = _branches(lines, slots)
    weight = [1.0] * len(lines)
    for start, stop, guard in guards:
        if guard.code is not None and not guard.runs(_code(way, guards)):
            weight[start + 1 : stop] = [0.0] * (stop - start - 1)
    for loop in loops:
        for n in range(loop.start, loop.stop + 1) if weight[loop.stop] else ():
            weight[n] *= loop.trips
    edges = sorted({0, len(lines), *marks, *(g[0] for g in guards), *(g[1] for g in guards)})
    pieces = ((a, b) for a, b in zip(edges, [*edges[1:], len(lines)]) if all(weight[a:b]))
    body_start, body_stop = max(pieces, key=lambda piece: piece[1] - piece[0], default=(0, 0))
    rounds = [(start, stop, guard.round) for start, stop, guard in guards]
    last = max((abs(value) for *_, value in rounds if value), default=0)
    for start, stop, value in rounds:
        # `!=` a constant jumps over the piece: it runs in the first (0) or the last round of the counter; `==` over
        # what runs in all the others. What holds the body is no such piece, unless another body runs in the other
        # rounds: that condition asks whether there is anything to do.
        holds_body = start < body_start and body_stop <= stop and -last not in (value for *_, value in rounds)
        if value is None or last == 0:
            continue
        if value == -last:
            share = last / (last + 1)
        elif value in (0, last) and not holds_body:
            share = 1 / (last + 1)
        else:
            continue
        for n in range(start + 1, stop):
            weight[n] *= share
    steps = loops[0].trips if loops else 1
    products = Counter()
    for line, runs in zip(lines, weight):
        products.update(dict.fromkeys(PRODUCT.findall(line), runs))
    rows = PRODUCT_ROWS * max(products.values(), default=0)
    return Schedule(sum(weight), len(lines), tuple(loops), steps, body_stop - body_start, rows)


@dataclass(frozen=True)
class _Guard:
    """What a piece that a branch jumps over asks.

    Attributes:
        round: the one round of a counter in which it runs, as it is; in which alone it does not, negative; None: neither.
        code: of the way of the attention kernel that it is of (`ours`), or is not of.
    """

    round: int | None = None
    code: int | None = None
    ours: bool = True

    def runs(self, code: int) -> bool:
        return (self.code == code) == self.ours


def _branches(lines: list[str], slots: int) -> tuple[list[Loop], list[tuple[int, int, _Guard]]]:
    """Loops, outermost first, and the pieces that are jumped over: (last slot of the branch, its target, what it asks)."""
    where = {region: n for n, line in enumerate(lines) for region in _regions(line)}
    compares, adds = {}, {}
    for line in lines:
        compares.update({name: (op, a, b) for name, op, a, b in COMPARE.findall(line)})
        adds.update({name: int(step) for name, step in ADD.findall(line)})
    loops, guards, end = [], [], len(lines) - 1
    for n, line in enumerate(lines):
        for negated, predicate, region in BRANCH.findall(line):
            target = where.get(region)
            if target is None:
                continue
            op, a, b = compares.get(predicate, (None, "", ""))
            if target <= n:
                loops.append(Loop(target, min(n + slots, end), _trips(op, a, b, adds, lines[target : n + 1])))
            else:
                guards.append((min(n + slots, target - 1), target, _guard(op, b, negated)))
    return sorted(loops, key=lambda loop: (loop.start, -loop.stop)), guards


def _code(way: str, guards: list[tuple[int, int, _Guard]]) -> int:
    """That of the way, or of the next slower one that the schedule has code of."""
    there = {guard.code for *_, guard in guards}
    slower = [CODES[w] for w in WAYS[WAYS.index(way) :] if CODES[w] in there]
    return slower[0] if slower else max(code for code in there if code is not None)


def _regions(line: str):
    return [a or b for a, b in REGION.findall(line)]


def _trips(op, a: str, b: str, adds: dict[str, int], body: list[str]) -> int:
    """Rounds of a loop that goes on until its counter, from 0 in steps of what is added to it, reaches a constant."""
    if op not in ("ge", "eq") or not b.isdigit():
        return 1
    rounds = -(-int(b) // adds.get(a.lstrip("%"), 1))
    # A pipelined grid takes two rounds more: the first only fetches, the last only stores.
    return rounds - 2 if rounds > 2 and any(PIPELINE in line for line in body[:40]) else rounds


def _guard(op, b: str, negated: str) -> _Guard:
    if op not in ("eq", "ne") or not b.isdigit():
        return _Guard()
    only = (op == "ne") != bool(negated)  # the branch is taken, and the piece jumped over, in all other cases
    if int(b) >= FIRST_CODE:
        return _Guard(code=int(b), ours=only)
    if int(b) == 0 and not only:
        return _Guard()  # all rounds but the first; or it asks whether there is anything to do, and there is
    return _Guard(round=int(b) if only else -int(b))
