"""Norms of tokens fused with what follows (a factor, a summand or a rotation by position): one kernel, one pass.

    norm(x) * (1 + scale) + shift                   (norm(x.float()) * (1 + scale) + shift).to(x.dtype)

with scale and shift of each sample, the RMS norm operation by operation,

    (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight

and rotation by upstream's `apply_rotary_emb`, by matrices, or by complex numbers:

    (matrices * norm(x).reshape(..., D / 2, 1, 2)).sum(-1)
    view_as_real(view_as_complex(x.reshape(..., D / 2, 2)) * turns)
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import torch
from torchax.tensor import Tensor

from ..kernels import rotary
from ..kernels.norm import Norm, Step
from ..kernels.norm import normed as fast_norm
from ..kernels.settings import current
from .made_of import made_of, operands, widened
from .on_host import NotTaken


LEAST_BYTES = 16 << 20  # of heads on a chip: fewer stay in VMEM, where XLA's code is faster (CogView4 on v6e-8)
WIDEST = 6144  # features of a token's heads, in the kernel that norms each: blocks of 256 tokens take 12 MiB of VMEM, v5e gives 16


class Normed(NamedTuple):
    """A normed array and the steps that followed. `narrow`: the array before it was widened for the norm; None: it was not."""

    x: jax.Array
    norm: Norm
    narrow: jax.Array | None
    steps: tuple[Step, ...] = ()

    def instead_of(self, result: Tensor) -> Tensor:
        """Norm and steps by the kernel, in the dtype before widening; `result` where the kernel does not support them."""
        wide = self.narrow is not None
        x = self.narrow if wide else self.x
        if x.shape != result.shape:
            return result
        whole = self.of_heads() if x.ndim == 4 else fast_norm(x, self.norm, current(), self.steps, wide)
        return result if whole is None else Tensor(whole, result._env)

    def of_heads(self, tables: tuple[jax.Array, ...] = (), apart: bool = False) -> jax.Array | None:
        """Heads [B, T, N, D] or [B, N, T, D], each normed by itself, and optionally times a vector [D]; None: not supported.

        `tables`, cos and sin, [T, D] or [B, T, D], rotate pairs of entries of [B, T, N, D], or of its halves (`apart`). This is not
        supported for heads that were normed in float32 by hand and are not cast back yet.
        """
        if tables and self.narrow is self.x:
            return None
        x = self.x if tables or self.narrow is None else self.narrow
        heads_first = not tables and x.shape[1] < x.shape[2]
        own = [vector for vector in (self.norm.weight, *(v for _, v in self.steps)) if vector is not None]
        own = own or [jnp.ones(x.shape[3], x.dtype)]
        alone = len(own) == 1 and own[0].size == x.shape[3] and "plus" not in dict(self.steps)
        alone = alone and not (self.steps and self.norm.bias is not None) and (tables or x.dtype == jnp.bfloat16)
        if not alone or min(x.shape[1:3]) * x.shape[3] > WIDEST:
            return None
        rows, rounded = jnp.swapaxes(x, 1, 2) if heads_first else x, bool(self.steps) and self.narrow is None
        norm = replace(self.norm, weight=own[0].reshape(-1))
        how = {"apart": apart, "rounded": rounded, "least_bytes": 0 if tables else LEAST_BYTES}
        result = rotary.by_kernel(rows.reshape(*rows.shape[:2], -1), norm, tables, current(), **how)
        result = None if result is None else result.reshape(rows.shape)
        return jnp.swapaxes(result, 1, 2) if heads_first and result is not None else result


def normed(x) -> Normed | None:
    """The record of the norm and the steps whose result x is; None where it is none."""
    of = operands(x, Normed)
    return of and Normed(*of)


def _with(result: Tensor, of: Normed) -> Tensor:
    """The result, with the record `of`; computed by the kernel, unless it was widened and may still be cast back."""
    return made_of(of.instead_of(result) if of.narrow is None else result, Normed, *of)


def layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    """(x - mean) / sqrt(variance + eps) * weight + bias in float32, as torch computes it; torchax rounds every step."""
    axes = last_axes(input, normalized_shape)
    return _remembered(input, axes, standardised(_wide(input), axes, eps), weight, bias, eps, centred=True)


def rms_norm(input, normalized_shape, weight=None, eps=None):
    """x / sqrt(mean(x^2) + eps) * weight in float32; the default of eps is float32's."""
    axes = last_axes(input, normalized_shape)
    x, eps = _wide(input), jnp.finfo(jnp.float32).eps.item() if eps is None else eps
    result = x * jax.lax.rsqrt((x * x).mean(axes, keepdims=True) + eps)
    return _remembered(input, axes, result, weight, None, eps, centred=False)


