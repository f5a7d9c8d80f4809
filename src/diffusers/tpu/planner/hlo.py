"""A compiled program's text, read: computations, instructions, shapes.

The text is what `jax.stages.Compiled.as_text()` gives for TPU: scheduled HLO, instructions in the order they run.
"""

import math
import re
from dataclasses import dataclass
from functools import cached_property


ITEM_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "c64": 8, "c128": 16, "f8e4m3fn": 1, "f8e5m2": 1, "bf16": 2, "token": 0}
ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^{}]*)\})?")
NO_ESTIMATE = 2**63 - 1  # of what a SparseCore does
START = re.compile(r"^  (ROOT )?%(\S+) = ")
HEAD = re.compile(r"^(ENTRY )?%(\S+) \(")
END = re.compile(r'^\}(, execution_thread="\w+")?$')


@dataclass(frozen=True)
class Array:
    """One array of a shape. `tile`: of its layout, outermost first; `space`: 0 is HBM, others are on the core."""

    dtype: str
    dims: tuple[int, ...]
    order: tuple[int, ...]
    tile: tuple[int, ...]
    space: int

    @property
    def item_bytes(self) -> float:
        return ITEM_BYTES.get(self.dtype) or int(re.sub(r"\D", "", self.dtype) or 8) / 8

    @property
    def stored_bytes(self) -> int:
        """Bytes with the padding that tiles bring."""
        dims = [self.dims[axis] for axis in reversed(self.order)]  # outermost first
        for back, size in enumerate(reversed(self.tile), 1):
            if back <= len(dims):
                dims[-back] = -(-dims[-back] // size) * size
        return int(math.prod(dims) * self.item_bytes)


def arrays_of(shape: str) -> list[Array]:
    """The arrays of a shape, a tuple's one after another."""
    found = []
    for dtype, dims, layout in ARRAY.findall(shape):
        dims = tuple(int(d) for d in dims.split(",") if d)
        order, _, rest = layout.partition(":")
        order = tuple(int(d) for d in order.split(",") if d) or tuple(range(len(dims) - 1, -1, -1))
        tile = re.search(r"T\(([\d,]+)\)", rest)
        space = re.search(r"S\((\d+)\)", rest)
        found.append(
            Array(
                dtype,
                dims,
                order,
                tuple(int(d) for d in tile[1].split(",")) if tile else (),
                int(space[1]) if space else 0,
            )
        )
    return found


@dataclass
class Instruction:
    """One instruction. `operands` are names; `rest` is the text after them."""

    name: str
    opcode: str
    shape: str
    operands: list[str]
    rest: str
    root: bool

    @cached_property
    def arrays(self) -> list[Array]:
        return arrays_of(self.shape)

    @cached_property
    def op_name(self) -> str:
        """JAX's name of the operation, the path of scopes it was traced in."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""

    @cached_property
    def estimated_cycles(self) -> int | None:
        found = re.search(r'"estimated_cycles":"(\d+)"', self.rest)
        return int(found[1]) if found and int(found[1]) != NO_ESTIMATE else None

    def called(self, key: str) -> str | None:
        """The computation that attribute `key` (calls, body, condition, to_apply) names."""
        found = re.search(rf"\b{key}=%([^\s,)}}]+)", self.rest)
        return found[1] if found else None

    @property
    def branches(self) -> list[str]:
        """The computations of a conditional."""
        found = re.search(r"branch_computations=\{([^}]*)\}", self.rest)
        names = found[1] if found else " ".join(re.findall(r"(?:true|false)_computation=(%[^\s,]+)", self.rest))
        return re.findall(r"%([^\s,]+)", names)

    @property
    def trip_count(self) -> int | None:
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.rest)
        return int(found[1]) if found else None


@dataclass
class Program:
    """The computations by name, and the name of the one that runs first."""

    computations: dict[str, list[Instruction]]
    entry: str

    def by_name(self, computation: str) -> dict[str, Instruction]:
        return {i.name: i for i in self.computations[computation]}

    def trip_count(self, loop: Instruction) -> int:
        """Of a while: as the compiler knows it, else the constant that its condition compares with."""
        if loop.trip_count is not None:
            return loop.trip_count
        constants = [
            int(i.operands[0])
            for i in self.computations[loop.called("condition")]
            if i.opcode == "constant" and i.operands and re.fullmatch(r"\d+", i.operands[0])
        ]
        return max(constants, default=1)


def parse(text: str) -> Program:
    """Raises ValueError for a text without an entry computation."""
    computations, entry, current, open_line = {}, None, None, ""
    for line in text.splitlines():
        head = HEAD.match(line) if line.endswith("{") else None
        if head:
            current = computations.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif END.match(line):
            _close(open_line, current)
            open_line, current = "", None
        elif current is not None:
            if START.match(line):
                _close(open_line, current)
                open_line = line
            else:
                open_line += " " + line
    if entry is None:
        raise ValueError("expected the text of a compiled program, got one without an entry computation")
    return Program(computations, entry)


def _close(line: str, into: list[Instruction] | None):
    start = START.match(line) if line else None
    if start is None:
        return
    body = re.sub(r"/\*.*?\*/", "", line[start.end() :])
    end = _matching(body, 0) if body.startswith("(") else body.index(" ")
    shape, rest = body[:end], body[end:].lstrip()
    opcode, _, rest = rest.partition("(")
    end = _matching("(" + rest, 0) - 1
    inside, rest = rest[: end - 1], rest[end:]
    operands = re.findall(r"%([^\s,()]+)", inside) if "%" in inside else [inside.strip()]
    into.append(Instruction(start[2], opcode, shape, operands, rest, bool(start[1])))


def _matching(text: str, start: int) -> int:
    """The position after the bracket that closes the one at `start`."""
    depth = 0
    for position in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position + 1
    raise ValueError(f"expected a closing bracket in {text[start : start + 80]!r}")
