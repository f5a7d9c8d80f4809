"""Sizes of the attention kernel's blocks: by a rule of VMEM and of prices of its schedule, or tuned.

`tuned.json` holds what `diffusers-tpu bench attention --tune` found with the compiler; the rule does the rest.
"""

import functools
import json
import math
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from ...chips.figures import MIB, chip_of
from ..pallas import LANES, round_up
from .softmax_modes import BOUND, MODES


TUNED = Path(__file__).with_name("tuned.json")

# What the rule's prices are, in bundles; schedules of v6e at Wan's shapes (other generations: the same order).
PER_SCORE = 1540 / 2**20
PER_PIECE = 250  # the matrix units run dry at the end of straight code
PER_STEP = 180  # of the grid
PER_QUERY = 0.25  # before the first key and after the last

MOST_SCORES_ASKED = 5_600_000  # of one piece of code of blocks that were asked for, on any chip
RARER_SCORES = 4_500_000  # of one piece of code of a mode that fewer heads go: what compiles in some 10 s on two cores
AS_GOOD = 1.005  # of the lowest price: then what compiles sooner is better
MOST_QUERIES = 8192  # of heads up to 128: what is done to a whole block of them before and after is straight code


@dataclass(frozen=True)
class Tile:
    """Queries and keys of one product; `lag`: how many tiles scores are computed ahead of their exponentials."""

    queries: int
    keys: int
    lag: int