def _wide(x: Tensor) -> jax.Array:
    return x.jax().astype(jnp.float32)


def _remembered(input, axes, result: jax.Array, weight, bias, eps: float, centred: bool) -> Tensor:
    result = affine(input, result, weight, bias)
    if len(axes) > 1:
        return result
    weight, bias = (None if a is None else a.jax() for a in (weight, bias))
    before = widened(input)
    return _with(result, Normed(input.jax(), Norm(weight, eps, bias, centred), before and before.narrow))


def standardised(x: jax.Array, axes: tuple[int, ...], eps: float) -> jax.Array:
    x = x - x.mean(axes, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(axes, keepdims=True) + eps)


def last_axes(input, shape) -> tuple[int, ...]:
    if tuple(input.shape[-len(shape) :]) != tuple(shape):
        raise NotTaken
    return tuple(range(-len(shape), 0))


def affine(input, x: jax.Array, weight, bias, trailing: int = 0):
    """x times weight plus bias, rounded to the input's dtype."""
    if weight is not None:
        x = x * weight.jax().reshape(*weight.shape, *(1,) * trailing)
    if bias is not None:
        x = x + bias.jax().reshape(*bias.shape, *(1,) * trailing)
    return Tensor(x.astype(input.jax().dtype), input._env)


def followed(name: str, result, x, vector) -> Tensor | None:
    """A norm "times" or "plus" one vector for all tokens, [C] or [B, 1, C]."""
    of, shape = normed(x), vector.shape if vector.ndim == 3 else (1, 1, *vector.shape)
    known = of is not None and of.x.shape == x.shape and x.ndim in (3, 4) and shape[1:] == (1, x.shape[-1])
    if not known or (result.shape, result.dtype) != (x.shape, x.dtype):
        return None
    return _with(result, Normed(*of[:-1], (*of.steps, (name, vector.jax().reshape(shape)))))


def narrowed(x, result: Tensor) -> Tensor | None:
    """`result`, x cast back to the dtype that it was widened from for its norm; None for other casts."""
    of = normed(x)
    if of is None or of.narrow is None or of.narrow.dtype != result.jax().dtype:
        return None
    result = of.instead_of(result)
    return result if of.steps else made_of(result, Normed, of.narrow, of.norm, None)


def squared(result, x, exponent) -> Tensor | None:
    """Records the array, before it was widened, that `result` is the square of."""
    before = widened(x)
    return None if before is None or exponent != 2 else made_of(result, squared, before.narrow)


def mean(result, x, dim=None, keepdim=False) -> Tensor | None:
    """Records the array that has these mean squares over the last axis."""
    of = operands(x, squared)
    return made_of(result, mean, *of) if of is not None and keepdim and dim in ([-1], [x.ndim - 1]) else None


def with_eps(result, x, eps) -> Tensor | None:
    of = operands(x, mean) if isinstance(eps, float) else None
    return None if of is None else made_of(result, with_eps, *of, eps)


def inverse(result, x) -> Tensor | None:
    """Records the array that has these inverse root mean squares."""
    of = operands(x, with_eps)
    return None if of is None else made_of(result, inverse, *of)


def by_hand(result, x, factor):
    """Records an RMS norm: x times the inverse of its own root mean square, in float32."""
    narrow, eps = (operands(factor, inverse) if isinstance(factor, Tensor) else None) or (None, None)
    if narrow is None or x.jax() is not narrow or result.shape != x.shape:
        return None
    return made_of(result, Normed, narrow, Norm(None, eps), narrow)


def rotated(x, tables, use_real=True, use_real_unbind_dim=-1, sequence_dim=2):
    """Upstream's `apply_rotary_emb` of heads [B, T, N, D] just normed, in the norm's kernel; None: not supported."""
    of, known = normed(x), use_real and sequence_dim == 1 and all(isinstance(t, Tensor) for t in tables)
    if of is None or not known or x.shape != of.x.shape:
        return None
    arrays = tuple(table.jax() for table in tables)
    result = _normed_and_rotated(of, arrays, apart=use_real_unbind_dim == -2)
    return None if result is None else Tensor(result, x._env)


