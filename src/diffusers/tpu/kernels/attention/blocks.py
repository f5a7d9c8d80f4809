"""Block sizes of the attention kernel: tuned ones, else the cheapest that fit VMEM by a cost model of its schedule.

`tuned.json` holds what `diffusers-tpu bench attention --tune` found with the compiler; the cost model chooses all others.
"""

import functools
import json
import math
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from ...chips.figures import MIB, chip_of
from ..pallas import LANES, round_up, vmem_room
from .softmax_modes import BOUND, MODES


TUNED = Path(__file__).with_name("tuned.json")

# The cost model, in bundles: from schedules of v6e at Wan's shapes (other generations: the same order).
PER_SCORE = 1540 / 2**20
PER_PIECE = 250  # the matrix units idle at the end of each piece
PER_STEP = 180  # a step of the grid
PER_QUERY = 0.25  # work before the first key and after the last

MOST_SCORES_ASKED = 5_600_000  # scores of a piece, for block sizes set by the user, on any chip
RARER_SCORES = 4_500_000  # scores of a piece in the rarer modes: compiles in some 10 s on two cores
AS_GOOD = 1.005  # times the lowest cost: up to this, blocks that compile sooner are preferred
MOST_QUERIES = 8192  # in a block, heads up to 128: the work before and after all keys is straight-line code


@dataclass(frozen=True)
class Tile:
    """Queries and keys of one product; `lag`: how many tiles scores are computed ahead of their exponentials."""

    queries: int
    keys: int
    lag: int


@dataclass(frozen=True)
class Blocks:
    """Block sizes of the kernel, in tokens.

    Attributes:
        queries, keys: of one grid step.
        piece: queries whose tiles, with all keys of the step, are straight-line code; a loop runs over pieces.
        bound, online: the tiles of mode "bound" and of the other two (see `softmax_modes`).
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
        """(queries, keys) of one piece in this mode. `cut`: it masks; `cut_at_end`: as of `Call`; `rare`: few blocks are cut."""
        tile, keys, share = self.tile(mode), self.keys, 1
        if cut and cut_at_end:  # one block of many
            blocks = -(-kv_len // keys)
            keys = round_up(kv_len - (blocks - 1) * keys, tile.keys)
            share = max(-(-2 * keys // self.keys), min(4, blocks // 4))
        elif cut:  # small pieces, so that there is little code
            share = self.piece if rare else 2
        elif mode != BOUND:  # rarer, and the running maximum takes twice the code
            share = max(2, -(-self.piece * keys // RARER_SCORES))
        tiles = self.piece // tile.queries
        fitting = (n for n in range(1, tiles + 1) if tiles % n == 0 and n * share <= tiles)
        return max(fitting, default=1) * tile.queries, keys


@dataclass(frozen=True)
class Shape:
    """What block sizes depend on. `masked`: last keys that a key mask may hide; `dense_bytes`: of an entry of `Mask.dense`."""

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
        """Heads fill whole rows of lanes: the kernel can then use the layout of linear layers."""
        return self.dim % LANES == self.out_dim % LANES == 0


def folded_parts(shape: Shape, generation: str | None) -> int:
    """`Call.folded`: 1 in float32; 2 in bfloat16 if the depth of the matrix unit has room for them; else 0.

    One more bfloat16 rounding of q would double the error of scores with standard deviation 4.
    """
    if shape.bytes == 4:
        return 1
    return 2 if 2 * shape.dim <= chip_of(generation).matrix_side and shape.dim % 16 == 0 else 0


def vmem_bytes(blocks: Blocks, shape: Shape) -> int:
    """An upper bound on the VMEM of a kernel with these blocks.

    Two buffers of each block of q^T [D, queries], k [keys, D], v^T [E, keys], the mask's parts and the output
    [E, queries]. The state: two rows of eight sublanes and E float32 per query. q times its factor [2 D, queries] and keys
    twice [keys, 2 D], whether or not the call uses them; q transposed [D, queries]; values without padding [E, keys]; the
    key mask's column [keys, 128]. What the compiler spills: scores and weights of lag + 2 tiles, and the rows of one.
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


def choose(shape: Shape, generation: str | None = None, wanted: tuple[int, int, int] | None = None) -> Blocks:
    """The blocks for a shape: `wanted` (`TPUConfig.attention_blocks`), else tuned ones, else the cheapest candidate.

    Raises ValueError if `wanted`, or the smallest candidate, does not fit VMEM; NotImplementedError for an unknown generation.
    """
    generation = chip_of(generation).generation
    if wanted is None:
        return _tuned().get(tuned_key(shape, generation)) or candidates(shape, generation)[0]
    blocks = _wanted(shape, generation, wanted)
    if vmem_bytes(blocks, shape) > vmem_room(generation):
        raise ValueError(
            f"expected attention blocks that fit {vmem_room(generation) / MIB:.0f} MiB of VMEM on {generation}, got"
            f" {wanted}, which take {vmem_bytes(blocks, shape) / MIB:.0f} MiB; use smaller ones, or None"
        )
    return blocks


