"""Indexing: reads and writes of parts of a tensor, where torchax 0.0.13 differs from torch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils._pytree import tree_map_only
from torchax.tensor import Tensor

from ..idioms.devices import inside
from ..kernels.pallas import LANES
from ..kernels.settings import current
from .host_values import as_host, bounded
from .made_of import made_of, operands
from .on_host import NotTaken
from .views import Step, as_view, base_of, has_values


aten = torch.ops.aten


def register(env, over):
    """Register every operator of this file in the environment. `over`: as in `operators.register`."""
    ours = {
        aten.expand.default: over(_expand, aten.expand.default),
        aten.repeat.default: over(_repeat, aten.repeat.default),
        aten.gather.default: over(_gather, aten.gather.default),
        aten.index_put.default: over(_index_put, aten.index_put.default),
        aten.embedding.default: over(_embedding, aten.embedding.default),
        aten.searchsorted.Tensor: searchsorted,
        torch.Tensor.repeat_interleave: repeat_interleave,
        torch.take_along_dim: take_along_dim,
        torch.Tensor.take_along_dim: take_along_dim,
    }
    for function, operator in ours.items():
        env.override_op_definition(function, operator)
    getitem = torch.Tensor.__getitem__
    env.override_op_definition(getitem, over(_get_item, getitem))
    Tensor.__setitem__ = set_item


def _get_item(plain, self, key):
    """torchax's operator; slices and numbers give a view (`views`)."""
    parts = _parts(key)
    if any(isinstance(part, (list, torch.Tensor, jax.Array)) for part in parts):
        return plain(self, key)
    array = self.jax()
    _check_places(array.shape, parts)
    of_a_list = type(key) is int and array.ndim > 0 and -len(array) <= key < len(array) and has_values(array)
    part = _entry(array, key % len(array)) if of_a_list else array[key]
    if (everywhere := operands(base_of(self), whole_on_chips)) is not None:
        part = jax.lax.with_sharding_constraint(part, *everywhere)
    part = Tensor(part, self._env)
    named = any(isinstance(one, (bool, np.ndarray)) for one in parts)
    return part if named else as_view(self, part, Step(torch.Tensor.__getitem__, (key,), {}))


def whole_on_chips(weight: Tensor, everywhere: jax.sharding.Sharding) -> Tensor:
    """The weight, which every chip has; records this sharding, which its slices keep. The compiler would cut a table of positions for
    the chips of the sequence that it is added to, and exchange what lies elsewhere (Stable Diffusion 3.5 medium: 2.2 of 11.7 ms)."""
    return made_of(weight, whole_on_chips, everywhere)


def _parts(key) -> tuple:
    return key if isinstance(key, tuple) else (key,)


def _check_places(shape: tuple[int, ...], parts: tuple):
    """Raises NotTaken for an index beyond an axis, where JAX reads the last entry or writes nothing, and for a negative step."""
    try:
        np.broadcast_to(np.int8(0), shape)[parts]
    except IndexError as error:
        raise NotTaken from error
    if any(isinstance(part, slice) and isinstance(part.step, int) and part.step < 0 for part in parts):
        raise NotTaken


@jax.jit
def _entry(array: jax.Array, place: int) -> jax.Array:
    """`array[place]` as one program; outside of a trace JAX runs several operations for it."""
    return jax.lax.dynamic_index_in_dim(array, place, keepdims=False)


def set_item(self, key, value, _upstream=Tensor.__setitem__):
    """`self[key] = value`, cast to self's dtype as in torch; JAX warns that it will refuse such casts. Outside on the twins.

    Host tensors are moved to the device here: torchax's method bypasses dispatch, which would move them.
    """
    if not inside.depth:
        key, value = tree_map_only(Tensor, as_host, (key, value))
        as_host(self)[key] = value
        return
    key = bounded(key)
    if isinstance(value, torch.Tensor) and value.dtype != self.dtype:
        value = value.to(dtype=self.dtype)
    elif isinstance(value, (bool, int, float)):
        value = self.jax().dtype.type(value)
    parts = [np.asarray(part, None if part else int) if isinstance(part, list) else part for part in _parts(key)]
    key, value = tree_map_only(torch.Tensor, self._env.moved, (tuple(parts), value))
    if not any(isinstance(part, torch.Tensor) for part in parts):
        np.broadcast_to(np.int8(0), self.shape)[key]  # raises IndexError as torch does; JAX would write nothing
    while isinstance(value, torch.Tensor) and value.shape[:1] == (1,):  # torch accepts extra leading axes of one entry
        value = value.squeeze(0)
    if _moves_edges(key, value):
        view = self[key]
        view._elem = jnp.broadcast_to(value.jax(), view.shape)
        return
    if (parts := _beside(self, key, value)) is not None:
        self._elem = jnp.concatenate(*parts)
        return
    mask = key[0] if isinstance(key, tuple) and len(key) == 1 else key
    given = key, _of_each(self, mask, value)
    self._env.with_decided(lambda args, kwargs: _upstream(self, *args), given, {})


def _moves_edges(key, value) -> bool:
    """Whether to write through a view: chips that share a sequence then exchange only the edges that move. Other keys use JAX's
    scatter, for which the partitioner gathers the whole tensor on every chip."""
    parts, shared = _parts(key), current().sequence and current().chips > 1
    return shared and isinstance(value, torch.Tensor) and all(type(part) is slice for part in parts)