@dataclass(frozen=True)
class Blocks:
    """How the kernel goes through queries and keys; all in tokens.

    Attributes:
        queries, keys: of one grid step.
        piece: queries whose tiles, with all keys of the step, are one straight piece of code; pieces are looped over.
        bound, online: the tiles of the mode "bound" and of the two others (see `modes`).
    """

    queries: int
    keys: int
    piece: int
    bound: Tile
    online: Tile

    def tile(self, mode: str) -> Tile:
        """The tiles of this mode."""
        return self.bound if mode == BOUND else self.online

    def straight(self, mode: str, kv_len: int, cut: bool, cut_at_end: bool, rare: bool = True) -> tuple[int, int]:
        """Queries and keys of one straight piece of code of this mode; `cut`: masked, as `Call.cut_at_end` says, and `rare` or not."""
        tile, keys, share = self.tile(mode), self.keys, 1
        if cut and cut_at_end:  # one block of many
            blocks = -(-kv_len // keys)
            keys = round_up(kv_len - (blocks - 1) * keys, tile.keys)
            share = max(-(-2 * keys // self.keys), min(4, blocks // 4))
        elif cut:  # its piece is small, so that its code is
            share = self.piece if rare else 2
        elif mode != BOUND:  # rarer, and the running maximum takes twice the code
            share = max(2, -(-self.piece * keys // RARER_SCORES))
        tiles = self.piece // tile.queries
        fitting = (n for n in range(1, tiles + 1) if tiles % n == 0 and n * share <= tiles)
        return max(fitting, default=1) * tile.queries, keys


@dataclass(frozen=True)
class Shape:
    """What the sizes depend on. `masked`: the number of last keys that a mask by key may take away; `dense_bytes`: of `Mask.dense`."""

    q_len: int
    kv_len: int
    dim: int
    out_dim: int
    bytes: int = 2
    out_bytes: int = 2
    masked: int = 0
    dense_bytes: int = 0

    @property
    def whole_lanes(self) -> bool:
        """Heads are whole rows of lanes, so that the kernel can take and give them as linear layers do."""
        return self.dim % LANES == self.out_dim % LANES == 0


def folded_parts(shape: Shape, generation: str | None) -> int:
    """`Call.folded`: one of float32, two of bfloat16 where the depth of the matrix unit has room for them; else 0.

    One bfloat16 rounding of q more would double the error of scores of deviation 4.
    """
    if shape.bytes == 4:
        return 1
    return 2 if 2 * shape.dim <= chip_of(generation).matrix_side and shape.dim % 16 == 0 else 0


def vmem_bytes(blocks: Blocks, shape: Shape) -> int:
    """VMEM of a kernel with these blocks, from above.

    Two buffers of each block of q^T [D, queries], k [keys, D], v^T [E, keys], the mask's parts and the output
    [E, queries]; the state: two rows of eight sublanes and E float32 per query; q with its factor [2 D, queries] and keys
    twice [keys, 2 D], whether or not the call has them; q turned [D, queries], as much; values without padding [E, keys];
    the key mask's column [keys, 128]; and what the compiler spills: scores and weights of lag + 2 tiles, and the rows of one.
    """
    wide, out_wide = round_up(shape.dim, LANES), round_up(shape.out_dim, LANES)
    tall, out_tall = round_up(shape.dim, 16), round_up(shape.out_dim, 16)
    operands = blocks.queries * tall * shape.bytes + blocks.keys * (wide + out_tall) * shape.bytes
    operands += blocks.queries * out_tall * shape.out_bytes + blocks.queries * 8 * 4
    operands += blocks.keys * 8 * 4 * bool(shape.masked) + blocks.queries * blocks.keys * shape.dense_bytes
    state = blocks.queries * (16 + out_tall) * 4 + blocks.keys * out_tall * shape.bytes
    state += blocks.queries * tall * shape.bytes * shape.whole_lanes
    state += (blocks.queries * tall + blocks.keys * (wide if shape.dim % LANES else 0)) * 2 * shape.bytes
    state += blocks.keys * LANES * 4 * bool(shape.masked)
    spilled = max(
        (tile.lag + 2) * tile.queries * tile.keys * 8 + tile.queries * (out_wide + wide) * 8
        for tile in (blocks.bound, blocks.online)
    )
    return 2 * operands + state + spilled


def vmem_limit(generation: str | None) -> int:
    """Bytes a kernel may ask for: some are the compiler's own."""
    return chip_of(generation).vmem_bytes - 12 * MIB


def choose(shape: Shape, generation: str | None = None, wanted: tuple[int, int, int] | None = None) -> Blocks:
    """The blocks for a shape: `wanted` (`TPUConfig.attention_blocks`), else tuned ones, else the rule's first.

    Raises ValueError where what is wanted does not fit VMEM, NotImplementedError for a generation that nothing is known of.
    """
    generation = chip_of(generation).generation
    if wanted is None:
        return _tuned().get(tuned_key(shape, generation)) or candidates(shape, generation)[0]
    blocks = _wanted(shape, generation, wanted)
    if vmem_bytes(blocks, shape) > vmem_limit(generation):
        raise ValueError(
            f"expected attention blocks that fit {vmem_limit(generation) / MIB:.0f} MiB of VMEM on {generation}, got"
            f" {wanted}, which take {vmem_bytes(blocks, shape) / MIB:.0f} MiB; use smaller ones, or None"
        )
    return blocks


def of_tiles(shape: Shape, generation: str | None, queries: int, keys: int) -> Blocks:
    """Blocks of so many queries and keys, whole tiles of registers."""
    chip = chip_of(generation)
    bound, online = (Tile(math.gcd(q, queries), math.gcd(k, keys), lag) for q, k, lag in chip.tiles)
    width = math.lcm(bound.queries, online.queries)
    return Blocks(queries, keys, _largest_piece(queries, keys, width, _most_scores(shape, chip)), bound, online)


def _largest_piece(queries: int, keys: int, width: int, most: int) -> int:
    """Queries of a piece, whole tiles of this width, with at most so many scores; one tile where that has more."""
    fitting = (n for n in range(width, queries + 1, width) if queries % n == 0 and n * keys <= most)
    return max(fitting, default=width)


def _most_scores(shape: Shape, chip) -> int:
    """Of one piece: float32 products are six of bfloat16, and twice the registers spill; a product's code grows with the head size."""
    most = chip.most_scores // (1 if shape.bytes == 2 else 10)
    return most * 256 // max(256, shape.dim + shape.out_dim)


def tuned_key(shape: Shape, generation: str) -> str:
    """The name of a shape in `tuned.json`."""
    return "-".join(map(str, (generation, *astuple(shape))))


@functools.cache
def _tuned() -> dict[str, Blocks]:
    return {key: from_list(value["blocks"]) for key, value in json.loads(TUNED.read_text()).items()}


def from_list(values: list) -> Blocks:
    """The blocks of `tuned.json`: sizes, and those of the tiles."""
    return Blocks(*values[:3], Tile(*values[3]), Tile(*values[4]))


@functools.lru_cache(1024)
def candidates(shape: Shape, generation: str) -> tuple[Blocks, ...]:
    """Blocks that fit VMEM, the cheapest by the rule's prices first."""
    bound, online = _tiles(shape, generation)
    unit_q, unit_k = (math.lcm(getattr(bound, axis), getattr(online, axis)) for axis in ("queries", "keys"))
    found = []
    most = _most_scores(shape, chip_of(generation))
    of_keys = range(unit_k, round_up(min(shape.kv_len, 16384), unit_k) + 1, unit_k)
    # masking is slow: where one block, the last, holds all that may be masked, no other has code for it
    fitting = [n for n in of_keys if shape.masked <= (shape.kv_len - 1) % n + 1]
    of_keys = fitting if fitting and shape.masked < shape.kv_len else of_keys
    longest = MOST_QUERIES * LANES // max(LANES, shape.dim, shape.out_dim)
    for keys in of_keys:
        for piece in range(unit_q, min(2048, round_up(shape.q_len, unit_q)) + 1, unit_q):
            if piece // unit_q % 2 and piece > unit_q:
                continue  # an odd number of tiles leaves one of two matrix units without work
            if piece * keys > max(most, unit_q * unit_k):
                break
            for queries in range(piece, max(piece, min(longest, round_up(shape.q_len, piece))) + 1, piece):
                blocks = Blocks(queries, keys, piece, bound, online)
                if vmem_bytes(blocks, shape) > vmem_limit(generation):
                    break
                found.append((_price(blocks, shape), astuple(blocks)[:3], blocks))
    if not found:
        raise ValueError(f"expected heads whose smallest blocks fit VMEM on {generation}, got head size {shape.dim}")
    most = AS_GOOD * min(price for price, _, _ in found)

    def rank(priced):
        price, sizes, blocks = priced
        return price > most, _code(blocks, shape) if price <= most else 0, price, sizes

    return tuple(blocks for *_, blocks in sorted(found, key=rank))


def _code(blocks: Blocks, shape: Shape) -> int:
    """Scores of all straight pieces of code that are compiled, where nothing but the end is masked."""
    ends = shape.masked or shape.kv_len % blocks.keys
    pieces = [blocks.straight(mode, shape.kv_len, True, True) for mode in MODES if ends]
    if not ends or shape.kv_len > blocks.keys:
        pieces += [blocks.straight(mode, shape.kv_len, False, True) for mode in MODES]
    return sum(queries * keys for queries, keys in pieces)


def _tiles(shape: Shape, generation: str) -> tuple[Tile, Tile]:
    """The chip's tiles of the mode "bound" and of the others, no larger than the queries and keys there are."""
    queries, keys = round_up(shape.q_len, LANES), round_up(shape.kv_len, LANES)
    bound, online = (Tile(min(q, queries), min(k, keys), lag) for q, k, lag in chip_of(generation).tiles)
    return bound, online


def _wanted(shape: Shape, generation: str, wanted: tuple[int, int, int]) -> Blocks:
    queries, keys, depth = wanted
    bound, online = _tiles(shape, generation)
    width = math.lcm(bound.queries, online.queries)
    depth = min(round_up(depth, LANES), round_up(shape.kv_len, LANES))
    queries = min(round_up(queries, width), round_up(shape.q_len, width))
    keys = min(round_up(keys, depth), round_up(shape.kv_len, depth))
    piece = _largest_piece(queries, keys, width, MOST_SCORES_ASKED)
    return Blocks(queries, keys, piece, *(replace(tile, keys=depth) for tile in (bound, online)))


def _price(blocks: Blocks, shape: Shape) -> float:
    """Bundles of one head, by what schedules of such kernels cost."""
    full, rest = divmod(shape.kv_len, blocks.keys)
    pieces = blocks.queries // blocks.piece
    step = blocks.queries * blocks.keys * PER_SCORE + pieces * PER_PIECE + PER_STEP
    last = blocks.queries * round_up(rest, blocks.bound.keys) * PER_SCORE + pieces * PER_PIECE + PER_STEP
    blocks_of_queries = -(-shape.q_len // blocks.queries)
    return blocks_of_queries * (full * step + (last if rest else 0) + blocks.queries * PER_QUERY)