def of_tiles(shape: Shape, generation: str | None, queries: int, keys: int) -> Blocks:
    """Blocks of exactly these queries and keys, as sparse attention needs them."""
    chip = chip_of(generation)
    bound, online = (Tile(math.gcd(q, queries), math.gcd(k, keys), lag) for q, k, lag in chip.tiles)
    width = math.lcm(bound.queries, online.queries)
    return Blocks(queries, keys, _largest_piece(queries, keys, width, _most_scores(shape, chip)), bound, online)


def _largest_piece(queries: int, keys: int, width: int, most: int) -> int:
    """The most queries of a piece that divide the block: tiles of `width` with at most `most` scores, or a single tile."""
    fitting = (n for n in range(width, queries + 1, width) if queries % n == 0 and n * keys <= most)
    return max(fitting, default=width)


def _most_scores(shape: Shape, chip) -> int:
    """Most scores of a piece: fewer in float32 (products are six of bfloat16, spills double) and for large heads (more code)."""
    most = chip.most_scores // (1 if shape.bytes == 2 else 10)
    return most * 256 // max(256, shape.dim + shape.out_dim)


def tuned_key(shape: Shape, generation: str) -> str:
    """The key of a shape in `tuned.json`."""
    return "-".join(map(str, (generation, *astuple(shape))))


@functools.cache
def _tuned() -> dict[str, Blocks]:
    return {key: from_list(value["blocks"]) for key, value in json.loads(TUNED.read_text()).items()}


def from_list(values: list) -> Blocks:
    """`Blocks` from an entry of `tuned.json`: three sizes and two tiles."""
    return Blocks(*values[:3], Tile(*values[3]), Tile(*values[4]))


@functools.lru_cache(1024)
def candidates(shape: Shape, generation: str) -> tuple[Blocks, ...]:
    """Blocks that fit VMEM, the cheapest by `_price` first. Raises ValueError if there are none."""
    bound, online = _tiles(shape, generation)
    unit_q, unit_k = (math.lcm(getattr(bound, axis), getattr(online, axis)) for axis in ("queries", "keys"))
    found = []
    most = _most_scores(shape, chip_of(generation))
    of_keys = range(unit_k, round_up(min(shape.kv_len, 16384), unit_k) + 1, unit_k)
    # masking is slow: if all keys that may be masked are in the last block, no other block has code for it
    fitting = [n for n in of_keys if shape.masked <= (shape.kv_len - 1) % n + 1]
    of_keys = fitting if fitting and shape.masked < shape.kv_len else of_keys
    longest = MOST_QUERIES * LANES // max(LANES, shape.dim, shape.out_dim)
    for keys in of_keys:
        for piece in range(unit_q, min(2048, round_up(shape.q_len, unit_q)) + 1, unit_q):
            if piece // unit_q % 2 and piece > unit_q:
                continue  # with an odd number of tiles one of two matrix units idles
            if piece * keys > max(most, unit_q * unit_k):
                break
            for queries in range(piece, max(piece, min(longest, round_up(shape.q_len, piece))) + 1, piece):
                blocks = Blocks(queries, keys, piece, bound, online)
                if vmem_bytes(blocks, shape) > vmem_room(generation):
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
    """Scores of all compiled pieces, a measure of compile time, if only the end is masked."""
    ends = shape.masked or shape.kv_len % blocks.keys
    pieces = [blocks.straight(mode, shape.kv_len, True, True) for mode in MODES if ends]
    if not ends or shape.kv_len > blocks.keys:
        pieces += [blocks.straight(mode, shape.kv_len, False, True) for mode in MODES]
    return sum(queries * keys for queries, keys in pieces)


def _tiles(shape: Shape, generation: str) -> tuple[Tile, Tile]:
    """The chip's tiles for mode "bound" and for the others, no larger than the call's queries and keys."""
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
    """Estimated bundles of one head."""
    full, rest = divmod(shape.kv_len, blocks.keys)
    pieces = blocks.queries // blocks.piece
    step = blocks.queries * blocks.keys * PER_SCORE + pieces * PER_PIECE + PER_STEP
    last = blocks.queries * round_up(rest, blocks.bound.keys) * PER_SCORE + pieces * PER_PIECE + PER_STEP
    blocks_of_queries = -(-shape.q_len // blocks.queries)
    return blocks_of_queries * (full * step + (last if rest else 0) + blocks.queries * PER_QUERY)
