"""Parses a compiled program's text into computations, instructions and shapes.

The text is what `jax.stages.Compiled.as_text()` returns for TPU: scheduled HLO, instructions in the order in which they run.
"""

import math
import re
from dataclasses import dataclass
from functools import cached_property


ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^{}]*)\})?")
NO_ESTIMATE = 2**63 - 1  # the compiler's value for a SparseCore's operations
COMPUTATION = re.compile(r'^(ENTRY )?%(\S+) \(.*\{\n((?:.*\n)*?)\}(?:, execution_thread="\w+")?$', re.M)
START = re.compile(r"^(?=  (?:ROOT )?%\S+ = )", re.M)
# Name, shape, opcode, operands and the rest of an instruction.
INSTRUCTION = re.compile(r"  (?:ROOT )?%(\S+) = (.*?) ([a-z][\w-]*)\(([^)]*)\)(.*)")


@dataclass(frozen=True)
class Array:
    """One array of a shape. `tile`: tile sizes of its layout, outermost first; `space`: 0 is HBM, others are on the core."""

    dtype: str
    dims: tuple[int, ...]
    order: tuple[int, ...]
    tile: tuple[int, ...]
    space: int

    @property
    def stored_bytes(self) -> int:
        """Bytes, with the padding to whole tiles."""
        dims = [self.dims[axis] for axis in reversed(self.order)]  # outermost first
        for back, size in enumerate(reversed(self.tile), 1):
            if back <= len(dims):
                dims[-back] = -(-dims[-back] // size) * size
        bits = re.search(r"\d+", self.dtype)  # none in pred and token
        return int(math.prod(dims) * (int(bits[0]) if bits else 8) / 8)


def arrays_of(shape: str) -> list[Array]:
    """The arrays of a shape, a tuple's one after another."""
    found = []
    for dtype, dims, layout in ARRAY.findall(shape):
        order, _, rest = layout.partition(":")
        tile, space = re.search(r"T\(([\d,]+)\)", rest), re.search(r"S\((\d+)\)", rest)
        dims = _integers(dims)
        order = _integers(order) or tuple(reversed(range(len(dims))))
        found.append(Array(dtype, dims, order, _integers(tile[1]) if tile else (), int(space[1]) if space else 0))
    return found


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(d) for d in text.split(",") if d)


@dataclass
class Instruction:
    """One instruction. `operands` are names; `rest` is the text after them."""

    name: str
    opcode: str
    shape: str
    operands: list[str]
    rest: str

    @cached_property
    def arrays(self) -> list[Array]:
        return arrays_of(self.shape)

    @property
    def stored_bytes(self) -> int:
        return sum(array.stored_bytes for array in self.arrays)

    @property
    def hbm_bytes(self) -> int:
        return sum(array.stored_bytes for array in self.arrays if array.space == 0)

    def attribute(self, pattern: str) -> str:
        """The text of the pattern's group in the attributes; empty without a match."""
        found = re.search(pattern, self.rest)
        return found[1] if found else ""

    @cached_property
    def op_name(self) -> str:
        """JAX's name of the operation: the path of the scopes in which it was traced."""
        return self.attribute(r'op_name="([^"]*)"')

    @property
    def estimated_cycles(self) -> int | None:
        cycles = int(self.attribute(r'"estimated_cycles":"(\d+)"') or NO_ESTIMATE)
        return None if cycles == NO_ESTIMATE else cycles

    def called(self, key: str) -> str:
        """The computation that attribute `key` (calls, body, condition, to_apply) names; empty without it."""
        return self.attribute(rf"\b{key}=%([^\s,)}}]+)")

    @property
    def branches(self) -> list[str]:
        """The computations of a conditional."""
        names = self.attribute(r"branch_computations=\{([^}]*)\}")
        return re.findall(r"%([^\s,]+)", names) or re.findall(r"(?:true|false)_computation=%([^\s,]+)", self.rest)


@dataclass
class Program:
    """The computations by name, and the name of the one that runs first."""

    computations: dict[str, list[Instruction]]
    entry: str

    def inside(self, i: Instruction) -> list[Instruction]:
        """The instructions of a fusion or a call."""
        return self.computations.get(i.called("calls") or i.called("to_apply"), [])

    def by_name(self, computation: str) -> dict[str, Instruction]:
        return {i.name: i for i in self.computations[computation]}

    def trip_count(self, loop: Instruction) -> int:
        """Trip count of a while loop: the compiler's, else the constant in its condition."""
        if known := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"'):
            return int(known)
        constants = [i.operands[0] for i in self.computations[loop.called("condition")] if i.opcode == "constant"]
        return max((int(value) for value in constants if value.isdigit()), default=1)


def parse(text: str) -> Program:
    """The parsed program. Raises ValueError for a text without an entry computation."""
    found = COMPUTATION.findall(text)
    entry = next((name for first, name, _ in found if first), None)
    if entry is None:
        raise ValueError("expected the text of a compiled program, got one without an entry computation")
    return Program({name: [_instruction(lines) for lines in START.split(body)[1:]] for _, name, body in found}, entry)


def _instruction(lines: str) -> Instruction:
    line = re.sub(r"/\*.*?\*/", "", " ".join(lines.splitlines()))
    name, shape, opcode, inside, rest = INSTRUCTION.match(line).groups()
    operands = re.findall(r"%([^\s,]+)", inside) if "%" in inside else [inside.strip()]
    return Instruction(name, opcode, shape, operands, rest)