def _beside(x: Tensor, key, value) -> tuple[list[jax.Array], int] | None:
    """`x[key] = value` as a concatenation: (kept part of x and value, axis), in a trace on one chip where the slice reaches its
    axis' end; else None. A scatter is a pass of its own, a concatenation none (CogView4's rotation: 28 of 125 ms)."""
    key, array = _parts(key), x.jax()
    traced = isinstance(value, Tensor) and current().chips == 1 and not has_values(array)
    cut = [n for n, part in enumerate(key) if type(part) is not slice or part != slice(None)]
    if not traced or len(cut) != 1 or type(key[cut[0]]) is not slice:
        return None
    (axis,) = cut
    start, stop, step = key[axis].indices(size := array.shape[axis])
    shape = *array.shape[:axis], stop - start, *array.shape[axis + 1 :]
    if step != 1 or not start < stop == size or value.shape != shape[len(shape) - value.ndim :]:
        return None
    return [jax.lax.slice_in_dim(array, 0, start, axis=axis), jnp.broadcast_to(value.jax(), shape)], axis


def _of_each(x: torch.Tensor, mask, value):
    """The value of `x[mask] = value` for each entry of a boolean mask, expanded where it is the same for all of them.

    torchax would give such a value to the first entry and zeros to the others.
    """
    if not (isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and isinstance(value, torch.Tensor)):
        return value
    entry = x.shape[mask.ndim :]
    while value.ndim > len(entry) and value.shape[0] == 1:
        value = value[0]
    return value.expand(entry) if value.ndim <= len(entry) else value


def _index_put(plain, self, indices, values, accumulate=False):
    """torchax's operator, with the value of `_of_each`."""
    values = _of_each(self, indices[0] if len(indices) == 1 else None, values)
    given = (self.jax(), [None if i is None else i.jax() for i in indices], values.jax(), accumulate)
    return Tensor(plain(*given), self._env)


def _embedding(plain, weight, indices, *args, **kwargs):
    """torchax's operator, but for integer indices only: torchax also accepts booleans and floats."""
    if indices.dtype not in (torch.int32, torch.int64):
        raise NotTaken
    return Tensor(plain(weight.jax(), indices.jax(), *args, **kwargs), weight._env)


def _expand(plain, x, sizes, *, implicit=False):
    """torchax's operator; the result records the array that it repeats."""
    return made_of(Tensor(plain(x.jax(), sizes), x._env), _expand, x.jax())


def _repeat(plain, x, repeats):
    """torchax's operator; recorded as `_expand` where only axes of one entry are repeated."""
    result, more = Tensor(plain(x.jax(), repeats), x._env), len(repeats) - x.ndim
    expands = all(size == 1 or count == 1 for size, count in zip(x.shape, repeats[more:]))
    return made_of(result, _expand, x.jax()) if expands else result


def _gather(plain, x, dim, index, *, sparse_grad=False):
    """torchax's operator, which gathers entry by entry. For an index that `expand` repeats along rows, whole rows are gathered."""
    array, indices = x.jax(), index.jax()
    others = [n for n in range(array.ndim) if n != dim % max(array.ndim, 1)]
    if array.ndim == 0 or any(array.shape[n] != indices.shape[n] for n in others):
        return Tensor(plain(array, dim, indices), x._env)
    (narrow,) = operands(index, _expand) or (indices,)
    narrow = narrow if narrow.ndim == array.ndim and narrow.shape[dim] == indices.shape[dim] else indices
    return Tensor(jnp.take_along_axis(array, narrow, dim, mode="clip"), x._env)


def take_along_dim(input, indices, dim=None):
    """torch's, by `gather`; torch itself raises TypeError for 32-bit indices, which all of the device's are."""
    if dim is None:
        return input.flatten().gather(0, indices.flatten())
    shape = torch.broadcast_shapes(*(t.select(dim, 0).shape for t in (input, indices)))
    input, indices = (t.movedim(dim, -1).expand(*shape, -1) for t in (input, indices))
    return input.gather(-1, indices).movedim(-1, dim)


def searchsorted(sequence, values, *, out_int32=False, right=False, side=None, sorter=None):
    """torch's, row by row for a sequence of several axes; torchax has neither rows nor `right` and `side`."""
    array, wanted = sequence.jax(), values.jax()
    rows = array if sorter is None else jnp.take_along_axis(array, sorter.jax(), -1)
    find = functools.partial(jnp.searchsorted, side="right" if right or side == "right" else "left")
    for _ in range(array.ndim - 1):
        find = jax.vmap(find)
    return Tensor(find(rows, wanted).astype(jnp.int32), sequence._env)


def repeat_interleave(input, repeats, dim=None, *, output_size=None):
    """Each element `repeats` times. torchax gathers where `output_size` is given, which loses a mask's provenance.

    Rows that do not fill whole registers are padded for it: XLA compiles 20 s for rows of 1,023 entries (LTX-2's angles).
    """
    x = input.jax()
    if not isinstance(repeats, int):
        return Tensor(jnp.repeat(x, repeats.jax(), axis=dim, total_repeat_length=output_size), input._env)
    along_rows = dim is not None and dim % max(x.ndim, 1) == x.ndim - 1 and jnp.issubdtype(x.dtype, jnp.floating)
    length = x.shape[-1] if along_rows else 0
    if length < LANES or length % LANES == 0:
        return Tensor(jnp.repeat(x, repeats, axis=dim), input._env)
    whole = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -length % LANES)])
    return Tensor(jnp.repeat(whole, repeats, axis=dim)[..., : length * repeats], input._env)
