"""The all-to-all of Ulysses on one chip: exchanges tokens for heads, and back.

Data is sent and received in the layout of linear layers, all heads of a token side by side; the kernels of `pieces` lay it out.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ..kept import exchanged
from ..pallas import LANES, ROWS, as_heads, by_token
from ..settings import current
from .key_bounds import KeyBounds
from .pieces import cut, divides, join, part, paste, takes


SHARES = ((3, 2), (1, 1), (2, 1), (3, 4))  # of heads in two groups; the exchange of the second's results is not hidden
# Of all chips, by generation: from here on a group's attention hides the next group's exchange. On v5e the weights of CogVideoX 5B,
# which are gathered on the same links, come later for it (17,920 tokens: 2 % longer).
LEAST_TOKENS = {None: 16_384, "v5e": 24_576}
TURNED = (True, False, True)  # q, k and v: whether the kernel takes tokens minor


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


def _tokens_minor(x: Float[Array, "B N T D"]) -> Float[Array, "B N*D T"]:
    return jnp.swapaxes(x, 2, 3).reshape(x.shape[0], -1, x.shape[2])
