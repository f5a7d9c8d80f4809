"""Cycles of one operation, from its final schedule. A TPU core issues one bundle a cycle; each bundle counts as often as it runs.

Loops run as often as their trip counts say. A piece under a branch counts as always run, with three exceptions. At a counter's
first or last value: once per round of that counter. Below a value, with a second piece from it on: each in its share of the rounds.
In a mode of the attention kernel (`softmax_modes`): always or never, by the mode that the caller asks for. A branch takes effect
`Chip.branch_slots` bundles later; the bundles in between run whether or not it is taken.
"""

import re
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from ..kernels.attention.softmax_modes import BOUND, CODES, FIRST_CODE, MODES


LINE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+(\w\w)?\s*:")
BRANCH = re.compile(r"sbr\.rel \((!?)%(p\d+(?:_p\d+)?)\) target = \$region(\d+)")
ONLY_IF = r"(?:\(!?%p\w+\), )?"  # a predicate; where it is false, nothing read here uses the result
COMPARE = re.compile(rf"%(p\d+(?:_p\d+)?) = scmp\.(\w+)\.s32\.totalorder {ONLY_IF}(%?[\w.]+), (%?[\w.]+)")
ADD = re.compile(rf"%(s\d+(?:_s\d+)?) = sadd\.s32 {ONLY_IF}(\d+), ")
REGION = re.compile(r"Start region (\d+)|Start/End empty region (\d+)")
PRODUCT = re.compile(r"\bvmatmul[\w.]*\.(?:bf16|s8|f8e4m3fn)[\w.\[\]]*\.mxu(\d)")
PRODUCT_ROWS = 16  # bfloat16 rows through a matrix unit by one of these; 8 bits: twice as many, at twice the rate
PIPELINE = "iteration index, stage = 1"


@dataclass(frozen=True)
class Loop:
    """Bundles `start` to `stop` (which end with the branch back and its slots) run `trips` times."""

    start: int
    stop: int
    trips: int


@dataclass(frozen=True)
class Schedule:
    """Totals of one operation's schedule."""

    cycles: float  # bundles times runs, all pieces together
    bundles: int  # of the whole text
    loops: tuple[Loop, ...]  # outermost first
    steps: int  # of a kernel's grid: trips of the outermost loop, without those that only fill or drain its pipeline
    body: int  # bundles of the longest straight-line piece, which every step runs
    rows: float = 0.0  # bfloat16 rows through the busiest matrix unit


def read_modes(text: str, slots: int) -> dict[str, Schedule]:
    """`read` for each mode of the attention kernel; the same for all if the text has no modes."""
    if any(str(code) in text for code in CODES.values()):
        return {mode: read(text, slots, mode) for mode in MODES}
    return dict.fromkeys(MODES, read(text, slots))


def read(text: str, slots: int, mode: str = BOUND) -> Schedule:
    """The schedule of a `final_bundles` text.

    Args:
        slots: delay slots of a branch, `Chip.branch_slots`.
        mode: mode of the attention kernel for all heads; the next slower one that is compiled if this one is not.
    """
    lines, marks = _bundles(text)
    loops, pieces = _branches(lines, slots)
    codes = {piece.value for piece in pieces if piece.of_a_way}
    code = next((CODES[w] for w in MODES[MODES.index(mode) :] if CODES[w] in codes), max(codes, default=None))
    weight = [1.0] * len(lines)
    for start, stop, value, only, *_ in (piece for piece in pieces if piece.of_a_way):
        if (value == code) != only:
            weight[start + 1 : stop] = [0.0] * (stop - start - 1)
    for loop in loops:
        for n in range(loop.start, loop.stop + 1) if weight[loop.stop] else ():
            weight[n] *= loop.trips
    edges = sorted({0, len(lines), *marks, *(n for piece in pieces for n in piece[:2])})
    straight = ((a, b) for a, b in zip(edges, [*edges[1:], len(lines)]) if all(weight[a:b]))
    body_start, body_stop = max(straight, key=lambda piece: piece[1] - piece[0], default=(0, 0))
    rounds = [piece for piece in pieces if piece.value is not None and not piece.of_a_way and piece.from_on is None]
    last = max((piece.value for piece in rounds), default=0)
    sides = {(piece.value, piece.from_on) for piece in pieces if piece.from_on is not None}
    parts = [p for p in pieces if p.from_on is not None and p.value <= last and (p.value, not p.from_on) in sides]
    others = [piece for piece in rounds if not piece.only and piece.value == last]
    for piece in parts:
        of_rounds = last + 1 - piece.value if piece.from_on else piece.value
        for n in range(piece.start + 1, piece.stop):
            weight[n] *= of_rounds / (last + 1)
    for start, stop, value, only, *_ in rounds if last else ():
        # A piece around the body always runs, as its branch only tests whether there is work. Exception: a piece outside of it
        # runs in the other rounds.
        always = all(start <= piece.start and piece.stop <= stop for piece in others)
        holds_body = start < body_start and body_stop <= stop and always
        if only and value in (0, last) and not holds_body:
            share = 1 / (last + 1)
        elif not only and value == last:
            share = last / (last + 1)
        else:
            continue
        for n in range(start + 1, stop):
            weight[n] *= share
    products = Counter()
    for line, runs in zip(lines, weight):
        products.update(dict.fromkeys(PRODUCT.findall(line), runs))
    rows = PRODUCT_ROWS * max(products.values(), default=0)
    steps = loops[0].trips if loops else 1
    return Schedule(sum(weight), len(lines), tuple(loops), steps, body_stop - body_start, rows)


