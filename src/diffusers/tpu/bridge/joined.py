"""Concatenated sequences of which each chip of `sp` holds its part of every one, such as text and latents.

Upstream concatenates them along the tokens, for attention or for a whole block. In that order each chip would hold one run of the
result, and nearly all tokens would move between chips. Layers, norms and rotations compute each token by itself, and attention does
not depend on the order. So the result of `torch.cat` is deferred, computed with the tokens in the chips' order (first each
sequence's part of chip 0, then of chip 1, ...), and split where upstream splits it. Its values are read in upstream's order.
"""

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torchax.tensor import Tensor

from ..chips.sharding import taken_apart, together
from ..kernels.attention.masks import product_of
from ..kernels.settings import current, using
from . import autocast, norms
from .by_token import ReadsOthers, axes_of_tokens
from .made_of import beside, made_of, operands, same_as
from .views import WRITES_TO_FIRST, Step, as_view, storage


@dataclass(eq=False)
class Joined:
    """The deferred result of `torch.cat`, or of a function of one, and its views. The `source` of each: (this object, the tensor in
    the chips' order, its token axis).

    Attributes:
        sizes: tokens of each sequence, all multiples of `chips`.
        root: the deferred tensor that is no view; `compute` returns its values in upstream's order.
        views: its views in the order of creation: reference, index among the function's results, function, arguments.
        whole: the tensor that sequences were split from; they are views of it in torch too.
        parts: those sequences by index: tensor, its array when it was split off, view operator.
    """

    sizes: tuple[int, ...]
    chips: int
    root: Tensor | None = None
    compute: Callable[[], jax.Array] | None = None
    views: list[tuple[weakref.ref, int, Callable, tuple, dict]] = field(default_factory=list)
    whole: Tensor | None = None
    parts: dict[int, tuple[Tensor, jax.Array, Step]] = field(default_factory=dict)

    def deferred(self, x: Tensor, axis: int, compute: Callable[[], jax.Array] | None = None) -> Tensor:
        """A deferred tensor for x, which is in the chips' order."""
        result = x._env.deferred(jax.ShapeDtypeStruct(x.shape, x.jax().dtype), self.settle, (self, x, axis))
        if self.root is None:
            self.root, self.compute = result, compute or (lambda: jnp.concatenate(self.apart(x.jax(), axis), axis))
        return result

    def beside(self, x: Tensor, axis: int) -> Tensor:
        """A deferred tensor for x, which is in the chips' order and shares no storage with these."""
        return Joined(self.sizes, self.chips).deferred(x, axis)

    def settle(self):
        """Compute the values of the root and its views, and make the split-off sequences views of `whole`."""
        self.root.settle(self.compute())
        for ref, number, function, args, kwargs in self.views:
            if (view := ref()) is not None:
                with autocast.without(), self.root._env:
                    view.become(tree_leaves(function(*args, **kwargs))[number])
        parts, self.parts = self.parts, {}
        for part, array, step in parts.values():
            now = part.jax()
            as_view(self.whole, part, step)
            if now is not array:
                part._elem = now

    def see_written(self):
        """Apply writes to sequences that were split off to the tensor that they were split from."""
        if all(part.jax() is array for part, array, _ in self.parts.values()):
            return
        if self.whole is not self.root or any(ref() is not None for ref, *_ in self.views):
            return self.settle()
        _, x, axis = self.root.source
        sequences = self.apart(x.jax(), axis)
        for number, (part, _, step) in self.parts.items():
            sequences[number] = part.jax()
            self.parts[number] = part, part.jax(), step
        self.root.source = self, Tensor(together(sequences, axis, self.chips), x._env), axis
        self.compute = lambda: jnp.concatenate(sequences, axis)

    def result(self, function: Callable, args: tuple, kwargs: dict):
        """The function's result, deferred; NotImplemented where it depends on the order of tokens, or writes."""
        leaves, spec = tree_flatten((args, kwargs))
        of = {n: leaf.source for n, leaf in enumerate(leaves) if is_joined(leaf)}
        name = getattr(getattr(function, "overloadpacket", function), "__name__", "")
        if any(family.sizes != self.sizes for family, *_ in of.values()) or WRITES_TO_FIRST.fullmatch(name):
            return NotImplemented
        if function is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if (parts := self._taken_apart(function, name, *args, **kwargs)) is not NotImplemented:
            return parts
        given, axes, behind = [*leaves], {}, {x.ndim - axis for _, x, axis in of.values()}
        for n, leaf in enumerate(leaves):
            if n in of:
                _, given[n], axes[n] = of[n]
            elif isinstance(leaf, Tensor) and len(behind) == 1 and leaf.ndim >= min(behind):
                axis = leaf.ndim - min(behind)
                if leaf.shape[axis] == sum(self.sizes):  # one value per token
                    given[n], axes[n] = self.in_order(leaf, axis), axis
        if (found := _axes_of_results(function, given, spec, axes)) is None:
            return NotImplemented
        with autocast.without(), self.root._env:
            args_in_order, kwargs_in_order = tree_unflatten(given, spec)
            results, form = tree_flatten(function(*args_in_order, **kwargs_in_order))
        results = [self._standing(x, found[n], leaves, (n, function, args, kwargs)) for n, x in enumerate(results)]
        return tree_unflatten(results, form)

    def _standing(self, x: Tensor, axis: int, leaves: list, made_by: tuple) -> Tensor:
        """A deferred tensor for a result x: the argument in `leaves` that x is, a view of one if they share storage, or new."""
        given = [leaf for leaf in leaves if is_joined(leaf)]
        if (same := next((leaf for leaf in given if leaf.source[1] is x), None)) is not None:
            return same
        base = next((leaf.source[0] for leaf in given if storage(leaf.source[1]) is storage(x)), None)
        if base is None:
            return self.beside(x, axis)
        base.views.append((weakref.ref(view := base.deferred(x, axis)), *made_by))
        return view

    def _attention(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):
        given = [x.source if is_joined(x) else (None, x, x.ndim - 2) for x in (query, key, value)]
        known = all(axis == x.ndim - 2 for _, x, axis in given) and given[1][0] and given[2][0]
        if dropout_p or is_causal or not known:
            return NotImplemented
        masks = () if attn_mask is None else product_of(attn_mask.jax()) or (attn_mask.jax(),)
        for axis, of in ((-2, given[0][0]), (-1, self)):
            if of is not None:
                masks = [
                    m if m.shape[axis] == 1 else self.in_order(Tensor(m, attn_mask._env), m.ndim + axis).jax()
                    for m in masks
                ]
        attn_mask = attn_mask if attn_mask is None else Tensor(functools.reduce(operator.mul, masks), attn_mask._env)
        with autocast.without(), self.root._env:
            tensors, how = (x for _, x, _ in given), {"scale": scale, "enable_gqa": enable_gqa}
            answer = F.scaled_dot_product_attention(*tensors, attn_mask, **how)
        return answer if given[0][0] is None else self.beside(answer, answer.ndim - 2)

    def _taken_apart(self, function: Callable, name: str, whole=None, *args, **kwargs):
        """One of the sequences, or all, where the function slices or splits them so; else NotImplemented."""
        if not is_joined(whole):
            return NotImplemented
        family, x, axis = whole.source
        if family.whole is not None and family.whole is not whole:
            return NotImplemented

        def parts(numbers: Iterable[int], several: bool = True) -> tuple[Tensor, ...]:
            family.whole = whole
            for number in numbers:
                part = Tensor(self.apart(x.jax(), axis)[number], x._env)
                step = Step(function, args, kwargs, number if several else None)
                family.parts.setdefault(number, (part, part.jax(), step))
            return tuple(family.parts[number][0] for number in numbers)

        if name in ("split", "split_with_sizes"):
            sizes, dim, *_ = (*args, *kwargs.values(), 0)
            same = not isinstance(sizes, int) and tuple(sizes) == self.sizes and dim % x.ndim == axis
            return parts(range(len(sizes))) if same else NotImplemented
        key = args[0] if name == "__getitem__" and isinstance(args[0], tuple) else args[:1]
        if name != "__getitem__" or not all(isinstance(part, (slice, type(...))) for part in key):
            return NotImplemented
        at = key.index(...) if ... in key else len(key)
        key = (*key[:at], *[slice(None)] * (x.ndim - len(key) + (... in key)), *key[at + 1 :])
        ends, taken = itertools.accumulate(self.sizes, initial=0), key[axis].indices(x.shape[axis])
        number = next((n for n, pair in enumerate(itertools.pairwise(ends)) if (*pair, 1) == taken), None)
        if number is None or any(part != slice(None) for n, part in enumerate(key) if n != axis):
            return NotImplemented
        return parts([number], several=False)[0]

    def in_order(self, x: Tensor, axis: int) -> Tensor:
        """x, which has its tokens in upstream's order, in the chips' order."""
        ends = [*itertools.accumulate(self.sizes)][:-1]
        return Tensor(together(jnp.split(x.jax(), ends, axis), axis, self.chips), x._env)

    def apart(self, x: jax.Array, axis: int) -> list[jax.Array]:
        """The sequences that `together` made x of."""
        return taken_apart(x, axis, self.sizes, self.chips)


