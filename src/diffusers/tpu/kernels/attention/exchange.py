"""The all-to-all of Ulysses on one chip: exchanges tokens for heads, and back.

Data is sent and received in the layout of linear layers, all heads of a token side by side. XLA takes two passes over memory
to cut columns into pieces, one per chip to join pieces, and one to transpose tokens to lanes; each kernel here takes one.
After joining, each chip's tokens begin at a whole tile of `LANES`; the remainders of all chips (`rest`) follow at the end.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from ...chips.devices import QUEUED_BY
from ..kept import exchanged
from ..pallas import LANES, ROWS, by_token, call_kernel, cost, in_steps, round_up
from ..settings import current
from .key_bounds import KeyBounds


BLOCK_BYTES = 4 << 20  # of one array in VMEM; a kernel has two, or three with the remainders
SHARES = ((3, 2), (1, 1), (2, 1), (3, 4))  # of heads in two groups; the exchange of the second's results is not hidden
# Of all chips, by generation: from here on a group's attention hides the next group's exchange. On v5e the weights of CogVideoX 5B,
# which are gathered on the same links, come later for it (17,920 tokens: 2 % longer).
LEAST_TOKENS = {None: 16_384, "v5e": 24_576}
TURNED = (True, False, True)  # q, k and v: whether the kernel takes tokens minor
VMEM_BYTES = 3 * 2 * BLOCK_BYTES + (8 << 20)  # two buffers of each array, and the compiler's own


@dataclass(frozen=True)
class Exchange:
    """How the tensors of one attention call are exchanged over the `chips` of the axis "ulysses".

    Attributes:
        in_order: rows must keep the order of the sequence. False if neither a mask nor their position matters.
        interpret: of the kernels that lay out what is sent and received; None: XLA does it.
        shares: of heads, by group. While attention of one group runs, q, k and v of the next are sent in a single exchange, as only
            one runs at a time.
    """

    chips: int
    in_order: bool
    interpret: object
    shares: tuple[int, ...] = (1,)

    @classmethod
    def of(cls, q, k, v, chips: int, in_order: bool, interpret, grouped: bool = False, padding: int = 0) -> "Exchange":
        """The exchange of these tensors, by kernels if they support all three: rows must share an order.

        One chip only joins text and latents, in which order is kept; kernels do so for heads that do not fill whole registers.

        Args:
            grouped: by groups of heads.
            padding: rows at the end of the last chip's that must come last; they do if they are no more than what it has left of tiles.
        """
        tokens = q.shape[2]
        as_layers_leave_them = chips == 1 and q.shape[3] % LANES == v.shape[3] % LANES == 0
        kept = chips > 1 and (in_order or padding > tokens % LANES)
        if interpret is None or as_layers_leave_them or not all(takes(x, chips, kept) for x in (q, k, v)):
            return cls(chips, in_order or padding > tokens % ROWS, None)
        least = LEAST_TOKENS.get(current().generation, LEAST_TOKENS[None])
        grouped = grouped and chips > 1 and chips * tokens >= least and q.shape == k.shape == v.shape
        grouped = grouped and not current().differentiable
        shares = (shares for shares in SHARES if grouped and divides(shares, chips, q.shape[1], q.shape[3]))
        return cls(chips, in_order, interpret, next(shares, (1,)))

    @property
    def gives(self) -> dict:
        """Arguments of our kernel for the layout of its operands and result between exchanges."""
        return {} if self.interpret is None else {"turned": True}

    def own(self, x: Float[Array, "B N ..."]) -> list[Float[Array, "B N/W/G ..."]]:
        """This chip's heads of each group, from an array of all heads."""
        if self.chips == 1:
            return [x]
        chip, found, first = lax.axis_index("ulysses"), [], 0
        for share in self.shares:
            heads = x.shape[1] * share // (sum(self.shares) * self.chips)
            found.append(lax.dynamic_slice_in_dim(x, first + chip * heads, heads, 1))
            first += heads * self.chips
        return found

    def attended(
        self, attend: Callable, q, k, v, behind: tuple[list, ...] | None = None, bounds_of: Callable | None = None
    ) -> tuple[Float[Array, "B N T D"], list[Float[Array, "B N/W/G L D"]]]:
        """Runs `attend(group, q, k, v, bounds)` on all tokens and this chip's heads, by group, and exchanges the results back.

        Returns (result for this chip's tokens and all heads, by group the result for tokens `behind` and this chip's heads).
        Chips send in this order: mean of keys, keys, queries, maxima of keys, values, then what the next group needs, and each
        group's results. The compiler would otherwise choose any order, and send too late to hide it.

        Args:
            behind: tokens of q, k and v, by group, that follow the tokens of all chips.
            bounds_of: returns the key bounds of all heads; its argument is `meanwhile` of `key_bounds`. `attend` gets those of this
                chip's heads as keyword arguments. None: there are none.
        """
        others = [(None,) * 3 for _ in self.shares] if behind is None else [*zip(*behind)]
        length = 0 if behind is None else behind[0][0].shape[2]
        if self.chips == 1 or self.interpret is None or current().differentiable:
            there = (self.to_heads(*each) for each in zip((q, k, v), TURNED, others[0]))
            out = attend(0, *there, self._own_bounds(bounds_of and bounds_of())[0])
            return self.to_sequence(out, length), [out[:, :, out.shape[2] - length :]]
        tokens, dims, rows = q.shape[2], [x.shape[3] for x in (q, k, v)], [by_token(x) for x in (q, k, v)]
        q, k, v = (cut([x], self.chips, self.interpret, 0, self.shares) for x in rows)

        def meanwhile(mean, maxima):
            nonlocal q, k
            k, mean = lax.optimization_barrier((k, mean))
            q, k = lax.optimization_barrier((q, self._traded(k)))
            q, maxima = lax.optimization_barrier((self._traded(q), maxima))
            return mean, maxima

        bounds = meanwhile(None, None)[0] if bounds_of is None else bounds_of(meanwhile)
        v, q, bounds = lax.optimization_barrier((v, q, bounds))
        sent, results, answers = [(x, 0, 1) for x in (q, k, self._traded(v))], [], []
        for group, of_group in enumerate(self._own_bounds(bounds)):
            own = (None if x is None else by_token(x) for x in others[group])
            there = [
                join(pieces, dim, turned, self.interpret, last, *place)
                for (pieces, *place), dim, turned, last in zip(sent, dims, TURNED, own)
            ]
            if following := group + 1 < len(self.shares):
                pieces = cut(rows, self.chips, self.interpret, group + 1, self.shares)
                there, pieces = lax.optimization_barrier((there, pieces))
                pieces = self._traded(pieces)
            there = (as_heads(x, dim, turned) for x, dim, turned in zip(there, dims, TURNED))
            out = _tokens_minor(attend(group, *there, of_group))
            if following:
                out, pieces = lax.optimization_barrier((out, pieces))
                sent = [(pieces, place, 3) for place in range(3)]
            out, results = lax.optimization_barrier((out, results))
            results.append(self._traded(part(out, self.chips, tokens, self.interpret)))
            answers.append(as_heads(out[:, :, self.chips * tokens :], dims[2], turned=True))
        return self._of_tokens(paste(results, self.interpret), dims[2]), answers

    def _own_bounds(self, bounds: KeyBounds | None) -> list[dict]:
        """Bounds of this chip's heads, by group, as keyword arguments."""
        if bounds is None:
            return [{} for _ in self.shares]
        return [{"bounds": KeyBounds(*parts)} for parts in zip(*map(self.own, bounds))]

    def to_heads(
        self, x: Float[Array, "B N T D"], turned: bool = False, behind: Float[Array, "B N/W L D"] | None = None
    ) -> Float[Array, "B N/W W*T+L D"]:
        """Exchanges all heads of this chip's tokens for all tokens of this chip's heads.

        Args:
            turned: the result is wanted with tokens minor.
            behind: tokens of this chip's heads to append after those of all chips.
        """
        if self.chips == 1 and behind is None:
            return x
        length = 0 if behind is None else behind.shape[2]

        def back(_, gradient):
            of_behind = None if behind is None else gradient[:, :, gradient.shape[2] - length :]
            return self._to_sequence(gradient, length), of_behind

        out = _permuted(functools.partial(self._to_heads, turned), back, x, behind)
        return out if self.chips == 1 else exchanged(out)

    def to_sequence(self, x: Float[Array, "B N/W W*T+L D"], behind: int = 0) -> Float[Array, "B N T D"]:
        """The inverse of `to_heads`, for x with tokens minor; drops the last `behind` tokens."""
        batch, heads, _, dim = x.shape
        if self.chips == 1 and not behind:
            return x

        def back(_, gradient):
            others = jnp.zeros((batch, heads, behind, dim), x.dtype) if behind else None
            return (self._to_heads(True, gradient, others),)

        return _permuted(functools.partial(self._to_sequence, behind=behind), back, x)

    def _to_heads(self, turned: bool, x, behind):
        x, dim, behind = by_token(x), x.shape[3], None if behind is None else by_token(behind)
        if self.interpret is not None:
            pieces = x[None] if self.chips == 1 else self._traded(cut([x], self.chips, self.interpret))
            return as_heads(join(pieces, dim, turned, self.interpret, behind), dim, turned)
        if self.chips > 1:  # split by columns: the equal reshape took the compiler a minute (v6e, 8,190 rows)
            x = self._joined(self._traded(jnp.stack(jnp.split(x, self.chips, 2))))
        return as_heads(x if behind is None else jnp.concatenate([x, behind], 1), dim)

    def _to_sequence(self, x, behind: int):
        tokens, dim = x.shape[2] - behind, x.shape[3]
        if self.interpret is not None:
            pieces = part(_tokens_minor(x), self.chips, tokens // self.chips, self.interpret)
            x = pieces[0] if self.chips == 1 else paste([self._traded(pieces)], self.interpret)
            return self._of_tokens(x, dim)
        if self.chips == 1:
            return x[:, :, :tokens]
        pieces = self._traded(self._parted(by_token(x[:, :, :tokens])))
        return self._of_tokens(jnp.concatenate(list(pieces), 2), dim)

    def _of_tokens(self, x: Float[Array, "B T C"], dim: int) -> Float[Array, "B N T D"]:
        # Without the barrier the compiler makes tokens minor here, for the heads' axis, and transposes back for the next layer.
        return as_heads(lax.optimization_barrier(x), dim)

    def _traded(self, pieces):
        return lax.all_to_all(pieces, "ulysses", split_axis=0, concat_axis=0, tiled=True)

    def _joined(self, x):
        """Joins the rows of all chips, [W, B, T, C] -> [B, W T, C]; unless `in_order`, rows that fill no tile come last.

        Otherwise a chip's rows would begin within a tile: the copy that shifts them takes the compiler 25 s a tensor
        (v6e, 18,900 rows).
        """
        chips, batch, tokens, width = x.shape
        fill = self._fill(tokens)
        last = jnp.moveaxis(x[:, :, fill:], 0, 1).reshape(batch, chips * (tokens - fill), width)
        return jnp.concatenate([*x[:, :, :fill], last], 1)

    def _parted(self, x):
        """The inverse of `_joined`."""
        chips, (batch, tokens, width) = self.chips, x.shape
        tokens = tokens // chips
        fill = self._fill(tokens)
        last = x[:, chips * fill :].reshape(batch, chips, tokens - fill, width)
        return jnp.stack([jnp.concatenate([x[:, i * fill : (i + 1) * fill], last[:, i]], 1) for i in range(chips)])

    def _fill(self, tokens: int) -> int:
        """How many of a chip's rows `_joined` puts first; the others come last."""
        return tokens if self.in_order or tokens < ROWS else tokens - tokens % ROWS


def _permuted(run, back, *given) -> Array:
    """`run`, which only moves elements, on these arrays; `back` moves their gradients back."""
    if current().differentiable:
        plain, run = run, jax.custom_vjp(run)
        run.defvjp(lambda *given: (plain(*given), None), back)
    return run(*given)


def as_heads(x, dim: int, turned: bool = False) -> Float[Array, "B N T D"]:
    """[B, N, T, D] from [B, T, N D], or if `turned` from [B, N D, T], or from itself."""
    if x.ndim == 4:
        return x
    if turned:
        return jnp.swapaxes(x.reshape(x.shape[0], x.shape[1] // dim, dim, x.shape[2]), 2, 3)
    return jnp.swapaxes(x.reshape(*x.shape[:2], x.shape[2] // dim, dim), 1, 2)


def _tokens_minor(x: Float[Array, "B N T D"]) -> Float[Array, "B N*D T"]:
    return jnp.swapaxes(x, 2, 3).reshape(x.shape[0], -1, x.shape[2])


def takes(x: Float[Array, "B N T D"], chips: int, in_order: bool) -> bool:
    """Whether kernels support heads [B, N, T, D]: half registers of each chip, and tokens that may be reordered or fill whole tiles."""
    _, heads, tokens, dim = x.shape
    whole = heads % chips == 0 and heads // chips * dim % (LANES // 2) == 0
    return whole and tokens >= LANES and not (in_order and tokens % LANES)


def divides(shares: tuple[int, int], chips: int, heads: int, dim: int) -> bool:
    """Whether heads can be sent in two groups: the blocks that the second is cut from, and its tensors side by side, fill registers."""
    columns = heads * dim // (sum(shares) * chips)
    whole = heads % (sum(shares) * chips) == 0
    return whole and shares[1] * columns % LANES == chips * math.gcd(*shares) * columns % LANES == 0


def cut(
    tensors: list[Float[Array, "B T C"]], chips: int, interpret, group: int = 0, shares: tuple[int, ...] = (1,)
) -> Array:
    """Columns of one group in pieces, one per chip; tensors of one shape lie side by side: [W, B, T, N C / W]."""
    batch, tokens, columns = tensors[0].shape
    unit, share, before = columns // (sum(shares) * chips), shares[group], sum(shares[:group])
    rows = _rows_of_block(len(tensors) * chips * share * unit * tensors[0].dtype.itemsize)
    of_block = chips * math.gcd(share, before)  # in units; a group is several whole blocks
    blocks = range(chips * before // of_block, chips * (before + share) // of_block)

    def kernel(r):
        def some(at):
            for chip in range(chips):
                own = [divmod(chip * share + n, of_block) for n in range(share)]  # (block, unit of it)
                found = (
                    getattr(r, f"x{place}_{block}")[at, n * unit : (n + 1) * unit]
                    for place in range(len(tensors))
                    for block, n in own
                )
                r.o[chip, at, :] = jnp.concatenate([*found], 1)

        in_steps(rows, math.gcd(rows, LANES), some)

    def spec(block: int):
        return pl.BlockSpec((None, rows, of_block * unit), lambda b, t: (b, t, block))

    pairs = itertools.product(enumerate(tensors), enumerate(blocks))
    operands = {f"x{place}_{n}": (x, spec(block)) for (place, x), (n, block) in pairs}
    shape, grid = (chips, batch, tokens, len(tensors) * share * unit), (batch, pl.cdiv(tokens, rows))
    out_spec = pl.BlockSpec((chips, None, rows, shape[3]), lambda b, t: (0, b, t, 0))
    name = "exchange_cut" if len(tensors) == 1 else QUEUED_BY
    return _call(kernel, name, grid, operands, shape, out_spec, interpret)


def paste(pieces: list[Float[Array, "W B T C"]], interpret) -> Float[Array, "B T W*C"]:
    """The inverse of `cut`, with all groups side by side."""
    chips, batch, tokens, _ = pieces[0].shape
    columns = chips * sum(x.shape[3] for x in pieces)
    rows = _rows_of_block(columns * pieces[0].dtype.itemsize)

    def kernel(r):
        def some(at):
            found = (getattr(r, f"x{group}")[chip, at, :] for group in range(len(pieces)) for chip in range(chips))
            r.o[at, :] = jnp.concatenate([*found], 1)

        in_steps(rows, math.gcd(rows, LANES), some)

    def block(x):
        return pl.BlockSpec((chips, None, rows, x.shape[3]), lambda b, t: (0, b, t, 0))

    operands = {f"x{group}": (x, block(x)) for group, x in enumerate(pieces)}
    out_spec = pl.BlockSpec((None, rows, columns), lambda b, t: (b, t, 0))
    shape, grid = (batch, tokens, columns), (batch, pl.cdiv(tokens, rows))
    return _call(kernel, "exchange_paste", grid, operands, shape, out_spec, interpret)


def _rows_of_block(row_bytes: int) -> int:
    return max(16, BLOCK_BYTES // row_bytes // LANES * LANES)


def join(
    pieces: Float[Array, "W B T N*C"],
    dim: int,
    turned: bool,
    interpret,
    behind: Float[Array, "B L C"] | None = None,
    place: int = 0,
    places: int = 1,
) -> Array:
    """Tokens of all chips, then those of `behind`, as the kernel reads them without a copy.

    [B, C, W T + L] if `turned`; else [B, W T + L, C] for heads that fill whole registers, and [B, C / D, W T + L, D] for others.
    `place`: which of the `places` tensors that were cut together.
    """
    chips, batch, tokens, width = pieces.shape
    width //= places
    by_head = not turned and dim % LANES != 0
    rows, whole, rest = _blocks(
        tokens, (width // dim * round_up(dim, LANES) if by_head else width) * pieces.dtype.itemsize
    )
    rest = chips * rest + (0 if behind is None else behind.shape[1])
    last = -(-rest // rows)  # blocks of the remainders

    def block(b, i):
        i = jnp.minimum(i, chips * whole - 1)
        return lax.div(i, whole), b, lax.rem(i, whole), place

    def laid_out(batch, tokens, of=lambda size: size):
        if by_head:
            return batch, of(width // dim), tokens, of(dim)
        return (batch, of(width), tokens) if turned else (batch, tokens, of(width))

    def of_tokens(index):
        return pl.BlockSpec(laid_out(None, rows), lambda b, i: laid_out(b, index(i), lambda size: 0))

    operands = {"x": (pieces, pl.BlockSpec((None, None, rows, width), block))}
    if rest:
        left = jnp.moveaxis(pieces[:, :, whole * rows :, place * width : (place + 1) * width], 0, 1).reshape(
            batch, -1, width
        )
        left = left if behind is None else jnp.concatenate([left, behind], 1)
        left = jnp.pad(left, ((0, 0), (0, last * rows - rest), (0, 0)))
        spec = of_tokens(lambda i: jnp.maximum(i - chips * whole, 0))
        left = as_heads(left, dim) if by_head else jnp.swapaxes(left, 1, 2) if turned else left
        operands["left"] = left, spec

    def kernel(r):
        def take(ref):
            r.o[...] = ref[...]

        def by_heads():
            for n in range(width // dim):
                r.o[n] = r.x[:, n * dim : (n + 1) * dim]

        own = by_heads if by_head else functools.partial(_turn, r.x, r.o) if turned else functools.partial(take, r.x)
        if not rest:
            return own()
        pl.when(pl.program_id(1) < chips * whole)(own)
        pl.when(pl.program_id(1) >= chips * whole)(functools.partial(take, r.left))

    shape, grid = laid_out(batch, chips * whole * rows + rest), (batch, chips * whole + last)
    return _call(kernel, "exchange_join", grid, operands, shape, of_tokens(lambda i: i), interpret)


def part(x: Float[Array, "B C W*T+L"], chips: int, tokens: int, interpret) -> Float[Array, "W B T C"]:
    """The inverse of `join` with `turned`, for `tokens` of each chip; drops the tokens behind them."""
    batch, width, _ = x.shape
    rows, whole, rest = _blocks(tokens, width * x.dtype.itemsize)
    spec = pl.BlockSpec((None, width, rows), lambda w, b, i: (b, 0, w * whole + jnp.minimum(i, whole - 1)))
    operands = {"x": (x, spec)}
    if rest:
        left = x[:, :, chips * whole * rows : chips * tokens].reshape(batch, width, chips, rest).transpose(2, 0, 3, 1)
        operands["left"] = left, pl.BlockSpec((None, None, rest, width), lambda w, b, i: (w, b, 0, 0))

    def kernel(r):
        def take():
            r.o[:rest] = r.left[...]

        if not rest:
            return _turn(r.x, r.o)
        pl.when(pl.program_id(2) < whole)(functools.partial(_turn, r.x, r.o))
        pl.when(pl.program_id(2) == whole)(take)

    shape, grid = (chips, batch, tokens, width), (chips, batch, whole + bool(rest))
    out_spec = pl.BlockSpec((None, None, rows, width), lambda w, b, i: (w, b, i, 0))
    return _call(kernel, "exchange_part", grid, operands, shape, out_spec, interpret)


def _blocks(tokens: int, row_bytes: int) -> tuple[int, int, int]:
    """(tokens of a block, whole blocks of a chip, tokens left over): the largest blocks that divide a chip's whole tiles."""
    tiles = tokens // LANES
    most = max(1, BLOCK_BYTES // (LANES * row_bytes))
    tiles_a_block = max(n for n in range(1, min(most, tiles) + 1) if tiles % n == 0)
    return tiles_a_block * LANES, tiles // tiles_a_block, tokens % LANES


def _turn(x_ref, o_ref):
    """o = x^T, `LANES` rows of x at a time, or as many columns."""
    rows, columns = x_ref.shape

    def turn_rows(at):
        o_ref[:, at] = x_ref[at, :].T

    def turn_columns(at):
        o_ref[at, :] = x_ref[:, at].T

    if rows % LANES == 0:
        in_steps(rows, LANES, turn_rows)
    else:
        in_steps(columns, LANES, turn_columns)


def _call(kernel, name: str, grid, operands: dict, shape, out_spec, interpret) -> Array:
    o = jax.ShapeDtypeStruct(shape, next(iter(operands.values()))[0].dtype)
    outputs, how = {"o": (o, out_spec)}, {"parallel": len(grid), "work": cost(o, o)}
    return call_kernel(kernel, name, grid, operands, outputs, interpret=interpret, vmem_bytes=VMEM_BYTES, **how)["o"]