def plainly_rotated(x: jax.Array, cos: jax.Array, sin: jax.Array, apart: bool) -> jax.Array:
    """Heads x [B, T, N, D] rotated by tables [T, D] in float32."""
    return rotary.rotate_pairs(x.astype(jnp.float32), cos[:, None], sin[:, None], apart).astype(x.dtype)


def _normed_and_rotated(of: Normed, tables: tuple[jax.Array, jax.Array], apart: bool = False) -> jax.Array | None:
    """Heads [B, T, N, D] normed and rotated by one kernel; None: not supported, such as tables other than [T, D] or [B, T, D]."""
    (batch, tokens, _, dim), shape = of.x.shape, tables[0].shape
    return of.of_heads(tables, apart) if shape in ((tokens, dim), (batch, tokens, dim)) else None


def turned(result, pairs, matrices):
    """Records pairs [..., D / 2, 1, 2] times matrices [..., D / 2, 2, 2]: summed, these are rotated pairs."""
    if pairs.ndim < 4 or pairs.shape[-2:] != (1, 2) or matrices.shape[-2:] != (2, 2) or result.dtype != torch.float32:
        return None
    if result.shape[:-2] != pairs.shape[:-2] or matrices.shape[-3] != pairs.shape[-3]:
        return None
    return made_of(result, turned, pairs.jax(), matrices.jax(), _norm_of_pairs(pairs, (1, 2)))


def as_complex(plain, pairs):
    """torch's `view_as_complex`; the result records its pairs [..., D / 2, 2]."""
    norm = _norm_of_pairs(pairs, (2,))
    return made_of(Tensor(plain(pairs.jax()), pairs._env), as_complex, pairs.jax(), norm)


def _norm_of_pairs(pairs, pair: tuple[int, ...]) -> Normed | None:
    """The norm whose heads were reshaped to these pairs, [B, T, N, D / 2, *pair]; None where there is none."""
    wide = widened(pairs)
    norm = normed(pairs) if wide is None else wide.norm
    shape = (*norm.x.shape[:-1], norm.x.shape[-1] // 2, *pair) if norm is not None else None
    return norm if pairs.shape == shape and len(norm.x.shape) == 4 else None


def turned_complex(result, x, turns):
    """Records pairs that are multiplied elementwise, as complex numbers, by `turns`."""
    of = operands(x, as_complex)
    known = of is not None and result.shape == x.shape and turns.shape[-1:] == x.shape[-1:]
    return made_of(result, turned_complex, *of, turns.jax()) if known else None


def as_real(plain, x):
    """torch's `view_as_real`; rotated pairs are computed on whole heads, as XLA would keep each pair in a row of 128 lanes."""
    if (of := operands(x, turned_complex)) is None:
        return Tensor(plain(x.jax()), x._env)
    pairs, norm, turns = of
    tables = tuple(jnp.repeat(part, 2, -1) for part in (turns.real, turns.imag))
    return _turned_heads(pairs, 1, norm, tables, x._env)


def summed(plain, x, dim=None, keepdim=False, **kwargs):
    """torch's `sum`; rotated pairs are computed on whole heads, as XLA would keep each pair in a row of 128 lanes."""
    of = operands(x, turned)
    if of is None or dim not in ([-1], [x.ndim - 1]) or keepdim or kwargs:
        return plain(x, dim, keepdim, **kwargs)
    pairs, matrices, norm = of
    tables = matrices[..., 0, 0], matrices[..., 1, 1], -matrices[..., 0, 1], matrices[..., 1, 0]
    own, other = (jnp.stack(two, -1).reshape(*matrices.shape[:-3], -1) for two in (tables[:2], tables[2:]))
    return _turned_heads(pairs, 2, norm, (own, other), x._env)


def _turned_heads(
    pairs: jax.Array, axes: int, norm: Normed | None, tables: tuple[jax.Array, jax.Array], env
) -> Tensor:
    """Pairs of heads' last `axes` axes, rotated by tables, [B, T, 1, D] or [T, 1, D] for all heads: [..., D / 2, 2] in float32."""
    heads, result = pairs.reshape(*pairs.shape[: -1 - axes], -1), None
    if norm is not None and tables[0].ndim in (3, 4) and tables[0].shape[-2] == 1:
        alike = [table[0] if table.ndim == 4 and len(table) == 1 else table for table in tables]
        result = _normed_and_rotated(norm, tuple(table[..., 0, :] for table in alike))
    result = rotary.rotate_pairs(heads, *tables) if result is None else result.astype(jnp.float32)
    return Tensor(result.reshape(*heads.shape[:-1], -1, 2), env)