def is_joined(x) -> bool:
    """Whether x is a deferred tensor of sequences in the chips' order."""
    if not (getattr(x, "waits", False) and x.source and isinstance(x.source[0], Joined)):
        return False
    x.source[0].see_written()
    return x.waits


def cat(tensors, dim=0, **kwargs):
    """`torch.cat`; deferred along the tokens of [B, T, C], [B, T, N, D] or [B, N, T, D], where chips share and divide them."""
    plain, settings, first = torch.ops.aten.cat.default, current(), tensors[0]
    shared = settings.sequence and settings.mesh is not None and not settings.pad_tokens and settings.window is None
    chips = settings.mesh.shape["sp"] if shared else 1
    axis = dim % first.ndim if first.ndim in (3, 4) else 0
    if not kwargs and len(tensors) == 2 and axis == first.ndim - 1 > 1 and all(isinstance(t, Tensor) for t in tensors):
        result = plain(tensors, dim)
        alike = all(t.dtype == result.dtype and t.ndim == result.ndim for t in tensors)
        return beside(result, *(t.jax() for t in tensors)) if alike else result
    if kwargs or len(tensors) == 1 or not 0 < axis < first.ndim - 1:
        return plain(tensors, dim, **kwargs)
    if chips == 1:
        return _of_normed(plain(tensors, dim), tensors)
    arrays = [t.jax() for t in tensors if isinstance(t, Tensor) and t.ndim == first.ndim and t.dtype == first.dtype]
    divided = all(isinstance(x, jax.core.Tracer) and x.shape[axis] and x.shape[axis] % chips == 0 for x in arrays)
    if len(arrays) < len(tensors) or not divided:
        return plain(tensors, dim)
    joined = Joined(tuple(x.shape[axis] for x in arrays), chips)
    inner = _of_normed(Tensor(together(arrays, axis, chips), first._env), tensors)
    return joined.deferred(inner, axis, lambda: plain(tensors, dim).jax())