class _Piece(NamedTuple):
    """The bundles that a branch skips, from the branch's last slot to its target.

    `value`: of a counter or mode code that the branch tests; None: of neither. `only`: runs at this value, else at all others.
    `from_on`: runs from `value` on (True) or below it (False); None: the branch tests for equality.
    """

    start: int
    stop: int
    value: int | None
    only: bool
    from_on: bool | None = None

    @property
    def of_a_way(self) -> bool:
        return self.value is not None and self.value >= FIRST_CODE and self.from_on is None


def _bundles(text: str) -> tuple[list[str], set[int]]:
    """The bundles, one per line, and the numbers of marked bundles, at which straight-line pieces begin."""
    lines, marks = [], set()
    for line in text.splitlines():
        if found := LINE.match(line):
            lines.append(line)
            marks |= {len(lines) - 1} if found[2] else set()
        elif lines:
            lines[-1] += " " + line.strip()
    return lines, marks


def _branches(lines: list[str], slots: int) -> tuple[list[Loop], list[_Piece]]:
    """Loops, outermost first, and the pieces that branches skip."""
    where = {a or b: n for n, line in enumerate(lines) for a, b in REGION.findall(line)}
    compares, adds = {}, {}
    for line in lines:
        compares.update({name: (op, a, b) for name, op, a, b in COMPARE.findall(line)})
        adds.update({name: int(step) for name, step in ADD.findall(line)})
    loops, pieces, end = [], [], len(lines) - 1
    for n, line in enumerate(lines):
        for negated, predicate, region in BRANCH.findall(line):
            target = where.get(region)
            op, a, b = compares.get(predicate, (None, "", ""))
            if target is not None and target <= n:
                trips = _trips(op, b, adds.get(a.lstrip("%"), 1), lines[target : n + 1])
                loops.append(Loop(target, min(n + slots, end), trips))
            elif target is not None:
                value = int(b) if op in ("eq", "ne", "lt", "ge") and b.isdigit() else None
                from_on = (op == "lt") != bool(negated) if op in ("lt", "ge") and value is not None else None
                only = (op == "ne") != bool(negated)  # the branch skips the piece in all other cases
                if value == 0 and not only and from_on is None:
                    value = None  # all rounds but the first, or a test for work, which there is: counted as always
                pieces.append(_Piece(min(n + slots, target - 1), target, value, only, from_on))
    return sorted(loops, key=lambda loop: (loop.start, -loop.stop)), pieces


def _trips(op, limit: str, step: int, body: list[str]) -> int:
    """Trips of a loop whose counter goes from 0 in increments of `step` up to the constant `limit`; 1 for other loops."""
    if op not in ("ge", "eq") or not limit.isdigit():
        return 1
    rounds = -(-int(limit) // step)
    # A pipelined grid takes two rounds more: the first only fetches, the last only stores.
    return rounds - 2 if rounds > 2 and any(PIPELINE in line for line in body[:40]) else rounds