def _of_normed(result, tensors):
    """`result`, the concatenation of tensors; records them where one of them was normed."""
    of_norms = all(isinstance(t, Tensor) for t in tensors) and any(norms.normed(t) is not None for t in tensors)
    return made_of(result, cat, *map(same_as, tensors)) if of_norms else result


def rotated(x, tables, use_real=True, use_real_unbind_dim=-1, sequence_dim=2):
    """As `norms.rotated`, also in the chips' order, and for heads whose sequences were normed separately."""
    how = use_real, use_real_unbind_dim, sequence_dim
    joined, inner, axis = x.source if is_joined(x) else (None, x, sequence_dim)
    of_tokens = all(isinstance(table, Tensor) and table.ndim == 2 for table in tables)
    if joined is not None and (axis != sequence_dim or not of_tokens):
        return None
    if (parts := operands(inner, cat)) is not None and of_tokens:
        ends = list(itertools.accumulate(part.shape[sequence_dim] for part in parts))[:-1]
        pieces = zip(parts, *(jnp.split(table.jax(), ends) for table in tables))
        found = [
            (part, of, norms.rotated(part, [Tensor(table, x._env) for table in of], *how)) for part, *of in pieces
        ]
        if all(result is None for *_, result in found):
            return None
        apart = use_real_unbind_dim == -2
        arrays = [
            norms.plainly_rotated(part.jax(), *of, apart) if one is None else one.jax() for part, of, one in found
        ]
        result = Tensor(together(arrays, sequence_dim, joined.chips if joined else 1), x._env)
    else:
        tables = tables if joined is None else tuple(joined.in_order(table, 0) for table in tables)
        result = norms.rotated(inner, tables, *how)
    return result if result is None or joined is None else joined.beside(result, axis)


def _axes_of_results(function: Callable, given: list, spec: TreeSpec, axes: dict[int, int]) -> list[int] | None:
    """The token axis of each tensor that the function returns; None where a token depends on others, or an axis is not found.

    `axes`: the token axes of the arguments, by index.
    """
    tensors = [n for n, leaf in enumerate(given) if isinstance(leaf, Tensor)]

    def plainly(*arrays):
        copies = {n: Tensor(array, given[n]._env) for n, array in zip(tensors, arrays)}
        args, kwargs = tree_unflatten([copies.get(n, leaf) for n, leaf in enumerate(given)], spec)
        with autocast.without(), given[tensors[0]]._env:
            results = tree_leaves(function(*args, **kwargs))
        if not all(isinstance(x, Tensor) for x in results):
            raise ReadsOthers
        return [x.jax() for x in results]

    avals = [jax.ShapeDtypeStruct(given[n].shape, given[n].jax().dtype) for n in tensors]
    try:
        with using(replace(current(), layers="xla")):  # whose equations `axes_of_tokens` supports
            jaxpr = jax.make_jaxpr(plainly)(*avals)
        found = axes_of_tokens(jaxpr.jaxpr, [axes.get(n) for n in tensors])
    except Exception:  # it is raised again where the function runs on values
        return None
    return found if found and None not in found else None
